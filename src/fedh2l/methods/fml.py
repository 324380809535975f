"""FML: federated mutual learning (Shen et al., 2020)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedh2l.learner import Learner, LocalData, labels_for
from fedh2l.losses import cross_entropy, distillation
from fedh2l.messages import SERVER, Kind, Message, Parameters
from fedh2l.methods.base import Method, Preset
from fedh2l.methods.fedavg import weighted_sum
from fedh2l.methods.schedule import INTERVAL_HELP, Interval, steps
from fedh2l.network import Network
from fedh2l.server import Server


class FML(Method):
    """FML: each node's own model and a small common one, the meme, teach each other; a server averages the memes.

    On each local batch, from the same forward pass of the own model f and the meme g:
    L_f = α·CE(f) + (1 − α)·KL(p_g ‖ p_f) and L_g = β·CE(g) + (1 − β)·KL(p_f ‖ p_g), the other side constant; both
    gradients are taken before either steps. Every `interval` steps the memes are averaged, evenly.

    A node's model is its own one; the meme, as it was after the last exchange, is tested beside it. α = β = 1 is
    training alone beside FedAvg. In the reference the meme's optimiser starts anew at each exchange (`native`), and
    rates fall at each third of the run, which is left out here.
    """

    name: ClassVar[str] = "fml"
    heterogeneous: ClassVar[Literal["partly"]] = "partly"  # all but the meme
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

    alpha: float = Field(0.5, ge=0, le=1, description="share of labels in the own model's loss (α); 1: no distillation")
    beta: float = Field(0.5, ge=0, le=1, description="share of labels in the meme's loss (β); 1: no distillation")
    interval: Interval = Field("1 epoch", description=INTERVAL_HELP)
    local_data: LocalData = Field("private+own-public", description="what a node trains on")
    meme: str | None = Field(None, description="model of the meme; the first node's if not given")
    meme_args: dict[str, Any] = Field({}, description="arguments of the meme")
    meme_state: Literal["persistent", "reset"] = Field(
        "persistent", description="what becomes of a meme's optimiser state at an exchange"
    )

    @model_validator(mode="after")
    def _arguments_of_a_meme(self) -> Self:
        if self.meme_args and self.meme is None:
            raise ValueError("meme_args are given, but no meme")
        return self

    def fitted(self, learners: Sequence[Learner], rounds: int) -> Self:
        """With the interval in steps, counted on the meme."""
        first = learners[0]
        size = first.shared().numel()
        if self.meme is not None:
            size = Network(first.build(self.meme, self.meme_args), first.optimizer).shared().numel()
        return self.model_copy(update={"interval": steps(self.interval, learners, self.local_data, size)})

    def prepare(self, server: Server, learners: Sequence[Learner]) -> None:
        """A copy of the meme for everybody; it starts as the first node's model would."""
        first = learners[0]
        meme = first.module if self.meme is None else first.build(self.meme, self.meme_args)
        for node in learners:
            node.memory["meme"] = node.further("meme", meme).shared()
        shares = torch.full((len(learners),), 1 / len(learners), dtype=torch.float64)
        server.memory["weights"] = shares.to(server.device)

    def exchanges(self, round: int) -> bool:
        """Every K rounds."""
        assert isinstance(self.interval, int), "the method has not been fitted"
        return round % self.interval == 0

    def needs_labels(self) -> list[str]:
        """Those of public data that nodes train on."""
        return labels_for(self.local_data)

    def local_step(self, node: Learner, round: int) -> None:
        """A step of both models on one batch."""
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
        """The meme."""
        return Parameters.of(node.name, round, node.networks["meme"].shared())

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """The mean of the memes, the same for all."""
        average = weighted_sum(messages, server.memory["weights"])
        return dict.fromkeys(server.roster.names, Parameters.of(SERVER, round, average))

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Goes on from the common meme."""
        (answer,) = inbox
        assert isinstance(answer, Parameters)
        meme = node.networks["meme"]
        meme.adopt(answer.values)
        node.memory["meme"] = answer.values
        if self.meme_state == "reset":
            meme.optimizer_states.clear()

    def crossing(self) -> str:
        """Of the memes alone."""
        return "parameters of memes"

    def views(self, node: Learner) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """The meme, as it was after the last exchange."""
        return {"meme": partial(node.networks["meme"].predict_as, node.memory["meme"])}
