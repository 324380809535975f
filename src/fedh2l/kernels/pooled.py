"""Convolution, pooling and ReLU as one function, so an engine can replace it by a faster one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
    """Apply a convolution with stride 1, 2 × 2 max pooling and ReLU. Engines override this function."""
    if has_torch_function((x, weight)):
        result: Tensor = handle_torch_function(pooled_convolution, (x, weight), x, weight, bias, padding)
        return result
    # Pooling before ReLU gives the same values and applies ReLU to a quarter of them.
    return F.relu(F.max_pool2d(torch.conv2d(x, weight, bias, padding=padding), 2))
