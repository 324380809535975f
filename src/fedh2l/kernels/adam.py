"""A step of Adam or AMSGrad."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedh2l.kernels.blocks import blocks
from fedh2l.kernels.cpu import adam as on_cpu
from fedh2l.kernels.cuda import adam as on_cuda

State = dict[str, Tensor]


class Rule(NamedTuple):
    """Constants of the update rule."""

    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


def step(parameters: Tensor, gradient: Tensor, state: State, rate: float, rule: Rule, compiled: bool) -> None:
    """Update `parameters` `(…, parameters)` and `state` in place.

    This is Adam (Kingma & Ba, 2015), or AMSGrad (Reddi et al., 2018) if the state has `largest`.
    """
    for own in (on_cpu, on_cuda) if compiled else ():
        if own.can_step(parameters, gradient, state):
            own.step(parameters, gradient, state, rate, *rule)
            return
    by_pytorch(parameters, gradient, state, rate, rule)


def by_pytorch(parameters: Tensor, gradient: Tensor, state: State, rate: float, rule: Rule) -> None:
    """Take the step with PyTorch's operations."""
    state["steps"] += 1
    steps = state["steps"].double().unsqueeze(-1)
    size = (rate / (1 - rule.beta1**steps)).to(parameters.dtype)
    correction = (1 - rule.beta2**steps).sqrt().to(parameters.dtype)
    vectors = [state[name] for name in ("mean", "square", "largest") if name in state]
    for part, slope, mean, square, *largest in blocks(parameters, gradient, *vectors):
        if rule.weight_decay:
            slope = slope.add(part, alpha=rule.weight_decay)
        mean.lerp_(slope, 1 - rule.beta1)
        square.mul_(rule.beta2).addcmul_(slope, slope, value=1 - rule.beta2)
        if largest:
            square = torch.maximum(largest[0], square, out=largest[0])
        denominator = square.sqrt().div_(correction).add_(rule.epsilon)
        part.sub_(denominator.reciprocal_().mul_(mean).mul_(size))
