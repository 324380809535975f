"""FedAgnostic: agnostic federated learning (AFL; Mohri, Sivek, Suresh, 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from fedh2l.methods.base import Preset
from fedh2l.methods.fedavg import FedAvg
from fedh2l.methods.schedule import INTERVAL_HELP, Interval
from fedh2l.protocol.messages import Message, Vector
from fedh2l.training.learner import Learner
from fedh2l.training.node_learner import NodeLearner
from fedh2l.training.server import Server


class Agnostic(FedAvg):
    """FedAgnostic: min over w of max over mixtures λ of the nodes' losses, Σ_k λ_k L_k(w).

    - K = 1 (Stochastic-AFL): node k sends the gradient and the loss of one batch, both at the received w. The server
      takes a step with Σ_k λ_k g_k and projects λ + γ·ℓ onto the simplex. Both updates use the old (w, λ).
    - K > 1 (Ro et al., 2021): node k measures its loss on one batch at the received w, then takes K steps. The server
      averages the models with weights λ and multiplies λ_k by exp(γ·ℓ_k).

    λ starts at n_k / n, also in the preset `native`. The step on w uses the optimiser of the run (AMSGrad) instead of
    plain SGD. A node's model is the last iterate. The theory for convex losses is about the mean of all iterates, so
    the mean is evaluated too, as `mean`. The mean of λ is not kept.
    """

    name: ClassVar[str] = "agnostic"
    presets: ClassVar[Mapping[str, Preset]] = {
        "native": {
            "method.lambda_lr": 0.1,
            "run.batch_size": 10,
            "optimizer.name": "sgd",
            "optimizer.lr": 0.1,
            "optimizer.weight_decay": 0.0,
        }
    }

    interval: Interval = Field(1, description=INTERVAL_HELP + " 1 averages gradients.")
    lambda_lr: float | None = Field(
        None,
        ge=0,
        description="Learning rate of the mixture λ (γ). 0 gives FedAvg. By default 0.01 with interval = 1, else 0.1.",
    )

    def fitted(self, learners: Sequence[NodeLearner], rounds: int) -> Self:
        """Return the method with its interval in steps and the learning rate of λ."""
        method = super().fitted(learners, rounds)
        usual = 0.01 if method.interval == 1 else 0.1
        return method if self.lambda_lr is not None else method.model_copy(update={"lambda_lr": usual})

    def prepare(self, server: Server, learners: Sequence[NodeLearner]) -> None:
        """Set λ to FedAvg's weights, and start the mean of the iterates."""
        super().prepare(server, learners)
        for node in learners:
            node.memory["mean"] = node.network.shared()
            node.memory["iterates"] = torch.zeros((), dtype=torch.float64, device=server.device)

    def emit(self, node: Learner, round: int) -> Message:
        """Return FedAvg's message, with the loss at the received w."""
        message = super().emit(node, round)
        assert isinstance(message, Vector)
        return type(message)(message.sender, round, message.values, node.memory.pop("loss").to(torch.float32))

    def _measured(self, node: Learner, loss: Tensor) -> None:
        node.memory.setdefault("loss", loss.detach())  # the first loss after an exchange is the loss at the received w

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """Update w with the old λ, then update λ."""
        answers = super().aggregate(server, messages, round)
        mixture = server.memory["weights"]
        assert self.lambda_lr is not None, "the method has not been fitted"
        losses = torch.stack([m.loss.double() for m in messages if isinstance(m, Vector) and m.loss is not None], -1)
        if self._steps == 1:
            mixture = project_on_simplex(mixture + self.lambda_lr * losses)
        else:
            mixture = torch.softmax(torch.log(mixture) + self.lambda_lr * losses, -1)
        server.memory["weights"] = mixture
        return answers

    def receive(self, node: Learner, inbox: Sequence[Message], round: int) -> None:
        """Load the global model and add it to the mean of the iterates."""
        super().receive(node, inbox, round)
        node.memory["iterates"] = node.memory["iterates"] + 1
        share = (1 / node.memory["iterates"]).to(node.parameters.dtype).unsqueeze(-1)
        node.memory["mean"] = torch.lerp(node.memory["mean"], node.network.shared(), share)

    def crossing(self) -> str:
        return f"{super().crossing()} and losses"

    def views(self, node: Learner) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Return the mean of the iterates as an extra model."""
        return {"mean": partial(node.network.predict_as, node.memory["mean"])}


def project_on_simplex(values: Tensor) -> Tensor:
    """Project `(…, n)` onto the simplex: coordinates of at least 0 that sum to 1 (Duchi et al., 2008)."""
    ordered = values.sort(-1, descending=True).values
    count = torch.arange(1, values.shape[-1] + 1, device=values.device, dtype=values.dtype)
    shift = (1 - ordered.cumsum(-1)) / count
    kept = (ordered + shift > 0).sum(-1, keepdim=True)
    return (values + shift.gather(-1, kept - 1)).clamp_min(0)
