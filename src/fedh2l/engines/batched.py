"""Nodes of one architecture as one computation, for one federation or for several that differ by seed or data alone.

The rounds of all of them are run together (`formation.py`); each federation's trainer sees an engine of its own, a
window on its share. On a GPU rounds are recorded as CUDA graphs (`graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.engines.base import Engine, Fault, Which, raise_earliest
from fedh2l.engines.classroom import RAGGED
from fedh2l.engines.formation import ANSWER, FAULT, Formation
from fedh2l.engines.local import LocalEngine
from fedh2l.errors import ConfigError
from fedh2l.messages import SERVER
from fedh2l.settings import AS_USUAL


class BatchedEngine(Engine):
    """One federation's window on a formation."""

    def __init__(self, formation: Formation, place: int) -> None:
        self.formation = formation
        self.place = place
        self.inner = formation.engines[place]
        self.ledger = self.inner.ledger
        self.learners = self.inner.learners
        self.method = self.inner.method
        self._first = place * len(formation.names)

    @staticmethod
    def of(engines: Sequence[LocalEngine]) -> list[BatchedEngine]:
        """Windows on a formation of these federations; raises `ConfigError` if they cannot be run as one."""
        reason = obstacle(engines)
        if reason:
            raise ConfigError(f"run.engine: 'batched' cannot run this: {reason}; use 'local'")
        formation = Formation(engines)
        return [BatchedEngine(formation, place) for place in range(len(engines))]

    def moves(self, other: Engine) -> bool:
        """All that are in the formation."""
        return isinstance(other, BatchedEngine) and other.formation is self.formation

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Takes the whole formation along."""
        return self.formation.advance(first, last, keep_going)

    def _records(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        names = self.formation.names
        return {name: self.formation.records.setdefault(f"{self.place}/{name}", {}) for name in names}

    def verify(self) -> None:
        """Looks through what was recorded, and at the parameters."""
        found: list[Fault] = []
        unsound = self.formation.unsound()
        for offset, (name, records) in enumerate(self._records().items()):
            for what in unsound[self._first + offset]:
                found.append(Fault(self.formation.round, 3, name, f"{what} are not finite"))
            for key, entries in records.items():
                for round, value in entries:
                    if key in (FAULT, ANSWER):
                        if value:
                            kind = self.formation.sent[0 if key == FAULT else 1]
                            who, order = (name, 1.0) if key == FAULT else (SERVER, 1.5)
                            found.append(Fault(round, order, who, f"it sent {kind.FAULTS[int(value) - 1]}"))
                    elif not np.isfinite(value):
                        found.append(
                            Fault(round, 0 if key.startswith("local") else 2, name, f"its {key} is not finite")
                        )
            records.pop(FAULT, None)
            records.pop(ANSWER, None)
        raise_earliest(found)

    def series(self) -> dict[str, dict[str, list[float]]]:
        """What each node recorded since the last call."""
        collected = {}
        for name, records in self._records().items():
            collected[name] = {key: [value for _, value in entries] for key, entries in records.items()}
            records.clear()
        return collected

    def complete(self, count: bool) -> None:
        """For all federations at once; each counts its own."""
        message = self.formation.complete()
        if message is not None and count:
            self.ledger.add(SERVER, self.formation.names, message)

    def validate(self) -> dict[str, int]:
        """This federation's share of what all get right."""
        counts = self.formation.validate()
        return {name: counts[self._first + i] for i, name in enumerate(self.formation.names)}

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        """By the learners themselves."""
        return self.inner.correct(sets)

    def validate_views(self) -> dict[str, dict[str, int]]:
        """This federation's share."""
        names = self.formation.names
        return {
            view: {name: counts[self._first + i] for i, name in enumerate(names)}
            for view, counts in self.formation.validate_views().items()
        }

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        """By the learners themselves."""
        self.formation.save(self.place)
        return self.inner.correct_view(view, names, sets)

    def keep_best(self, names: Iterable[str]) -> None:
        """In the stack."""
        self.formation.keep_best({self._first + self.inner.roster.index[name] for name in names})

    def select(self, which: Which) -> None:
        """By the learners themselves, after the last round."""
        if not self.inner.residents.selected:
            self.formation.save(self.place)
        self.inner.select(which)

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """By the learners themselves."""
        return self.inner.state_dicts()

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        """By the learners themselves."""
        return self.inner.logits(inputs)

    def state(self) -> dict[str, Tensor]:
        """The same as the local engine's, so that either may go on from it."""
        self.formation.save(self.place)
        for learner in self.learners:
            records = self._records()[learner.name]
            learner.records = {
                key: [(round, torch.tensor(value, dtype=torch.float64)) for round, value in entries]
                for key, entries in records.items()
            }
        return self.inner.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Through the learners, which are then stacked anew."""
        self.inner.restore(state)
        for name, records in self._records().items():
            learner = next(learner for learner in self.learners if learner.name == name)
            records.clear()
            records |= {
                key: [(round, float(value)) for round, value in entries] for key, entries in learner.records.items()
            }
            learner.records = {}
        self.formation.stale = True  # the others may still have to be restored

    @property
    def parameter_bytes(self) -> int:
        """Of all learners."""
        return self.inner.parameter_bytes

    def close(self) -> None:
        """Gives the modules back, with what they learned also if the run was cut short."""
        if not self.inner.residents.selected:
            self.formation.save_weights(self.place)
        self.inner.close()


def obstacle(engines: Sequence[LocalEngine]) -> str | None:
    """Why these federations cannot be run as one computation; None if they can."""
    first = engines[0]
    if any(engine.roster.names != first.roster.names for engine in engines):
        return "the federations have different nodes"
    learners = [learner for engine in engines for learner in engine.learners]
    if any(learner.compute != AS_USUAL for learner in learners):
        return "run.precision or run.micro_batch is set"
    if len({learner.seed_set.labelled for learner in learners}) > 1:
        return "some of the federations have public data without labels"
    sizes = {len(learner.seed_set.parts[learner.name]) for learner in learners}
    if len(sizes) > 1:
        return "nodes have public data of different sizes"
    if min(len(learner.private) for learner in learners) <= first.learners[0].batch_size:
        return "a node has less private data than a batch"
    if any(engine.method != first.method for engine in engines):
        return "the method fits the federations differently"
    if len({len(learner.validation) for learner in learners if learner.validation is not None}) > 1:
        return "the federations have validation data of different sizes"
    if first.method.decentralised:
        exchanging = islice((round for round in range(1, first.rounds + 1) if first.method.exchanges(round)), 64)
        graphs = [first.method.teachers(engine.roster, round) for round in exchanging for engine in engines]
        counts = {len(heard) for graph in graphs for heard in graph.values()}
        if len(counts) > 1 or counts == {0}:
            return RAGGED
    pools = {len(learner.private) for learner in learners}
    if len(pools) > 1 and "features" in first.method.sends:
        return "nodes send features of different numbers of samples"
    return None
