"""Optimisers as functions of one flat parameter vector, its gradient and a state of tensors.

They follow the update rules of `torch.optim` up to rounding. One vector for the whole model needs a few kernels instead
of a few per layer, and its state is easy to save. Leading dimensions are possible, for stacked nodes. The optimiser
adds weight decay to the gradient, so the projection does not see it.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedh2l.section import Section
from fedh2l.training.parameters import blocks

State = dict[str, Tensor]


class OptimizerSettings(Section):
    """The `[optimizer]` section."""

    name: Literal["amsgrad", "adam", "sgd"] = Field("amsgrad", description="Update rule.")
    lr: float = Field(1e-3, gt=0, le=1e30, description="Learning rate of the local step (the paper's β).")
    mutual_lr_scale: float = Field(
        1.0, gt=0, le=1e3, description="Multiplier on the mutual step's learning rate (the paper's η is lr times this)."
    )
    weight_decay: float = Field(1e-4, ge=0, le=1e30, description="L2 penalty. 0 turns it off.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of sgd. amsgrad and adam ignore it.")

    def rate(self, phase: Literal["local", "mutual"]) -> float:
        return self.lr * self.mutual_lr_scale if phase == "mutual" else self.lr

    def initial_state(self, parameters: Tensor) -> State:
        """Return the state before the first step, for parameters `(…, parameters)`."""
        names = {"amsgrad": ("mean", "square", "largest"), "adam": ("mean", "square"), "sgd": ("velocity",)}
        state = {name: torch.zeros_like(parameters) for name in names[self.name]}
        return {**state, "steps": torch.zeros(parameters.shape[:-1], dtype=torch.int64, device=parameters.device)}

    def step(self, parameters: Tensor, gradient: Tensor, state: State, rate: float) -> None:
        """Update `parameters` and `state` in place. They must not require gradients."""
        state["steps"] += 1
        names = [name for name in state if name != "steps"]
        for part, slope, *rest in blocks(parameters, gradient, *(state[name] for name in names)):
            if self.weight_decay:
                slope = slope.add(part, alpha=self.weight_decay)
            own = dict(zip(names, rest, strict=True))
            if self.name == "sgd":
                own["velocity"].mul_(self.momentum).add_(slope)
                part.add_(own["velocity"], alpha=-rate)
            else:
                _adam(part, slope, {**own, "steps": state["steps"]}, rate)


BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def _adam(parameters: Tensor, gradient: Tensor, state: State, rate: float) -> None:
    """Take a step of Adam (Kingma & Ba, 2015), or of AMSGrad (Reddi et al., 2018) if the state has `largest`."""
    steps = state["steps"].double().unsqueeze(-1)
    size = (rate / (1 - BETA1**steps)).to(parameters.dtype)
    correction = (1 - BETA2**steps).sqrt().to(parameters.dtype)
    mean, square = state["mean"], state["square"]
    mean.lerp_(gradient, 1 - BETA1)
    square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    if "largest" in state:
        square = torch.maximum(state["largest"], square, out=state["largest"])
    denominator = square.sqrt().div_(correction).add_(EPSILON)
    parameters.sub_(denominator.reciprocal_().mul_(mean).mul_(size))
