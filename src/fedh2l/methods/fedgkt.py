"""FedGKT: group knowledge transfer (He et al., 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from fedh2l.errors import ConfigError
from fedh2l.methods.base import Method, Preset, PublicData
from fedh2l.methods.schedule import INTERVAL_HELP, Interval, batches, steps
from fedh2l.models.factory import Recipe
from fedh2l.models.split import split
from fedh2l.protocol.messages import SERVER, Features, Kind, Logits, Message, Parameters
from fedh2l.training.learner import Learner, LocalData, labels_for
from fedh2l.training.losses import cross_entropy, distillation, take_rows
from fedh2l.training.network import Network
from fedh2l.training.node import Node
from fedh2l.training.node_learner import NodeLearner
from fedh2l.training.server import Server


class FedGKT(Method):
    """FedGKT: nodes train the first layers and a small head. A server trains the rest on their features.

    Node k trains its stem e and head c with CE(c∘e, y) + α·T²·KL(p_server ‖ p_c), and with CE alone before the first
    exchange. Every `interval` steps it sends features, logits and label of *every* training sample. The server trains
    its trunk s on them, one node after another, with CE(s, y) + T²·KL(p_c ‖ p_s). It returns the logits of s per
    sample.

    The stem is cut from the node's model. The trunk is the rest of the first node's model. A stem whose features have
    another shape gets an adapter (a 1 × 1 convolution and pooling, or a linear layer). A node's model is s∘e, so the
    trunk is sent to all nodes once, after the last round. c∘e is evaluated as `edge`.

    Choices of this project:

    - The server computes its logits in evaluation mode after its last epoch. Samples are matched by their position.
    - α weights only the distillation at the nodes.
    - `server_epochs` is 5 and not the reference's 20, because there are hundreds of exchanges, one per epoch of a node.
    - Learning rates do not fall on a plateau.

    Features and labels of *private* samples leave the node. FedH2L does not allow that.
    """

    name: ClassVar[str] = "fedgkt"
    heterogeneous: ClassVar[Literal["partly"]] = "partly"  # stems may differ, the trunk may not
    decentralised: ClassVar[bool] = False
    sends: ClassVar[tuple[Kind, ...]] = ("features", "logits", "parameters")
    presets: ClassVar[Mapping[str, Preset]] = {
        "native": {"method.server_epochs": 20, "method.server_distillation": False, "run.batch_size": 256}
    }

    alpha: float = Field(
        1.0, ge=0, description="Weight of the distillation loss at the nodes (α). 0 means that nodes train alone."
    )
    temperature: float = Field(3.0, gt=0, description="Distillation temperature of nodes and server (T).")
    server_distillation: bool = Field(True, description="Whether the server also learns from the nodes' logits.")
    server_epochs: int = Field(5, ge=1, description="Epochs of the server per exchange.")
    server_batch_size: int = Field(256, ge=1, description="Samples per step of the server.")
    interval: Interval = Field("1 epoch", description=INTERVAL_HELP)
    local_data: LocalData = Field("private+own-public", description="Training data of the local step.")

    @classmethod
    def parameter_free(cls) -> bool:
        """Return True: parameters are sent only after the last round."""
        return True

    def adapt(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return the nodes with models that are cut in two and have a head."""
        for node in nodes:
            if not node.recipe.factory or isinstance(node.model, nn.Module):
                raise ConfigError(
                    f"node '{node.name}': fedgkt cuts models in two, so it must build them itself. Give the name of "
                    f"the model, 'package.module:factory' or a class, not a module"
                )
            if node.weights is not None:
                raise ConfigError(f"node '{node.name}': fedgkt cuts models in two, and cannot start from weights")
            if node.domain.augmentation is not None:
                raise ConfigError("fedgkt sends features of unaugmented samples; set data.augment to 'none'")
        first = nodes[0].recipe
        common = {"trunk": first.factory, "trunk_args": dict(first.arguments)}
        return [
            replace(
                node,
                model="fedh2l.methods.fedgkt:EdgeNet",
                model_args={"model": node.recipe.factory, "model_args": dict(node.recipe.arguments), **common},
            )
            for node in nodes
        ]

    def fitted(self, learners: Sequence[NodeLearner], rounds: int) -> Self:
        """Return the method with its interval in steps."""
        first = learners[0]
        rows = len(first.pool(self.local_data))
        width = first.predict(first.private.inputs[:1], part="features").shape[-1]
        numbers = math.ceil(rows * (width + 2 * first.classes + 0.5) / 2)  # labels are half as long as floats
        return self.model_copy(update={"interval": steps(self.interval, learners, self.local_data, numbers)})

    def prepare(self, server: Server, learners: Sequence[NodeLearner]) -> None:
        """Create the server's trunk from the first node's model."""
        trunk = learners[0].module.trunk
        assert isinstance(trunk, nn.Module)
        server.further("trunk", trunk)

    def crossing(self) -> str:
        """Describe the messages. Name the private samples explicitly."""
        return "features, logits and labels of private samples, and the server's trunk,"

    def views(self, node: Learner) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Return the stem with its head as an extra model."""
        return {"edge": partial(node.predict, part="edge")}

    def exchanges(self, round: int) -> bool:
        assert isinstance(self.interval, int), "the method has not been fitted"
        return round % self.interval == 0

    def needs_labels(self) -> list[str]:
        return labels_for(self.local_data)

    def needs_public_data(self) -> PublicData:
        return "none"

    def local_step(self, node: Learner, round: int) -> None:
        """Train stem and head for one step."""
        indices = node.local_indices(round, self.local_data)
        batch = node.pool(self.local_data).take(indices)
        logits = node.logits(batch.inputs, part="edge")
        loss = cross_entropy(logits, batch.labels)
        if "taught" in node.memory:
            taught = take_rows(node.memory["taught"], indices)
            loss = loss + self.alpha * distillation(taught.to(logits.dtype), logits, self.temperature)
        node.step(node.gradient(loss), "local")
        node.record(round, local_loss=loss)

    def emit(self, node: Learner, round: int) -> Message:
        """Return features, logits and labels of all local training data."""
        pool = node.pool(self.local_data)
        features, logits = (node.predict(pool.inputs, part=part) for part in ("features", "edge"))
        return Features.of(node.name, round, features, logits, pool.labels)

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """Train the trunk, then return its logits on each node's samples."""
        trunk = server.networks["trunk"]
        sent = [message for message in messages if isinstance(message, Features)]
        for epoch in range(self.server_epochs):
            for message in sent:
                self._teach(server, trunk, message, f"{message.sender}/{epoch}", round)
        answers = {}
        for message in sent:
            says = trunk.predict(message.values.to(trunk.parameters.dtype))
            answers[message.sender] = Logits.of(SERVER, round, says)
        return answers

    def _teach(self, server: Server, trunk: Network, message: Features, address: str, round: int) -> None:
        """Train the trunk for one epoch on one node's features."""
        rows, dtype = message.values.shape[-2], trunk.parameters.dtype
        order = server.order(address, round, rows)
        for part in batches(order, self.server_batch_size):
            logits = trunk.logits(take_rows(message.values, part).to(dtype))
            loss = cross_entropy(logits, take_rows(message.labels.unsqueeze(-1), part).squeeze(-1))
            if self.server_distillation:
                loss = loss + distillation(take_rows(message.logits, part).to(dtype), logits, self.temperature)
            trunk.step(trunk.gradient(loss), "local")

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Store the server's logits for the next local steps."""
        (answer,) = inbox
        assert isinstance(answer, Logits)
        node.memory["taught"] = answer.values

    def closing(self, server: Server, round: int) -> Message | None:
        """Return the trunk."""
        return Parameters.of(SERVER, round, server.networks["trunk"].shared())

    @torch.no_grad()
    def complete(self, node: Learner, message: Message) -> None:
        """Load the trunk into the last layers of the node's model."""
        assert isinstance(message, Parameters)
        trunk = node.module.trunk
        assert isinstance(trunk, nn.Module)
        count = sum(p.numel() for p in trunk.parameters() if p.requires_grad)
        values = message.values.to(node.parameters.dtype)
        whole, size = node.network.shared(), node.parameters.shape[-1]
        whole[..., size - count : size] = values[..., :count]
        if buffers := values.shape[-1] - count:
            whole[..., -buffers:] = values[..., count:]
        node.network.adopt(whole)


