"""Small networks for trials on a CPU: a residual one with batch norm, and a plain one without."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, wider, 3, stride, 1, bias=False), nn.BatchNorm2d(wider))
        self.second = nn.Sequential(nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider))
        self.shortcut = nn.Sequential(nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def resnet(num_classes: int, width: int = 12) -> nn.Module:
    """Three blocks. The second and third halve the image and double the width."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes),
    )  # fmt: skip


def plain(num_classes: int, width: int = 16) -> nn.Module:
    """Pairs of convolutions without shortcut and batch norm. Each pair halves the image and doubles the width."""
    layers: list[nn.Module] = []
    for channels, wider in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(channels, wider, 3, 1, 1), nn.ReLU()]
        layers += [nn.Conv2d(wider, wider, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * width, num_classes))
