"""What an engine is: the part of a run that knows where nodes are and how messages travel between them.

A trainer drives an engine and never touches a node; a method is driven by an engine and never knows which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.errors import DivergedError, RunError
from fedh2l.ledger import Ledger
from fedh2l.messages import SERVER

Which = Literal["best", "last"]


class Fault(NamedTuple):
    """Something unsound that happened; the earliest is the one to tell."""

    round: int
    order: float
    """When within a round: 0 the local step, 1 a message, 1.5 the server's answer, 2 the mutual step, 3 its end."""
    who: str
    what: str


def raise_earliest(faults: Sequence[Fault]) -> None:
    """Raises `DivergedError` for the earliest of these, if there is any."""
    if faults:
        first = min(faults)
        who = "the server" if first.who == SERVER else f"node '{first.who}'"
        raise DivergedError(f"{who}, round {first.round}: {first.what}")


class NodesLostError(RunError):
    """Nodes are gone, in the middle of something; `Engine.revive` says which, and brings them back."""

    def __init__(self) -> None:
        super().__init__("the process of a node died")


class Engine(ABC):
    """Runs rounds, and answers questions about the nodes' models.

    Where nodes are in processes of their own, any call may raise `NodesLostError`.
    """

    fragile: ClassVar[bool] = False
    """Whether nodes can be lost, so that a checkpoint to go back to is always wanted."""

    ledger: Ledger
    """What has crossed between the nodes so far."""

    @abstractmethod
    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Runs rounds `first` to `last`; returns the last one done, earlier if `keep_going(round)` is false."""

    @abstractmethod
    def verify(self) -> None:
        """Raises `DivergedError` if a loss or message since the last call was unsound, naming where it began."""

    @abstractmethod
    def series(self) -> dict[str, dict[str, list[float]]]:
        """What each node recorded since the last call, scalar by scalar."""

    @abstractmethod
    def complete(self, count: bool) -> None:
        """Brings what a server still holds of the nodes' models to them, before an evaluation.

        What that sends is counted only if asked for: a federation would do it once, after its last round.
        """

    @abstractmethod
    def validate(self) -> dict[str, int]:
        """For each node, how many samples of everybody's validation data its model gets right."""

    @abstractmethod
    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        """For each node, how many samples of each set its model gets right."""

    @abstractmethod
    def validate_views(self) -> dict[str, dict[str, int]]:
        """As `validate`, for everything else that the method wants to be tested, by name."""

    @abstractmethod
    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        """As `correct`, for one view of some nodes."""

    @abstractmethod
    def keep_best(self, names: Iterable[str]) -> None:
        """Remembers the present weights of these nodes as their best."""

    @abstractmethod
    def select(self, which: Which) -> None:
        """Puts the best or last weights in every node's model, once all rounds are done."""

    @abstractmethod
    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """The state dict of each node's model, for saving."""

    @abstractmethod
    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        """What each node's model says of `inputs` `(n, …)`, on the CPU: `(n, classes)`."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything that the next round depends on, for a checkpoint, under `node/…`."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` returned."""

    @property
    @abstractmethod
    def parameter_bytes(self) -> int:
        """The size of all nodes' parameters, to judge what a checkpoint will cost."""

    def moves(self, other: Engine) -> bool:
        """Whether another federation's engine goes on when this one does."""
        return other is self

    def revive(self) -> list[str]:
        """Brings lost nodes back and names them. What state anybody is in is undefined: `restore` comes next."""
        return []

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Gives back what the engine holds; models stay as they are."""
