"""FedAgnostic: agnostic federated learning (AFL; Mohri, Sivek, Suresh, 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from fedh2l.learner import Learner
from fedh2l.messages import Message, Vector
from fedh2l.methods.base import Preset
from fedh2l.methods.fedavg import FedAvg
from fedh2l.methods.schedule import INTERVAL_HELP, Interval
from fedh2l.server import Server


class Agnostic(FedAvg):
    """FedAgnostic: min over w of max over mixtures λ of the nodes' losses, Σ_k λ_k L_k(w).

    With K = 1 (Stochastic-AFL): node k sends the gradient and the loss of a batch, both at the w it received; the
    server takes a step with Σ_k λ_k g_k and projects λ + γ·ℓ on the simplex, both from the old (w, λ). With K > 1
    (Ro et al., 2021): node k notes its loss at the w it received, then takes K steps; the server averages with λ and
    multiplies λ_k by exp(γ·ℓ_k). λ starts at n_k / n.

    The step on w is the run's optimiser (AMSGrad) rather than plain SGD. The node's model is the last iterate; the
    mean of all iterates, which the theory for convex losses is about, is tested beside it as `mean`. The loss in the
    K > 1 variant is that of one batch. No mean of λ is kept, and `native` starts it at n_k / n too.
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

    interval: Interval = Field(1, description=INTERVAL_HELP + "; 1 averages gradients")
    lambda_lr: float | None = Field(
        None,
        ge=0,
        description="rate of the mixture λ (γ); 0 keeps it, which is FedAvg; if not given, 0.01 with interval = 1, "
        "else 0.1",
    )

    def fitted(self, learners: Sequence[Learner], rounds: int) -> Self:
        """With the rate of λ."""
        method = super().fitted(learners, rounds)
        usual = 0.01 if method.interval == 1 else 0.1
        return method if self.lambda_lr is not None else method.model_copy(update={"lambda_lr": usual})

    def prepare(self, server: Server, learners: Sequence[Learner]) -> None:
        """λ starts where FedAvg's weights stay; the mean of the iterates starts empty."""
        super().prepare(server, learners)
        for node in learners:
            node.memory["mean"] = node.shared()
            node.memory["iterates"] = torch.zeros((), dtype=torch.float64, device=server.device)

    def emit(self, node: Learner, round: int) -> Message:
        """What FedAvg sends, with the loss at the received w."""
        message = super().emit(node, round)
        assert isinstance(message, Vector)
        return type(message)(message.sender, round, message.values, node.memory.pop("loss").to(torch.float32))

    def _measured(self, node: Learner, loss: Tensor) -> None:
        node.memory.setdefault("loss", loss.detach())  # the first after an exchange is the one at the received w

    def aggregate(self, server: Server, messages: Sequence[Message], round: int) -> Mapping[str, Message]:
        """A step on w with the old λ, and one on λ."""
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
        """Goes on from the global model, and counts it in the mean."""
        super().receive(node, inbox, round)
        node.memory["iterates"] = node.memory["iterates"] + 1
        share = (1 / node.memory["iterates"]).to(node.parameters.dtype).unsqueeze(-1)
        node.memory["mean"] = torch.lerp(node.memory["mean"], node.shared(), share)

    def crossing(self) -> str:
        """With the losses."""
        return f"{super().crossing()} and losses"

    def views(self, node: Learner) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """The mean of the iterates."""
        return {"mean": partial(node.predict_as, node.memory["mean"])}


def project_on_simplex(values: Tensor) -> Tensor:
    """The nearest point to `(…, n)` whose coordinates are not negative and sum to 1 (Duchi et al., 2008)."""
    ordered = values.sort(-1, descending=True).values
    count = torch.arange(1, values.shape[-1] + 1, device=values.device, dtype=values.dtype)
    shift = (1 - ordered.cumsum(-1)) / count
    kept = (ordered + shift > 0).sum(-1, keepdim=True)
    return (values + shift.gather(-1, kept - 1)).clamp_min(0)
