"""Other views of the same images, for training: resized crop, mirror image, colour jitter.

What is drawn has an address like everything else that is random, so a resumed run draws the same, and all nodes see
the same views of a public batch. A few numbers an image are drawn on the CPU; the images are changed where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedh2l.pixels import Pixels
from fedh2l.sampling import Purpose, random_words
from fedh2l.upload import uploaded

RATIO = (3 / 4, 4 / 3)
"""Width by height of what is cut out."""
GREY = (0.299, 0.587, 0.114)
"""How much of each colour is in the brightness that the eye sees."""


@dataclass(frozen=True)
class Augmentation:
    """How far views of an image may be from it."""

    pixels: Pixels
    crop: float = 0.8
    """The least share of the area that is cut out and brought back to size; 1: no crop."""
    flip: float = 0.5
    """How often an image is mirrored."""
    jitter: float = 0.4
    """How far brightness, contrast and saturation are changed, by factors of 1 ± this."""
    public: bool = False
    """Whether public batches are seen otherwise too, by everybody in the same way."""

    def views(
        self, images: Tensor, dtype: torch.dtype, purpose: Purpose, seed: int | str, node: str, round: int
    ) -> Tensor:
        """Images `(rows, channels, height, width)` of bytes, seen otherwise, and ready for a model."""
        images = images.to(dtype).div_(self.pixels.scale)
        rows, _, height, width = images.shape
        words = random_words(8 * rows, purpose, seed, node, round)
        drawn = torch.from_numpy(words / 2.0**64).view(rows, 8)
        if self.crop < 1 or self.flip > 0:
            window = uploaded(self._window(drawn[:, :5], width / height).to(dtype), images.device)
            grid = F.affine_grid(window, list(images.shape), align_corners=False)
            images = F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
        if self.jitter:
            factors = uploaded((1 + self.jitter * (2 * drawn[:, 5:] - 1)).to(dtype), images.device)
            images = jittered(images, factors)
        return self.pixels.normalised(images)

    def _window(self, drawn: Tensor, shape: float) -> Tensor:
        """What part of an image is seen, `(rows, 2, 3)`: scale and shift of both axes, which run from −1 to 1."""
        area = self.crop + (1 - self.crop) * drawn[:, 0]
        low, high = (math.log(ratio) for ratio in RATIO)
        ratio = torch.exp(low + (high - low) * drawn[:, 1]) / shape if self.crop < 1 else torch.ones(len(drawn))
        width = (area * ratio).sqrt().clamp(max=1)
        height = (area / ratio).sqrt().clamp(max=1)
        mirror = torch.where(drawn[:, 4] < self.flip, -1.0, 1.0)
        window = torch.zeros(len(drawn), 2, 3, dtype=torch.float64)
        window[:, 0, 0], window[:, 1, 1] = width * mirror, height
        window[:, 0, 2], window[:, 1, 2] = (1 - width) * (2 * drawn[:, 2] - 1), (1 - height) * (2 * drawn[:, 3] - 1)
        return window


def jittered(images: Tensor, factors: Tensor) -> Tensor:
    """Images of values 0 to 1, with brightness, contrast and saturation changed by factors `(rows, 3)`."""
    brightness, contrast, saturation = (factor.view(-1, 1, 1, 1) for factor in factors.unbind(1))
    images = (images * brightness).clamp(0, 1)
    middle = _grey(images).mean((1, 2, 3), keepdim=True)
    images = (middle + (images - middle) * contrast).clamp(0, 1)
    if images.shape[1] == 3:
        grey = _grey(images)
        images = (grey + (images - grey) * saturation).clamp(0, 1)
    return images


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.unbind(1)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue).unsqueeze(1)
