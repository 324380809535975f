"""Image augmentation for training: crop, flip, colour jitter, shift, zoom, erased squares, bending and mixing.

Parameters are drawn by address, so a resumed run draws the same ones, and all nodes see the same augmented public
batches. A few numbers per image are drawn on the CPU, so they are the same on every device. The images are changed on
the model's device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.data.pixels import Pixels
from fedh2l.hardware import uploaded
from fedh2l.protocol.sampling import Purpose, random_words

RATIO = (3 / 4, 4 / 3)
"""Range of the aspect ratio (width / height) of a crop."""
GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the perceived brightness."""
WORDS = 7
"""Random words per image, whether all are used or not. A word of 64 bits gives two numbers."""
POINTS = 4
"""Bending moves a grid of this many points across and down."""
PLAIN = 10
"""Parameters per image, without bending and mixing."""
Augment = Literal["none", "local", "public", "all"]
"""Steps that augment their images: no steps, local steps, mutual steps (`public`) or both (`all`)."""


@dataclass(frozen=True)
class Augmentation:
    """Strengths of the augmentations, with functions that draw and apply them."""

    pixels: Pixels
    crop: float = 0.8
    """Smallest share of the area that a random crop keeps. 1 turns it off."""
    flip: float = 0.5
    """Probability of a mirror image."""
    jitter: float = 0.4
    """Brightness, contrast and saturation change by factors of 1 ± this."""
    shift: float = 0.0
    """Largest shift in each direction, as a share of the side."""
    zoom: float = 0.0
    """The size changes by factors of 1 ± this."""
    erase: float = 0.0
    """Side of the largest erased square, as a share of the image's side."""
    bend: float = 0.0
    """Largest random shift of a grid point, as a share of the side. The common part of all shifts is then removed, so
    that the whole image keeps its place, size and orientation."""
    border: Literal["reflection", "zeros"] = "reflection"
    """Padding beyond the edge of an image."""
    public: PublicViews | None = None
    """Augmentation of public batches, the same for all nodes. None turns it off."""

    @property
    def words(self) -> int:
        """Random words per image."""
        return WORDS + (POINTS**2 if self.bend else 0)

    def views(
        self, images: Tensor, dtype: torch.dtype, purpose: Purpose, seed: int | str, node: str, round: int
    ) -> Tensor:
        """Augment images `(rows, channels, height, width)`, bytes or values 0 to 1, and normalise them for a model."""
        return self.apply(images, self.drawn(images, purpose, seed, node, round), dtype)

    def drawn(self, images: Tensor, purpose: Purpose, seed: int | str, node: str, round: int) -> Tensor:
        """Return the augmentation parameters of images `(rows, …)`, drawn by address, `(rows, numbers)`."""
        rows, _, height, width = images.shape
        words = random_words(self.words * rows, purpose, seed, node, round).reshape(rows, self.words)
        return uploaded(torch.from_numpy(self.numbers(words, width / height)), images.device)

    def numbers(self, words: NDArray[np.uint64], shape: float) -> NDArray[np.float64]:
        """Compute augmentation parameters `(…, numbers)` from random words `(…, words)`. `shape` is width / height.

        The parameters are, in this order:

        - scale in x and y, and centre in x and y, of the window to sample, with axes from −1 to 1
        - factors of brightness, contrast and saturation
        - centre in x and y, and side, of the erased square, with axes from 0 to 1
        - with bending, the shifts of all points across, then down
        """
        plain = self._plain(_halves(words[..., :WORDS]), shape)
        if not self.bend:
            return plain
        moves = 2 * self.bend * (2 * _halves(words[..., WORDS : WORDS + POINTS**2]) - 1)
        # Shifts across, then down. These products are small enough for BLAS to start no threads.
        each = moves.reshape(*moves.shape[:-2], -1, POINTS**2) @ _on_their_own()
        return np.concatenate([plain, each.reshape(moves.shape)], -1)

    def _plain(self, halves: NDArray[np.float64], shape: float) -> NDArray[np.float64]:
        drawn = np.moveaxis(halves, -1, 0)
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
        """Apply parameters `(…, rows, numbers)` to images `(…, rows, channels, height, width)`, and normalise them."""
        flat, own = images.flatten(0, -4), numbers.flatten(0, -2)
        values = flat.to(dtype).div_(self.pixels.scale) if flat.dtype == torch.uint8 else flat.to(dtype)
        if self.crop < 1 or self.flip or self.shift or self.zoom or self.bend:
            bends = own[:, PLAIN : PLAIN + 2 * POINTS**2].to(dtype) if self.bend else None
            values = moved(values, own[:, :4].to(dtype), self.border, bends)
        if self.jitter:
            values = jittered(values, own[:, 4:7].to(dtype))
        values = self.pixels.normalised(values)
        if self.erase:
            values = values * _left(values, own[:, 7:PLAIN].to(dtype))
        return values.view(*images.shape[:-3], *values.shape[1:])

    def mixture(self, numbers: Tensor) -> Mixture | None:
        """Return how images `(…, rows)` are mixed, or None if they are not."""
        return None

    def of(self, steps: Augment, **more: float) -> Augmentation | None:
        """Return the augmentation for these steps, or None. `more` sets further values for public batches.

        With `public`, local batches are not augmented.
        """
        if steps == "none":
            return None
        if steps == "local":
            return self
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        local = self if steps == "all" else Augmentation(self.pixels, crop=1, flip=0, jitter=0)
        return replace(local, public=PublicViews(**{**own, **more}))


