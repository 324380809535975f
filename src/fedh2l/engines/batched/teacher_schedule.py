"""Teachers and public batches of each round, for the stacked members of several experiments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.data.augmentation import Mixture
from fedh2l.data.domain import Samples
from fedh2l.engines.batched.random_buffer import RandomBuffers
from fedh2l.engines.batched.samples import StackedAugmentation, Store
from fedh2l.errors import ConfigError
from fedh2l.methods.base import Method
from fedh2l.protocol.roster import Roster
from fedh2l.protocol.sampling import draw_block, stream_key
from fedh2l.protocol.topology import Graph
from fedh2l.training.node_learner import NodeLearner

RAGGED = "nodes have different numbers of teachers"
"""A reason why nodes cannot be run as one computation."""
REMEMBERED = 256
"""Rounds of cached graphs per experiment, for rounds that are prepared while others run."""


class TeacherSchedule:
    """Draws teachers and public batches of all members by address. `learners` are ordered by experiment."""

    def __init__(
        self,
        method: Method,
        rosters: Sequence[Roster],
        learners: Sequence[NodeLearner],
        store: Store,
        draws: RandomBuffers,
    ) -> None:
        self._method, self._rosters, self._learners = method, rosters, learners
        self._names = rosters[0].names
        self._store, self._draws = store, draws
        own = [store.add(learner.seed_set.parts[learner.name]) for learner in learners]
        self._public = torch.from_numpy(np.stack(own)).to(draws.device)
        self._views = self._views_of(learners[0])
        self._graphs: dict[int, tuple[Graph, NDArray[np.int64]]] = {}
        self._drawn: dict[tuple[int, int], Graph] = {}
        self._taught: dict[int, Tensor] = {}
        self._senders: dict[str, int] = {}
        self._batches: dict[tuple[int, int], Samples] = {}

    def _views_of(self, first: NodeLearner) -> StackedAugmentation | None:
        """Return the augmentation of public batches, or None."""

        def keys(rounds: Sequence[int]) -> list[int]:
            return [stream_key("public-views", m.seed_set.seed, m.name, r) for r in rounds for m in self._learners]

        views = first.seed_set.views
        return StackedAugmentation(views, first.parameters.dtype, "public-views", keys) if views else None

    def new_round(self) -> None:
        """Clear the caches of the previous round."""
        self._taught.clear()
        self._batches.clear()

    def graph(self, experiment: int, round: int) -> Graph:
        """Return the teachers of each node in an experiment. Recent graphs are cached."""
        if (experiment, round) not in self._drawn:
            if len(self._drawn) > REMEMBERED * len(self._rosters):
                self._drawn.clear()
            self._drawn[experiment, round] = self._method.teachers(self._rosters[experiment], round)
        return self._drawn[experiment, round]

    def teachers(self, round: int) -> Tensor:
        """Return the positions of each member's teachers, `(members, teachers)`."""
        if round not in self._taught:
            self._taught[round] = self._draws.get("teachers", self._tables, round)
        return self._taught[round]

    def sender(self, place: int) -> str:
        """Return the sender of the messages of each member's teacher at `place`: one message has many senders."""
        name = f"teacher {place}"
        self._senders[name] = place
        return name

    def batches_for(self, places: Tensor, everybody: bool) -> Callable[[str, int, int], Samples]:
        """Return a function that returns public batches for the members at `places`.

        Its argument `owner` is `own`, the name of a node, or a result of `sender`.
        """
        nodes = len(self._names)

        def public(owner: str, round: int, size: int) -> Samples:
            batch = self._batch(round, size)
            if owner == "own":
                return batch if everybody else _of(batch, places)
            if owner in self._names:
                experiment = places.div(nodes, rounding_mode="floor")
                return _of(batch, experiment * nodes + self._names.index(owner))
            teachers = self.teachers(round)
            mine = teachers if everybody else teachers.index_select(0, places)
            return _of(batch, mine[:, self._senders[owner]])

        return public

    def _batch(self, round: int, size: int) -> Samples:
        """Return the public batches of all members, `(members, size, …)`."""
        if (round, size) not in self._batches:
            batch = self._store.take(self._rows(round, size))
            self._batches[round, size] = self._views.of(batch, self._draws, round) if self._views else batch
        return self._batches[round, size]

    def _rows(self, round: int, size: int) -> Tensor:
        """Return the positions of the public batches in the store, `(members, size)`."""
        population = self._public.shape[1]
        if size >= population:
            return self._public

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [stream_key("public-batch", m.seed_set.seed, m.name, r) for r in rounds for m in self._learners]
            drawn = draw_block([population] * len(keys), size, keys)
            return drawn.reshape(len(rounds), len(self._learners), size)

        return self._public.gather(1, self._draws.get(("public-batch", size), compute, round))

    def _tables(self, rounds: Sequence[int]) -> NDArray[np.int64]:
        tables = [self._table(experiment, round) for round in rounds for experiment in range(len(self._rosters))]
        if len({table.shape for table in tables}) > 1:
            raise ConfigError(f"run.engine: {RAGGED}; use 'local'")
        return np.stack(tables).reshape(len(rounds), len(self._learners), -1)

    def _table(self, experiment: int, round: int) -> NDArray[np.int64]:
        """Return the positions of the teachers of an experiment's members, `(nodes, teachers)`."""
        roster = self._rosters[experiment]
        graph = self.graph(experiment, round)
        known = self._graphs.get(experiment)
        if known is None or known[0] is not graph:  # most methods return one object for all rounds
            if len({len(heard) for heard in graph.values()}) > 1:
                raise ConfigError(f"run.engine: {RAGGED}; use 'local'")
            first = experiment * len(self._names)
            rows = [[first + roster.index[teacher] for teacher in graph[name]] for name in self._names]
            known = self._graphs[experiment] = (graph, np.array(rows, dtype=np.int64))
        return known[1]


def _of(samples: Samples, places: Tensor) -> Samples:
    """Return the samples of the members at `places`, `(places, rows, …)`."""
    mixture = samples.mixture
    if mixture is not None:
        mixture = Mixture(*(part.index_select(0, places) for part in mixture))
    return Samples(samples.inputs.index_select(0, places), samples.labels.index_select(0, places), mixture)
