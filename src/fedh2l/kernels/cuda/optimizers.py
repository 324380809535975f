"""An optimiser step for one network, or all networks of a stack, in one kernel instead of twenty."""

from __future__ import annotations

import torch
from torch import Tensor

from fedh2l.kernels.cuda.compiler import THREADS, can_take, kernel, rows_of
from fedh2l.training.optimizers import BETA1, BETA2, EPSILON, OptimizerSettings, State


def can_step(settings: OptimizerSettings, parameters: Tensor, gradient: Tensor, state: State) -> bool:
    """Return whether a kernel supports this update rule and these parameters and gradients `(…, parameters)`."""
    return settings.name in ("adam", "amsgrad") and can_take(parameters, gradient)


def step(settings: OptimizerSettings, parameters: Tensor, gradient: Tensor, state: State, rate: float) -> None:
    """Take the same step as `OptimizerSettings.step`."""
    blocks, nets, size = rows_of(parameters)
    state["steps"] += 1
    tensors = (parameters, gradient.contiguous(), state["mean"], state["square"], state.get("largest"), state["steps"])
    with torch.cuda.device(parameters.device):
        run = kernel("adam.cu", "adam", parameters.dtype, {})
        run((blocks, nets), THREADS, *tensors, size, rate, settings.weight_decay, BETA1, BETA2, EPSILON)