class Mixture(NamedTuple):
    """Another image for each image of a batch, and the share of each."""

    own: Tensor
    """Share of the image itself, `(…, rows)`."""
    other: Tensor
    """Position of the other image in the batch, `(…, rows)`."""


@dataclass(frozen=True)
class PublicViews(Augmentation):
    """Augmentation of public batches, the same for all nodes. It can also mix pairs of images of a batch."""

    mix: float = 0.0
    """Largest share of another image that is mixed in."""

    @property
    def words(self) -> int:
        return super().words + (1 if self.mix else 0)

    def numbers(self, words: NDArray[np.uint64], shape: float) -> NDArray[np.float64]:
        """Append the share of the image itself, and the position of the other image in the batch."""
        numbers = super().numbers(words, shape)
        if not self.mix:
            return numbers
        share, place = np.moveaxis(_halves(words[..., -1:]), -1, 0)
        own, other = 1 - self.mix * share, np.floor(words.shape[-2] * place)
        return np.concatenate([numbers, own[..., None], other[..., None]], -1)

    def apply(self, images: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Augment each image, then mix the images."""
        seen = super().apply(images, numbers, dtype)
        mixture = self.mixture(numbers)
        if mixture is None:
            return seen
        own, other = (part[..., None, None, None] for part in mixture)
        return torch.lerp(seen.gather(seen.dim() - 4, other.expand_as(seen)), seen, own.to(dtype))

    def mixture(self, numbers: Tensor) -> Mixture | None:
        """Return the mixture. Each image keeps a share of at least 1 − `mix`."""
        return Mixture(numbers[..., -2], numbers[..., -1].long()) if self.mix else None


def _halves(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return two numbers from 0 to 1 per word: `(…, words)` to `(…, 2 · words)`."""
    return np.ascontiguousarray(words, "<u8").view("<u4") * 2.0**-32


def moved(images: Tensor, window: Tensor, border: str, bends: Tensor | None = None) -> Tensor:
    """Sample images through windows `(rows, 4)`: scale in x and y, centre in x and y, with axes from −1 to 1.

    `bends` `(rows, 2 · POINTS²)` are the shifts of the grid points across, then down.
    """
    rows, _, height, width = images.shape
    across, down = (_middles(count, images) * 2 - 1 for count in (width, height))
    x = (window[:, 0:1] * across + window[:, 2:3]).unsqueeze(1).expand(rows, height, width)
    y = (window[:, 1:2] * down + window[:, 3:4]).unsqueeze(2).expand(rows, height, width)
    if bends is not None:
        below, along = (_between(count, images.device, images.dtype) for count in (height, width))
        pulls = below @ bends.view(rows, 2, POINTS, POINTS) @ along.T
        x, y = x + pulls[:, 0], y + pulls[:, 1]
    return F.grid_sample(images, torch.stack([x, y], -1), mode="bilinear", padding_mode=border, align_corners=False)


@lru_cache(64)
def _between(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the weights of the grid points at each of `count` pixels, `(count, POINTS)`. Cached."""
    return torch.from_numpy(_cubic(count)).to(device, dtype)


def _cubic(count: int) -> NDArray[np.float64]:
    """Return the weights of cubic convolution (Keys, 1981), `(count, POINTS)`.

    The points are at the centres of equal parts. The values of the first and last point continue to the edges.
    """
    weights = np.zeros((count, POINTS))
    where = (np.arange(count) + 0.5) / count * POINTS - 0.5
    first = np.floor(where).astype(int)
    for step in (-1, 0, 1, 2):
        away = np.abs(where - (first + step))
        near = 1.5 * away**3 - 2.5 * away**2 + 1
        far = -0.5 * away**3 + 2.5 * away**2 - 4 * away + 2
        place = np.clip(first + step, 0, POINTS - 1)
        np.add.at(weights, (np.arange(count), place), np.where(away <= 1, near, np.where(away < 2, far, 0)))
    return weights


@lru_cache(1)
def _on_their_own() -> NDArray[np.float64]:
    """Return the matrix `(points, points)` that removes the common part of all shifts.

    The common part is a translation, a stretch and a rotation. It is measured over the whole image, and the remaining
    shifts have none.
    """
    fine = 32
    field = np.kron(_cubic(fine), _cubic(fine))
    down, across = np.meshgrid(*[(np.arange(fine) + 0.5) / fine * 2 - 1] * 2, indexing="ij")
    common = np.stack([np.ones(fine**2), across.ravel(), down.ravel()]) @ field
    return np.eye(POINTS**2) - np.linalg.pinv(common) @ common


def _middles(count: int, like: Tensor) -> Tensor:
    """Return the centres of `count` pixels in a row, from 0 to 1."""
    return (torch.arange(count, dtype=like.dtype, device=like.device) + 0.5) / count


def _left(images: Tensor, squares: Tensor) -> Tensor:
    """Return a mask `(rows, 1, height, width)`: 0 in erased squares `(rows, 3)` given by centre and side, else 1."""
    height, width = images.shape[-2:]
    x, y, side = (value.view(-1, 1) for value in squares.unbind(1))
    across, down = (_middles(width, images) - x).abs() < side / 2, (_middles(height, images) - y).abs() < side / 2
    return (~(down.unsqueeze(2) & across.unsqueeze(1))).to(images.dtype).unsqueeze(1)


def jittered(images: Tensor, factors: Tensor) -> Tensor:
    """Change brightness, contrast and saturation of images of values 0 to 1 by factors `(rows, 3)`."""
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
