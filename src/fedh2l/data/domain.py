"""The data of one node: four splits of labelled samples from its own domain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedh2l.data.augmentation import Augmentation, Mixture
from fedh2l.data.digest import data_digest
from fedh2l.data.pixels import Pixels, ready
from fedh2l.data.splits import DEFAULT_SHARES, Shares, stratified_split
from fedh2l.errors import DataError
from fedh2l.hardware import uploaded

SPLITS = ("private", "public", "validation", "test")
REMEDIES = {
    "private": "there is nothing to train on. Add samples, or lower the other shares (data.alpha, data.validation and "
    "data.test, or fedh2l.Shares)",
    "test": "its accuracy cannot be measured. Add samples, or raise the share of test data (data.test, or "
    "fedh2l.Shares(test=…))",
}
"""Splits that every domain needs, with advice for the case that one is empty."""
UNKNOWN = -1
"""Label of public samples without labels. It is not a class, so that training on it by mistake is impossible."""


@dataclass(frozen=True)
class Samples:
    """Inputs `(n, …)` and class indices `(n,)`, in memory or on a GPU for the whole training.

    Inputs `(n, channels, height, width)` of type uint8 are images. Preprocessing turns them into model inputs.

    Samples of stacked nodes have a leading dimension of nodes in both tensors.
    """

    inputs: Tensor
    labels: Tensor
    mixture: Mixture | None = None
    """How images are mixed. The label is that of the larger part."""

    def __len__(self) -> int:
        if self.labels.dim() > 1:
            raise TypeError("samples of stacked nodes have no length; use labels.shape[-1]")
        return len(self.labels)

    def take(self, indices: Tensor | Sequence[int]) -> Samples:
        """Return the samples at these positions."""
        where = uploaded(torch.as_tensor(indices, dtype=torch.long), self.labels.device)
        if self.labels.dim() == 2:  # stacked nodes, with indices per node or the same for all
            each = torch.arange(len(self.labels), device=where.device).unsqueeze(-1)
            return Samples(self.inputs[each, where], self.labels[each, where])
        return Samples(self.inputs.index_select(0, where), self.labels.index_select(0, where))

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """Return the samples on a device, with inputs in the floating-point type of the run."""
        inputs = self.inputs.to(device, dtype) if self.inputs.is_floating_point() else self.inputs.to(device)
        return Samples(inputs, self.labels.to(device))

    def as_numbers(self, pixels: Pixels | None) -> Samples:
        """Return the samples with images as model inputs instead of bytes."""
        return Samples(ready(self.inputs, pixels, torch.float32), self.labels)

    @staticmethod
    def concatenate(parts: Sequence[Samples]) -> Samples:
        """Return all samples of several sets, in order."""
        if len(parts) == 1:
            return parts[0]
        return Samples(torch.cat([p.inputs for p in parts]), torch.cat([p.labels for p in parts]))

    @staticmethod
    def of(source: Any) -> Samples:
        """Return samples from `Samples`, an `(inputs, labels)` pair of tensors or arrays, or a map-style dataset."""
        if isinstance(source, Samples):
            return source
        try:
            if isinstance(source, tuple) and len(source) == 2:
                inputs, labels = (_tensor(part) for part in source)
            else:
                items = [source[i] for i in range(len(source))]
                inputs = torch.stack([_tensor(item[0]) for item in items])
                labels = torch.as_tensor([int(item[1]) for item in items])
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
            raise DataError(
                f"samples must be a tuple of inputs and labels, or a dataset of (input, label) of one shape: {error}"
            ) from error
        if labels.dim() != 1 or labels.is_floating_point():
            raise DataError(
                f"labels are class indices, a whole number each, not {labels.dtype} of shape {tuple(labels.shape)}"
            )
        if len(inputs) != len(labels):
            raise DataError(f"there are {len(inputs)} inputs but {len(labels)} labels")
        return Samples(inputs.float() if inputs.dtype == torch.float64 else inputs, labels.long())


def _tensor(part: Any) -> Tensor:
    return part if isinstance(part, Tensor) else torch.as_tensor(np.asarray(part))


def class_names(classes: Sequence[str] | int) -> tuple[str, ...]:
    """Return the names of classes. A number n stands for the names 0 to n − 1."""
    return tuple(map(str, range(classes) if isinstance(classes, int) else classes))


@dataclass(frozen=True)
class Domain:
    """One node's data, in four splits.

    Other nodes see only `public`. It may be empty for methods that use no public data. Validation data may be empty if
    another node has some. `preprocessing` describes how a raw input, such as an image file, becomes a model input. It
    is saved with each model, so that the model file is complete.
    """

    name: str
    classes: tuple[str, ...]
    private: Samples
    public: Samples
    validation: Samples
    test: Samples
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    augmentation: Augmentation | None = None
    """Augmentation of its images in training."""
    public_labels: bool = True
    """Whether public samples have labels. If not, given labels are dropped."""

    def __post_init__(self) -> None:
        for split in SPLITS:
            object.__setattr__(self, split, Samples.of(getattr(self, split)))
        self._settle_empty_splits()
        if not self.public_labels:
            object.__setattr__(
                self, "public", Samples(self.public.inputs, torch.full_like(self.public.labels, UNKNOWN))
            )
        object.__setattr__(self, "classes", class_names(self.classes))
        self._check()

    def _settle_empty_splits(self) -> None:
        """Refuse a domain without private or test data. Give other empty splits the shape and type of the inputs."""
        for split in SPLITS:
            if len(getattr(self, split)) == 0:
                if split in REMEDIES:
                    raise DataError(f"domain '{self.name}' has no {split} data, so {REMEDIES[split]}")
                object.__setattr__(self, split, self.private.take(range(0)))

    def _check(self) -> None:
        shape = self.private.inputs.shape[1:]
        for split in SPLITS:
            samples: Samples = getattr(self, split)
            where = f"domain '{self.name}': its {split} data"
            if samples.inputs.shape[1:] != shape:
                raise DataError(
                    f"{where} has inputs of shape {tuple(samples.inputs.shape[1:])}, "
                    f"its private data of shape {tuple(shape)}"
                )
            known = len(samples) and (split != "public" or self.public_labels)
            if known and (int(samples.labels.min()) < 0 or int(samples.labels.max()) >= len(self.classes)):
                raise DataError(
                    f"{where} has labels outside 0…{len(self.classes) - 1}, its {len(self.classes)} classes"
                )
            if self.augmentation is not None and not self._augmentable(samples.inputs, self.augmentation):
                raise DataError(
                    f"{where}: only images of bytes (uint8), or of values 0 to 1 without normalisation, can be "
                    f"augmented, not {samples.inputs.dtype} of shape {tuple(samples.inputs.shape)}"
                )
            if samples.inputs.is_floating_point() and not bool(torch.isfinite(samples.inputs).all()):
                raise DataError(f"{where} contains NaN or infinite inputs")

    @staticmethod
    def _augmentable(images: Tensor, augmentation: Augmentation) -> bool:
        plain = images.is_floating_point() and augmentation.pixels.plain
        return images.dim() == 4 and (plain or images.dtype == torch.uint8)

    @property
    def pixels(self) -> Pixels | None:
        """How image bytes become model inputs. None if inputs are not image bytes."""
        inputs = self.private.inputs
        return Pixels.of(self.preprocessing) if inputs.dtype == torch.uint8 and inputs.dim() == 4 else None

    def as_numbers(self) -> Domain:
        """Return the domain with images as model inputs instead of bytes."""
        splits = (self.private, self.public, self.validation, self.test)
        private, public, validation, test = (samples.as_numbers(self.pixels) for samples in splits)
        return replace(self, private=private, public=public, validation=validation, test=test)

    @cached_property
    def digest(self) -> str:
        """Hash of all samples, their classes, preprocessing and augmentation, to detect changed data."""
        return data_digest(self._tensors(SPLITS), f"{self._meaning} {self.augmentation}")

    @cached_property
    def own_digest(self) -> str:
        """Hash without public data and augmentation, which a federation of peers may change."""
        return data_digest(self._tensors([split for split in SPLITS if split != "public"]), self._meaning)

    @property
    def _meaning(self) -> str:
        """The names of the classes and the preprocessing, which a saved model has too."""
        return json.dumps([self.classes, dict(self.preprocessing)], sort_keys=True, default=str)

    def _tensors(self, splits: Sequence[str]) -> list[Tensor]:
        return [tensor for split in splits for tensor in (getattr(self, split).inputs, getattr(self, split).labels)]

    @staticmethod
    def split(
        source: Any,
        name: str,
        classes: Sequence[str] | int,
        seed: int = 0,
        shares: Shares = DEFAULT_SHARES,
        preprocessing: Mapping[str, Any] | None = None,
    ) -> Domain:
        """Return a domain from one labelled dataset, split at random and stratified by class.

        `source` is anything that `Samples.of` accepts.
        """
        samples = Samples.of(source)
        private, public, validation, test = (
            samples.take(part) for part in stratified_split(samples.labels.tolist(), shares, seed, name)
        )
        return Domain(name, class_names(classes), private, public, validation, test, preprocessing or {})
