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

from fedh2l.kernels import adam
from fedh2l.kernels.adam import State
from fedh2l.kernels.blocks import blocks
from fedh2l.section import Section


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

    def step(self, parameters: Tensor, gradient: Tensor, state: State, rate: float, *, compiled: bool = True) -> None:
        """Update `parameters` and `state` in place. They must not require gradients."""
        if self.name != "sgd":
            adam.step(parameters, gradient, state, rate, adam.Rule(self.weight_decay), compiled)
            return
        state["steps"] += 1
        for part, slope, velocity in blocks(parameters, gradient, state["velocity"]):
            if self.weight_decay:
                slope = slope.add(part, alpha=self.weight_decay)
            velocity.mul_(self.momentum).add_(slope)
            part.add_(velocity, alpha=-rate)
