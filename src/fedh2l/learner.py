"""A node at work: what a method's hooks are given.

A method sees a participant only through this interface: batches, logits, gradients, steps. An engine that runs many
nodes at once offers the same interface with a leading dimension, and the method does not notice.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedh2l.batches import Batches
from fedh2l.domain import Samples
from fedh2l.network import Network, flattened, grouped
from fedh2l.node import Node
from fedh2l.optimizers import OptimizerSettings
from fedh2l.sampling import PrivatePurpose, shuffled, torch_seed
from fedh2l.seedset import SeedSet
from fedh2l.settings import AS_USUAL, Compute
from fedh2l.upload import uploaded

LocalData = Literal["private", "private+own-public", "private+all-public"]
Pool = LocalData | Literal["all-public"]
Weights = dict[str, Tensor]

AVERAGE, AVERAGED = "average of weights", "weights in the average"
"""Under which a node remembers the average of its weights, and how many there are in it."""


def labels_for(pool: Pool) -> list[str]:
    """What a local pool needs labels of public data for, as a method says it (`Method.needs_labels`)."""
    return [] if pool == "private" else [f"method.local_data = '{pool}'"]


class Learner(Network):
    """One node's model, data and memory during a training."""

    def __init__(
        self,
        node: Node,
        seed_set: SeedSet,
        secret: str,
        optimizer: OptimizerSettings,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        validation: Samples | None = None,
        compute: Compute = AS_USUAL,
        decay: float = 0.0,
    ) -> None:
        module = node.build(secret, batch_size)
        first = next(module.parameters())
        self._home = (first.device, first.dtype, module.training)
        super().__init__(module.to(device, dtype), optimizer, node.domain.pixels, compute)
        self.name = node.name
        self.classes = len(node.domain.classes)
        self.private = node.domain.private.to(device, dtype)
        self.seed_set = seed_set
        self.validation = validation
        """Everybody's validation data, pooled: what models are selected on."""
        self.batch_size = batch_size
        self.networks: dict[str, Network] = {}
        """Networks that a method keeps beside the node's own."""
        self.memory: dict[str, Tensor] = {}
        """What a method keeps from round to round for this node; saved in checkpoints."""
        self.ready: tuple[Hashable, Tensor] | None = None
        """What was computed ahead of a message, under a name of what it is; gone when a run stops."""
        self.records: dict[str, list[tuple[int, Tensor]]] = {}
        """Scalars of each round since the last evaluation."""
        self.best: Weights | None = None
        """The weights that did best on validation data so far."""
        self.reported: Weights | None = None
        """The weights that count as this node's model, where they are not the ones it is training."""
        self.decay = decay
        """Of the average of its weights; 0: none is kept."""
        self.augmentation = node.domain.augmentation
        """Other views of its images, to train on."""
        self._node = node
        self._secret = secret
        self._batches = Batches(secret, device)
        self._pools: dict[str, Samples] = {}

    def local_batch(self, round: int, pool: Pool) -> Samples:
        """The batch of a round from this node's local pool, drawn by its secret."""
        batch = self.pool(pool).take(self.local_indices(round, pool))
        if self.augmentation is None:
            return batch
        dtype = self.parameters.dtype
        seen = self.augmentation.views(batch.inputs, dtype, "local-views", self._secret, self.name, round)
        return Samples(seen, batch.labels)

    def local_indices(self, round: int, pool: Pool) -> Tensor:
        """Where in its local pool the batch of a round is, `(batch_size,)`."""
        return self.draw("local-batch", round, len(self.pool(pool)), self.batch_size)

    def draw(self, purpose: PrivatePurpose, round: int, population: int, count: int) -> Tensor:
        """`count` of `population` indices, drawn by this node's secret; all, in order, if there are no more."""
        return self._batches.indices(population, count, purpose, self.name, round)

    def order(self, purpose: PrivatePurpose, round: int, count: int) -> Tensor:
        """All `count` indices in a random order, drawn by this node's secret."""
        drawn = shuffled(range(count), purpose, self._secret, self.name, round)
        return uploaded(torch.tensor(drawn), self.parameters.device)

    def pool(self, kind: Pool) -> Samples:
        """What this node trains on locally: private data, then public data in roster order."""
        if kind not in self._pools:
            self._pools[kind] = Samples.concatenate(self.parts_of(kind))
        return self._pools[kind]

    def use(self, seed_set: SeedSet) -> None:
        """From now on with other public data."""
        self.seed_set, self._pools, self.ready = seed_set, {}, None

    def parts_of(self, kind: Pool) -> list[Samples]:
        """The sets of samples that a local pool consists of, in order."""
        public = self.seed_set.parts
        return {
            "private": [self.private],
            "private+own-public": [self.private, public[self.name]],
            "private+all-public": [self.private, *public.values()],
            "all-public": list(public.values()),
        }[kind]

    def public_batch(self, owner: str, round: int, size: int) -> Samples:
        """The batch of a round from the public data of `owner`, the same for everybody.

        Its images may be mixed (`Samples.mixture`), if the data says so; then a label is the larger part of the truth.
        """
        return self.seed_set.batch(owner, round, size)

    def public_subset(self, round: int, size: int) -> Samples:
        """`size` samples of everybody's public data, the same for everybody; all of them, if there are no more."""
        return self.seed_set.subset(round, size)

    def build(self, model: str, arguments: Mapping[str, Any]) -> nn.Module:
        """Another model, with the initial weights that it would have had as this node's own."""
        return replace(self._node, model=model, model_args=arguments, weights=None).build(self._secret, self.batch_size)

    def further(self, name: str, module: nn.Module) -> Network:
        """A copy of `module`, kept in training beside this node's own model."""
        copied = copy.deepcopy(module).to(self.parameters.device, self.parameters.dtype)
        network = Network(copied, self.optimizer, self.pixels, self.compute)
        self.networks[name] = network
        return network

    def in_training(self) -> list[tuple[str, Network]]:
        """This node's own network and those beside it, each with what to call its parameters."""
        return [("its parameters", self), *((f"parameters of its {name}", n) for name, n in self.networks.items())]

    def take_ready(self, what: Hashable) -> Tensor | None:
        """What was computed ahead, if it is this; either way it is kept no longer."""
        ready, self.ready = self.ready, None
        return ready[1] if ready is not None and ready[0] == what else None

    def report(self) -> None:
        """From now on, and until the next call, the present weights count as this node's model."""
        self.reported = self.weights()

    def average(self) -> None:
        """Moves the average of the weights that count as this node's model towards those of now."""
        present = self.shared() if self.reported is None else self.vector_of(self.reported)
        self.follow(present, AVERAGE, AVERAGED)

    @torch.no_grad()
    def follow(self, present: Tensor, average: str, averaged: str) -> None:
        """Moves an average of weights, remembered under a name and how many there are in it under another.

        The first ones count for less and less: after n of them the decay is at most (1 + n) / (10 + n). Where this
        node keeps no averages (`decay` is 0), it is the weights of now.
        """
        if average not in self.memory:
            self.memory[average] = present
            self.memory[averaged] = torch.ones(present.shape[:-1], dtype=torch.float64, device=present.device)
            return
        count = self.memory[averaged]
        rate = 1 - ((1 + count) / (10 + count)).clamp(max=self.decay)
        self.memory[average] = torch.lerp(self.memory[average], present, rate.to(present.dtype).unsqueeze(-1))
        self.memory[averaged] = count + 1

    @property
    def shown(self) -> Weights | None:
        """The weights that count as this node's model, a copy of its own; None: those that it is training."""
        if AVERAGE in self.memory:
            return self.weights_of(self.memory[AVERAGE].clone())
        return self.reported

    @torch.no_grad()
    def teach(self, inputs: Tensor) -> Tensor:
        """Logits `(rows, classes)` of the average of its weights, if one is kept, in evaluation mode."""
        return self.predict_as(self.memory[AVERAGE], inputs) if AVERAGE in self.memory else self.predict(inputs)

    def end_of_training(self) -> None:
        """From now on the weights in the model are what counts."""
        self.reported = None
        self.memory.pop(AVERAGE, None)

    @contextmanager
    def showing(self, weights: Weights | None) -> Iterator[None]:
        """Puts other weights in the model for a while; None changes nothing."""
        if weights is None:
            yield
            return
        training = self.weights()
        self.load_weights(weights)
        try:
            yield
        finally:
            self.load_weights(training)

    def seed_torch(self, purpose: PrivatePurpose, round: int) -> None:
        """Addresses what a model draws from torch's own generator (dropout) like everything else that is random."""
        seed_generators(torch_seed(purpose, self._secret, self.name, round), self.parameters.device)

    def record(self, round: int, **values: Tensor) -> None:
        """Notes scalars of a round; they stay on the device until the next evaluation reads them all."""
        for name, value in values.items():
            self.records.setdefault(name, []).append((round, value.detach()))

    def state(self) -> dict[str, Tensor]:
        """Everything that the next round depends on, for a checkpoint."""
        state = super().state() | flattened(
            {
                "best": self.best or {},
                # These may be one tensor twice, or the best.
                "reported": {name: value.clone() for name, value in (self.reported or {}).items()},
                "memory": {name: value.clone() for name, value in self.memory.items()},
                **{f"network-{name}": network.state() for name, network in self.networks.items()},
            }
        )
        for name, entries in self.records.items():
            state[f"record.{name}.rounds"] = torch.tensor([round for round, _ in entries])
            state[f"record.{name}.values"] = torch.stack([value for _, value in entries])
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` returned."""
        super().restore(state)
        self.ready = None
        groups = grouped(state, self.parameters.device)
        self.best, self.reported = groups.get("best"), groups.get("reported")
        self.memory = groups.get("memory", {})
        for name, network in self.networks.items():
            network.restore(groups[f"network-{name}"])
        records = groups.get("record", {})
        self.records = {}
        for name in sorted({key.rpartition(".")[0] for key in records}):
            rounds, values = records[f"{name}.rounds"].tolist(), records[f"{name}.values"].unbind()
            self.records[name] = list(zip(rounds, values, strict=True))

    def release(self) -> None:
        """Leaves the module as it was found, but for what it learned: storages, device, type and mode."""
        device, dtype, training = self._home
        self.flat.release()
        self.module.to(device, dtype).train(training)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seeds the generator that a model on `device` draws from."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def architectures(learners: Sequence[Learner]) -> dict[str, list[str]]:
    """Names of nodes by the layout of their models; parameter averaging needs one layout."""
    found: dict[str, list[str]] = {}
    for learner in learners:
        layout = str([(name, tuple(t.shape)) for name, t in learner.module.state_dict().items()])
        found.setdefault(layout, []).append(learner.name)
    return found
