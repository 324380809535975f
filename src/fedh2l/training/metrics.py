"""ACC, WDP and CDP as the paper defines them, from counts of correct answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fedh2l.data.domain import Samples

METRICS = ("ACC", "WDP", "CDP")
EVALUATION_ROWS = 512
"""Largest batch in an evaluation."""


def scores(correct: Sequence[int], totals: Sequence[int], own: int) -> dict[str, float]:
    """Return the three metrics of one model, in percent.

    `correct[j]` of `totals[j]` test samples of domain j are right, and `own` is the model's domain. ACC pools all
    domains, WDP covers the model's domain, CDP pools the others.
    """
    others = [j for j in range(len(totals)) if j != own]
    return {
        "ACC": 100 * sum(correct) / sum(totals),
        "WDP": 100 * correct[own] / totals[own],
        "CDP": 100 * sum(correct[j] for j in others) / sum(totals[j] for j in others),
    }


def average(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the nodes."""
    return {metric: sum(row[metric] for row in rows) / len(rows) for metric in METRICS}


def count_correct(predict: Callable[[Tensor], Tensor], samples: Samples) -> int:
    """Count the samples that a function from inputs to logits classifies correctly."""
    import torch  # imported here, because results and their tables do not need it

    from fedh2l.protocol.messages.base import correct_count
    from fedh2l.training.network import rows_at_once

    rows = min(EVALUATION_ROWS, rows_at_once(samples.inputs))
    batches = zip(torch.split(samples.inputs, rows), torch.split(samples.labels, rows), strict=True)
    with torch.no_grad():
        return int(torch.stack([correct_count(predict(inputs), labels) for inputs, labels in batches]).sum())
