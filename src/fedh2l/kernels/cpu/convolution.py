"""Small convolution, pooling and ReLU as one compiled function (`convolution.c`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedh2l.kernels.cpu.compiler import call, library
from fedh2l.kernels.cpu.vectors import has_floats

T = TypeVar("T")

FEWEST = 16
"""Smallest number of images per thread."""
MEMORY = 1 << 20
"""Approximate limit for the stack memory of a function, in bytes."""


class Shape(NamedTuple):
    """Shape of images `(channels, height, width)` and square filters, named as in `convolution.c`."""

    C: int
    H: int
    W: int
    O: int  # noqa: E741
    K: int
    P: int

    @property
    def pooled(self) -> tuple[int, int]:
        """Return height and width after pooling."""
        return (self.H + 2 * self.P - self.K + 1) // 2, (self.W + 2 * self.P - self.K + 1) // 2

    @property
    def suits(self) -> bool:
        """Return whether the output is not empty and the channels are few. Libraries are faster for many channels."""
        image = self.C * (self.H + 2 * self.P) * (self.W + 2 * self.P)
        filters = 3 * self.O * (self.K + 2) * ((self.K + 1) * self.C + 16)
        small = self.C <= 32 and self.O <= 64 and 4 * (10 * image + filters) <= MEMORY
        return small and self.P >= 0 and min(self.pooled) > 0


def can_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> bool:
    """Return whether `PooledConvolution` supports these tensors. The first call compiles it."""
    square = weight.shape[1:] == (x.shape[1], weight.shape[3], weight.shape[3]) if x.dim() == 4 else False
    fits = square and x.numel() > 0 and (bias is None or bias.shape == weight.shape[:1])
    plain = fits and all(has_floats(each) for each in (x, weight, bias) if each is not None)
    return plain and _functions(_shape(x, weight, padding)) is not None


def _shape(x: Tensor, weight: Tensor, padding: int) -> Shape:
    channels, height, width = x.shape[1:]
    return Shape(channels, height, width, len(weight), weight.shape[3], padding)


@cache
def _functions(shape: Shape) -> CDLL | None:
    return library("convolution.c", **shape._asdict()) if shape.suits else None


class PooledConvolution(torch.autograd.Function):
    """Convolution with stride 1, 2 × 2 max pooling and ReLU of images `(n, channels, height, width)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
        """Compute with channels last in memory, for inputs and outputs."""
        images, filters, shape = _laid_out(x), weight.contiguous(), _shape(x, weight, padding)
        start = None if bias is None else bias.contiguous()
        outputs = _laid_out(x.new_empty(len(x), *shape.pooled, shape.O).permute(0, 3, 1, 2))
        where = x.new_empty(len(x), *shape.pooled, shape.O, dtype=torch.uint8)
        forward = _library(shape).forward

        def part(rows: slice) -> None:
            call(forward, images[rows], filters, start, outputs[rows], where[rows], rows.stop - rows.start)

        _in_parts(len(x), part)
        ctx.save_for_backward(x, weight, bias, where)
        ctx.shape = shape
        return outputs

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        """Compute gradients. PyTorch computes them if second derivatives may be needed."""
        x, weight, bias, where = ctx.saved_tensors
        shape, wanted = ctx.shape, ctx.needs_input_grad
        if torch.is_grad_enabled():
            return *_differentiable(x, weight, bias, shape.P, above, wanted), None
        images, above, filters = _laid_out(x), _laid_out(above), weight.contiguous()
        to_x = torch.empty_like(images) if wanted[0] else None
        backward = _library(shape).backward

        def part(rows: slice) -> tuple[Tensor, Tensor]:
            to_weight, to_bias = torch.empty_like(filters), x.new_empty(shape.O)
            given = (images[rows], filters, above[rows], where[rows])
            results = (None if to_x is None else to_x[rows], to_weight, to_bias)
            call(backward, *given, *results, rows.stop - rows.start)
            return to_weight, to_bias

        (to_weight, to_bias), *others = _in_parts(len(x), part)
        for more_weight, more_bias in others:
            to_weight += more_weight
            to_bias += more_bias
        return to_x, to_weight, to_bias if bias is not None else None, None


def _differentiable(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, above: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    inputs = [each for each, asked in zip((x, weight, bias), wanted, strict=False) if asked and each is not None]
    outputs = F.relu(F.max_pool2d(torch.conv2d(x, weight, bias, padding=padding), 2))
    found = iter(torch.autograd.grad(outputs, inputs, above, create_graph=True))
    return [next(found) if asked else None for asked in wanted[:3]]


def _laid_out(images: Tensor) -> Tensor:
    """Return the images with channels last in memory."""
    return images.contiguous(memory_format=torch.channels_last)


def _library(shape: Shape) -> CDLL:
    functions = _functions(shape)
    assert functions is not None
    return functions


def _in_parts(rows: int, action: Callable[[slice], T]) -> list[T]:
    """Apply the action to each part of the rows. The number of parts is at most PyTorch's number of threads."""
    parts = max(1, min(torch.get_num_threads(), rows // FEWEST))
    slices = [slice(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]
    return [action(slices[0])] if parts == 1 else list(_pool(os.getpid()).map(action, slices))


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process. A forked process needs new ones."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="fedh2l-part")
