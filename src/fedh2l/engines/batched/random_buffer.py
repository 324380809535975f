"""Addressed draws for rounds that run directly, and for rounds that are recorded and replayed.

A recorded round cannot compute draws. It reads them from a buffer on the device, at the position of a counter on the
device. The buffer is filled in advance for a block of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.errors import MethodError
from fedh2l.training.learner import seed_generators

Compute = Callable[[Sequence[int]], NDArray[np.int64]]
"""Function from rounds to their draws, `(rounds, …)`."""


@dataclass
class RandomBuffer:
    """Buffers with the draws of a recorded round, and the position to read."""

    capacity: int
    counter: Tensor
    """Position of the next prepared round, `(1,)`."""
    buffers: dict[Hashable, tuple[Tensor, Compute]] = field(default_factory=dict)
    filled: int = 0
    """Position of the draws of the first round, which allocates the buffers."""
    sealed: bool = False
    """Whether the first round is done, so that no buffers can be added."""
    seed: Callable[[int], int] | None = None
    """Seed of torch's own generator for a round, if the round needs one."""

    _prepared: tuple[tuple[int, ...], list[NDArray[np.int64]]] = ((), [])

    @staticmethod
    def empty(capacity: int, device: torch.device) -> RandomBuffer:
        """Return a random buffer without draws."""
        return RandomBuffer(capacity, torch.zeros(1, dtype=torch.int64, device=device))

    def read(self, key: Hashable, compute: Compute, round: int) -> Tensor:
        """Return the draw of the next round.

        The first round that needs a draw allocates its buffer. That round runs directly, because memory allocated
        during a recording is also used by other recordings.
        """
        if key not in self.buffers:
            if self.sealed:
                raise MethodError(
                    f"round {round} draws {key!r}, which the first round of its kind did not; tell such rounds apart "
                    f"in kind_of_round"
                )
            drawn = torch.from_numpy(compute([round]))
            buffer = torch.zeros(self.capacity, *drawn.shape[1:], dtype=torch.int64, device=self.counter.device)
            buffer[self.filled : self.filled + 1].copy_(drawn)
            self.buffers[key] = (buffer, compute)
        return self.buffers[key][0].index_select(0, self.counter).squeeze(0)

    def prepare(self, rounds: Sequence[int]) -> None:
        """Compute the draws of these rounds for a later `fill`."""
        drawn = [compute(rounds) for _, compute in self.buffers.values()]
        self._prepared = (tuple(rounds), drawn)

    def fill(self, rounds: Sequence[int]) -> None:
        """Copy the draws of these rounds to the buffers, the first at position 0."""
        if self._prepared[0] != tuple(rounds) or len(self._prepared[1]) < len(self.buffers):
            self.prepare(rounds)
        for (buffer, _), drawn in zip(self.buffers.values(), self._prepared[1], strict=True):
            source = torch.from_numpy(drawn)
            if buffer.is_cuda:
                source = source.pin_memory()  # so that the copy does not wait for a busy device
            buffer[: len(rounds)].copy_(source, non_blocking=True)


class RandomBuffers:
    """Provides draws to stacked nodes, from the buffer of the present round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer: RandomBuffer | None = None
        self.now = 0
        """The present round."""

    def get(self, key: Hashable, compute: Compute, round: int) -> Tensor:
        """Return the draw of `round`. `key` identifies it among the draws of a round."""
        assert self.buffer is not None, "draws are for rounds"
        ahead = round - self.now  # a late message refers to the batch of an earlier round
        shifted = compute if ahead == 0 else lambda rounds: compute([r + ahead for r in rounds])
        return self.buffer.read((key, ahead), shifted, round if ahead == 0 else self.now)

    def seed(self, seed: Callable[[int], int], device: torch.device, round: int) -> None:
        """Seed torch's own generator. A recorded round is seeded once, before its replay."""
        if self.buffer is None or self.buffer.seed is None:
            seed_generators(seed(round), device)
        if self.buffer is not None and self.buffer.seed is None:
            self.buffer.seed = seed
