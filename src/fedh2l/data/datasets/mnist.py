"""MNIST digits as arrays: the 5,000 in this package, or idx files in a folder."""

from __future__ import annotations

import functools
import gzip
import math
import zlib
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fedh2l.errors import DataError

Digits = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images `(n, 28, 28)` with values 0…255, and their digits `(n,)`."""

LARGEST = 2**30
"""Largest number of values in an idx file."""
_IDX_STEMS = (("train-images", "train-labels"), ("t10k-images", "t10k-labels"))


@functools.cache
def embedded_digits() -> Digits:
    """Return the 5,000 MNIST digits in this package, 500 per class, sorted. `mnist-5000.md` names their origin."""
    with files("fedh2l.data.datasets").joinpath("mnist-5000.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["images"], arrays["labels"].astype(np.int64)


def idx_digits(root: str) -> Digits:
    """Return all digits of the idx files in a folder, training files first. Files may be gzipped."""
    folder = Path(root)
    if not folder.is_dir():
        raise DataError(f"data.root: there is no folder '{root}'")
    images, labels = [], []
    for image_stem, label_stem in _IDX_STEMS:
        image_file, label_file = _find(folder, image_stem), _find(folder, label_stem)
        if image_file and label_file:
            images.append(read_idx(image_file))
            labels.append(read_idx(label_file).astype(np.int64))
            if len(images[-1]) != len(labels[-1]):
                raise DataError(f"'{image_file}' and '{label_file}' do not have the same number of entries")
    if not images:
        raise DataError(
            f"data.root: '{root}' has no pair of MNIST files such as train-images-idx3-ubyte and "
            f"train-labels-idx1-ubyte (.gz or plain)"
        )
    return np.concatenate(images), np.concatenate(labels)


def _find(folder: Path, stem: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"{stem}*idx?-ubyte*"))), None)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes: two zero bytes, type 8, the rank, big-endian sizes, then the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            sizes = file.read(4 * head[3]) if len(head) == 4 and head[:3] == b"\x00\x00\x08" else b""
            if not sizes or len(sizes) < 4 * head[3]:
                raise DataError(f"'{path}' is not an idx file of unsigned bytes")
            shape = tuple(map(int, np.frombuffer(sizes, ">u4")))
            wanted = math.prod(shape)
            if wanted > LARGEST:
                raise DataError(f"'{path}' has {wanted} values by its header; at most {LARGEST} are read")
            raw = _up_to(wanted + 1, cast(BinaryIO, file))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    if len(raw) < wanted:
        raise DataError(f"'{path}' is cut short: {len(raw)} values where its header says {wanted}")
    if len(raw) > wanted:
        raise DataError(f"'{path}' has more values than its header says, {wanted}")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _up_to(size: int, file: BinaryIO) -> bytearray:
    """Read at most `size` bytes. A compressed file may hold far more bytes than its header says, or fewer."""
    found = bytearray()
    while len(found) < size and (part := file.read(min(size - len(found), 2**20))):
        found += part
    return found
