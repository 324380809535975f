"""Convolution with stride 1, 2 × 2 max pooling and ReLU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedh2l.kernels.cpu.convolution import PooledConvolution, can_convolve
from fedh2l.kernels.cpu.vectors import has_floats

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_allowed: ContextVar[bool] = ContextVar("fedh2l-kernels", default=False)


@contextmanager
def allowing(kernels: bool) -> Iterator[None]:
    """Set for a while whether the layers of a model may use compiled kernels. By default they may not."""
    token = _allowed.set(kernels)
    try:
        yield
    finally:
        _allowed.reset(token)


def allowed() -> bool:
    """Return whether layers may use compiled kernels. `torch.compile` needs PyTorch's operations."""
    return not torch.compiler.is_compiling() and _allowed.get()


def pooled(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a convolution to `(n, channels, height, width)`, then 2 × 2 max pooling and ReLU.

    The result may be channels-last in memory: `flatten` and `reshape` work on it, `view` does not. A layer with hooks,
    or of another type than `nn.Conv2d`, is called as usual.
    """
    if type(layer) is not nn.Conv2d or any(getattr(layer, hooks) for hooks in HOOKS):
        return F.relu(F.max_pool2d(layer(x), 2))
    plain = layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
    if not plain or isinstance(layer.padding, str) or len(set(layer.padding)) > 1:
        return F.relu(F.max_pool2d(layer(x), 2))
    return pooled_convolution(x, layer.weight, layer.bias, layer.padding[0])


def pooled_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Apply a convolution with stride 1, 2 × 2 max pooling and ReLU."""
    if allowed() and can_convolve(x, weight, bias, padding):
        result: Tensor = PooledConvolution.apply(x, weight, bias, padding)
        return result
    return by_pytorch(x, weight, bias, padding)


def by_pytorch(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Compute `pooled_convolution` with PyTorch's operations, on a CPU with channels last in memory.

    Pooling before ReLU gives the same values and applies ReLU to a quarter of them.
    """
    if not torch.compiler.is_compiling() and x.dim() == 4 and has_floats(x):
        x = _channels_last(x)
    return F.relu(F.max_pool2d(torch.conv2d(x, weight, bias, padding=padding), 2))


def _channels_last(x: Tensor) -> Tensor:
    """Return images with channels last in memory. With one channel, only the strides tell PyTorch so."""
    count, channels, height, width = x.shape
    if channels == 1:
        return x.reshape(count, height, width, 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)
