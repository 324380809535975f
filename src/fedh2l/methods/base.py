"""What a method is: a frozen set of parameters and a few hooks.

A method keeps no state of its own. What it must remember belongs to a node and lives in `Learner.memory`, so that
every engine can save it, move it and stack it. Losses and projections are pure functions of tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from fedh2l.learner import Learner
from fedh2l.messages import Posteriors
from fedh2l.roster import Roster
from fedh2l.section import Section
from fedh2l.topology import Graph

Message = Posteriors
"""What a method may send."""


class Method(Section):
    """A federated method. Its fields are the keys of the `[method]` section."""

    name: ClassVar[str]

    @abstractmethod
    def local_step(self, node: Learner, round: int) -> None:
        """Train on what the node holds. Rounds count from 1."""

    @abstractmethod
    def exchanges(self, round: int) -> bool:
        """Whether anything crosses between nodes in this round."""

    @abstractmethod
    def emit(self, node: Learner, round: int) -> Message:
        """What leaves the node, in a round that exchanges."""

    @abstractmethod
    def receive(self, node: Learner, inbox: list[Message], round: int) -> None:
        """Learn from what came in, in a round that exchanges. The inbox is in roster order and may be empty."""

    @abstractmethod
    def teachers(self, roster: Roster, round: int) -> Graph:
        """Whom each member hears in a round that exchanges."""

    @abstractmethod
    def public_batch_rows(self, batch_size: int) -> int:
        """How many public samples a signal speaks of, before the size of the public data limits it."""

    def check(self, roster: Roster) -> None:
        """Refuses a federation that this method cannot run; the default takes any."""
