"""Fingerprints of data and models, to check that a resumed run has the same inputs."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-3
"""Allowed relative difference of logits between machines, or between a CPU and a GPU."""

Fingerprint = dict[str, Any]


@torch.no_grad()
def model_fingerprint(module: nn.Module, floating: bool, shape: Iterable[int]) -> Fingerprint:
    """Return a module's architecture, and its logits for fixed inputs, weights and buffers in evaluation mode.

    Initial weights do not matter, so a rebuilt model has the same fingerprint. The module, its modes and torch's
    generators do not change. Logits are None if the model cannot be run like this.
    """
    inputs = _fixed_inputs(module, floating, tuple(shape))
    with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []), _fixed_weights(module):
        torch.default_generator.manual_seed(0)
        architecture = _architecture(module)
        try:
            logits = module(inputs).double().cpu().tolist()
        except Exception:  # a user's model may fail in any way; training reports the error
            logits = None
    return {"architecture": architecture, "logits": logits}


def _architecture(module: nn.Module) -> str:
    parts = [re.sub(r" at 0x[0-9a-fA-F]+", "", repr(module))]  # memory address of a function
    parts += [f"{name} {type(layer).__qualname__}" for name, layer in module.named_modules()]
    parts += [f"{name} {tuple(p.shape)} {p.requires_grad}" for name, p in module.named_parameters()]
    parts += [f"{name} {tuple(b.shape)}" for name, b in module.named_buffers()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _fixed_inputs(module: nn.Module, floating: bool, shape: tuple[int, ...], rows: int = 4) -> Tensor:
    """Return a few inputs `(rows, …)`. Indices are 0, because no other index is known to be valid."""
    first = next(module.parameters())
    if not floating:
        return torch.zeros(rows, *shape, dtype=torch.long, device=first.device)
    drawn = torch.empty(rows, *shape).uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    return drawn.to(first.device, first.dtype)


@contextmanager
def _fixed_weights(module: nn.Module) -> Iterator[None]:
    """Give floating-point parameters and buffers fixed values for a while, with all layers in evaluation mode."""
    modes = [(layer, layer.training) for layer in module.modules()]
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
    before = [tensor.detach().clone() for tensor in tensors]
    generator = torch.Generator().manual_seed(2)
    try:
        module.eval()
        for tensor in tensors:
            tensor.copy_(_fixed_values(tensor.shape, generator))
        yield
    finally:
        module.train(modes[0][1])
        for layer, mode in modes:
            layer.training = mode
        for tensor, values in zip(tensors, before, strict=True):
            tensor.copy_(values)


def _fixed_values(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return fixed values: matrices scaled by their inputs, and vectors positive, as variances must be."""
    values = torch.empty(shape)
    if len(shape) < 2:
        return values.uniform_(0.25, 1, generator=generator)
    bound = 2 / math.sqrt(max(shape[1:].numel(), 1))
    return values.uniform_(-bound, bound, generator=generator)


def difference(then: Mapping[str, Fingerprint], now: Mapping[str, Fingerprint]) -> str | None:
    """Describe the first node whose data or model has changed, and the change. Return None if all agree."""
    for name, present in now.items():
        before = then.get(name, {})
        if before.get("data") != present["data"]:
            return f"node '{name}' has other data"
        if before.get("architecture") != present["architecture"]:
            return f"the model of node '{name}' has another architecture"
        if not _alike(before.get("logits"), present["logits"]):
            return f"the model of node '{name}' computes other logits from the same inputs and weights"
    return None


def _alike(then: Any, now: Any) -> bool:
    if then is None or now is None:
        return then is now
    one, two = torch.tensor(then, dtype=torch.float64), torch.tensor(now, dtype=torch.float64)
    if one.shape != two.shape:
        return False
    scale = float(two[torch.isfinite(two)].abs().max()) if bool(torch.isfinite(two).any()) else 1.0
    return torch.allclose(one, two, rtol=0, atol=TOLERANCE * scale, equal_nan=True)
