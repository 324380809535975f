"""ACC, WDP and CDP, exactly as the paper defines them, from counts of correct answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.losses import correct_count
from fedh2l.network import rows_at_once

METRICS = ("ACC", "WDP", "CDP")
EVALUATION_ROWS = 512
"""How many samples are predicted at once in an evaluation, at most."""


def scores(correct: Sequence[int], totals: Sequence[int], own: int) -> dict[str, float]:
    """The three metrics of one model, in percent.

    `correct[j]` of `totals[j]` test samples of domain j are right, and domain `own` is the model's. ACC pools all
    domains, WDP takes its own, CDP pools the others.
    """
    others = [j for j in range(len(totals)) if j != own]
    return {
        "ACC": 100 * sum(correct) / sum(totals),
        "WDP": 100 * correct[own] / totals[own],
        "CDP": 100 * sum(correct[j] for j in others) / sum(totals[j] for j in others),
    }


def average(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the nodes."""
    return {metric: sum(row[metric] for row in rows) / len(rows) for metric in METRICS}


@torch.no_grad()
def count_correct(predict: Callable[[Tensor], Tensor], samples: Samples) -> int:
    """How many samples a function from inputs to logits gets right."""
    rows = min(EVALUATION_ROWS, rows_at_once(samples.inputs))
    batches = zip(torch.split(samples.inputs, rows), torch.split(samples.labels, rows), strict=True)
    return int(torch.stack([correct_count(predict(inputs), labels) for inputs, labels in batches]).sum())
