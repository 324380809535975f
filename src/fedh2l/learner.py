"""A node at work: what a method's hooks are given.

A method sees a participant only through this interface: batches, logits, gradients, steps. An engine that runs many
nodes at once offers the same interface with a leading dimension, and the method does not notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from fedh2l.domain import Samples
from fedh2l.node import Node
from fedh2l.optimizers import OptimizerSettings, State
from fedh2l.parameters import FlatParameters
from fedh2l.sampling import PrivatePurpose, draw_indices, torch_seed
from fedh2l.seedset import SeedSet

LocalData = Literal["private+all-public", "private+own-public"]
Phase = Literal["local", "mutual"]


class Learner:
    """One node's model, data, optimiser states and memory during a training."""

    def __init__(
        self,
        node: Node,
        seed_set: SeedSet,
        secret: str,
        optimizer: OptimizerSettings,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.name = node.name
        self.classes = len(node.domain.classes)
        module = node.build(secret, batch_size)
        first = next(module.parameters())
        self._home = (first.device, first.dtype, module.training)
        self.module: nn.Module = module.to(device, dtype)
        self.flat = FlatParameters(self.module)
        self.private = node.domain.private.to(device, dtype)
        self.seed_set = seed_set
        self.batch_size = batch_size
        self.optimizer = optimizer
        self.optimizer_states: dict[str, State] = {}
        self.memory: dict[str, Tensor] = {}
        """What a method keeps from round to round for this node; saved in checkpoints."""
        self.records: dict[str, list[tuple[int, Tensor]]] = {}
        """Scalars of each round since the last evaluation."""
        self.best: dict[str, Tensor] | None = None
        """The weights that did best on validation data so far."""
        self._secret = secret
        self._pools: dict[LocalData, Samples] = {}
        self._plain_modes = all(type(m).train is nn.Module.train for m in self.module.modules())
        self._modules = list(self.module.modules())

    @property
    def parameters(self) -> Tensor:
        """All trainable parameters as one vector `(parameters,)`."""
        return self.flat.vector

    def local_batch(self, round: int, pool: LocalData) -> Samples:
        """The batch of a round from this node's local pool, drawn by its secret."""
        samples = self.pool(pool)
        drawn = draw_indices(len(samples), self.batch_size, "local-batch", self._secret, self.name, round)
        return samples.take(drawn)

    def pool(self, kind: LocalData) -> Samples:
        """Everything that this node may train on locally: private data, then public data in roster order."""
        if kind not in self._pools:
            public = self.seed_set.parts
            shared = [public[self.name]] if kind == "private+own-public" else list(public.values())
            self._pools[kind] = Samples.concatenate([self.private, *shared])
        return self._pools[kind]

    def public_batch(self, owner: str, round: int, size: int) -> Samples:
        """The batch of a round from the public data of `owner`, the same for everybody."""
        return self.seed_set.batch(owner, round, size)

    def logits(self, inputs: Tensor) -> Tensor:
        """What the model, in training mode, says of inputs `(rows, …)`: `(rows, classes)`, with its graph."""
        self._set_mode(training=True)
        output: Tensor = self.module(inputs)
        return output

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Logits `(rows, classes)` in evaluation mode, as a teacher or in a test."""
        self._set_mode(training=False)
        output: Tensor = self.module(inputs)
        return output

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of a loss with respect to `parameters`, `(parameters,)`."""
        return self.flat.gradient(loss)

    @torch.no_grad()
    def step(self, gradient: Tensor, phase: Phase, state: Phase | None = None) -> None:
        """One optimiser step at the rate of `phase`, with the state of that phase or of another one."""
        key = state or phase
        if key not in self.optimizer_states:
            self.optimizer_states[key] = self.optimizer.initial_state(self.parameters)
        self.optimizer.step(self.parameters, gradient, self.optimizer_states[key], self.optimizer.rate(phase))

    def seed_torch(self, purpose: PrivatePurpose, round: int) -> None:
        """Addresses what a model draws from torch's own generator (dropout) like everything else that is random."""
        seed = torch_seed(purpose, self._secret, self.name, round)
        device = self.parameters.device
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    def record(self, round: int, **values: Tensor) -> None:
        """Notes scalars of a round; they stay on the device until the next evaluation reads them all."""
        for name, value in values.items():
            self.records.setdefault(name, []).append((round, value.detach()))

    def weights(self) -> dict[str, Tensor]:
        """A copy of all that makes the model: trained parameters in one vector, buffers and frozen parameters."""
        rest = {f"rest.{name}": tensor.detach().clone() for name, tensor in self._untrained().items()}
        return {"parameters": self.parameters.clone(), **rest}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over what `weights` returned."""
        self.parameters.copy_(weights["parameters"])
        for name, tensor in self._untrained().items():
            tensor.copy_(weights[f"rest.{name}"])

    def _untrained(self) -> dict[str, Tensor]:
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        return {**frozen, **dict(self.module.named_buffers())}

    def state(self) -> dict[str, Tensor]:
        """Everything that the next round depends on, for a checkpoint."""
        state = {f"model.{name}": value for name, value in self.weights().items()}
        state |= {f"best.{name}": value for name, value in (self.best or {}).items()}
        state |= {f"memory.{name}": value.clone() for name, value in self.memory.items()}  # may be one tensor twice
        for phase, optimizer in self.optimizer_states.items():
            state |= {f"optimizer.{phase}.{name}": value for name, value in optimizer.items()}
        for name, entries in self.records.items():
            state[f"record.{name}.rounds"] = torch.tensor([round for round, _ in entries])
            state[f"record.{name}.values"] = torch.stack([value for _, value in entries])
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` returned."""
        device = self.parameters.device
        groups: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            group, _, name = key.partition(".")
            groups.setdefault(group, {})[name] = value.to(device)
        self.load_weights(groups["model"])
        self.best = groups.get("best")
        self.memory = groups.get("memory", {})
        self.optimizer_states = {}
        for key, value in groups.get("optimizer", {}).items():
            phase, _, name = key.partition(".")
            self.optimizer_states.setdefault(phase, {})[name] = value
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

    def _set_mode(self, training: bool) -> None:
        """`module.train(training)`, without its cost for small models unless one of the layers redefines it."""
        if not self._plain_modes:
            self.module.train(training)
        elif self.module.training is not training:
            for module in self._modules:
                module.training = training
