"""An optimiser step in one pass over the parameters instead of ten (`adam.c`)."""

from __future__ import annotations

from torch import Tensor

from fedh2l.kernels.cpu.compiler import call, library
from fedh2l.kernels.cpu.vectors import can_take
from fedh2l.training.optimizers import BETA1, BETA2, EPSILON, OptimizerSettings, State


def can_step(settings: OptimizerSettings, parameters: Tensor, gradient: Tensor, state: State) -> bool:
    """Return whether the function supports this update rule and these vectors `(parameters,)`."""
    kept = [value for name, value in state.items() if name != "steps"]
    known = settings.name in ("adam", "amsgrad") and can_take(parameters, gradient, *kept)
    return known and all(each.is_contiguous() for each in (parameters, *kept)) and library("adam.c") is not None


def step(settings: OptimizerSettings, parameters: Tensor, gradient: Tensor, state: State, rate: float) -> None:
    """Take the same step as `OptimizerSettings.step`."""
    functions = library("adam.c")
    assert functions is not None
    state["steps"] += 1
    tensors = (parameters, gradient.contiguous(), state["mean"], state["square"], state.get("largest"), state["steps"])
    numbers = map(float, (rate, settings.weight_decay, BETA1, BETA2, EPSILON))
    call(functions.adam, *tensors, len(parameters), *numbers)
