"""Layers of stacked networks as plain matrix products.

`torch.func.vmap` turns the convolutions of many networks into one grouped convolution, which cuDNN then runs group
after group. For the small images that are worth stacking, gathering every window in a matrix and multiplying all of
them at once keeps a GPU busy instead: on an H200 a round of 32 LeNets takes three quarters of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

LARGEST = 65_536
"""Numbers in the matrix of one sample beyond which windows take too much memory."""


class AsMatrices(TorchFunctionMode):
    """While active, linear layers and small two-dimensional convolutions are plain matrix products."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Intercepts `conv2d` and `linear`."""
        if func is torch.conv2d:
            return convolution(*args, **(kwargs or {}))
        if func is F.linear:
            return linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.conv2d`, by the windows of the input where they are small enough."""
    out_channels, in_channels, height, width = weight.shape
    plain = x.dim() == 4 and groups == 1 and not isinstance(padding, str) and set(_pair(dilation)) == {1}
    if not plain or isinstance(padding, str):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    (down, across), (tall, wide) = _pair(stride), _pair(padding)
    rows = (x.shape[2] + 2 * tall - height) // down + 1
    columns = (x.shape[3] + 2 * wide - width) // across + 1
    if in_channels * height * width * rows * columns > LARGEST:
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    padded = F.pad(x, (wide, wide, tall, tall)) if tall or wide else x
    windows = padded.unfold(2, height, down).unfold(3, width, across)  # (n, channels, rows, columns, height, width)
    matrix = windows.permute(0, 1, 4, 5, 2, 3).reshape(x.shape[0], -1, rows * columns)
    product = weight.flatten(1) @ matrix
    if bias is not None:
        product = product + bias.unsqueeze(-1)
    return product.reshape(x.shape[0], out_channels, rows, columns)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` as a product and a sum; stacked, its own form takes kernels more, to multiply the bias by 1."""
    product = x @ weight.t()
    return product if bias is None else product + bias


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value
    return first, second
