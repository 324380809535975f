"""Faster CPU versions of layers that are slow in PyTorch.

With a C compiler, a small convolution and its pooling are one compiled function. It is five times as fast. Its results
differ only in the order of sums.

Without a compiler, two other methods are used. `max_pool2d` compares single pixels unless channels are last in memory.
Taking the maximum of whole rows is ten times as fast and gives identical bits. A convolution of grey images has one
channel, which is slow. If it is pooled next, it is computed on the four quarters of the image as four channels. The
pixels to compare are then in four blocks.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedh2l.kernels.cpu.convolution import PooledConvolution, can_convolve
from fedh2l.kernels.overrides import Table
from fedh2l.kernels.pooled import pooled_convolution


def max_pooling(input: Tensor, *arguments: Any, **options: Any) -> Any:
    """`F.max_pool2d` without indices."""
    if _halves(input, *arguments, **options):
        return HalvingPool.apply(input)
    return F.max_pool2d(input, *arguments, **options)


def convolution_and_pooling(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Apply `pooled_convolution`, compiled if possible."""
    if can_convolve(x, weight, bias, padding):
        result: Tensor = PooledConvolution.apply(x, weight, bias, padding)
        return result
    return by_quarters(x, weight, bias, padding)


def by_quarters(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """Apply `pooled_convolution` with PyTorch's functions."""
    if not _has_quarters(x, weight, padding):
        return F.relu(max_pooling(torch.conv2d(x, weight, bias, padding=padding), 2))
    outputs, side = len(weight), weight.shape[3]
    half = side // 2 + 1
    kernel = (weight.flatten(1) @ _taps(side, weight.dtype)).view(outputs, 4, 4, half, half).transpose(0, 1)
    padded = F.pad(x, (padding,) * 4) if padding else x
    count, _, height, width = padded.shape
    quarters = padded.reshape(count, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3)
    said = torch.conv2d(quarters.reshape(count, 4, height // 2, width // 2), kernel.flatten(0, 1))
    largest: Tensor = LargestOfFour.apply(said.view(count, 4, outputs, *said.shape[2:]))
    return F.relu(largest if bias is None else largest + bias.view(-1, 1, 1))


ON_CPU: Table = {F.max_pool2d: max_pooling, pooled_convolution: convolution_and_pooling}


def _has_quarters(x: Tensor, weight: Tensor, padding: int) -> bool:
    """Return whether these are grey images of even padded size, and the kernel is square and odd."""
    tall, wide = weight.shape[2:]
    even = x.dim() == 4 and all((side + 2 * padding) % 2 == 0 for side in x.shape[2:])
    return x.is_cpu and even and weight.shape[1] == 1 and tall == wide and tall % 2 == 1 and x.numel() > 0


@cache
def _taps(side: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix that maps a kernel's weights to the kernel on quarters, `(side², 4 · 4 · half²)`.

    Pixel 2i + a of the result uses pixels 2i + a + u of the image: i + (a + u) // 2 of its quarter (a + u) % 2.
    """
    half = side // 2 + 1
    taps = torch.zeros(side, side, 2, 2, 2, 2, half, half, dtype=dtype)
    for u, v, a, b in product(range(side), range(side), range(2), range(2)):
        taps[u, v, a, b, (a + u) % 2, (b + v) % 2, (a + u) // 2, (b + v) // 2] = 1
    return taps.view(side * side, -1)


class LargestOfFour(torch.autograd.Function):
    """Maximum over dimension 1 of finite `(n, 4, …)`. On ties, the first gets the gradient."""

    @staticmethod
    def forward(ctx: Any, four: Tensor) -> Tensor:
        """Compare in pairs."""
        a, b, c, d = four.unbind(1)
        largest = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
        ctx.save_for_backward(four, largest)
        return largest

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        """Give each gradient to the first of the largest values.

        `threshold_backward` is the gradient of ReLU. On a CPU, it and a difference are much faster than comparisons.
        """
        four, largest = ctx.saved_tensors
        parts = []
        for one in four.unbind(1)[:3]:
            rest = torch.ops.aten.threshold_backward(above, largest - one, 0)
            parts.append(above - rest)
            above = rest
        return torch.stack([*parts, above], 1)


def _halves(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Return whether this is 2 × 2 pooling without overlap that covers a plain batch of images."""
    if kernel_size not in TWO or (stride is not None and stride not in TWO) or padding not in ZERO:
        return False
    plain = input.dim() == 4 and input.is_contiguous() and input.is_floating_point() and input.is_cpu
    height, width = input.shape[-2:]
    return plain and dilation in ONE and height % 2 == width % 2 == 0 and input.numel() > 0


ZERO, ONE, TWO = ((n, (n, n), [n, n]) for n in (0, 1, 2))


class HalvingPool(torch.autograd.Function):
    """2 × 2 max pooling of `(n, channels, height, width)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compare rows first, since they are contiguous in memory."""
        squares = _squares(x)
        rows = torch.maximum(squares[:, :, :, 0], squares[:, :, :, 1])
        largest = torch.maximum(rows[..., 0], rows[..., 1])
        ctx.save_for_backward(x, largest)
        return largest

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        """Give the gradient to the first largest pixel, row by row. Its place is computed only here."""
        x, largest = ctx.saved_tensors
        squares, width = _squares(x), x.shape[3]
        first = squares[:, :, :, 0, :, 0] == largest
        second = squares[:, :, :, 0, :, 1] == largest
        third = squares[:, :, :, 1, :, 0] == largest
        below = ~(first | second)
        right = (second > first) | (below > third)
        small = torch.uint8 if width < 255 else torch.int32  # a product of small integers is fast
        places = (below.to(small) * width + right).long() + _corners(x.shape[2], width)
        result: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            above, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places
        )
        return result


def _squares(x: Tensor) -> Tensor:
    """View images as `(n, channels, height / 2, 2, width / 2, 2)`."""
    count, channels, height, width = x.shape
    return x.view(count, channels, height // 2, 2, width // 2, 2)


@cache
def _corners(height: int, width: int) -> Tensor:
    """Return the index of the first pixel of each square."""
    return torch.arange(0, height, 2).unsqueeze(1) * width + torch.arange(0, width, 2)
