"""Small networks of other architectures, for experiments with different models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(num_classes: int, input_shape: Sequence[int], hidden: Sequence[int] = (200, 100)) -> nn.Sequential:
    """A multilayer perceptron on the flattened input; `hidden = []` is logistic regression."""
    sizes = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in pairwise(sizes):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_classes))


def cnn(
    num_classes: int, input_shape: Sequence[int], channels: Sequence[int] = (16, 32, 64), hidden: int = 64
) -> nn.Sequential:
    """A stack of 3 × 3 convolutions, each halving the image, and one hidden layer."""
    sizes = [input_shape[0], *channels]
    layers: list[nn.Module] = []
    for channels_in, channels_out in pairwise(sizes):
        layers += [nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1), nn.ReLU()]
    side_h, side_w = (math.ceil(side / 2 ** len(channels)) for side in input_shape[1:])
    flat = sizes[-1] * side_h * side_w
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
