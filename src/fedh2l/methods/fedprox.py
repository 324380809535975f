"""FedProx (Li et al., 2020): FedAvg with a proximal term that keeps nodes near the global model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedh2l.methods.base import Preset
from fedh2l.methods.fedavg import FedAvg
from fedh2l.methods.schedule import INTERVAL_HELP, Interval
from fedh2l.training.learner import Learner


class FedProx(FedAvg):
    """FedProx: FedAvg with (μ/2)·‖w − w^t‖² added to each node's loss. w^t is the last global model.

    The gradient is increased by μ·(w − w^t). Buffers are not part of it. μ = 0 gives FedAvg. K = 1 does too, because
    then w = w^t. AMSGrad rescales the term with the rest of the gradient, so μ is not comparable to papers that use
    SGD. All nodes do the same number of steps and are weighted by n_k/n. The paper's adaptive μ is not implemented.
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
    mu: float = Field(0.01, ge=0, description="Weight of the proximal term (μ). 0 gives FedAvg.")

    def _local_gradient(self, node: Learner, gradient: Tensor) -> Tensor:
        """Return the gradient with the proximal term."""
        return gradient + self.mu * (node.parameters - node.memory["anchor"])

    def _received(self, node: Learner) -> None:
        super()._received(node)
        node.memory["anchor"] = node.parameters.clone()
