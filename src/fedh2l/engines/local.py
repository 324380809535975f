"""The engine that runs all nodes in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.engines.base import Engine, Which, raise_earliest
from fedh2l.engines.hub import Hub
from fedh2l.engines.residents import Inboxes, Outbox, Residents
from fedh2l.engines.rounds import Exchange, rounds
from fedh2l.methods.base import Method
from fedh2l.node_learner import NodeLearner
from fedh2l.roster import Roster
from fedh2l.server import Server


class LocalEngine(Engine):
    """Runs the rounds of a federation with all learners, in roster order, in this process."""

    def __init__(self, learners: Sequence[NodeLearner], method: Method, roster: Roster, rounds: int) -> None:
        self.roster = roster
        self.rounds = rounds
        self.method = method.fitted(learners, rounds)
        self.hub = Hub(self.method, learners, roster, rounds)
        self.residents = Residents(learners, self.method)
        self.ledger = self.hub.ledger
        self._round_done = 0

    @property
    def learners(self) -> list[NodeLearner]:
        """Learners, in roster order."""
        return self.residents.learners

    @property
    def server(self) -> Server:
        """Server of the method."""
        return self.hub.server

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        for event in rounds(self.residents, self.method, range(first, last + 1)):
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
            return self.hub.answers(sent, round)
        teachers = self.method.teachers(self.roster, round)
        self.ledger.heard(teachers, sent.__getitem__)
        return {name: [sent[teacher] for teacher in heard] for name, heard in teachers.items()}

    def verify(self) -> None:
        """Read all losses and flags at once, so that no round waits for the device."""
        raise_earliest(self.residents.faults(self._round_done) + self.hub.faults())

    def series(self) -> dict[str, dict[str, list[float]]]:
        return self.residents.series()

    def complete(self, count: bool) -> None:
        message = self.hub.closing(self._round_done, count)
        if message is not None:
            self.residents.complete(message)

    def validate(self) -> dict[str, int]:
        return self.residents.validate()

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        return self.residents.correct(sets)

    def validate_views(self) -> dict[str, dict[str, int]]:
        return self.residents.validate_views()

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        return self.residents.correct_view(view, names, sets)

    def keep_best(self, names: Iterable[str]) -> None:
        self.residents.keep_best(names)

    def select(self, which: Which) -> None:
        self.residents.select(which)

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        return self.residents.state_dicts()

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        return self.residents.logits(inputs)

    def state(self) -> dict[str, Tensor]:
        """Return the states of all learners and of the server, each under its name."""
        return {**self.residents.state(), **self.hub.state()}

    def restore(self, state: Mapping[str, Tensor], round: int = 0) -> None:
        self._round_done = round
        self.residents.restore(state)
        self.hub.restore(state)

    @property
    def parameter_bytes(self) -> int:
        return self.residents.parameter_bytes

    def close(self) -> None:
        self.residents.close()
