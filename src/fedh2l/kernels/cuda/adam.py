"""An optimiser step for one network, or all networks of a stack, in one kernel instead of twenty."""

from __future__ import annotations

import torch
from torch import Tensor

from fedh2l.kernels.cuda.compiler import THREADS, can_take, kernel, rows_of


def can_step(parameters: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> bool:
    """Return whether a kernel supports these parameters and gradients `(…, parameters)`."""
    return can_take(parameters, gradient)


def step(parameters: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: float, *rule: float) -> None:
    """Take the step. `rule` is weight decay, both betas and epsilon."""
    blocks, nets, size = rows_of(parameters)
    state["steps"] += 1
    tensors = (parameters, gradient.contiguous(), state["mean"], state["square"], state.get("largest"), state["steps"])
    with torch.cuda.device(parameters.device):
        run = kernel("adam.cu", "adam", parameters.dtype, {})
        run((blocks, nets), THREADS, *tensors, size, *map(float, (rate, *rule)))
