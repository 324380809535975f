"""Read public samples from folders of images, lists of images, and tables."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedh2l.data.datasets.image_folder import IMAGENET
from fedh2l.data.datasets.table import Table
from fedh2l.data.domain import UNKNOWN, Samples
from fedh2l.data.images import SUFFIXES, read_bytes
from fedh2l.errors import ConfigError, DataError, did_you_mean
from fedh2l.peer.membership.records import raw_samples, raw_schema


def image_schema(text: str) -> dict[str, Any]:
    """Parse `MODE:WIDTHxHEIGHT`, such as `L:28x28`. `RGB:224x224:imagenet` gives the schema of `image-folder`."""
    found = re.fullmatch(r"(L|RGB):([1-9]\d{0,3})x([1-9]\d{0,3})(:imagenet)?", text)
    if found is None or (found[4] and found[1] != "RGB"):
        raise ConfigError(
            f"'{text}' is not of the form MODE:WIDTHxHEIGHT, such as L:28x28. "
            f"For models trained on ImageNet, write RGB:224x224:imagenet"
        )
    about = {"kind": "image", "mode": found[1], "size": [int(found[2]), int(found[3])], "scale": 255}
    return {**about, "fit": "crop", **IMAGENET} if found[4] else about


def from_folder(folder: Path, classes: Sequence[str], schema: dict[str, Any], labelled: bool = True) -> Samples:
    """Read all images of a folder with one sub-folder per class, in the order of their names.

    Without labels, the images are in the folder itself.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder '{folder}'")
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not labelled:
        if inside:
            raise DataError(
                f"'{folder}' has folders in it ('{inside[0]}'); without labels, name one that has images alone"
            )
        there = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != "."]
        return _images([(path, UNKNOWN) for path in there], schema, f"'{folder}' has no images")
    strange = [name for name in inside if name not in classes]
    if strange:
        raise DataError(f"'{folder / strange[0]}' is not named after a class; classes are {', '.join(classes)}")
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).glob("**/*"))
        if path.suffix.lower() in SUFFIXES
    ]
    return _images(found, schema, f"'{folder}' has no images in folders named after its classes")


def from_list(path: Path, classes: Sequence[str], schema: dict[str, Any], labelled: bool = True) -> Samples:
    """Read the images of a CSV file with a column `path` and, if labelled, `label`. Paths are relative to the file."""
    label = "label" if labelled else None
    found = [
        (path.parent / row["path"], _label(path, line, row, label, classes))
        for line, row in _rows(path, ("path", *([label] if label else [])))
    ]
    return _images(found, schema, f"'{path}' lists no images")


def from_table(
    path: Path, columns: Mapping[str, Any], labelled: bool = True, units: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], Samples]:
    """Return the schema and the raw records of a CSV or Parquet file. `columns` holds the keys of a table dataset."""
    table = Table.read({**columns, "files": {"": path.name}, "root": str(path.parent)}, "data")
    strange = [name for name in units or () if name not in table.numeric]
    if strange:
        raise ConfigError(f"--units: '{strange[0]}' is not one of --columns")
    found = table.read_file("", labelled)
    absent = [name for name in (*table.numeric, *table.categorical) if name not in found.columns]
    if absent:
        raise DataError(f"'{path}' has no column '{absent[0]}'.{did_you_mean(absent[0], found.columns)}")
    schema = raw_schema(table, found, units or {})
    return schema, _in_no_order(raw_samples(found, schema))


def _label(path: Path, line: int, row: Mapping[str, str], column: str | None, classes: Sequence[str]) -> int:
    if column is None:
        return UNKNOWN
    if row[column] not in classes:
        raise DataError(f"'{path}', line {line}: '{row[column]}' is not one of {', '.join(classes)}")
    return classes.index(row[column])


def _rows(path: Path, wanted: Sequence[str]) -> Iterable[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in wanted if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(f"'{path}' has no column '{missing[0]}'")
            for row in reader:
                if any(row[name] is None for name in wanted):
                    raise DataError(f"'{path}', line {reader.line_num}: the row is too short")
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read '{path}': {error}") from error


def _images(found: Sequence[tuple[Path, int]], schema: dict[str, Any], nothing: str) -> Samples:
    if not found:
        raise DataError(nothing)
    pixels = torch.stack([read_bytes(path, schema) for path, _ in found])
    return _in_no_order(Samples(pixels, torch.tensor([label for _, label in found])))


def _in_no_order(samples: Samples) -> Samples:
    """Sort samples without labels by the hashes of their inputs, so that their order reveals nothing.

    Samples with labels keep their order.
    """
    if int(samples.labels.max()) != UNKNOWN:
        return samples
    hashes = [hashlib.sha256(row.numpy().tobytes()).digest() for row in samples.inputs]
    return samples.take(sorted(range(len(hashes)), key=hashes.__getitem__))
