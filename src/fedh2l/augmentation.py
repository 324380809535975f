"""Other views of the same images, for training: moved, mirrored, bent, in other sizes and colours, with pieces missing.

What is drawn has an address like everything else that is random, so a resumed run draws the same, and all nodes see
the same views of a public batch. A few numbers an image are drawn on the CPU, wherever the model computes, so they are
the same everywhere; the images are changed where they are.
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

from fedh2l.pixels import Pixels
from fedh2l.sampling import Purpose, random_words
from fedh2l.upload import uploaded

RATIO = (3 / 4, 4 / 3)
"""Width by height of what is cut out."""
GREY = (0.299, 0.587, 0.114)
"""How much of each colour is in the brightness that the eye sees."""
WORDS = 7
"""Drawn for every image, whether all are used or not: two numbers each, of 32 bits."""
POINTS = 4
"""An image is bent at so many points across and down."""
PLAIN = 10
"""How many numbers say what becomes of an image that is neither bent nor mixed."""
Augment = Literal["none", "local", "public", "all"]
"""Which steps see other views: none, local ones, mutual ones, both."""


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
    bend: float = 0.0
    """How far moves of points of an image are drawn, as a share of its side; what they have in common is then taken
    out, so that as a whole it stays where it is, as large and as upright as it was."""
    border: Literal["reflection", "zeros"] = "reflection"
    """What is seen beyond the edge of an image."""
    public: PublicViews | None = None
    """How public batches are seen, by everybody in the same way; None: as they are."""

    @property
    def words(self) -> int:
        """How many are drawn for an image."""
        return WORDS + (POINTS**2 if self.bend else 0)

    def views(
        self, images: Tensor, dtype: torch.dtype, purpose: Purpose, seed: int | str, node: str, round: int
    ) -> Tensor:
        """Images `(rows, channels, height, width)`, bytes or values 0 to 1, seen otherwise, and ready for a model."""
        return self.apply(images, self.drawn(images, purpose, seed, node, round), dtype)

    def drawn(self, images: Tensor, purpose: Purpose, seed: int | str, node: str, round: int) -> Tensor:
        """What becomes of images `(rows, …)` by their address, `(rows, numbers)`."""
        rows, _, height, width = images.shape
        words = random_words(self.words * rows, purpose, seed, node, round).reshape(rows, self.words)
        return uploaded(torch.from_numpy(self.numbers(words, width / height)), images.device)

    def numbers(self, words: NDArray[np.uint64], shape: float) -> NDArray[np.float64]:
        """What becomes of images of a shape, width by height, from words that were drawn `(…, words)`: `(…, numbers)`.

        Scale and middle of both axes of what is seen, which run from −1 to 1; factors of brightness, contrast and
        saturation; middle and side of what is left out, where axes run from 0 to 1; if images are bent, how far each
        point is moved across, and then down.
        """
        plain = self._plain(_halves(words[..., :WORDS]), shape)
        if not self.bend:
            return plain
        moves = 2 * self.bend * (2 * _halves(words[..., WORDS : WORDS + POINTS**2]) - 1)
        # Across, then down; in products that are small enough for BLAS to start no threads.
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
        """Images `(…, rows, channels, height, width)` as `numbers` `(…, rows, numbers)` say, ready for a model."""
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
        """What images `(…, rows)` are mixed with; None: with nothing."""
        return None

    def of(self, steps: Augment, **more: float) -> Augmentation | None:
        """These views for some steps; public batches, which all see alike, have `more` done to them.

        For public ones alone, local batches stay as they are.
        """
        if steps == "none":
            return None
        if steps == "local":
            return self
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        local = self if steps == "all" else Augmentation(self.pixels, crop=1, flip=0, jitter=0)
        return replace(local, public=PublicViews(**{**own, **more}))


class Mixture(NamedTuple):
    """What each of some images is mixed with."""

    own: Tensor
    """How much of it is its own, `(…, rows)`."""
    other: Tensor
    """Where among them the other one is, `(…, rows)`."""


@dataclass(frozen=True)
class PublicViews(Augmentation):
    """How everybody sees public batches: also mixed, each image with another one of the batch."""

    mix: float = 0.0
    """How much of another image is in one, at most."""

    @property
    def words(self) -> int:
        """One more."""
        return super().words + (1 if self.mix else 0)

    def numbers(self, words: NDArray[np.uint64], shape: float) -> NDArray[np.float64]:
        """The last two are how much of an image is its own, and where in the batch the other one is."""
        numbers = super().numbers(words, shape)
        if not self.mix:
            return numbers
        share, place = np.moveaxis(_halves(words[..., -1:]), -1, 0)
        own, other = 1 - self.mix * share, np.floor(words.shape[-2] * place)
        return np.concatenate([numbers, own[..., None], other[..., None]], -1)

    def apply(self, images: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """What goes for one image alone comes first."""
        seen = super().apply(images, numbers, dtype)
        mixture = self.mixture(numbers)
        if mixture is None:
            return seen
        own, other = (part[..., None, None, None] for part in mixture)
        return torch.lerp(seen.gather(seen.dim() - 4, other.expand_as(seen)), seen, own.to(dtype))

    def mixture(self, numbers: Tensor) -> Mixture | None:
        """At least 1 − mix of an image is its own."""
        return Mixture(numbers[..., -2], numbers[..., -1].long()) if self.mix else None


def _halves(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Two numbers from 0 to 1 from each word `(…, words)`, `(…, 2 · words)`."""
    return np.ascontiguousarray(words, "<u8").view("<u4") * 2.0**-32


def moved(images: Tensor, window: Tensor, border: str, bends: Tensor | None = None) -> Tensor:
    """What is seen of images through windows `(rows, 4)`: scale of x and y, middle of x and y, from −1 to 1.

    `bends` `(rows, 2 · POINTS²)` say how far points of what is seen are moved across and down.
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
    """What the points of a line are worth at each of `count` pixels, `(count, POINTS)`; made once."""
    return torch.from_numpy(_cubic(count)).to(device, dtype)


def _cubic(count: int) -> NDArray[np.float64]:
    """Cubic convolution (Keys, 1981) between points that stand in the middle of equal parts; the last ones go on."""
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
    """Takes from the moves of all points what they have in common, `(points, points)`: a shift, a stretch, a turn.

    What is left of a field of moves has no such part when it is measured over the whole image.
    """
    fine = 32
    field = np.kron(_cubic(fine), _cubic(fine))
    down, across = np.meshgrid(*[(np.arange(fine) + 0.5) / fine * 2 - 1] * 2, indexing="ij")
    common = np.stack([np.ones(fine**2), across.ravel(), down.ravel()]) @ field
    return np.eye(POINTS**2) - np.linalg.pinv(common) @ common


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
