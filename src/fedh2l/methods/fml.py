"""FML: federated mutual learning (Shen et al., 2020)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedh2l.methods.base import Method, Preset, PublicData
from fedh2l.methods.fedavg import weighted_sum
from fedh2l.methods.schedule import INTERVAL_HELP, Interval, steps
from fedh2l.protocol.messages import SERVER, Kind, Message, Parameters
from fedh2l.training.learner import Learner, LocalData, labels_for
from fedh2l.training.losses import cross_entropy, distillation
from fedh2l.training.network import Network
from fedh2l.training.node_learner import NodeLearner
from fedh2l.training.server import Server


class FML(Method):
    """FML: each node's own model and a common small model, the meme, teach each other. A server averages the memes.

    On each local batch, the own model f and the meme g are run once. Their losses are L_f = α·CE(f) + (1 − α)·KL(p_g ‖
    p_f) and L_g = β·CE(g) + (1 − β)·KL(p_f ‖ p_g). The teacher is constant in each. Both gradients are computed before
    either model steps. Every `interval` steps the memes are averaged with equal weights.

    A node's model is its own model. The meme after the last exchange is evaluated too. α = β = 1 gives training alone
    and FedAvg side by side. In the reference, the meme's optimiser is reset at each exchange (preset `native`), and
    learning rates fall at each third of the run, which is not implemented.
    """

    name: ClassVar[str] = "fml"
    heterogeneous: ClassVar[Literal["partly"]] = "partly"  # only the meme is the same on all nodes
    decentralised: ClassVar[bool] = False
    sends: ClassVar[tuple[Kind, ...]] = ("parameters",)
    presets: ClassVar[Mapping[str, Preset]] = {
        "native": {
            "method.interval": "5 epochs",
            "method.meme_state": "reset",
            "run.batch_size": 128,
            "optimizer.name": "sgd",
            "optimizer.lr": 0.01,
            "optimizer.momentum": 0.9,
            "optimizer.weight_decay": 5e-4,
        }
    }

    alpha: float = Field(
        0.5, ge=0, le=1, description="Weight of the labels in the own model's loss (α). 1 turns its distillation off."
    )
    beta: float = Field(
        0.5, ge=0, le=1, description="Weight of the labels in the meme's loss (β). 1 turns its distillation off."
    )
    interval: Interval = Field("1 epoch", description=INTERVAL_HELP)
    local_data: LocalData = Field("private+own-public", description="Training data of the local step.")
    meme: str | None = Field(None, description="Model of the meme. By default the first node's model.")
    meme_args: dict[str, Any] = Field({}, description="Arguments of the meme.")
    meme_state: Literal["persistent", "reset"] = Field(
        "persistent", description="Whether the meme's optimiser state persists across exchanges or is reset."
    )

    @model_validator(mode="after")
    def _arguments_of_a_meme(self) -> Self:
        if self.meme_args and self.meme is None:
            raise ValueError("meme_args need a meme")
        return self

    def fitted(self, learners: Sequence[NodeLearner], rounds: int) -> Self:
        """Return the method with its interval in steps, based on the size of the meme."""
        first = learners[0]
        size = first.network.shared().numel()
        if self.meme is not None:
            size = Network(first.build(self.meme, self.meme_args), first.network.optimizer).shared().numel()
        return self.model_copy(update={"interval": steps(self.interval, learners, self.local_data, size)})

    def prepare(self, server: Server, learners: Sequence[NodeLearner]) -> None:
        """Give each node a copy of the meme. The default meme is the first node's model with its initial weights."""
        first = learners[0]
        meme = first.module if self.meme is None else first.build(self.meme, self.meme_args)
        for node in learners:
            node.memory["meme"] = node.further("meme", meme).shared()
        shares = torch.full((len(learners),), 1 / len(learners), dtype=torch.float64)
        server.memory["weights"] = shares.to(server.device)

    def exchanges(self, round: int) -> bool:
        assert isinstance(self.interval, int), "the method has not been fitted"
        return round % self.interval == 0

    def needs_labels(self) -> list[str]:
        return labels_for(self.local_data)

    def needs_public_data(self) -> PublicData:
        return "none"

    def local_step(self, node: Learner, round: int) -> None:
        """Train both models for one step on one batch."""
        meme = node.networks["meme"]
        batch = node.local_batch(round, self.local_data)
        own, other = node.logits(batch.inputs), meme.logits(batch.inputs)
        own_loss = self.alpha * cross_entropy(own, batch.labels) + (1 - self.alpha) * distillation(other, own)
        meme_loss = self.beta * cross_entropy(other, batch.labels) + (1 - self.beta) * distillation(own, other)
        own_gradient, meme_gradient = node.gradient(own_loss), meme.gradient(meme_loss)
        node.step(own_gradient, "local")
        meme.step(meme_gradient, "local")
        node.record(round, local_loss=own_loss, meme_loss=meme_loss)

    def emit(self, node: Learner, round: int) -> Message:
        """Return the meme."""
        return Parameters.of(node.name, round, node.networks["meme"].shared())

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """Return the mean of the memes, the same for all nodes."""
        average = weighted_sum(messages, server.memory["weights"])
        return dict.fromkeys(server.roster.names, Parameters.of(SERVER, round, average))

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Load the common meme."""
        (answer,) = inbox
        assert isinstance(answer, Parameters)
        meme = node.networks["meme"]
        meme.adopt(answer.values)
        node.memory["meme"] = answer.values
        if self.meme_state == "reset":
            meme.optimizer_states.clear()

    def crossing(self) -> str:
        return "parameters of memes"

    def views(self, node: Learner) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Return the meme of the last exchange as an extra model."""
        return {"meme": partial(node.networks["meme"].predict_as, node.memory["meme"])}
