"""FedProx (Li et al., 2020): FedAvg whose nodes are held near the global model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedh2l.learner import Learner
from fedh2l.methods.base import Preset
from fedh2l.methods.fedavg import FedAvg
from fedh2l.methods.schedule import INTERVAL_HELP, Interval


class FedProx(FedAvg):
    """FedProx: FedAvg whose node k minimises F_k(w) + (μ/2)·‖w − w^t‖², w^t being the last global model.

    The gradient gets μ·(w − w^t); buffers have no part in it. μ = 0 gives FedAvg, and so does K = 1, where w = w^t.
    Under AMSGrad the term is rescaled with the rest, so μ does not compare with papers that use SGD. All nodes do
    equal work and are weighted by n_k/n; the paper's adaptive μ is left out.
    """

    name: ClassVar[str] = "fedprox"
    presets: ClassVar[Mapping[str, Preset]] = {
        "native": {
            "method.interval": "20 epochs",
            "method.mu": 1.0,
            "method.optimizer_state": "reset",
            "run.batch_size": 10,
            "optimizer.name": "sgd",
            "optimizer.lr": 0.03,
            "optimizer.weight_decay": 0.0,
        }
    }

    interval: Interval = Field(10, description=INTERVAL_HELP)
    mu: float = Field(0.01, ge=0, description="how strongly a node is held near the global model (μ); 0: FedAvg")

    def _local_gradient(self, node: Learner, gradient: Tensor) -> Tensor:
        """With the pull towards the last global model."""
        return gradient + self.mu * (node.parameters - node.memory["anchor"])

    def _received(self, node: Learner) -> None:
        super()._received(node)
        node.memory["anchor"] = node.parameters.clone()
