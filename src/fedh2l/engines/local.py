"""The engine that runs all nodes in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fedh2l.engines.base import Engine, Fault
from fedh2l.engines.local_nodes import Inboxes, LocalNodes, Outbox
from fedh2l.engines.rounds import Exchange, rounds
from fedh2l.engines.router import MessageRouter
from fedh2l.methods.base import Method
from fedh2l.protocol.roster import Roster
from fedh2l.training.node_learner import NodeLearner


class LocalEngine(LocalNodes, Engine):
    """Runs the rounds of an experiment with all learners, in roster order, in this process."""

    def __init__(self, learners: Sequence[NodeLearner], method: Method, roster: Roster, rounds: int) -> None:
        super().__init__(learners, method.fitted(learners, rounds))
        self.roster = roster
        self.rounds = rounds
        self.router = MessageRouter(self.method, learners, roster, rounds)
        self.ledger = self.router.ledger

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        for event in rounds(self, self.method, range(first, last + 1)):
            if isinstance(event, Exchange):
                event.inboxes = self._deliver(event.sent, event.round)
            elif not keep_going(event.round):
                break
        return self.round

    def _deliver(self, sent: Outbox, round: int) -> Inboxes:
        """Return each node's inbox: the messages of its teachers, or the answer of the server."""
        if not self.method.decentralised:
            return self.router.answers(sent, round)
        teachers = self.method.teachers(self.roster, round)
        self.ledger.heard(teachers, sent.__getitem__)
        return {name: [sent[teacher] for teacher in heard] for name, heard in teachers.items()}

    def faults(self) -> list[Fault]:
        return super().faults() + self.router.faults()

    def complete(self, count: bool) -> None:
        message = self.router.closing(self.round, count)
        if message is not None:
            self.take(message)

    def state(self) -> dict[str, Tensor]:
        """Return the states of all learners and of the server, each under its name."""
        return {**super().state(), **self.router.state()}

    def restore(self, state: Mapping[str, Tensor], round: int = 0) -> None:
        super().restore(state, round)
        self.router.restore(state)
