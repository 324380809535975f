"""Convolution and pooling of many small networks at once.

Libraries are made for large layers of one network. On a stack of small networks, they copy each input window, which
takes many times the input's memory, or they run one network after another. Here a block keeps a few images and one
network's filters in shared memory. Inputs are `(nets, rows, channels, height, width)`.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from fedh2l.kernels.cuda.compiler import TYPES, Kernel, available, kernel
from fedh2l.kernels.cuda.tiles import Shape, plan, plan_weights

POOL_THREADS = 256


def _device(tensor: Tensor) -> tuple[int, int]:
    """Return the number of multiprocessors and the largest shared memory of a block."""
    properties = torch.cuda.get_device_properties(tensor.device)
    most: int = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return properties.multi_processor_count, min(most, 96 * 1024)


def can_convolve(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> bool:
    """Return whether kernels support one network's input `(rows, channels, height, width)` and its weights."""
    if not (x.is_cuda and x.dtype in TYPES and weight.dtype == x.dtype and available(x.device)):
        return False
    shape, item = _shape(x, weight, padding), x.element_size()
    processors, limit = _device(x)
    forward = plan(shape, 1, x.shape[-4], item, processors, limit)
    backward = plan(shape.backward(), 1, x.shape[-4], item, processors, limit) if forward else None
    return backward is not None and plan_weights(shape, item, limit) is not None


def _shape(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Shape:
    channels, height, width = x.shape[-3:]
    filters, _, tall, wide = weight.shape[-4:]
    return Shape(channels, height, width, filters, tall, wide, *padding)


def correlate(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, flipped: bool) -> Tensor:
    """Correlate windows with filters. With `flipped`, use the filters of the convolution whose gradient this is."""
    x, step = _dense(x)
    nets, rows = x.shape[:2]
    tiles = plan(shape, nets, rows, x.element_size(), *_device(x))
    assert tiles is not None
    words = {"#CORRELATE": 1, **({"#FLIPPED": 1} if flipped else {})}
    cut = {name: getattr(tiles, name) for name in ("PX", "OT", "S", "T", "CC")}
    run = kernel("convolution.cu", "correlate", x.dtype, {**words, **shape.constants(), **cut}, tiles.shared)
    y = x.new_empty(nets, rows, shape.O, *shape.size)
    grid = (ceil(rows / tiles.S), nets, ceil(shape.O / tiles.OT))
    run(grid, tiles.T, x, step, weight, bias, y, rows)
    return y


def weight_gradient(shape: Shape, x: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients for weights `(nets, filters · channels · height · width)` and bias `(nets, filters)`."""
    x, step = _dense(x)
    nets, rows = x.shape[:2]
    processors, limit = _device(x)
    split = plan_weights(shape, x.element_size(), limit)
    assert split is not None
    cut = {name: getattr(split, name) for name in ("OT", "PARTS", "T")}
    run = kernel("convolution.cu", "weights", x.dtype, {"#WEIGHTS": 1, **shape.constants(), **cut}, split.shared)
    each = max(1, nets * rows // (8 * processors))
    entries = shape.O * shape.C * shape.KH * shape.KW
    parts = x.new_empty(nets, ceil(rows / each), entries + shape.O)
    run((parts.shape[1], nets), split.T, x, step, above, parts, rows, each)
    total = parts.sum(1)
    return total[:, :entries], total[:, entries:]


def _dense(x: Tensor) -> tuple[Tensor, int]:
    """Return a tensor with contiguous samples, and the stride between nets: 0 if they share their inputs."""
    if x.stride(0) == 0 and x[0].is_contiguous():
        return x, 0
    x = x.contiguous()
    return x, x.stride(0)


class Convolution(torch.autograd.Function):
    """Convolution of many networks, each with its own weights and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        """Take `x` `(nets, rows, …)`, `weight` `(nets, filters, …)` and `bias` `(nets, filters)`."""
        weight = weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.shape = _shape(x, weight, padding)
        return correlate(ctx.shape, x, weight, None if bias is None else bias.contiguous(), False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Compute only the gradients that are needed."""
        x, weight = ctx.saved_tensors
        above = above.contiguous()
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = correlate(ctx.shape.backward(), above, weight, None, True)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            for_weight, for_bias = weight_gradient(ctx.shape, x, above)
            for_weight = for_weight.view(weight.shape)
        return for_x, for_weight, for_bias if ctx.needs_input_grad[2] else None, None


class Pooling(torch.autograd.Function):
    """Maximum of each square of `k` × `k` pixels, without overlap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        """Take `x` `(…, height, width)`."""
        x = x.contiguous()
        height, width = x.shape[-2:]
        ctx.k, ctx.size = k, x.shape
        y = x.new_empty(*x.shape[:-2], height // k, width // k)
        where = torch.empty(y.shape, dtype=torch.uint8, device=y.device)
        Pooling._kernel("pool", x, k)((ceil(y.numel() / POOL_THREADS),), POOL_THREADS, x, y, where, y.numel())
        ctx.save_for_backward(where)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        """Give the gradient to the largest pixel."""
        (where,) = ctx.saved_tensors
        out = above.new_empty(ctx.size)
        run = Pooling._kernel("unpool", out, ctx.k)
        run((ceil(out.numel() / POOL_THREADS),), POOL_THREADS, above.contiguous(), where, out, out.numel())
        return out, None

    @staticmethod
    def _kernel(name: str, x: Tensor, k: int) -> Kernel:
        height, width = x.shape[-2:]
        return kernel("pooling.cu", name, x.dtype, {"H": height, "W": width, "K": k})


class OneConvolution(torch.autograd.Function):
    """`Convolution` for one of many networks under `vmap`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
        """Raise an error: a single network is computed in other ways."""
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing: gradients are computed outside `vmap`."""

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> Any:
        """Compute all networks at once."""
        x, weight = _leading(info, x, dims[0]), _leading(info, weight, dims[1])
        bias = None if bias is None else _leading(info, bias, dims[2])
        return Convolution.apply(x, weight, bias, padding), 0


class OnePooling(torch.autograd.Function):
    """`Pooling` for one of many networks under `vmap`."""

    @staticmethod
    def forward(x: Tensor, k: int) -> Tensor:
        """Raise an error: a single network is computed in other ways."""
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing: gradients are computed outside `vmap`."""

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], x: Tensor, k: int) -> Any:
        """Compute all networks at once."""
        return Pooling.apply(_leading(info, x, dims[0]), k), 0


def _leading(info: Any, tensor: Tensor, dim: int | None) -> Tensor:
    """Return the tensor with the dimension of networks first. Networks with equal values share them."""
    return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def can_pool(x: Tensor) -> bool:
    """Return whether kernels support these images."""
    return x.is_cuda and x.dtype in TYPES and available(x.device)
