"""The engine that runs all nodes in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from fedh2l.data.domain import Samples
from fedh2l.engines.base import Engine, Which, raise_earliest
from fedh2l.engines.local_nodes import Inboxes, LocalNodes, Outbox
from fedh2l.engines.rounds import Exchange, rounds
from fedh2l.engines.router import MessageRouter
from fedh2l.methods.base import Method
from fedh2l.protocol.roster import Roster
from fedh2l.training.node_learner import NodeLearner
from fedh2l.training.server import Server


class LocalEngine(Engine):
    """Runs the rounds of an experiment with all learners, in roster order, in this process."""

    def __init__(self, learners: Sequence[NodeLearner], method: Method, roster: Roster, rounds: int) -> None:
        self.roster = roster
        self.rounds = rounds
        self.method = method.fitted(learners, rounds)
        self.router = MessageRouter(self.method, learners, roster, rounds)
        self.local_nodes = LocalNodes(learners, self.method)
        self.ledger = self.router.ledger
        self._round_done = 0

    @property
    def learners(self) -> list[NodeLearner]:
        """Learners, in roster order."""
        return self.local_nodes.learners

    @property
    def server(self) -> Server:
        """Server of the method."""
        return self.router.server

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        for event in rounds(self.local_nodes, self.method, range(first, last + 1)):
            if isinstance(event, Exchange):
                event.inboxes = self._deliver(event.sent, event.round)
                continue
            self._round_done = event.round
            if not keep_going(event.round):
                break
        return self._round_done

    def _deliver(self, sent: Outbox, round: int) -> Inboxes:
        """Return each node's inbox: the messages of its teachers, or the answer of the server."""
        if not self.method.decentralised:
            return self.router.answers(sent, round)
        teachers = self.method.teachers(self.roster, round)
        self.ledger.heard(teachers, sent.__getitem__)
        return {name: [sent[teacher] for teacher in heard] for name, heard in teachers.items()}

    def verify(self) -> None:
        """Read all losses and flags at once, so that no round waits for the device."""
        raise_earliest(self.local_nodes.faults(self._round_done) + self.router.faults())

    def series(self) -> dict[str, dict[str, list[float]]]:
        return self.local_nodes.series()

    def complete(self, count: bool) -> None:
        message = self.router.closing(self._round_done, count)
        if message is not None:
            self.local_nodes.complete(message)

    def validate(self) -> dict[str, int]:
        return self.local_nodes.validate()

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        return self.local_nodes.correct(sets)

    def validate_views(self) -> dict[str, dict[str, int]]:
        return self.local_nodes.validate_views()

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        return self.local_nodes.correct_view(view, names, sets)

    def keep_best(self, names: Iterable[str]) -> None:
        self.local_nodes.keep_best(names)

    def select(self, which: Which) -> None:
        self.local_nodes.select(which)

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        return self.local_nodes.state_dicts()

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        return self.local_nodes.logits(inputs)

    def state(self) -> dict[str, Tensor]:
        """Return the states of all learners and of the server, each under its name."""
        return {**self.local_nodes.state(), **self.router.state()}

    def restore(self, state: Mapping[str, Tensor], round: int = 0) -> None:
        self._round_done = round
        self.local_nodes.restore(state)
        self.router.restore(state)

    @property
    def parameter_bytes(self) -> int:
        return self.local_nodes.parameter_bytes

    def close(self) -> None:
        self.local_nodes.close()
