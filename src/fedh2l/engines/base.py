"""The interface of engines, which place the nodes and deliver their messages.

A trainer uses an engine and never a node. A method does not depend on the engine that runs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from fedh2l.data.domain import Samples
from fedh2l.engines.ledger import Ledger
from fedh2l.errors import DivergedError, RunError, UnsoundMessageError
from fedh2l.protocol.messages import SERVER

Which = Literal["best", "last"]


class Fault(NamedTuple):
    """An invalid value, loss or message. Only the earliest fault is reported."""

    round: int
    order: float
    """Position in the round: 0 local step, 1 message, 1.5 answer of the server, 2 mutual step, 3 end."""
    who: str
    what: str
    diverged: bool = True
    """Whether values are not finite. Otherwise a method sent an invalid message."""


def raise_earliest(faults: Sequence[Fault]) -> None:
    """Raise `DivergedError` or `UnsoundMessageError` for the earliest of these faults, if there is any."""
    if faults:
        first = min(faults)
        who = "the server" if first.who == SERVER else f"node '{first.who}'"
        kind = DivergedError if first.diverged else UnsoundMessageError
        raise kind(f"{who}, round {first.round}: {first.what}")


class NodesLostError(RunError):
    """Nodes were lost during a call. `Engine.revive` restarts them and returns their names."""

    def __init__(self) -> None:
        super().__init__("the process of a node died")


class Models(ABC):
    """The models of the nodes, as a recorder sees them: to check, evaluate, select and save them."""

    @abstractmethod
    def verify(self) -> None:
        """Raise `DivergedError` for an invalid loss or message since the last call. The error names its origin."""

    @abstractmethod
    def series(self) -> dict[str, dict[str, list[float]]]:
        """Return the scalars that each node recorded since the last call."""

    @abstractmethod
    def complete(self, count: bool) -> None:
        """Send the nodes the parts of their models that a server still holds, before an evaluation.

        `count` adds the message to the ledger. Real peers would send it once, after the last round.
        """

    @abstractmethod
    def validate(self) -> dict[str, int]:
        """Return each model's number of correct samples of the pooled validation data."""

    @abstractmethod
    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        """Return each model's number of correct samples in each set."""

    @abstractmethod
    def validate_views(self) -> dict[str, dict[str, int]]:
        """Return counts as `validate` does for each extra evaluation of the method, by name."""

    @abstractmethod
    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        """Return counts as `correct` does for one extra evaluation of some nodes."""

    @abstractmethod
    def keep_best(self, names: Iterable[str]) -> None:
        """Save the present weights of these nodes as their best."""

    @abstractmethod
    def select(self, which: Which) -> None:
        """Load the best or last weights into every node's model, after all rounds."""

    @abstractmethod
    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """Return the state dict of each node's model, for saving."""

    @abstractmethod
    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return each model's logits for `inputs` `(n, …)`, on the CPU: `(n, classes)`."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return everything that the next round depends on, under `node/…`, for a checkpoint."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor], round: int = 0) -> None:
        """Restore a result of `state` after a round."""

    @property
    @abstractmethod
    def parameter_bytes(self) -> int:
        """Size of all nodes' parameters in bytes, to estimate the cost of a checkpoint."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release resources. Models are not changed."""


class Engine(Models):
    """Runs rounds, and evaluates the nodes' models.

    If nodes run in other processes, any call may raise `NodesLostError`.
    """

    fragile: ClassVar[bool] = False
    """Whether nodes can be lost, so that there must always be a checkpoint."""

    ledger: Ledger
    """Counts of all bytes sent so far."""

    @abstractmethod
    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Run rounds `first` to `last`, or fewer if `keep_going(round)` is false. Return the last one done."""

    def moves(self, other: Engine) -> bool:
        """Return whether `advance` also runs the rounds of another experiment's engine."""
        return other is self

    def revive(self) -> list[str]:
        """Restart lost nodes and return their names. All nodes must then be restored."""
        return []
