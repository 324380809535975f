"""How often a method that shares parameters exchanges: every K steps, every few epochs, or as FedH2L's bytes allow."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor

from fedh2l.learner import Learner, LocalData

_EPOCHS = re.compile(r"([1-9]\d*) epochs?")


def _known(interval: int | str) -> int | str:
    if isinstance(interval, int):
        if interval < 1:
            raise ValueError("must be at least 1")
    elif interval != "matched" and not _EPOCHS.fullmatch(interval):
        raise ValueError("must be a number of local steps, 'matched', or 'N epochs'")
    return interval


Interval = Annotated[int | str, AfterValidator(_known)]
"""Local steps between two exchanges."""

INTERVAL_HELP = (
    "local steps between two exchanges (K): a number, 'N epochs' over the largest local pool, or 'matched', "
    "which sends as many bytes as FedH2L with full exchange does"
)


def epoch_steps(learners: Sequence[Learner], pool: LocalData) -> int:
    """Batches that it takes to see the largest local pool once."""
    return max(math.ceil(len(learner.pool(pool)) / learner.batch_size) for learner in learners)


def batches(order: Tensor, size: int) -> list[Tensor]:
    """Indices `(…, n)` in parts of `size`; a last one alone, which batch norm could not take, joins those before it."""
    parts = list(torch.split(order, size, -1))
    if len(parts) > 1 and parts[-1].shape[-1] == 1:
        parts[-2:] = [torch.cat(parts[-2:], -1)]
    return parts


def steps(interval: int | str, learners: Sequence[Learner], pool: LocalData, shared: int) -> int:
    """An interval in local steps; `shared` is how many numbers a node sends in an exchange."""
    if isinstance(interval, int):
        return interval
    if interval == "matched":
        first = learners[0]
        rows = min(first.batch_size, *(len(part) for part in first.seed_set.parts.values()))
        signal = rows * first.classes + 1
        return math.ceil(2 * shared / ((len(learners) - 1) * signal))
    epochs = _EPOCHS.fullmatch(interval)
    assert epochs is not None  # as validated
    return int(epochs[1]) * epoch_steps(learners, pool)
