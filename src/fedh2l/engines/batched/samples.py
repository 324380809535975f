"""Samples of stacked nodes: all data of a run in one tensor, and augmentation of many batches at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.data.augmentation import Augmentation
from fedh2l.data.domain import Samples
from fedh2l.engines.batched.random_buffer import RandomBuffers
from fedh2l.protocol.sampling import word_block

AT_A_TIME = 32
"""Batches whose augmentations are drawn at once. This many fit in the caches of a core."""


class Store:
    """All samples of a run in one tensor, so that one look-up gives the batches of many nodes."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], tuple[int, Samples]] = {}
        self._ends: dict[tuple[int, ...], tuple[tuple[Samples, ...], NDArray[np.int64]]] = {}
        self._size = 0
        self.inputs = torch.empty(0)
        self.labels = torch.empty(0)

    def add(self, samples: Samples) -> NDArray[np.int64]:
        """Add samples and return their positions. Repeated samples are kept once."""
        key = (id(samples.inputs), id(samples.labels))
        if key not in self._parts:
            self._parts[key] = (self._size, samples)
            self._size += len(samples)
        start, _ = self._parts[key]
        return np.arange(start, start + len(samples))

    def rows(self, parts: Sequence[Samples]) -> NDArray[np.int64]:
        """Return the positions of some parts, one after the other.

        All parts but the first are cached, because many nodes share them.
        """
        first, rest = parts[0], tuple(parts[1:])
        if not rest:
            return self.add(first)
        key = tuple(map(id, rest))
        if key not in self._ends:
            self._ends[key] = (rest, np.concatenate([self.add(part) for part in rest]))
        return np.concatenate([self.add(first), self._ends[key][1]])

    def close(self) -> None:
        """Concatenate all samples, once all are added."""
        parts = [samples for _, samples in self._parts.values()]
        self.inputs = torch.cat([part.inputs for part in parts])
        self.labels = torch.cat([part.labels for part in parts])

    def take(self, rows: Tensor) -> Samples:
        """Return the samples at positions `(…)`, in that shape."""
        flat = rows.reshape(-1)
        inputs = self.inputs.index_select(0, flat).view(*rows.shape, *self.inputs.shape[1:])
        return Samples(inputs, self.labels.index_select(0, flat).view(rows.shape))


class StackedAugmentation(NamedTuple):
    """Augmentation of the images of several members."""

    augmentation: Augmentation
    dtype: torch.dtype
    what: Hashable
    """Identifies these draws among the draws of a round."""
    keys: Callable[[Sequence[int]], list[int]]
    """Addresses of the members' draws in some rounds: round by round, member by member."""

    def of(self, batch: Samples, draws: RandomBuffers, round: int) -> Samples:
        """Augment batches `(members, rows, …)`."""
        members, rows = batch.labels.shape
        height, width = batch.inputs.shape[-2:]

        def compute(rounds: Sequence[int]) -> NDArray[np.int64]:
            addresses = self.keys(rounds)
            unlike = {key: place for place, key in enumerate(dict.fromkeys(addresses))}  # one seed, one draw
            drawn = self._numbers(list(unlike), rows, width / height)
            places = np.array([unlike[key] for key in addresses])
            numbers: NDArray[np.float64] = drawn[places].reshape(len(rounds), members, rows, -1)
            return numbers.view(np.int64)  # draws are stored as integers

        numbers = draws.get((self.what, rows), compute, round).view(torch.float64)
        seen = self.augmentation.apply(batch.inputs, numbers, self.dtype)
        return Samples(seen, batch.labels, self.augmentation.mixture(numbers))

    def _numbers(self, keys: Sequence[int], rows: int, shape: float) -> NDArray[np.float64]:
        """Return the augmentation parameters of `rows` images per key, `(keys, rows, numbers)`."""
        count = self.augmentation.words
        parts = [keys[start : start + AT_A_TIME] for start in range(0, len(keys), AT_A_TIME)]
        words = (word_block(part, count * rows).reshape(len(part), rows, count) for part in parts)
        return np.concatenate([self.augmentation.numbers(drawn, shape) for drawn in words])
