"""The training loop: the order of steps in a round. Every engine and every peer runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fedh2l.methods.base import Method

Sent = TypeVar("Sent")
Inboxes = TypeVar("Inboxes")
Sent_co = TypeVar("Sent_co", covariant=True)
Inboxes_contra = TypeVar("Inboxes_contra", contravariant=True)


class Nodes(Protocol[Sent_co, Inboxes_contra]):
    """The nodes of this process: one, several in parallel, or a stack of them."""

    def local_step(self, round: int) -> None:
        """Train on local data."""

    def emit(self, round: int) -> Sent_co:
        """Return the messages that the nodes send."""

    def receive(self, inboxes: Inboxes_contra, round: int) -> None:
        """Train on the received messages."""

    def update_averages(self, exchanged: bool) -> None:
        """Update the moving averages of the weights at the end of a round."""


@dataclass
class Exchange(Generic[Sent, Inboxes]):
    """The point of a round at which messages are sent. The engine sets `inboxes` before it continues."""

    round: int
    sent: Sent
    inboxes: Inboxes | None = None


@dataclass(frozen=True)
class Done:
    """The end of a round."""

    round: int


def rounds(
    nodes: Nodes[Sent, Inboxes], method: Method, schedule: Iterable[int], stepped: int | None = None
) -> Iterator[Exchange[Sent, Inboxes] | Done]:
    """Run the rounds of a schedule. Yield where messages are sent and where a round ends.

    `stepped` is a round whose local step is done already: a peer may be stopped in the middle of a round.
    """
    for round in schedule:
        if round != stepped:
            nodes.local_step(round)
        exchanged = method.exchanges(round)
        if exchanged:
            exchange: Exchange[Sent, Inboxes] = Exchange(round, nodes.emit(round))
            yield exchange
            if exchange.inboxes is None:
                raise RuntimeError(f"the messages of round {round} were not delivered")
            nodes.receive(exchange.inboxes, round)
        nodes.update_averages(exchanged)
        yield Done(round)
