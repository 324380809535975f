"""Nodes whose data are images as bytes, and a small network with batch norm for them."""

from __future__ import annotations

import torch
from torch import nn

import fedh2l
from fedh2l.data.augmentation import Augmentation
from fedh2l.data.domain import Domain

IMAGENET = {"kind": "image", "scale": 255, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def net(num_classes: int = 3, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(16, num_classes),
    )  # fmt: skip


def pictures(name: str, seed: int = 0, augmentation: Augmentation | None = None, side: int = 8) -> Domain:
    """Bright, dark and striped, as bytes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 120, (60, 3, side, side), generator=generator)
    labels = torch.arange(60) % 3
    images[labels == 1] += 120
    images[labels == 2, :, ::2] += 120
    split = Domain.split((images.to(torch.uint8), labels), name, 3, preprocessing=IMAGENET)
    return Domain(
        name, split.classes, split.private, split.public, split.validation, split.test, IMAGENET, augmentation
    )


def nodes(augmentation: Augmentation | None = None, model: object = net) -> list[fedh2l.Node]:
    return [fedh2l.Node(name, model, pictures(name, seed, augmentation)) for seed, name in enumerate("abc")]
