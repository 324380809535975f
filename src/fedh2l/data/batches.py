"""Indices of batches, drawn for a block of rounds and copied to the model's device together.

A round's draw has an address, so it can be made in advance. One copy to a GPU per round would take longer than many
steps.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fedh2l.hardware import uploaded
from fedh2l.protocol.sampling import Purpose, draw_indices

BLOCK = 64
"""Rounds drawn at once."""


class Batches:
    """Draws indices of batches from one seed or from a node's secret."""

    def __init__(self, seed: int | str, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._blocks: dict[Hashable, tuple[int, Tensor]] = {}

    def indices(self, population: int, count: int, purpose: Purpose, node: str, round: int) -> Tensor:
        """Return the indices that `draw_indices` draws, `(count,)`, or all in order if there are no more."""
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
