"""A step of the optimiser for all networks of a stack, in one kernel instead of twenty."""

from __future__ import annotations

from math import ceil

from torch import Tensor

from fedh2l.engines.cuda.compiler import TYPES, available, kernel
from fedh2l.optimizers import BETA1, BETA2, EPSILON, OptimizerSettings, State

THREADS = 256


def can_step(settings: OptimizerSettings, parameters: Tensor) -> bool:
    """Whether there is a kernel for this update rule and these parameters `(nets, parameters)`."""
    return settings.name in ("adam", "amsgrad") and parameters.is_cuda and parameters.dtype in TYPES and available()


def step(settings: OptimizerSettings, parameters: Tensor, gradient: Tensor, state: State, rate: float) -> None:
    """As `OptimizerSettings.step`."""
    nets, size = parameters.shape
    state["steps"] += 1
    tensors = (parameters, gradient.contiguous(), state["mean"], state["square"], state.get("largest"), state["steps"])
    run = kernel("adam.cu", "adam", parameters.dtype, {})
    run((ceil(size / THREADS), nets), THREADS, *tensors, size, rate, settings.weight_decay, BETA1, BETA2, EPSILON)
