"""PACS (Li et al., 2017): photographs, art paintings, cartoons and sketches of seven classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from fedh2l.data.augmentation_keys import ImageKind
from fedh2l.data.datasets.image_folder import ImageFolder, Labelled, Split
from fedh2l.data.splits import by_class, rounded
from fedh2l.errors import DataError
from fedh2l.files import UnreadableError, read_text
from fedh2l.protocol.sampling import shuffled

LISTS = {"private": "train", "validation": "crossval", "test": "test"}
"""The official list of each split."""


class PACS(ImageFolder):
    """PACS: photographs, art paintings, cartoons and sketches of the same seven classes."""

    name: ClassVar[str] = "pacs"
    DOMAINS: ClassVar[tuple[str, ...]] = ("art_painting", "cartoon", "photo", "sketch")
    CLASSES: ClassVar[tuple[str, ...]] = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")

    kind: ImageKind = "photographs"
    protocol: Literal["clean", "paper"] = Field(
        "clean",
        description="With clean, splits do not overlap. With paper, they are the official lists. Their test list "
        "is the whole domain, so it includes training images.",
    )
    lists: str | None = Field(
        None,
        description="Folder of the official lists, for protocol = 'paper'. By default 'splits' in or beside data.root.",
    )

    @property
    def note(self) -> str:
        """Return a note with the protocol, since results of the two protocols cannot be compared."""
        return f"{super().note}, protocol '{self.protocol}'"

    def _split(self, domain: Labelled, seed: int) -> Split:
        if self.protocol == "clean":
            return super()._split(domain, seed)
        listed = {part: self._listed(domain, name) for part, name in LISTS.items()}
        public: list[int] = []
        for label, places in by_class(listed["test"], domain.labels).items():
            order = shuffled(places, "split", seed, domain.name, label)
            public += order[: max(1, rounded(self.alpha * len(order)))]
        given = set(public)
        return {**listed, "public": public, "test": [place for place in listed["test"] if place not in given]}

    def _listed(self, domain: Labelled, name: str) -> list[int]:
        """Return the indices of the files in an official list."""
        path = self._lists() / f"{domain.name}_{name}_kfold.txt"
        try:
            lines = [line.rsplit(maxsplit=1) for line in read_text(path).splitlines() if line.strip()]
        except (OSError, UnreadableError) as error:
            raise DataError(f"data.protocol = 'paper' needs '{path}', which cannot be read: {error}") from error
        places = {file: place for place, file in enumerate(domain.files)}
        absent = [line[0] for line in lines if line[0] not in places]
        if absent:
            raise DataError(
                f"'{path}' names {len(absent)} files that are not in '{self.root}': {', '.join(absent[:3])}"
                f"{', …' if absent[3:] else ''}"
            )
        found = []
        for number, (file, *rest) in enumerate(lines, 1):
            label = int(rest[0]) - 1 if rest and rest[0].isdecimal() else -1
            if not 0 <= label < len(self.CLASSES):
                raise DataError(
                    f"'{path}', line {number}: '{' '.join(rest)}' is not a label; they are 1 to {len(self.CLASSES)}"
                )
            if label != domain.labels[places[file]]:
                raise DataError(
                    f"'{path}', line {number}: '{file}' has the label {self.CLASSES[label]}, but is in the folder of "
                    f"{self.CLASSES[domain.labels[places[file]]]}"
                )
            found.append(places[file])
        if not found:
            raise DataError(f"'{path}' lists no images")
        return found

    def _lists(self) -> Path:
        if self.lists is not None:
            return Path(self.lists)
        root = Path(self.root)
        usual: Sequence[Path] = (root / "splits", root.parent / "splits")
        return next((folder for folder in usual if folder.is_dir()), usual[0])

    def _classes(self, folders: Sequence[str]) -> list[str]:
        if self.protocol == "paper" and self.classes and tuple(self.classes) != self.CLASSES:
            raise DataError("data.classes: the official lists of data.protocol = 'paper' need all seven classes")
        return super()._classes(folders)
