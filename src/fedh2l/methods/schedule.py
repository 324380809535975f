"""Exchange intervals of methods that send parameters: K steps, a number of epochs, or FedH2L's number of bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor

from fedh2l.training.learner import LocalData
from fedh2l.training.node_learner import NodeLearner

_EPOCHS = re.compile(r"([1-9][0-9]{0,8}) epochs?")


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
    "Local steps between exchanges (K): a number, 'N epochs' of the largest local pool, or 'matched'. The last sends "
    "at most as many bytes as FedH2L with full exchange."
)


def epoch_steps(learners: Sequence[NodeLearner], pool: LocalData) -> int:
    """Return the number of batches that covers the largest local pool once."""
    return max(math.ceil(len(learner.pool(pool)) / learner.batch_size) for learner in learners)


def batches(order: Tensor, size: int) -> list[Tensor]:
    """Split indices `(…, n)` into parts of `size`. A last part of one index joins the part before, for batch norm."""
    parts = list(torch.split(order, size, -1))
    if len(parts) > 1 and parts[-1].shape[-1] == 1:
        parts[-2:] = [torch.cat(parts[-2:], -1)]
    return parts


def steps(interval: int | str, learners: Sequence[NodeLearner], pool: LocalData, shared: int) -> int:
    """Return an interval in local steps. `shared` is the number of values that a node sends per exchange."""
    if isinstance(interval, int):
        return interval
    if interval == "matched":
        first = learners[0]
        rows = min([first.batch_size, *(len(part) for part in first.seed_set.parts.values() if len(part))])
        signal = rows * first.classes + 1
        return math.ceil(2 * shared / ((len(learners) - 1) * signal))
    epochs = _EPOCHS.fullmatch(interval)
    assert epochs is not None  # the format is validated
    return int(epochs[1]) * epoch_steps(learners, pool)
