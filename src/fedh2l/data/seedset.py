"""The public seed set: every node's public data, the same on all nodes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from fedh2l.data.augmentation import PublicViews
from fedh2l.data.batches import Batches
from fedh2l.data.domain import Samples
from fedh2l.protocol.sampling import draw_indices


class SeedSet:
    """The public samples of each member, and the public batches of each round.

    Indices are addressed by (federation seed, owner, round), so every peer derives the same batch and no indices are
    sent.
    """

    def __init__(
        self,
        parts: Mapping[str, Samples],
        seed: int,
        views: PublicViews | None = None,
        labelled: bool = True,
    ) -> None:
        self.parts = dict(parts)
        self.seed = seed
        self.labelled = labelled
        """Whether the samples have labels."""
        self.views = views
        """Augmentation of public batches, the same for all nodes."""
        self._dtype = torch.float32
        self._batches = Batches(seed, next(iter(parts.values())).labels.device)
        self._kept: tuple[int, dict[tuple[str, int], Samples]] = (-1, {})

    def to(self, device: torch.device, dtype: torch.dtype) -> SeedSet:
        """Return the same set on a device."""
        parts = {name: part.to(device, dtype) for name, part in self.parts.items()}
        moved = SeedSet(parts, self.seed, self.views, self.labelled)
        moved._dtype = dtype
        return moved

    @cached_property
    def union(self) -> Samples:
        """All public data, in roster order."""
        return Samples.concatenate(list(self.parts.values()))

    def subset(self, round: int, size: int) -> Samples:
        """Return `size` samples of all public data, or all of them if there are no more."""
        if size >= len(self.union):
            return self.union
        return self.union.take(draw_indices(len(self.union), size, "alignment", self.seed, "", round))

    def batch(self, owner: str, round: int, size: int) -> Samples:
        """Return `size` samples of the owner's public data, or all of them if there are no more."""
        kept_round, kept = self._kept  # nodes in one process use the same batches: keep those of this round
        if kept_round != round:
            kept = {}
            self._kept = (round, kept)
        if (owner, size) not in kept:  # two threads may both draw it, with the same result
            batch = self.parts[owner].take(self._indices(owner, round, size))
            if self.views is not None:
                numbers = self.views.drawn(batch.inputs, "public-views", self.seed, owner, round)
                seen = self.views.apply(batch.inputs, numbers, self._dtype)
                batch = Samples(seen, batch.labels, self.views.mixture(numbers))
            kept[owner, size] = batch
        return kept[owner, size]

    def labels(self, owner: str, round: int, size: int) -> Tensor:
        """Return the labels of the batch."""
        return self.parts[owner].labels[self._indices(owner, round, size)]

    def _indices(self, owner: str, round: int, size: int) -> Tensor:
        return self._batches.indices(len(self.parts[owner]), size, "public-batch", owner, round)
