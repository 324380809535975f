"""LeNet in the two sizes that fit the paper's text."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedh2l.kernels.pooled import pooled


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling, 61,706 parameters for 28 × 28 grey images and 10 classes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.hidden1 = nn.Linear(400, 120)
        self.hidden2 = nn.Linear(120, 84)
        self.output = nn.Linear(84, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the 84 inputs of the last layer."""
        x = pooled(self.conv2, pooled(self.conv1, x)).flatten(1)
        return F.relu(self.hidden2(F.relu(self.hidden1(x))))

    def split(self) -> tuple[nn.Module, nn.Module]:
        """Return the first convolution and the rest."""
        stem = nn.Sequential(self.conv1, nn.MaxPool2d(2), nn.ReLU())
        convolution = (self.conv2, nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
        return stem, nn.Sequential(*convolution, self.hidden1, nn.ReLU(), self.hidden2, nn.ReLU(), self.output)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images `(n, 1, 28, 28)`."""
        logits: Tensor = self.output(self.features(x))
        return logits


class LeNetWide(nn.Module):
    """The LeNet of many code collections: 20 and 50 channels, 500 hidden units, 431,080 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.hidden = nn.Linear(800, 500)
        self.output = nn.Linear(500, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the 500 inputs of the last layer."""
        x = pooled(self.conv2, pooled(self.conv1, x)).flatten(1)
        return F.relu(self.hidden(x))

    def split(self) -> tuple[nn.Module, nn.Module]:
        """Return the first convolution and the rest."""
        stem = nn.Sequential(self.conv1, nn.MaxPool2d(2), nn.ReLU())
        convolution = (self.conv2, nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
        return stem, nn.Sequential(*convolution, self.hidden, nn.ReLU(), self.output)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images `(n, 1, 28, 28)`."""
        logits: Tensor = self.output(self.features(x))
        return logits
