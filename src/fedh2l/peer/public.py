"""Public samples from files: folders of images, lists of images, tables."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedh2l.data.image_folder import IMAGENET
from fedh2l.data.images import SUFFIXES, read_bytes
from fedh2l.domain import UNKNOWN, Samples
from fedh2l.errors import ConfigError, DataError


def image_schema(text: str) -> dict[str, Any]:
    """What `MODE:WIDTHxHEIGHT` stands for, as `L:28x28`; `RGB:224x224:imagenet` is what `image-folder` makes."""
    found = re.fullmatch(r"(L|RGB):([1-9]\d{0,3})x([1-9]\d{0,3})(:imagenet)?", text)
    if found is None or (found[4] and found[1] != "RGB"):
        raise ConfigError(
            f"'{text}': images are described by MODE:WIDTHxHEIGHT, as L:28x28, RGB:224x224 or RGB:224x224:imagenet"
        )
    about = {"kind": "image", "mode": found[1], "size": [int(found[2]), int(found[3])], "scale": 255}
    return {**about, "fit": "crop", **IMAGENET} if found[4] else about


def table_schema(columns: Sequence[str]) -> dict[str, Any]:
    """Numbers of these columns, in this order."""
    if not columns or len(set(columns)) < len(columns):
        raise ConfigError("a table needs columns, no two of one name")
    return {"kind": "table", "columns": list(columns)}


def from_folder(folder: Path, classes: Sequence[str], schema: dict[str, Any], labelled: bool = True) -> Samples:
    """All images of a folder with one sub-folder a class, in the order of their names; without labels, of it alone."""
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
    """The images of a CSV file with the columns `path` and, if there are labels, `label`; paths are relative to it."""
    label = "label" if labelled else None
    found = [
        (path.parent / row["path"], _label(path, line, row, label, classes))
        for line, row in _rows(path, ("path", *([label] if label else [])))
    ]
    return _images(found, schema, f"'{path}' lists no images")


def from_table(path: Path, label: str | None, classes: Sequence[str], schema: dict[str, Any]) -> Samples:
    """The rows of a CSV file with a column for each number and, unless there are none, one for the label."""
    columns = schema["columns"]
    inputs, labels = [], []
    for line, row in _rows(path, (*columns, *([label] if label else []))):
        labels.append(_label(path, line, row, label, classes))
        try:
            numbers = [float(row[column]) for column in columns]
        except ValueError as error:
            raise DataError(f"'{path}', line {line}: {error}") from None
        if not all(map(math.isfinite, numbers)):
            raise DataError(f"'{path}', line {line}: a number is missing or not finite")
        inputs.append(numbers)
    if not inputs:
        raise DataError(f"'{path}' has no rows")
    return _in_no_order(Samples(torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels)))


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
    """As they are; without labels, by what they hold, so that where a sample stands does not tell what it is."""
    if int(samples.labels.max()) != UNKNOWN:
        return samples
    hashes = [hashlib.sha256(row.numpy().tobytes()).digest() for row in samples.inputs]
    return samples.take(sorted(range(len(hashes)), key=hashes.__getitem__))
