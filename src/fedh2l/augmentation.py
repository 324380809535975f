"""Other views of the same images, for training: moved, mirrored, in other sizes and colours, with a piece missing.

What is drawn has an address like everything else that is random, so a resumed run draws the same, and all nodes see
the same views of a public batch. A few numbers an image are drawn on the CPU, wherever the model computes, so they are
the same everywhere; the images are changed where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.pixels import Pixels
from fedh2l.sampling import Purpose, random_words
from fedh2l.upload import uploaded

RATIO = (3 / 4, 4 / 3)
"""Width by height of what is cut out."""
GREY = (0.299, 0.587, 0.114)
"""How much of each colour is in the brightness that the eye sees."""
WORDS = 7
"""Drawn for an image, whether all are used or not: two numbers each, of 32 bits."""


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
    shift: float = 0.0
    """How far an image is moved, at most, in either direction, as a share of its side."""
    zoom: float = 0.0
    """How far its size is changed, by factors of 1 ± this."""
    erase: float = 0.0
    """The side, at most, of a square that is left out, as a share of the image's."""
    border: Literal["reflection", "zeros"] = "reflection"
    """What is seen beyond the edge of an image."""
    public: bool = False
    """Whether public batches are seen otherwise too, by everybody in the same way."""

    def views(
        self, images: Tensor, dtype: torch.dtype, purpose: Purpose, seed: int | str, node: str, round: int
    ) -> Tensor:
        """Images `(rows, channels, height, width)`, bytes or values 0 to 1, seen otherwise, and ready for a model."""
        rows, _, height, width = images.shape
        words = random_words(WORDS * rows, purpose, seed, node, round).reshape(rows, WORDS)
        numbers = uploaded(torch.from_numpy(self.numbers(words, width / height)), images.device)
        return self.apply(images, numbers, dtype)

    def numbers(self, words: NDArray[np.uint64], shape: float) -> NDArray[np.float64]:
        """What becomes of images of a shape, width by height, from words that were drawn `(…, 7)`: `(…, 10)`.

        Scale and middle of both axes of what is seen, which run from −1 to 1; factors of brightness, contrast and
        saturation; middle and side of what is left out, where axes run from 0 to 1.
        """
        halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], -1) / 2.0**32
        drawn = np.moveaxis(halves.reshape(*words.shape[:-1], 2 * WORDS), -1, 0)
        area = self.crop + (1 - self.crop) * drawn[0]
        low, high = (math.log(ratio) for ratio in RATIO)
        ratio = np.exp(low + (high - low) * drawn[1]) / shape if self.crop < 1 else np.ones_like(area)
        width, height = np.minimum(np.sqrt(area * ratio), 1), np.minimum(np.sqrt(area / ratio), 1)
        x, y = ((1 - side) * (2 * where - 1) for side, where in ((width, drawn[2]), (height, drawn[3])))
        size = 1 / (1 + self.zoom * (2 * drawn[8] - 1))
        x, y = (middle + 2 * self.shift * (2 * where - 1) for middle, where in ((x, drawn[9]), (y, drawn[10])))
        mirror = np.where(drawn[4] < self.flip, -1.0, 1.0)
        factors = [1 + self.jitter * (2 * drawn[place] - 1) for place in (5, 6, 7)]
        numbers = [width * size * mirror, height * size, x, y, *factors, drawn[11], drawn[12], self.erase * drawn[13]]
        return np.stack(numbers, -1)

    def apply(self, images: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Images `(…, rows, channels, height, width)` as `numbers` `(…, rows, 10)` say, ready for a model."""
        flat, own = images.flatten(0, -4), numbers.flatten(0, -2)
        values = flat.to(dtype).div_(self.pixels.scale) if flat.dtype == torch.uint8 else flat.to(dtype)
        if self.crop < 1 or self.flip or self.shift or self.zoom:
            values = moved(values, own[:, :4].to(dtype), self.border)
        if self.jitter:
            values = jittered(values, own[:, 4:7].to(dtype))
        values = self.pixels.normalised(values)
        if self.erase:
            values = values * _left(values, own[:, 7:].to(dtype))
        return values.view(*images.shape[:-3], *values.shape[1:])


def moved(images: Tensor, window: Tensor, border: str) -> Tensor:
    """What is seen of images through windows `(rows, 4)`: scale of x and y, middle of x and y, from −1 to 1."""
    rows, _, height, width = images.shape
    across, down = (_middles(count, images) * 2 - 1 for count in (width, height))
    x = window[:, 0:1] * across + window[:, 2:3]
    y = window[:, 1:2] * down + window[:, 3:4]
    grid = torch.stack([x.unsqueeze(1).expand(rows, height, width), y.unsqueeze(2).expand(rows, height, width)], -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=border, align_corners=False)


def _middles(count: int, like: Tensor) -> Tensor:
    """Of `count` pixels side by side, from 0 to 1."""
    return (torch.arange(count, dtype=like.dtype, device=like.device) + 0.5) / count


def _left(images: Tensor, squares: Tensor) -> Tensor:
    """1 where an image stays, 0 in squares `(rows, 3)`, middle and side, `(rows, 1, height, width)`."""
    height, width = images.shape[-2:]
    x, y, side = (value.view(-1, 1) for value in squares.unbind(1))
    across, down = (_middles(width, images) - x).abs() < side / 2, (_middles(height, images) - y).abs() < side / 2
    return (~(down.unsqueeze(2) & across.unsqueeze(1))).to(images.dtype).unsqueeze(1)


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
