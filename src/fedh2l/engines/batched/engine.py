"""Nodes of one architecture as one computation, for one experiment or several that differ only by seed or data.

`nodes.py` runs the rounds of all experiments together. Each experiment's trainer uses its own `BatchedEngine`. On a
GPU, rounds are recorded as CUDA graphs (`graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fedh2l.data.domain import Samples
from fedh2l.engines.base import Engine, Fault, Which, raise_earliest
from fedh2l.engines.batched.nodes import ANSWER, FAULT, StackedNodes
from fedh2l.engines.batched.teacher_schedule import RAGGED
from fedh2l.engines.local import LocalEngine
from fedh2l.errors import ConfigError
from fedh2l.protocol.messages import SERVER


class BatchedEngine(Engine):
    """The engine of one experiment in a stack."""

    def __init__(self, stacked: StackedNodes, place: int) -> None:
        self.stacked = stacked
        self.place = place
        self.inner = stacked.engines[place]
        self.ledger = self.inner.ledger
        self.learners = self.inner.learners
        self.method = self.inner.method
        self._first = place * len(stacked.names)

    @staticmethod
    def of(engines: Sequence[LocalEngine]) -> list[BatchedEngine]:
        """Return engines that share one stack. Raise `ConfigError` if the experiments cannot be run as one."""
        reason = obstacle(engines)
        if reason:
            raise ConfigError(f"run.engine: 'batched' cannot run this: {reason}. Use 'local'")
        stacked = StackedNodes(engines)
        return [BatchedEngine(stacked, place) for place in range(len(engines))]

    def moves(self, other: Engine) -> bool:
        """Return whether the other engine belongs to the same stack."""
        return isinstance(other, BatchedEngine) and other.stacked is self.stacked

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Run rounds of all experiments in the stack."""
        return self.stacked.advance(first, last, keep_going)

    def _records(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        names = self.stacked.names
        return {name: self.stacked.records.setdefault(f"{self.place}/{name}", {}) for name in names}

    def verify(self) -> None:
        """Check recorded values and parameters."""
        found: list[Fault] = []
        unsound = self.stacked.unsound()
        for offset, (name, records) in enumerate(self._records().items()):
            for what in unsound[self._first + offset]:
                found.append(Fault(self.stacked.round, 3, name, f"{what} are not finite"))
            for key, entries in records.items():
                for round, value in entries:
                    if key in (FAULT, ANSWER):
                        if value:
                            kind = self.stacked.sent[0 if key == FAULT else 1]
                            who, order = (name, 1.0) if key == FAULT else (SERVER, 1.5)
                            found.append(Fault(round, order, who, kind.explain(int(value) - 1), value == 1))
                    elif not np.isfinite(value):
                        found.append(
                            Fault(round, 0 if key.startswith("local") else 2, name, f"its {key} is not finite")
                        )
            records.pop(FAULT, None)
            records.pop(ANSWER, None)
        raise_earliest(found)

    def series(self) -> dict[str, dict[str, list[float]]]:
        collected = {}
        for name, records in self._records().items():
            collected[name] = {key: [value for _, value in entries] for key, entries in records.items()}
            records.clear()
        return collected

    def complete(self, count: bool) -> None:
        """Complete all experiments at once, and count the bytes of this one."""
        message = self.stacked.complete()
        if message is not None and count:
            self.ledger.add(SERVER, self.stacked.names, message)

    def validate(self) -> dict[str, int]:
        counts = self.stacked.validate()
        return {name: counts[self._first + i] for i, name in enumerate(self.stacked.names)}

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        return self.inner.correct(sets)

    def validate_views(self) -> dict[str, dict[str, int]]:
        names = self.stacked.names
        return {
            view: {name: counts[self._first + i] for i, name in enumerate(names)}
            for view, counts in self.stacked.validate_views().items()
        }

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        self.stacked.save(self.place)
        return self.inner.correct_view(view, names, sets)

    def keep_best(self, names: Iterable[str]) -> None:
        self.stacked.keep_best({self._first + self.inner.roster.index[name] for name in names})

    def select(self, which: Which) -> None:
        if not self.inner.selected:
            self.stacked.save(self.place)
        self.inner.select(which)

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        return self.inner.state_dicts()

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        return self.inner.logits(inputs)

    def state(self) -> dict[str, Tensor]:
        """Return the same state as the local engine, so that either can continue from it."""
        self.stacked.save(self.place)
        for learner in self.learners:
            records = self._records()[learner.name]
            learner.records = {
                key: [(round, torch.tensor(value, dtype=torch.float64)) for round, value in entries]
                for key, entries in records.items()
            }
        return self.inner.state()

    def restore(self, state: Mapping[str, Tensor], round: int = 0) -> None:
        """Restore the learners. They are stacked again before the next round."""
        self.inner.restore(state, round)
        self.stacked.round = round
        for name, records in self._records().items():
            learner = next(learner for learner in self.learners if learner.name == name)
            records.clear()
            records |= {
                key: [(round, float(value)) for round, value in entries] for key, entries in learner.records.items()
            }
            learner.records = {}
        self.stacked.stale = True  # other experiments may not be restored yet

    @property
    def parameter_bytes(self) -> int:
        return self.inner.parameter_bytes

    def close(self) -> None:
        """Release the modules with their trained weights, even if the run was cut short."""
        if not self.inner.selected:
            self.stacked.save_weights(self.place)
        self.inner.close()


def obstacle(engines: Sequence[LocalEngine]) -> str | None:
    """Return the reason why these experiments cannot be run as one computation, or None."""
    first = engines[0]
    if any(engine.roster.names != first.roster.names for engine in engines):
        return "the experiments have different nodes"
    learners = [learner for engine in engines for learner in engine.learners]
    if any(learner.network.compute.bf16 or learner.network.compute.rows for learner in learners):
        return "run.precision or run.micro_batch is set"
    if len({learner.seed_set.labelled for learner in learners}) > 1:
        return "some of the experiments have public data without labels"
    sizes = {len(learner.seed_set.parts[learner.name]) for learner in learners}
    if len(sizes) > 1:
        return "nodes have public data of different sizes"
    if min(len(learner.private) for learner in learners) <= first.learners[0].batch_size:
        return "a node has less private data than a batch"
    if any(engine.method != first.method for engine in engines):
        return "the method fits the experiments differently"
    if len({len(learner.validation) for learner in learners if learner.validation is not None}) > 1:
        return "the experiments have validation data of different sizes"
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
