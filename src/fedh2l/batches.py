"""Which samples are in the batches of some rounds, brought to where a model computes at once.

A round's draw has an address, so it does not matter when it is drawn; a copy to a GPU takes longer than many a step of
a round.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fedh2l.sampling import Purpose, draw_indices
from fedh2l.upload import uploaded

BLOCK = 64
"""Rounds that are drawn at once."""


class Batches:
    """Indices of batches that follow from one seed, or from a node's secret."""

    def __init__(self, seed: int | str, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._blocks: dict[Hashable, tuple[int, Tensor]] = {}

    def indices(self, population: int, count: int, purpose: Purpose, node: str, round: int) -> Tensor:
        """What `draw_indices` draws, `(count,)`; all of them, in order, if there are no more than that."""
        rounds = 1 if count >= population else BLOCK
        first = 0 if rounds == 1 else round // BLOCK * BLOCK
        key = (population, count, purpose, node)
        start, block = self._blocks.get(key, (-1, torch.empty(0)))
        if start != first:
            drawn = [
                draw_indices(population, count, purpose, self._seed, node, r) for r in range(first, first + rounds)
            ]
            block = uploaded(torch.tensor(drawn), self._device)
            self._blocks[key] = (first, block)
        return block[round - first if rounds > 1 else 0]
