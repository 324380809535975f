"""Long vectors in parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Parameters per block. A block fits in a CPU's cache, or keeps a GPU busy for a while."""


def blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same parts of some vectors `(…, parameters)`, one after the other.

    Intermediate results, such as a copy in float64, are then much smaller than a large model.
    """
    first = vectors[0]
    largest = BLOCK["cuda" if first.is_cuda else "cpu"]
    if first.shape[-1] <= largest:
        yield vectors
        return
    yield from zip(*(torch.split(vector, largest, -1) for vector in vectors), strict=True)
