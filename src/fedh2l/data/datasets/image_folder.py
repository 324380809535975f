"""Image folders: `<root>/<domain>/<class>/<file>`, the layout of most multi-domain benchmarks."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedh2l.data.augmentation import Augment, Augmentation
from fedh2l.data.augmentation_keys import Bend, Crop, Erase, Flip, ImageKind, Jitter, Mix, Shift, Zoom, values_for
from fedh2l.data.base import Dataset, Share, WholeDomain, model_for
from fedh2l.data.domain import REMEDIES, SPLITS, Domain, Samples
from fedh2l.data.image_cache import decoded
from fedh2l.data.images import SUFFIXES, Fit
from fedh2l.data.pixels import Pixels
from fedh2l.data.splits import Shares, stratified_split
from fedh2l.errors import DataError, did_you_mean

log = logging.getLogger("fedh2l")

Split = Mapping[str, Sequence[int]]
"""For each of private, public, validation and test, the indices of its images in a domain."""

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
"""Colour scale of models that were trained on ImageNet."""


@dataclass(frozen=True)
class Labelled:
    """The images of one domain: paths relative to the root, and their classes."""

    name: str
    files: list[str]
    labels: list[int]


class ImageFolder(Dataset):
    """Your own images: one folder per domain, with one folder per class in it."""

    name: ClassVar[str] = "image-folder"
    DOMAINS: ClassVar[tuple[str, ...]] = ()
    """Folders of the domains, if the dataset has fixed ones."""
    CLASSES: ClassVar[tuple[str, ...]] = ()

    root: str = Field(description="Folder with one folder per domain, each with one folder per class.")
    folders: list[str] = Field([], description="Folders of the domains, in order. By default all.")
    classes: list[str] = Field(
        [], description="Classes, in order. By default all, and then every domain must have the same ones."
    )
    size: int = Field(224, ge=8, le=4096, description="Width and height of the images in pixels.")
    fit: Fit = Field(
        "crop", description="With crop, images are cut to a square. With stretch, they are distorted to one."
    )
    colour: bool = Field(True, description="Whether images are colour or grey.")
    normalise: Literal["imagenet", "none"] = Field(
        "imagenet",
        description="With imagenet, colours are scaled as models trained on ImageNet expect. With none, values "
        "are 0 to 1.",
    )
    augment: Augment = Field(
        "none",
        description="With local, local batches are augmented. With public, the public batches of FedH2L's mutual "
        "steps are. With all, both are. All nodes see the same augmentation of a public image.",
    )
    kind: ImageKind = "any"
    crop: Crop[float | None] = None
    flip: Flip[float | None] = None
    jitter: Jitter[float | None] = None
    shift: Shift[float | None] = None
    zoom: Zoom[float | None] = None
    erase: Erase[float | None] = None
    bend: Bend[float | None] = None
    mix: Mix[float | None] = None
    alpha: Share = Field(0.10, description="Share of each domain that is public (α).")
    validation: Share = Field(0.10, description="Share of each domain for validation.")
    test: Share = Field(0.15, description="Share of each domain for testing.")

    @property
    def note(self) -> str:
        """Return the image size. Subclasses add the split."""
        return f"{self.name}, {self.size} × {self.size} pixels"

    def suitable_model(self, seed: int) -> str:
        return model_for((3 if self.colour else 1, self.size, self.size))

    def origin(self, domain: str) -> str:
        return f"{Path(self.root).resolve()}/{domain}"

    def domain_names(self, seed: int) -> list[str]:
        """Return the folder names, with underscores for characters that node names cannot have."""
        folders = self._folders()
        names = [re.sub(r"[^A-Za-z0-9._-]+", "_", folder).strip("_.-")[:63] for folder in folders]
        for name, folder in zip(names, folders, strict=True):
            if not name or names.count(name) > 1:
                raise DataError(
                    f"'{Path(self.root) / folder}' gives no name for a node that others do not have; rename it"
                )
        return names

    def domains(self, seed: int) -> list[Domain]:
        folders = self._folders()
        classes = self._classes(folders)
        found = [self._list(folder, classes) for folder in folders]
        splits = [self._split(domain, seed) for domain in found]  # raises errors before images are read
        about = self.preprocessing()
        augmentation = self._views(Pixels.of(about))
        result = []
        for name, domain, split in zip(self.domain_names(seed), found, splits, strict=True):
            images = self._decoded(domain)
            private, public, validation, test = (
                Samples(
                    torch.from_numpy(images[list(split[part])]),  # a copy: other images stay on disk
                    torch.tensor([domain.labels[place] for place in split[part]], dtype=torch.long),
                )
                for part in SPLITS
            )
            result.append(Domain(name, tuple(classes), private, public, validation, test, about, augmentation))
        return result

    def whole(self, seed: int, preprocessing: Mapping[str, Any]) -> list[WholeDomain]:
        """Return all images of each folder. Small folders that cannot be split are accepted."""
        folders = self._folders()
        classes, result = self._classes(folders), []
        for name, folder in zip(self.domain_names(seed), folders, strict=True):
            domain = self._list(folder, classes)
            samples = Samples(torch.from_numpy(self._decoded(domain).copy()), torch.tensor(domain.labels))
            result.append(WholeDomain(name, tuple(classes), samples, self.preprocessing()))
        return result

    def _decoded(self, domain: Labelled) -> NDArray[np.uint8]:
        """Return all images of a domain, `(images, channels, height, width)`, mapped from disk."""
        paths = [Path(self.root) / file for file in domain.files]
        mode, size = self.preprocessing()["mode"], (self.size, self.size)
        return decoded(f"{self.name} '{domain.name}'", paths, mode, size, self.fit)

    def _views(self, pixels: Pixels) -> Augmentation | None:
        values: dict[str, Any] = self._values()
        public = {key: values.pop(key) for key in ("bend", "mix")}
        return Augmentation(pixels, **values).of(self.augment, **public)

    def _values(self) -> dict[str, float]:
        """Return the augmentation keys. The defaults depend on the kind of images."""
        usual = values_for(self.kind)
        given = {key: getattr(self, key) for key in usual}
        return {**usual, **{key: value for key, value in given.items() if value is not None}}

    def resolved(self) -> ImageFolder:
        """Return the same dataset with all augmentation keys set."""
        return self.model_copy(update=self._values())

    def preprocessing(self) -> dict[str, Any]:
        """Return how an image file is converted to an input."""
        about = {
            "kind": "image",
            "mode": "RGB" if self.colour else "L",
            "size": [self.size, self.size],
            "fit": self.fit,
            "scale": 255,
        }
        return {**about, **IMAGENET} if self.normalise == "imagenet" and self.colour else about

    def _split(self, domain: Labelled, seed: int) -> Split:
        shares = Shares(self.alpha, self.validation, self.test)
        split = dict(zip(SPLITS, stratified_split(domain.labels, shares, seed, domain.name), strict=True))
        for part, remedy in REMEDIES.items():
            if not split[part]:
                raise DataError(
                    f"'{Path(self.root) / domain.name}' has too few images ({len(domain.files)}) for {part} data, so "
                    f"{remedy}"
                )
        return split

    def _folders(self) -> list[str]:
        root = Path(self.root)
        if not root.is_dir():
            raise DataError(f"data.root: there is no folder '{self.root}'")
        there = _folders_in(root)
        wanted = self.folders or list(self.DOMAINS) or there
        for folder in wanted:
            if folder not in there:
                raise DataError(f"data.root: '{self.root}' has no folder '{folder}'.{did_you_mean(folder, there)}")
        if not wanted:
            raise DataError(
                f"data.root: '{self.root}' has no folders of domains; the layout is <root>/<domain>/<class>/<file>"
            )
        return wanted

    def _classes(self, folders: Sequence[str]) -> list[str]:
        """Return the configured classes, else the classes that all domains have."""
        there = {folder: _folders_in(Path(self.root) / folder) for folder in folders}
        wanted = self.classes or list(self.CLASSES)
        first = folders[0]
        for folder, inside in there.items():
            path = Path(self.root) / folder
            if not inside:
                raise DataError(f"'{path}' has no folders of classes; the layout is <root>/<domain>/<class>/<file>")
            missing = [name for name in wanted or there[first] if name not in inside]
            if missing:
                has = "" if wanted else f", which '{Path(self.root) / first}' has"
                raise DataError(
                    f"'{path}' has no folder for the class '{missing[0]}'{has}"
                    f"{f' (nor for {len(missing) - 1} others)' if missing[1:] else ''}; "
                    "all domains have the same classes"
                )
            more = [name for name in inside if name not in (wanted or there[first])]
            if more and not self.classes:
                known = "this dataset" if wanted else f"'{Path(self.root) / first}'"
                raise DataError(
                    f"'{path}' has a class '{more[0]}', which {known} has not; name the classes that count in "
                    "data.classes"
                )
        classes = wanted or there[first]
        if len(classes) < 2:
            raise DataError(f"'{self.root}': there is one class, '{classes[0]}', but at least two are needed")
        return classes

    def _list(self, folder: str, classes: Sequence[str]) -> Labelled:
        """Return all images of a domain, by class and then by name."""
        files, labels = [], []
        for label, name in enumerate(classes):
            path = Path(self.root) / folder / name
            there = [
                file
                for file in path.rglob("*")
                if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
            ]
            found = sorted(file.relative_to(self.root).as_posix() for file in there if file.suffix.lower() in SUFFIXES)
            if len(found) < len(there):
                log.info("'%s': ignored %d files whose names are not those of images", path, len(there) - len(found))
            if not found:
                raise DataError(f"'{path}' has no images ({', '.join(SUFFIXES)})")
            files += found
            labels += [label] * len(found)
        return Labelled(folder, files, labels)


class OfficeHome(ImageFolder):
    """Office-Home (Venkateswara et al., 2017): 65 classes as art, clip art, products and photographs."""

    name: ClassVar[str] = "office-home"
    DOMAINS: ClassVar[tuple[str, ...]] = ("Art", "Clipart", "Product", "Real World")

    kind: ImageKind = "photographs"


class OfficeCaltech10(ImageFolder):
    """Office-Caltech10 (Gong et al., 2012): 10 classes from four cameras. Some have only 8 images."""

    name: ClassVar[str] = "office-caltech10"
    DOMAINS: ClassVar[tuple[str, ...]] = ("amazon", "caltech10", "dslr", "webcam")

    kind: ImageKind = "photographs"


def _folders_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
