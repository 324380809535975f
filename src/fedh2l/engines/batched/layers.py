"""Layers of stacked networks.

`torch.func.vmap` turns the convolutions of many networks into one grouped convolution, which cuDNN computes group by
group. Small convolutions and poolings on a GPU use compiled kernels instead (`kernels/cuda/`, unless `run.kernels` is
`off`). Other small convolutions become one matrix product over all windows of the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedh2l.engines.batched.overrides import Table
from fedh2l.kernels.cuda.layers import OneConvolution, OnePooling, can_convolve, can_pool
from fedh2l.kernels.pooled import allowed

LARGEST = 65_536
"""Values in the windows of one sample above which cuDNN computes a convolution."""


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Compute `torch.conv2d`, by a kernel or by the windows of the input where they are small enough."""
    plain = x.dim() == 4 and groups == 1 and not isinstance(padding, str) and set(_pair(dilation)) == {1}
    if plain and not isinstance(padding, str):
        (down, across), (tall, wide) = _pair(stride), _pair(padding)
        in_channels, height, width = weight.shape[1:]
        rows = (x.shape[2] + 2 * tall - height) // down + 1
        columns = (x.shape[3] + 2 * wide - width) // across + 1
        if in_channels * height * width * rows * columns <= LARGEST:
            if (down, across) == (1, 1) and allowed() and can_convolve(x, weight, (tall, wide)):
                result: Tensor = OneConvolution.apply(x, weight, bias, (tall, wide))
                return result
            return _by_windows(x, weight, bias, (down, across), (tall, wide), (rows, columns))
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


def _by_windows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    size: tuple[int, int],
) -> Tensor:
    (out_channels, _, height, width), (tall, wide) = weight.shape, padding
    padded = F.pad(x, (wide, wide, tall, tall)) if tall or wide else x
    windows = padded.unfold(2, height, stride[0]).unfold(3, width, stride[1])  # (n, channels, *size, height, width)
    matrix = windows.permute(0, 1, 4, 5, 2, 3).reshape(x.shape[0], -1, size[0] * size[1])
    product = weight.flatten(1) @ matrix
    if bias is not None:
        product = product + bias.unsqueeze(-1)
    return product.reshape(x.shape[0], out_channels, *size)


def max_pooling(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """Compute `F.max_pool2d` without indices, by a kernel if windows are squares that do not overlap."""
    size, step = _pair(kernel_size), _pair(stride or kernel_size)
    tiled = len({*size, *step}) == 1 and set(_pair(padding)) == {0} and set(_pair(dilation)) == {1}
    fits = tiled and not ceil_mode and x.dim() == 4 and size[0] <= min(x.shape[2:])
    if fits and allowed() and can_pool(x):
        result: Tensor = OnePooling.apply(x, size[0])
        return result
    return torch.max_pool2d(x, size, step, _pair(padding), _pair(dilation), ceil_mode)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` as a product and a sum. The stacked form of `F.linear` takes more kernels."""
    product = x @ weight.t()
    return product if bias is None else product + bias


STACKED: Table = {
    torch.conv2d: convolution,
    F.max_pool2d: max_pooling,
    F.linear: linear,
}


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value
    return first, second
