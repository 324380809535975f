"""The data of one node: four splits of labelled samples from its own domain."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedh2l.augmentation import Augmentation, Mixture
from fedh2l.data.splits import DEFAULT_SHARES, Shares, stratified_split
from fedh2l.errors import DataError
from fedh2l.pixels import Pixels, ready
from fedh2l.upload import uploaded

SPLITS = ("private", "public", "validation", "test")
UNKNOWN = -1
"""The label of a public sample that has none: no class, so that nothing can be learned from it by mistake."""


@dataclass(frozen=True)
class Samples:
    """Inputs `(n, …)` and class indices `(n,)`, held in memory (or on a GPU) for the whole training.

    Inputs `(n, channels, height, width)` of type uint8 are images: a model is fed what preprocessing makes of them.

    Samples of several nodes that an engine runs as one have a leading dimension of nodes in both.
    """

    inputs: Tensor
    labels: Tensor
    mixture: Mixture | None = None
    """What images are mixed with; labels are those of which there is more in them."""

    def __len__(self) -> int:
        if self.labels.dim() > 1:
            raise TypeError("samples of stacked nodes have no length; use labels.shape[-1]")
        return len(self.labels)

    def take(self, indices: Tensor | Sequence[int]) -> Samples:
        """The samples at these positions."""
        where = uploaded(torch.as_tensor(indices, dtype=torch.long), self.labels.device)
        if self.labels.dim() == 2:  # stacked nodes, each with indices of its own or all with the same
            each = torch.arange(len(self.labels), device=where.device).unsqueeze(-1)
            return Samples(self.inputs[each, where], self.labels[each, where])
        return Samples(self.inputs.index_select(0, where), self.labels.index_select(0, where))

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """The same samples on a device, inputs in the floating-point type of the run."""
        inputs = self.inputs.to(device, dtype) if self.inputs.is_floating_point() else self.inputs.to(device)
        return Samples(inputs, self.labels.to(device))

    def as_numbers(self, pixels: Pixels | None) -> Samples:
        """The same with images as a model is fed them, rather than as bytes."""
        return Samples(ready(self.inputs, pixels, torch.float32), self.labels)

    @staticmethod
    def concatenate(parts: Sequence[Samples]) -> Samples:
        """All samples of several sets, in their order."""
        if len(parts) == 1:
            return parts[0]
        return Samples(torch.cat([p.inputs for p in parts]), torch.cat([p.labels for p in parts]))

    @staticmethod
    def of(source: Any) -> Samples:
        """Samples from `Samples`, an `(inputs, labels)` pair of tensors or arrays, or any map-style torch dataset.

        A dataset is read once, item by item, and kept: what its `__getitem__` draws at random is then fixed.
        """
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
                f"samples are a tuple (inputs, labels) or a dataset of (input, label) items of one shape: {error}"
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
    """Names of classes, or as many as a number says, called 0, 1, 2, …"""
    return tuple(map(str, range(classes) if isinstance(classes, int) else classes))


@dataclass(frozen=True)
class Domain:
    """One node's data, in four splits.

    Only `public` is ever seen by other nodes. `preprocessing` says how a raw input (an image file, say) becomes what
    the model is fed; it is saved with each model so that the model can be used with nothing else.
    """

    name: str
    classes: tuple[str, ...]
    private: Samples
    public: Samples
    validation: Samples
    test: Samples
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    augmentation: Augmentation | None = None
    """Other views of its images, to train on."""
    public_labels: bool = True
    """Whether anybody knows what its public samples are; if not, labels that are given all the same are dropped."""

    def __post_init__(self) -> None:
        for split in SPLITS:
            object.__setattr__(self, split, Samples.of(getattr(self, split)))
        if not self.public_labels:
            object.__setattr__(
                self, "public", Samples(self.public.inputs, torch.full_like(self.public.labels, UNKNOWN))
            )
        object.__setattr__(self, "classes", class_names(self.classes))
        self._check()

    def _check(self) -> None:
        shape = self.private.inputs.shape[1:]
        for split in SPLITS:
            samples: Samples = getattr(self, split)
            where = f"domain '{self.name}': its {split} data"
            if len(samples) == 0:
                raise DataError(f"{where} is empty; every split needs at least one sample")
            if samples.inputs.shape[1:] != shape:
                raise DataError(
                    f"{where} has inputs of shape {tuple(samples.inputs.shape[1:])}, "
                    f"its private data of shape {tuple(shape)}"
                )
            known = split != "public" or self.public_labels
            if known and (int(samples.labels.min()) < 0 or int(samples.labels.max()) >= len(self.classes)):
                raise DataError(
                    f"{where} has labels outside 0…{len(self.classes) - 1}, its {len(self.classes)} classes"
                )
            if self.augmentation is not None and not self._augmentable(samples.inputs, self.augmentation):
                raise DataError(
                    f"{where}: only images of bytes (uint8), or of values 0 to 1 that a model is fed as they are, can "
                    f"be augmented, not {samples.inputs.dtype} of shape {tuple(samples.inputs.shape)}"
                )
            if samples.inputs.is_floating_point() and not bool(torch.isfinite(samples.inputs).all()):
                raise DataError(f"{where} contains NaN or infinite inputs")

    @staticmethod
    def _augmentable(images: Tensor, augmentation: Augmentation) -> bool:
        plain = images.is_floating_point() and augmentation.pixels.plain
        return images.dim() == 4 and (plain or images.dtype == torch.uint8)

    @property
    def pixels(self) -> Pixels | None:
        """What the bytes of its images are to a model; None if inputs are something else."""
        inputs = self.private.inputs
        return Pixels.of(self.preprocessing) if inputs.dtype == torch.uint8 and inputs.dim() == 4 else None

    def as_numbers(self) -> Domain:
        """The same with images as a model is fed them, rather than as bytes."""
        splits = (self.private, self.public, self.validation, self.test)
        private, public, validation, test = (samples.as_numbers(self.pixels) for samples in splits)
        return replace(self, private=private, public=public, validation=validation, test=test)

    @cached_property
    def digest(self) -> str:
        """A hash of all samples and of what is made of them, to tell whether data is still the same."""
        sha = hashlib.sha256(f"{self.pixels} {self.augmentation}".encode())
        for split in SPLITS:
            samples: Samples = getattr(self, split)
            for tensor in (samples.inputs, samples.labels):
                sha.update(tensor.cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()

    @staticmethod
    def split(
        source: Any,
        name: str,
        classes: Sequence[str] | int,
        seed: int = 0,
        shares: Shares = DEFAULT_SHARES,
        preprocessing: Mapping[str, Any] | None = None,
    ) -> Domain:
        """A domain from one labelled dataset, split at random, stratified by class; anything `Samples.of` takes."""
        samples = Samples.of(source)
        private, public, validation, test = (
            samples.take(part) for part in stratified_split(samples.labels.tolist(), shares, seed, name)
        )
        return Domain(name, class_names(classes), private, public, validation, test, preprocessing or {})
