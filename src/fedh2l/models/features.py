"""Features: the inputs of a model's last layer."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from fedh2l.errors import ModelError


def features(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the features of `inputs`: the model's own `features(x)`, else the input of its last Linear layer.

    An attribute `features` that is a layer (as in torchvision's AlexNet and VGG) is ignored.
    """
    own = getattr(module, "features", None)
    if inspect.ismethod(own):
        offered: Tensor = own(inputs)
        return offered
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not linears:
        raise ModelError(f"{type(module).__name__} needs a method features(x) or a Linear layer")
    seen: list[Tensor] = []

    def remember(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen.append(arguments[0])

    handle = linears[-1].register_forward_pre_hook(remember)
    try:
        module(inputs)
    finally:
        handle.remove()
    if not seen:
        raise ModelError(f"the last Linear layer of {type(module).__name__} is not used in its forward pass")
    return seen[-1]
