"""An optimiser step in one pass over the parameters instead of ten (`adam.c`)."""

from __future__ import annotations

from torch import Tensor

from fedh2l.kernels.cpu.compiler import call, library
from fedh2l.kernels.cpu.vectors import can_take


def can_step(parameters: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> bool:
    """Return whether the function supports these vectors `(parameters,)`."""
    kept = [value for name, value in state.items() if name != "steps"]
    alike = can_take(parameters, gradient, *kept) and all(each.is_contiguous() for each in (parameters, *kept))
    return alike and library("adam.c") is not None


def step(parameters: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: float, *rule: float) -> None:
    """Take the step. `rule` is weight decay, both betas and epsilon."""
    functions = library("adam.c")
    assert functions is not None
    state["steps"] += 1
    tensors = (parameters, gradient.contiguous(), state["mean"], state["square"], state.get("largest"), state["steps"])
    call(functions.adam, *tensors, len(parameters), *map(float, (rate, *rule)))
