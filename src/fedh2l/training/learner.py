"""A node while it trains: the interface that methods work with.

`StackedLearner` runs many nodes at once. It has the same interface with a leading dimension, so methods need no
changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedh2l.data.augmentation import Augmentation
from fedh2l.data.domain import Samples
from fedh2l.data.seedset import SeedSet
from fedh2l.protocol.sampling import PrivatePurpose
from fedh2l.training.network import Network, Phase
from fedh2l.training.state import flattened, grouped

LocalData = Literal["private", "private+own-public", "private+all-public"]
Pool = LocalData | Literal["all-public"]
Weights = dict[str, Tensor]

EMA, EMA_COUNT = "ema", "ema_count"
"""Keys of a node's memory: the moving average of its weights, and the number of averaged weights."""


def labels_for(pool: Pool) -> list[str]:
    """Return the settings that use a local pool and need labels of public data (`Method.needs_labels`)."""
    return [] if pool == "private" else [f"method.local_data = '{pool}'"]


class Learner(ABC):
    """A node while it trains. It has a network, data, and a memory."""

    def __init__(
        self,
        name: str,
        classes: int,
        network: Network,
        seed_set: SeedSet,
        batch_size: int,
        decay: float = 0.0,
        augmentation: Augmentation | None = None,
    ) -> None:
        self.name, self.classes, self.batch_size = name, classes, batch_size
        self.network = network
        self.networks: dict[str, Network] = {}
        """Further networks of the method on this node."""
        self.memory: dict[str, Tensor] = {}
        """Tensors that a method keeps between rounds. Saved in checkpoints."""
        self.seed_set = seed_set
        self.augmentation = augmentation
        """Augmentation of local data."""
        self.validation: Samples | None = None
        """Pooled validation data of all nodes, for model selection."""
        self.decay = decay
        """EMA decay of the weights; 0 turns it off."""
        self.records: dict[str, list[tuple[int, Tensor]]] = {}
        """Scalars of each round since the last evaluation."""
        self.best: Weights | None = None
        """The weights with the best validation accuracy so far."""
        self.reported: Weights | None = None
        """Weights to evaluate, if they differ from the weights in training."""

    # The network

    @property
    def module(self) -> nn.Module:
        return self.network.module

    @property
    def parameters(self) -> Tensor:
        """All trainable parameters as one vector `(parameters,)`."""
        return self.network.parameters

    def logits(self, inputs: Tensor, frozen: bool = False, **how: Any) -> Tensor:
        """Return logits `(rows, classes)` in training mode, with their graph. `frozen`: batch norm does not update."""
        return self.network.logits(inputs, frozen, **how)

    def predict(self, inputs: Tensor, **how: Any) -> Tensor:
        """Return logits `(rows, classes)` in evaluation mode."""
        return self.network.predict(inputs, **how)

    def gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient of a loss with respect to `parameters`."""
        return self.network.gradient(loss)

    def step(self, gradient: Tensor, phase: Phase) -> None:
        """Take one optimiser step, with the learning rate and the optimiser state of a phase."""
        self.network.step(gradient, phase)

    # Data

    @abstractmethod
    def local_batch(self, round: int, pool: Pool) -> Samples:
        """Return the local batch of a round, drawn by the node's secret."""

    @abstractmethod
    def local_indices(self, round: int, pool: Pool) -> Tensor:
        """Return the positions of this batch in the pool, `(batch_size,)`."""

    @abstractmethod
    def draw(self, purpose: PrivatePurpose, round: int, population: int, count: int) -> Tensor:
        """Return `count` of `population` indices, drawn by the node's secret, or all in order if there are no more."""

    @abstractmethod
    def order(self, purpose: PrivatePurpose, round: int, count: int) -> Tensor:
        """Return all `count` indices in a random order, drawn by the node's secret."""

    @abstractmethod
    def pool(self, kind: Pool) -> Samples:
        """Return the node's local training data: private data, then public data in roster order."""

    @abstractmethod
    def public_batch(self, owner: str, round: int, size: int) -> Samples:
        """Return the batch of a round from the public data of `owner`, the same for all nodes.

        Its images may be mixed (`Samples.mixture`). Then the label is that of the larger part.
        """

    @abstractmethod
    def public_subset(self, round: int, size: int) -> Samples:
        """Return `size` samples of all public data, the same for all nodes, or all of them if there are no more."""

    @abstractmethod
    def seed_torch(self, purpose: PrivatePurpose, round: int) -> None:
        """Seed torch's own generator (dropout) by address."""

    # Weights to evaluate

    def report(self) -> None:
        """Use the present weights in evaluations until the next call."""
        self.reported = self.network.weights()

    @torch.no_grad()
    def average(self) -> None:
        """Update the exponential moving average of the weights to evaluate.

        The decay starts small: after n updates it is at most (1 + n) / (10 + n).
        """
        present = self.network.shared() if self.reported is None else self.network.vector_of(self.reported)
        if EMA not in self.memory:
            self.memory[EMA] = present
            self.memory[EMA_COUNT] = torch.ones(present.shape[:-1], dtype=torch.float64, device=present.device)
            return
        count = self.memory[EMA_COUNT]
        rate = 1 - ((1 + count) / (10 + count)).clamp(max=self.decay)
        self.memory[EMA] = torch.lerp(self.memory[EMA], present, rate.to(present.dtype).unsqueeze(-1))
        self.memory[EMA_COUNT] = count + 1

    @property
    def shown(self) -> Weights | None:
        """Copy of the weights to evaluate: the EMA if there is one. None for the weights in training."""
        if EMA in self.memory:
            return self.network.weights_of(self.memory[EMA].clone())
        return self.reported

    @torch.no_grad()
    def teach(self, inputs: Tensor) -> Tensor:
        """Return a teacher's logits `(rows, classes)` in evaluation mode, with the EMA if there is one."""
        return self.network.predict_as(self.memory[EMA], inputs) if EMA in self.memory else self.predict(inputs)

    def end_of_training(self) -> None:
        """Use the weights in the model in evaluations from now on."""
        self.reported = None
        self.memory.pop(EMA, None)

    @contextmanager
    def showing(self, weights: Weights | None) -> Iterator[None]:
        """Put other weights in the model for a while. None changes nothing."""
        if weights is None:
            yield
            return
        training = self.network.weights()
        self.network.load_weights(weights)
        try:
            yield
        finally:
            self.network.load_weights(training)

    # Records and state

    def in_training(self) -> list[tuple[str, Network]]:
        """Return all networks of the node, each with a name for its parameters."""
        beside = ((f"parameters of its {name}", network) for name, network in self.networks.items())
        return [("its parameters", self.network), *beside]

    def record(self, round: int, **values: Tensor) -> None:
        """Record scalars of a round. They stay on the device until the next evaluation reads them."""
        for name, value in values.items():
            self.records.setdefault(name, []).append((round, value.detach()))

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next round depends on, for a checkpoint."""
        state = self.network.state() | flattened(
            {
                "best": self.best or {},
                # These may be the same tensors, or those of the best weights.
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
        """Restore a result of `state`."""
        self.network.restore(state)
        groups = grouped(state, self.parameters.device)
        self.best, self.reported = groups.get("best"), groups.get("reported")
        self.memory = groups.get("memory", {})
        for weights in (self.best, self.reported):
            if weights is not None:
                self.network.check_weights(weights)
        for name, network in self.networks.items():
            network.restore(groups[f"network-{name}"])
        records = groups.get("record", {})
        self.records = {}
        for name in sorted({key.rpartition(".")[0] for key in records}):
            rounds, values = records[f"{name}.rounds"].tolist(), records[f"{name}.values"].unbind()
            self.records[name] = list(zip(rounds, values, strict=True))


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generator that a model on `device` draws from."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def architectures(learners: Sequence[Learner]) -> dict[str, list[str]]:
    """Return the names of nodes by the layout of their models. Parameter averaging needs one layout."""
    found: dict[str, list[str]] = {}
    for learner in learners:
        layout = str([(name, tuple(t.shape)) for name, t in learner.module.state_dict().items()])
        found.setdefault(layout, []).append(learner.name)
    return found
