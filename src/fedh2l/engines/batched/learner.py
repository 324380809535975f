"""Many nodes as one learner with a leading dimension, and the interface that methods use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.data.domain import Samples
from fedh2l.engines.batched.network import StackedNetwork, stack, take_member
from fedh2l.engines.batched.random_buffer import RandomBuffers
from fedh2l.engines.batched.samples import StackedAugmentation, Store
from fedh2l.protocol.sampling import PrivatePurpose, draw_block, shuffle_block, stream_key, torch_seed
from fedh2l.training.learner import Learner, Pool
from fedh2l.training.node_learner import NodeLearner


class StackedLearner(Learner):
    """Nodes with models of one architecture, from one experiment or several in step.

    `places` are their positions among all members of the run. Names of owners and senders are relative, such as `own`
    or `teacher 1`, because they differ between members.
    """

    network: StackedNetwork

    def __init__(
        self, members: Sequence[NodeLearner], places: Sequence[int], store: Store, draws: RandomBuffers
    ) -> None:
        first, network = members[0], StackedNetwork([member.network for member in members])
        super().__init__(
            "own", first.classes, network, first.seed_set, first.batch_size, first.decay, first.augmentation
        )
        self.members = tuple(members)
        self.places = torch.tensor(places, device=network.vector.device)
        self._load_nodes()
        self.public: Callable[[str, int, int], Samples]  # set by the engine, which knows the teachers
        self._store, self._draws = store, draws
        self._tables: dict[Pool, tuple[Tensor, list[int]]] = {}
        self._materialised: dict[Pool, Samples] = {}
        for member in members:  # samples for later use must be in the store before it is closed
            store.add(member.private)
        for seed_set in {id(member.seed_set): member.seed_set for member in members}.values():
            for part in seed_set.parts.values():
                store.add(part)
        validation = [member.validation for member in members if member.validation is not None]
        self._validation_size = len(validation[0])
        self._validation_starts = [int(store.add(samples)[0]) for samples in validation]

    def load(self) -> None:
        """Stack the state of the members."""
        self.network.load()
        self._load_nodes()

    def _load_nodes(self) -> None:
        self.memory = stack([member.memory for member in self.members])
        self.reported = stack([member.reported or {} for member in self.members]) or None
        self.best = stack([member.best or {} for member in self.members]) or None
        networks = self.members[0].networks
        self.networks = {name: StackedNetwork([m.networks[name] for m in self.members]) for name in networks}

    def save(self, places: Sequence[int]) -> None:
        """Copy the state of the members at these places back to them. The engine copies recorded values."""
        self.network.save(places)
        for network in self.networks.values():
            assert isinstance(network, StackedNetwork)
            network.save(places)
        for place in places:
            member = self.members[place]
            member.memory = take_member(self.memory, place)
            member.reported = take_member(self.reported, place) if self.reported else None
            member.best = take_member(self.best, place) if self.best else None

    def keep_best(self, which: Tensor) -> None:
        """Save the reported weights as the best, for members where `which` `(members,)` is true."""
        present = self.shown or self.network.weights()
        if self.best is None:
            self.best = {name: value.clone() for name, value in present.items()}
            return
        for name, value in self.best.items():
            mask = which.view(-1, *(1,) * (value.dim() - 1))
            self.best[name] = torch.where(mask, present[name], value)

    def find_validation(self) -> None:
        """Take the validation data of each member's experiment from the closed store."""
        places = torch.arange(self._validation_size, device=self.network.vector.device)
        if len(set(self._validation_starts)) > 1:
            starts = torch.tensor(self._validation_starts, device=self.network.vector.device)
            self.validation = self._store.take(starts.unsqueeze(1) + places)
        else:  # all members share one copy
            samples = self._store.take(places + self._validation_starts[0])
            members = len(self.members)
            inputs = samples.inputs.expand(members, *samples.inputs.shape)
            self.validation = Samples(inputs, samples.labels.expand(members, -1))

    def local_batch(self, round: int, pool: Pool) -> Samples:
        """Return the batches of a round, `(members, batch_size, …)`."""
        table, _ = self._table(pool)
        batch = self._store.take(table.gather(1, self.local_indices(round, pool)))
        if self.augmentation is None:
            return batch

        def keys(rounds: Sequence[int]) -> list[int]:
            return [self._key(member, "local-views", r) for r in rounds for member in self.members]

        views = StackedAugmentation(self.augmentation, self.network.vector.dtype, ("local-views", id(self)), keys)
        return views.of(batch, self._draws, round)

    def local_indices(self, round: int, pool: Pool) -> Tensor:
        """Return the positions of the batches of a round in the local pools, `(members, batch_size)`."""
        _, sizes = self._table(pool)

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [self._key(member, "local-batch", r) for r in rounds for member in self.members]
            drawn = draw_block(sizes * len(rounds), min(self.batch_size, min(sizes)), keys)
            return drawn.reshape(len(rounds), len(self.members), -1)

        return self._draws.get(("local-batch", pool, id(self)), compute, round)

    def draw(self, purpose: PrivatePurpose, round: int, population: int, count: int) -> Tensor:
        """Return `count` of `population` indices per member, `(members, count)`."""
        if count >= population:
            return torch.arange(population, device=self.network.vector.device).expand(len(self.members), -1)

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [self._key(member, purpose, r) for r in rounds for member in self.members]
            drawn = draw_block([population] * len(keys), count, keys)
            return drawn.reshape(len(rounds), len(self.members), -1)

        return self._draws.get((purpose, population, count, id(self)), compute, round)

    def order(self, purpose: PrivatePurpose, round: int, count: int) -> Tensor:
        """Return all `count` indices in a random order per member, `(members, count)`."""

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [self._key(member, purpose, r) for r in rounds for member in self.members]
            return shuffle_block(count, keys).reshape(len(rounds), len(self.members), -1)

        return self._draws.get((purpose, count, id(self)), compute, round)

    def pool(self, kind: Pool) -> Samples:
        """Return the local pools, `(members, n, …)`. They must have the same size."""
        if kind not in self._materialised:
            table, sizes = self._table(kind)
            assert len(set(sizes)) == 1, "local pools of different sizes cannot be stacked"
            self._materialised[kind] = self._store.take(table)
        return self._materialised[kind]

    def public_batch(self, owner: str, round: int, size: int) -> Samples:
        """Return the public batches of a round: each member's own, or those of each member's t-th teacher."""
        return self.public(owner, round, size)

    def public_subset(self, round: int, size: int) -> Samples:
        """Return samples of the public data of each member's own experiment."""
        table, sizes = self._table("all-public")
        count = min(sizes)
        if size >= count:
            return self.pool("all-public")

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            keys = [stream_key("alignment", m.seed_set.seed, "", r) for r in rounds for m in self.members]
            return draw_block(sizes * len(rounds), size, keys).reshape(len(rounds), len(self.members), -1)

        return self._store.take(table.gather(1, self._draws.get(("alignment", size, id(self)), compute, round)))

    def seed_torch(self, purpose: PrivatePurpose, round: int) -> None:
        """Seed torch's own generator by address, with the first member's secret."""
        first = self.members[0]
        self._draws.seed(lambda r: torch_seed(purpose, first.secret, first.name, r), self.network.vector.device, round)

    def _table(self, kind: Pool) -> tuple[Tensor, list[int]]:
        """Return the positions of the pools in the store, `(members, largest)`, and the size of each."""
        if kind not in self._tables:
            rows = [self._store.rows(member.parts_of(kind)) for member in self.members]
            sizes = [len(row) for row in rows]
            table = np.zeros((len(rows), max(sizes)), dtype=np.int64)
            for place, row in enumerate(rows):
                table[place, : len(row)] = row
            self._tables[kind] = (torch.from_numpy(table).to(self.network.vector.device), sizes)
        return self._tables[kind]

    @staticmethod
    def _key(member: NodeLearner, purpose: PrivatePurpose, round: int) -> int:
        return stream_key(purpose, member.secret, member.name, round)
