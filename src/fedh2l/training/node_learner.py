"""One node while it trains, with its own module and its own data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedh2l.data.batches import Batches
from fedh2l.data.domain import Samples
from fedh2l.data.seedset import SeedSet
from fedh2l.hardware import uploaded
from fedh2l.protocol.sampling import PrivatePurpose, shuffled, torch_seed
from fedh2l.training.compute import Compute
from fedh2l.training.fingerprint import model_fingerprint
from fedh2l.training.learner import Learner, Pool, seed_generators
from fedh2l.training.network import Network
from fedh2l.training.node import Node
from fedh2l.training.optimizers import OptimizerSettings


@dataclass(frozen=True)
class Training:
    """What all nodes of an experiment share: public data, validation data and settings."""

    seed_set: SeedSet
    validation: Samples
    optimizer: OptimizerSettings
    batch_size: int
    dtype: torch.dtype
    compute: Compute
    ema_decay: float

    def to(self, device: torch.device) -> Training:
        """Return the same with all data on a device, in the type of the parameters."""
        seed_set = self.seed_set.to(device, self.dtype)
        return replace(self, seed_set=seed_set, validation=self.validation.to(device, self.dtype))


class NodeLearner(Learner):
    """A learner with its own module and its own data. It starts with the node's initial weights."""

    def __init__(self, node: Node, training: Training, secret: str) -> None:
        batch_size, dtype, seed_set = training.batch_size, training.dtype, training.seed_set
        module, domain, device = node.build(secret, batch_size), node.domain, training.validation.labels.device
        first = next(module.parameters())
        self._home = (first.device, first.dtype, module.training)
        self.fingerprint = model_fingerprint(module, node.floating, node.input_shape)
        """Identifies the model, whatever its weights."""
        network = Network(module.to(device, dtype), training.optimizer, domain.pixels, training.compute)
        super().__init__(
            node.name, len(domain.classes), network, seed_set, batch_size, training.ema_decay, domain.augmentation
        )
        self.private = domain.private.to(device, dtype)
        self.validation = training.validation
        self.secret = secret
        """The seed of all private draws."""
        self._node = node
        self._batches = Batches(secret, device)
        self._pools: dict[Pool, Samples] = {}

    def local_batch(self, round: int, pool: Pool) -> Samples:
        batch = self.pool(pool).take(self.local_indices(round, pool))
        if self.augmentation is None:
            return batch
        dtype = self.parameters.dtype
        seen = self.augmentation.views(batch.inputs, dtype, "local-views", self.secret, self.name, round)
        return Samples(seen, batch.labels)

    def local_indices(self, round: int, pool: Pool) -> Tensor:
        return self.draw("local-batch", round, len(self.pool(pool)), self.batch_size)

    def draw(self, purpose: PrivatePurpose, round: int, population: int, count: int) -> Tensor:
        return self._batches.indices(population, count, purpose, self.name, round)

    def order(self, purpose: PrivatePurpose, round: int, count: int) -> Tensor:
        drawn = shuffled(range(count), purpose, self.secret, self.name, round)
        return uploaded(torch.tensor(drawn), self.parameters.device)

    def pool(self, kind: Pool) -> Samples:
        if kind not in self._pools:
            self._pools[kind] = Samples.concatenate(self.parts_of(kind))
        return self._pools[kind]

    def parts_of(self, kind: Pool) -> list[Samples]:
        """Return the parts of a local pool, in order."""
        public = self.seed_set.parts
        return {
            "private": [self.private],
            "private+own-public": [self.private, public[self.name]],
            "private+all-public": [self.private, *public.values()],
            "all-public": list(public.values()),
        }[kind]

    def public_batch(self, owner: str, round: int, size: int) -> Samples:
        return self.seed_set.batch(owner, round, size)

    def public_subset(self, round: int, size: int) -> Samples:
        return self.seed_set.subset(round, size)

    def seed_torch(self, purpose: PrivatePurpose, round: int) -> None:
        seed_generators(torch_seed(purpose, self.secret, self.name, round), self.parameters.device)

    def use(self, seed_set: SeedSet) -> None:
        """Replace the public data."""
        self.seed_set, self._pools = seed_set, {}

    def build(self, model: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Build another model, with the initial weights that it would have as this node's own."""
        return replace(self._node, model=model, model_args=arguments, weights=None).build(self.secret, self.batch_size)

    def further(self, name: str, module: nn.Module) -> Network:
        """Add a network that trains a copy of `module` beside the node's own model."""
        copied = copy.deepcopy(module).to(self.parameters.device, self.parameters.dtype)
        self.networks[name] = Network(copied, self.network.optimizer, self.network.pixels, self.network.compute)
        return self.networks[name]

    def release(self) -> None:
        """Give the module its original storages, device, type and mode. It keeps its present weights."""
        device, dtype, training = self._home
        self.network.flat.release()
        self.module.to(device, dtype).train(training)
