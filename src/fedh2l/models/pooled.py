"""A convolution, its pooling and ReLU as one function, so that they can be computed at once where that is quicker."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def pooled(layer: nn.Module, x: Tensor) -> Tensor:
    """What a convolution says of `(n, channels, height, width)`, the largest of each 2 × 2 pixels, and of that and 0.

    In memory its channels may come last: `flatten` and `reshape` take that, `view` does not.
    A layer that somebody listens to, or has put in another's place, is called as usual.
    """
    if type(layer) is not nn.Conv2d or any(getattr(layer, hooks) for hooks in HOOKS):
        return F.relu(F.max_pool2d(layer(x), 2))
    plain = layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
    if not plain or isinstance(layer.padding, str) or len(set(layer.padding)) > 1:
        return F.relu(F.max_pool2d(layer(x), 2))
    return pooled_convolution(x, layer.weight, layer.bias, layer.padding[0])


def pooled_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """A convolution with steps of one pixel, its pooling, and ReLU; engines have their own ways."""
    if has_torch_function((x, weight)):
        result: Tensor = handle_torch_function(pooled_convolution, (x, weight), x, weight, bias, padding)
        return result
    # Pooling before ReLU gives the same values as after it and computes a quarter of them.
    return F.relu(F.max_pool2d(torch.conv2d(x, weight, bias, padding=padding), 2))