Part = Literal["deployed", "edge", "features"]


class EdgeNet(nn.Module):
    """A node's model under FedGKT: the stem, a small head on it, and the server's trunk."""

    def __init__(
        self,
        num_classes: int,
        input_shape: Sequence[int],
        model: str,
        model_args: Mapping[str, Any],
        trunk: str,
        trunk_args: Mapping[str, Any],
    ) -> None:
        super().__init__()
        own, first = Recipe(model, model_args), Recipe(trunk, trunk_args)
        self.stem, rest = split(own.build(num_classes, input_shape))
        shape = wanted = _output_shape(self.stem, input_shape)
        if own != first:
            other, rest = split(first.build(num_classes, input_shape))
            wanted = _output_shape(other, input_shape)
        self.adapter = nn.Identity() if shape == wanted else _adapter(shape, wanted)
        self.head = _head(wanted, num_classes)
        self.trunk = nn.Sequential(nn.Unflatten(1, wanted), rest)  # must be last, since `FedGKT.complete` relies on it

    def forward(self, x: Tensor, part: Part = "deployed") -> Tensor:
        """Return the logits of the deployed model or of the edge, or the features `(n, width)` between them."""
        inside = self.adapter(self.stem(x))
        if part == "features":
            features: Tensor = inside.flatten(1)
            return features
        logits: Tensor = self.head(inside) if part == "edge" else self.trunk(inside.flatten(1))
        return logits


@torch.no_grad()
def _output_shape(stem: nn.Module, input_shape: Sequence[int]) -> tuple[int, ...]:
    training = stem.training
    shape = tuple(stem.eval()(torch.zeros(1, *input_shape)).shape[1:])
    stem.train(training)
    return shape


def _adapter(shape: tuple[int, ...], wanted: tuple[int, ...]) -> nn.Module:
    if len(shape) == len(wanted) == 3:
        return nn.Sequential(nn.Conv2d(shape[0], wanted[0], 1), nn.AdaptiveAvgPool2d(wanted[1:]))
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), math.prod(wanted)), nn.Unflatten(1, wanted))


def _head(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a linear layer. Images are first averaged to a grid of at most 7 × 7."""
    if len(shape) == 3:
        grid = (min(7, shape[1]), min(7, shape[2]))
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(grid), nn.Flatten(), nn.Linear(shape[0] * grid[0] * grid[1], num_classes)
        )
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))
