"""PACS (Li et al., 2017): photographs, art paintings, cartoons and sketches of seven classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from fedh2l.data.image_folder import ImageFolder, Labelled, Split
from fedh2l.data.splits import by_class, rounded
from fedh2l.errors import DataError
from fedh2l.sampling import shuffled

LISTS = {"private": "train", "validation": "crossval", "test": "test"}
"""Which official list is which split."""


class PACS(ImageFolder):
    """PACS: photographs, art paintings, cartoons and sketches of the same seven classes."""

    name: ClassVar[str] = "pacs"
    DOMAINS: ClassVar[tuple[str, ...]] = ("art_painting", "cartoon", "photo", "sketch")
    CLASSES: ClassVar[tuple[str, ...]] = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")

    protocol: Literal["clean", "paper"] = Field(
        "clean",
        description="clean: a split of the whole domain in which nothing overlaps; paper: the official lists, whose "
        "test list is the whole domain, so that test data was mostly trained on",
    )
    lists: str | None = Field(
        None,
        description="of data.protocol = 'paper': folder of the official lists, <domain>_train_kfold.txt and so on; "
        "'splits' in or beside data.root if not given",
    )

    @property
    def note(self) -> str:
        """Which protocol it is, since numbers of the two cannot be compared."""
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
        """Where the files of an official list are in the domain."""
        path = self._lists() / f"{domain.name}_{name}_kfold.txt"
        try:
            lines = [line.rsplit(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
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
                    f"'{path}', line {number}: '{file}' is said to be {self.CLASSES[label]}, and is in the folder of "
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
            raise DataError("data.classes: the official lists of data.protocol = 'paper' speak of all seven classes")
        return super()._classes(folders)
