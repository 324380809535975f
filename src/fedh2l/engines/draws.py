"""Addressed draws for rounds that are run as they are, and for rounds that are recorded once and repeated.

A recorded round cannot ask for numbers: it reads them from a buffer on the device, at the position that a counter on
the device says. Who repeats it fills the buffer beforehand, for a block of rounds at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedh2l.errors import MethodError
from fedh2l.learner import seed_generators

Compute = Callable[[Sequence[int]], NDArray[np.int64]]
"""From rounds to what is drawn in each, `(rounds, …)`."""


@dataclass
class Tape:
    """What a recorded round reads: its draws, and where in their buffers it is."""

    capacity: int
    counter: Tensor
    """`(1,)`, which of the prepared rounds is done next."""
    buffers: dict[Hashable, tuple[Tensor, Compute]] = field(default_factory=dict)
    filled: int = 0
    """The position at which the first round, which makes room, finds its draws."""
    sealed: bool = False
    """Whether the first round is done, so that there is room for no other draws."""
    seed: Callable[[int], int] | None = None
    """The seed of torch's own generator for a round, if the round asked for one."""

    _prepared: tuple[tuple[int, ...], list[NDArray[np.int64]]] = ((), [])

    @staticmethod
    def empty(capacity: int, device: torch.device) -> Tape:
        """A tape with nothing on it."""
        return Tape(capacity, torch.zeros(1, dtype=torch.int64, device=device))

    def read(self, key: Hashable, compute: Compute, round: int) -> Tensor:
        """The draw of the round that is next.

        The first round that asks for one makes room for it. That one is run as it is: what is made while recording
        lies in memory that other recordings use as well.
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
        """Computes the draws of these rounds, for when they are filled in."""
        drawn = [compute(rounds) for _, compute in self.buffers.values()]
        self._prepared = (tuple(rounds), drawn)

    def fill(self, rounds: Sequence[int]) -> None:
        """Makes the draws of these rounds be read, the first at position 0."""
        if self._prepared[0] != tuple(rounds) or len(self._prepared[1]) < len(self.buffers):
            self.prepare(rounds)
        for (buffer, _), drawn in zip(self.buffers.values(), self._prepared[1], strict=True):
            source = torch.from_numpy(drawn)
            if buffer.is_cuda:
                source = source.pin_memory()  # so that the copy does not wait for what the device is doing
            buffer[: len(rounds)].copy_(source, non_blocking=True)


class Draws:
    """Gives draws to stacked nodes: at once, or from the tape of the round that is being recorded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tape: Tape | None = None
        self.now = 0
        """The round that is run."""

    def get(self, key: Hashable, compute: Compute, round: int) -> Tensor:
        """What is drawn at `round`; `key` tells the draws of a round apart."""
        assert self.tape is not None, "draws are for rounds"
        ahead = round - self.now  # a late message speaks of an earlier round's batch
        shifted = compute if ahead == 0 else lambda rounds: compute([r + ahead for r in rounds])
        return self.tape.read((key, ahead), shifted, round if ahead == 0 else self.now)

    def seed(self, seed: Callable[[int], int], device: torch.device, round: int) -> None:
        """Seeds torch's own generator; a recorded round is seeded once, before it is repeated."""
        if self.tape is None or self.tape.seed is None:
            seed_generators(seed(round), device)
        if self.tape is not None and self.tape.seed is None:
            self.tape.seed = seed
