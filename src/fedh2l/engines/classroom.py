"""Who teaches whom in a round, and on which public samples, for the stacked members of several federations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.augmentation import Mixture
from fedh2l.domain import Samples
from fedh2l.engines.draws import Draws
from fedh2l.engines.stacked_nodes import Store, Views
from fedh2l.errors import ConfigError
from fedh2l.learner import Learner
from fedh2l.methods.base import Method
from fedh2l.roster import Roster
from fedh2l.sampling import draw_block, stream_key
from fedh2l.topology import Graph

RAGGED = "nodes hear different numbers of teachers"
"""What cannot be run as one computation."""
REMEMBERED = 256
"""How many rounds' graphs are remembered: those that are prepared while others are run."""


class Classroom:
    """Teachers and public batches of all members, drawn by address. `learners` are federation after federation."""

    def __init__(
        self, method: Method, rosters: Sequence[Roster], learners: Sequence[Learner], store: Store, draws: Draws
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
        self._batches: dict[tuple[int, int], Samples] = {}

    def _views_of(self, first: Learner) -> Views | None:
        """Of public batches, if they are seen otherwise."""

        def keys(rounds: Sequence[int]) -> list[int]:
            return [stream_key("public-views", m.seed_set.seed, m.name, r) for r in rounds for m in self._learners]

        views = first.seed_set.views
        return Views(views, first.parameters.dtype, "public-views", keys) if views else None

    def new_round(self) -> None:
        """Forgets what several asked for in the round before."""
        self._taught.clear()
        self._batches.clear()

    def graph(self, federation: int, round: int) -> Graph:
        """Who hears whom in a federation; what was asked for lately is remembered."""
        if (federation, round) not in self._drawn:
            if len(self._drawn) > REMEMBERED * len(self._rosters):
                self._drawn.clear()
            self._drawn[federation, round] = self._method.teachers(self._rosters[federation], round)
        return self._drawn[federation, round]

    def teachers(self, round: int) -> Tensor:
        """The places of each member's teachers, `(members, teachers)`."""
        if round not in self._taught:
            self._taught[round] = self._draws.get("teachers", self._tables, round)
        return self._taught[round]

    def batches_for(self, places: Tensor, everybody: bool) -> Callable[[str, int, int], Samples]:
        """What the members at `places` see of public data: their own batch, a named node's, their t-th teacher's."""
        nodes = len(self._names)

        def public(owner: str, round: int, size: int) -> Samples:
            batch = self._batch(round, size)
            if owner == "own":
                return batch if everybody else _of(batch, places)
            if owner in self._names:
                federation = places.div(nodes, rounding_mode="floor")
                return _of(batch, federation * nodes + self._names.index(owner))
            teachers = self.teachers(round)
            mine = teachers if everybody else teachers.index_select(0, places)
            return _of(batch, mine[:, int(owner.removeprefix("teacher "))])

        return public

    def _batch(self, round: int, size: int) -> Samples:
        """The public batches of all members, `(members, size, …)`."""
        if (round, size) not in self._batches:
            batch = self._store.take(self._rows(round, size))
            self._batches[round, size] = self._views.of(batch, self._draws, round) if self._views else batch
        return self._batches[round, size]

    def _rows(self, round: int, size: int) -> Tensor:
        """Where in the store they are, `(members, size)`."""
        population = self._public.shape[1]
        if size >= population:
            return self._public

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [stream_key("public-batch", m.seed_set.seed, m.name, r) for r in rounds for m in self._learners]
            drawn = draw_block([population] * len(keys), size, keys)
            return drawn.reshape(len(rounds), len(self._learners), size)

        return self._public.gather(1, self._draws.get(("public-batch", size), compute, round))

    def _tables(self, rounds: Sequence[int]) -> NDArray[np.int64]:
        tables = [self._table(federation, round) for round in rounds for federation in range(len(self._rosters))]
        if len({table.shape for table in tables}) > 1:
            raise ConfigError(f"run.engine: {RAGGED}; use 'local'")
        return np.stack(tables).reshape(len(rounds), len(self._learners), -1)

    def _table(self, federation: int, round: int) -> NDArray[np.int64]:
        """The places of the teachers of a federation's members, `(nodes, teachers)`."""
        roster = self._rosters[federation]
        graph = self.graph(federation, round)
        known = self._graphs.get(federation)
        if known is None or known[0] is not graph:  # most methods give one object for all rounds
            if len({len(heard) for heard in graph.values()}) > 1:
                raise ConfigError(f"run.engine: {RAGGED}; use 'local'")
            first = federation * len(self._names)
            rows = [[first + roster.index[teacher] for teacher in graph[name]] for name in self._names]
            known = self._graphs[federation] = (graph, np.array(rows, dtype=np.int64))
        return known[1]


def _of(samples: Samples, places: Tensor) -> Samples:
    """The samples of the members at `places`, `(places, rows, …)`."""
    mixture = samples.mixture
    if mixture is not None:
        mixture = Mixture(*(part.index_select(0, places) for part in mixture))
    return Samples(samples.inputs.index_select(0, places), samples.labels.index_select(0, places), mixture)
