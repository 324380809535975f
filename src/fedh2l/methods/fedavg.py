"""FedAvg (McMahan et al., 2017): a server averages the models of the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from fedh2l.methods.base import Method, Preset, PublicData
from fedh2l.methods.schedule import INTERVAL_HELP, Interval, steps
from fedh2l.protocol.messages import SERVER, Gradients, Kind, Message, Parameters, Vector
from fedh2l.training.learner import Learner, LocalData, labels_for
from fedh2l.training.losses import cross_entropy
from fedh2l.training.node_learner import NodeLearner
from fedh2l.training.server import Server


class FedAvg(Method):
    """FedAvg: nodes train one common model for K steps each, and a server averages the results.

    w ← Σ_k (n_k / n) w_k over all nodes, every K local steps, where n_k is the size of node k's local pool. Buffers
    (the means and variances of batch norm) are averaged too. Counters are not. Every node reports the global model
    after the last exchange.

    With K = 1, nodes send gradients and the server takes one step with their average. That is exact large-batch
    training with one optimiser state. With K > 1 each node has an optimiser state. All nodes take part in every
    exchange (C = 1). In the paper, nodes are sampled and run E epochs of SGD.
    """

    name: ClassVar[str] = "fedavg"
    heterogeneous: ClassVar[bool] = False
    decentralised: ClassVar[bool] = False
    sends: ClassVar[tuple[Kind, ...]] = ("parameters", "gradients")
    presets: ClassVar[Mapping[str, Preset]] = {
        "native": {
            "method.interval": "5 epochs",
            "method.optimizer_state": "reset",
            "run.batch_size": 10,
            "optimizer.name": "sgd",
            "optimizer.lr": 0.1,
            "optimizer.weight_decay": 0.0,
        }
    }

    interval: Interval = Field(1, description=INTERVAL_HELP + " 1 averages gradients.")
    local_data: LocalData = Field("private+own-public", description="Training data of the local step.")
    optimizer_state: Literal["persistent", "reset"] = Field(
        "persistent",
        description="Whether a node's optimiser state persists across exchanges or is reset. Used if interval > 1.",
    )

    def fitted(self, learners: Sequence[NodeLearner], rounds: int) -> Self:
        """Return the method with its interval in steps."""
        interval = steps(self.interval, learners, self.local_data, learners[0].network.shared().numel())
        return self.model_copy(update={"interval": interval})

    def prepare(self, server: Server, learners: Sequence[NodeLearner]) -> None:
        """Load the first node's weights into all nodes, and create the global model on the server."""
        server.further("global", learners[0].module)
        start = learners[0].network.weights()
        for node in learners:
            node.network.load_weights(start)
            self._received(node)
        sizes = torch.tensor([len(node.pool(self.local_data)) for node in learners], dtype=torch.float64)
        server.memory["weights"] = (sizes / sizes.sum()).to(server.device)

    def exchanges(self, round: int) -> bool:
        return round % self._steps == 0

    def needs_labels(self) -> list[str]:
        return labels_for(self.local_data)

    def needs_public_data(self) -> PublicData:
        return "none"

    def local_step(self, node: Learner, round: int) -> None:
        """Take a local step. With K = 1, compute only its gradient."""
        batch = node.local_batch(round, self.local_data)
        loss = cross_entropy(node.logits(batch.inputs), batch.labels)
        gradient = self._local_gradient(node, node.gradient(loss))
        node.record(round, local_loss=loss)
        self._measured(node, loss)
        if self._steps == 1:
            node.memory["gradient"] = gradient
        else:
            node.step(gradient, "local")

    def emit(self, node: Learner, round: int) -> Message:
        """Return the gradient or the parameters, with the buffers."""
        shared = node.network.shared()
        if self._steps > 1:
            return Parameters.of(node.name, round, shared)
        gradient = node.memory.pop("gradient")
        return Gradients.of(node.name, round, torch.cat([gradient, shared[..., gradient.shape[-1] :]], -1))

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """Update the global model, and return it for all nodes."""
        average = weighted_sum(messages, server.memory["weights"])
        model = server.networks["global"]
        if self._steps > 1:
            model.adopt(average)
        else:
            count = model.parameters.shape[-1]
            gradient, buffers = average[..., :count], average[..., count:]
            model.step(gradient.to(model.parameters.dtype), "local")
            if buffers.shape[-1]:
                model.adopt(torch.cat([model.parameters.double(), buffers], -1))
        answer = Parameters.of(SERVER, round, model.shared())
        return dict.fromkeys(server.roster.names, answer)

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Load the global model."""
        (answer,) = inbox
        assert isinstance(answer, Parameters)
        node.network.adopt(answer.values)
        if self.optimizer_state == "reset":
            node.network.optimizer_states.clear()
        self._received(node)

    def crossing(self) -> str:
        """Describe the messages. Gradients are sent only with K = 1."""
        return "gradients and parameters" if self.interval == 1 else "parameters"

    def _local_gradient(self, node: Learner, gradient: Tensor) -> Tensor:
        """Return the gradient of the local step, given the gradient of the loss."""
        return gradient

    def _received(self, node: Learner) -> None:
        """Report the global model as this node's model until the next exchange."""
        if self._steps > 1:  # with K = 1, a node's model is always the global model
            node.report()

    def _measured(self, node: Learner, loss: Tensor) -> None:
        """Record the loss of a local batch. FedAvg does not use it."""

    @property
    def _steps(self) -> int:
        assert isinstance(self.interval, int), "the method has not been fitted"
        return self.interval


def weighted_sum(messages: Sequence[Message], weights: Tensor) -> Tensor:
    """Return Σ_k weights[k] · values of message k, in roster order, in float64."""
    total: Tensor | None = None
    for message, weight in zip(messages, weights.unbind(-1), strict=True):
        assert isinstance(message, Vector)
        part = message.values.double() * weight.unsqueeze(-1)
        total = part if total is None else total + part
    assert total is not None
    return total
