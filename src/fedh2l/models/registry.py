"""The built-in models by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedh2l.registry import Builtin, Registry

if TYPE_CHECKING:
    from torch import nn

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    {
        "lenet": Builtin(
            "fedh2l.models.lenet:LeNet",
            "LeNet-5 with ReLU and max pooling, 61,706 parameters for 28 × 28 grey images and 10 classes.",
        ),
        "lenet-wide": Builtin(
            "fedh2l.models.lenet:LeNetWide",
            "The LeNet of many code collections: 20 and 50 channels, 500 hidden units, 431,080 parameters.",
        ),
        "mlp": Builtin(
            "fedh2l.models.small:mlp",
            "A multilayer perceptron on the flattened input; `hidden = []` is logistic regression.",
        ),
        "cnn": Builtin(
            "fedh2l.models.small:cnn",
            "A stack of 3 × 3 convolutions, each halving the image, and one hidden layer.",
        ),
    }
)
