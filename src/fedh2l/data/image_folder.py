"""Folders of images: `<root>/<domain>/<class>/<file>`, the layout of most multi-domain benchmarks."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from fedh2l.augmentation import Augment, Augmentation
from fedh2l.data.base import Dataset
from fedh2l.data.image_cache import decoded
from fedh2l.data.images import SUFFIXES, Fit
from fedh2l.data.splits import Shares, stratified_split
from fedh2l.domain import SPLITS, Domain, Samples
from fedh2l.errors import DataError, did_you_mean
from fedh2l.pixels import Pixels

log = logging.getLogger("fedh2l")

Share = Annotated[float, Field(gt=0, lt=1)]
Split = Mapping[str, Sequence[int]]
"""For each of private, public, validation and test, the places of its images in a domain."""

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
"""What models that were trained on ImageNet expect of colours."""


@dataclass(frozen=True)
class Labelled:
    """The images of one domain: paths relative to the root, and their classes."""

    name: str
    files: list[str]
    labels: list[int]


class ImageFolder(Dataset):
    """Images of your own: a folder for each domain, in it one for each class."""

    name: ClassVar[str] = "image-folder"
    DOMAINS: ClassVar[tuple[str, ...]] = ()
    """The folders of the domains, where they are known."""
    CLASSES: ClassVar[tuple[str, ...]] = ()

    root: str = Field(description="folder that has one folder for each domain, and these one for each class")
    folders: list[str] = Field([], description="the folders of the domains, in order; all that are there if not given")
    classes: list[str] = Field(
        [], description="the classes, in order; all that are there if not given, which all domains must have"
    )
    size: int = Field(224, ge=8, le=4096, description="width and height that images are brought to, in pixels")
    fit: Fit = Field("crop", description="crop: what stands out of a square is cut off; stretch: it is pressed in")
    colour: bool = Field(True, description="whether images have three colours or are grey")
    normalise: Literal["imagenet", "none"] = Field(
        "imagenet", description="imagenet: colours as networks trained on ImageNet expect; none: values 0 to 1"
    )
    augment: Augment = Field(
        "none",
        description="train on other views of images (resized crop, mirror image, changed colours): local, in local "
        "steps; public, in FedH2L's mutual steps, with the same views of public images for everybody; all, in both",
    )
    crop: float = Field(0.8, gt=0, le=1, description="of data.augment: the least share of an image that is cut out")
    flip: float = Field(0.5, ge=0, le=1, description="of data.augment: how often an image is mirrored")
    jitter: float = Field(
        0.4, ge=0, lt=1, description="of data.augment: how far brightness, contrast and saturation go"
    )
    mix: float = Field(
        0.0, ge=0, le=0.5, description="of public views: how much of another image is in a public one, at most"
    )
    alpha: Share = Field(0.10, description="share of each domain that is public seed data (α)")
    validation: Share = Field(0.10, description="share of each domain that is validation data")
    test: Share = Field(0.15, description="share of each domain that is test data")

    @property
    def note(self) -> str:
        """The size of images, and the split where there is a choice."""
        return f"{self.name}, {self.size} × {self.size} pixels"

    def domain_names(self, seed: int) -> list[str]:
        """As their folders are called, with underscores for what cannot be in the name of a node."""
        folders = self._folders()
        names = [re.sub(r"[^A-Za-z0-9._-]+", "_", folder).strip("_.-")[:63] for folder in folders]
        for name, folder in zip(names, folders, strict=True):
            if not name or names.count(name) > 1:
                raise DataError(
                    f"'{Path(self.root) / folder}' gives no name for a node that others do not have; rename it"
                )
        return names

    def domains(self, seed: int) -> list[Domain]:
        """One for each folder, split by `seed`."""
        folders = self._folders()
        classes = self._classes(folders)
        found = [self._list(folder, classes) for folder in folders]
        splits = [self._split(domain, seed) for domain in found]  # what is wrong is said before images are read
        about = self.preprocessing()
        augmentation = self._views(Pixels.of(about))
        result = []
        for name, domain, split in zip(self.domain_names(seed), found, splits, strict=True):
            paths = [Path(self.root) / file for file in domain.files]
            images = decoded(f"{self.name} '{domain.name}'", paths, about["mode"], (self.size, self.size), self.fit)
            private, public, validation, test = (
                Samples(
                    torch.from_numpy(images[list(split[part])]),  # a copy: the rest stays on disk
                    torch.tensor([domain.labels[place] for place in split[part]], dtype=torch.long),
                )
                for part in SPLITS
            )
            result.append(Domain(name, tuple(classes), private, public, validation, test, about, augmentation))
        return result

    def _views(self, pixels: Pixels) -> Augmentation | None:
        return Augmentation(pixels, self.crop, self.flip, self.jitter).of(self.augment, mix=self.mix)

    def preprocessing(self) -> dict[str, Any]:
        """How an image file becomes an input."""
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
        for part, places in split.items():
            if not places:
                raise DataError(
                    f"'{Path(self.root) / domain.name}' has too few images ({len(domain.files)}) for {part} data: "
                    f"{max(domain.labels.count(label) for label in set(domain.labels))} of its largest class"
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
        """The same in all domains, or as configured."""
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
            raise DataError(f"'{self.root}': there is one class, '{classes[0]}', and nothing to tell apart")
        return classes

    def _list(self, folder: str, classes: Sequence[str]) -> Labelled:
        """All images of a domain, class by class, in the order of their names."""
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
                log.info("'%s': %d files are not images by their names, and left out", path, len(there) - len(found))
            if not found:
                raise DataError(f"'{path}' has no images ({', '.join(SUFFIXES)})")
            files += found
            labels += [label] * len(found)
        return Labelled(folder, files, labels)


class OfficeHome(ImageFolder):
    """Office-Home (Venkateswara et al., 2017): 65 classes of things as art, clip art, products and photographs."""

    name: ClassVar[str] = "office-home"
    DOMAINS: ClassVar[tuple[str, ...]] = ("Art", "Clipart", "Product", "Real World")


class OfficeCaltech10(ImageFolder):
    """Office-Caltech10 (Gong et al., 2012): 10 classes of things by four cameras; small, 8 images in some classes."""

    name: ClassVar[str] = "office-caltech10"
    DOMAINS: ClassVar[tuple[str, ...]] = ("amazon", "caltech10", "dslr", "webcam")


def _folders_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
