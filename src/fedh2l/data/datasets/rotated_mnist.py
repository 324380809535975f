"""Rotated MNIST (Ghifary et al., 2015): the same digits at several angles, one angle per node."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor

from fedh2l.data.augmentation import Augment, Augmentation
from fedh2l.data.augmentation_keys import Bend, Erase, Mix, Shift, Zoom
from fedh2l.data.base import Dataset
from fedh2l.data.datasets.mnist import embedded_digits, idx_digits
from fedh2l.data.domain import Domain, Samples
from fedh2l.data.pixels import Pixels
from fedh2l.data.splits import Shares, rounded, stratified_split
from fedh2l.errors import DataError
from fedh2l.protocol.sampling import draw_indices

Angle = Annotated[float, Field(ge=-360, le=360)]


class RotatedMNIST(Dataset):
    """MNIST digits rotated clockwise, one domain per angle: M0, M20, M40, M60 by default."""

    name: ClassVar[str] = "rotated-mnist"

    alpha: float = Field(0.10, gt=0, lt=0.75, description="Share of each domain that is public (α).")
    angles: list[Angle] = Field(
        [0.0, 20.0, 40.0, 60.0], min_length=2, description="Clockwise rotation of each domain in degrees."
    )
    per_class: int = Field(100, ge=4, description="Images per digit. All domains rotate the same images.")
    splits: Literal["independent", "aligned"] = Field(
        "independent",
        description="With independent, each domain draws its own split, as in the paper. A test digit may then be "
        "in another node's training data at another angle. With aligned, all domains share one "
        "split, and test digits are in no training data.",
    )
    tests: Literal["split", "rest"] = Field(
        "split",
        description="Test digits. With split, they are 15 % of each domain. With rest, they are all digits that "
        "are in no domain.",
    )
    augment: Augment = Field(
        "none",
        description="With local, local batches are augmented. With public, the public batches of FedH2L's mutual "
        "steps are. With all, both are. Digits are never rotated further.",
    )
    shift: Shift[float] = 0.1
    zoom: Zoom[float] = 0.15
    erase: Erase[float] = 0.3
    bend: Bend[float] = 0.1
    mix: Mix[float] = 0.5
    root: str | None = Field(None, description="Folder with MNIST idx files. By default the 5,000 embedded digits.")

    @field_validator("angles")
    @classmethod
    def _angles_differ(cls, angles: list[float]) -> list[float]:
        if len(set(angles)) < len(angles):
            raise ValueError("two domains have the same angle")
        return angles

    @property
    def note(self) -> str:
        """Return a note if the test digits are not those of the split."""
        return "tests are on all digits that are in no domain" if self.tests == "rest" else ""

    def origin(self, domain: str) -> str:
        """Return the folder of the digits. All domains rotate the same digits."""
        return f"{self.name} {Path(self.root).resolve() if self.root else ''}"

    def domain_names(self, seed: int) -> list[str]:
        """Return M followed by the angle: M0, M20, M22.5."""
        return [f"M{angle:g}" for angle in self.angles]

    def domains(self, seed: int) -> list[Domain]:
        """Return the rotated domains, with `per_class` digits per class, drawn by `seed`."""
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
        taken = sum(rounded(self.per_class * share) for share in (shares.test, shares.validation, shares.public))
        if taken >= self.per_class:
            raise DataError(
                f"data.alpha = {self.alpha:g} of data.per_class = {self.per_class} images leaves no private data; "
                "lower alpha, or take more images"
            )

    def _rest(self, images: NDArray[np.uint8], labels: NDArray[np.int64], chosen: NDArray[np.int64]) -> Samples:
        """Return the digits that are in no domain, upright."""
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
"""How an image file is converted to an input of these models: grey, 28 × 28, values divided by 255."""


def _as_tensors(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return images `(n, 1, height, width)` with values 0 to 1, and their digits."""
    return torch.from_numpy(images).float().div(255).unsqueeze(1), torch.from_numpy(labels).long()


def rotate_clockwise(images: Tensor, degrees: float) -> Tensor:
    """Rotate images `(n, c, h, w)` clockwise about their centre, bilinear, with black corners.

    Images must be square. Rows grow downwards, so on the screen a clockwise rotation takes (x, y) to (x·cos − y·sin,
    x·sin + y·cos). The grid below is the inverse: the source of each output pixel.
    """
    if degrees % 360 == 0:
        return images
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    inverse = torch.tensor([[cos, sin, 0.0], [-sin, cos, 0.0]], dtype=images.dtype)
    grid = F.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
