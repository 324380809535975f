"""All nodes in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.engines.base import Engine, Which, raise_earliest
from fedh2l.engines.hub import Hub
from fedh2l.engines.residents import Residents
from fedh2l.learner import Learner
from fedh2l.methods.base import Method
from fedh2l.roster import Roster
from fedh2l.server import Server


class LocalEngine(Engine):
    """Runs the rounds of a federation whose learners, in roster order, are all here."""

    def __init__(self, learners: Sequence[Learner], method: Method, roster: Roster, rounds: int) -> None:
        self.roster = roster
        self.rounds = rounds
        self.method = method.fitted(learners, rounds)
        self.hub = Hub(self.method, learners, roster, rounds)
        self.residents = Residents(learners, self.method)
        self.ledger = self.hub.ledger
        self._round_done = 0

    @property
    def learners(self) -> list[Learner]:
        """The nodes at work, in roster order."""
        return self.residents.learners

    @property
    def server(self) -> Server:
        """What the method keeps at its server."""
        return self.hub.server

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Runs rounds one by one."""
        for round in range(first, last + 1):
            self._round(round)
            self._round_done = round
            if not keep_going(round):
                return round
        return last

    def _round(self, round: int) -> None:
        self.residents.local_steps(round)
        if not self.method.exchanges(round):
            return
        sent = self.residents.emit(round)
        if self.method.decentralised:
            teachers = self.method.teachers(self.roster, round)
            self.residents.receive({name: [sent[t] for t in heard] for name, heard in teachers.items()}, round)
            self.ledger.heard(teachers, sent.__getitem__)
        else:
            self.residents.receive(self.hub.answers(sent, round), round)

    def verify(self) -> None:
        """Reads all losses and flags at once, so that no round waits for the device."""
        raise_earliest(self.residents.faults(self._round_done) + self.hub.faults())

    def series(self) -> dict[str, dict[str, list[float]]]:
        """Of all nodes."""
        return self.residents.series()

    def complete(self, count: bool) -> None:
        """Brings what the server still holds of the nodes' models to them."""
        message = self.hub.closing(self._round_done, count)
        if message is not None:
            self.residents.complete(message)

    def validate(self) -> dict[str, int]:
        """Evaluates model after model."""
        return self.residents.validate()

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        """Evaluates model after model."""
        return self.residents.correct(sets)

    def validate_views(self) -> dict[str, dict[str, int]]:
        """View after view, model after model."""
        return self.residents.validate_views()

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        """As `correct`, for one view of some nodes."""
        return self.residents.correct_view(view, names, sets)

    def keep_best(self, names: Iterable[str]) -> None:
        """Copies weights."""
        self.residents.keep_best(names)

    def select(self, which: Which) -> None:
        """Swaps weights."""
        self.residents.select(which)

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """As torch gives them."""
        return self.residents.state_dicts()

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        """Model after model."""
        return self.residents.logits(inputs)

    def state(self) -> dict[str, Tensor]:
        """The states of all learners and of the server, each under its name."""
        return {**self.residents.state(), **self.hub.state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Hands each holder its own."""
        self.residents.restore(state)
        self.hub.restore(state)

    @property
    def parameter_bytes(self) -> int:
        """Of all learners."""
        return self.residents.parameter_bytes

    def close(self) -> None:
        """Gives the modules back."""
        self.residents.close()
