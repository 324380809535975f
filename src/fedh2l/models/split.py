"""Splits of a model into a stem that stays on a node, and a trunk that may run on a server."""

from __future__ import annotations

import inspect

from torch import nn

from fedh2l.errors import ModelError


def split(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a model's stem and trunk. They share its layers, and trunk(stem(x)) is the model's output.

    The model's own `split()` method is used if there is one. Otherwise an `nn.Sequential` is cut after its first
    activation.
    """
    own = getattr(module, "split", None)
    if inspect.ismethod(own):
        stem, trunk = own()
        return stem, trunk
    if isinstance(module, nn.Sequential):
        layers = list(module)
        trained = next((i for i, layer in enumerate(layers) if any(True for _ in layer.parameters())), len(layers))
        cut = next((i + 1 for i in range(trained + 1, len(layers)) if not any(True for _ in layers[i].parameters())), 0)
        if 0 < cut < len(layers) and any(True for layer in layers[cut:] for _ in layer.parameters()):
            return nn.Sequential(*layers[:cut]), nn.Sequential(*layers[cut:])
    raise ModelError(
        f"{type(module).__name__} cannot be cut in two. Give it a method split() that returns (stem, trunk)"
    )
