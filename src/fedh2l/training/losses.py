"""The losses of the paper, as pure functions of tensors.

Functions reduce trailing dimensions and keep all leading ones, so the same code serves one node and many stacked nodes.
Students are given as log-posteriors, the `log_softmax` of their logits, computed once for both losses.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_rows(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy per row: log-posteriors `(…, rows, classes)`, labels `(…, rows)` to `(…, rows)`."""
    return -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, eq. (1): logits `(…, rows, classes)`, labels `(…, rows)` to `(…)`."""
    return cross_entropy_rows(torch.log_softmax(logits, -1), labels).mean(-1)


def kl_rows(teacher: Tensor, log_p: Tensor) -> Tensor:
    """Return KL(teacher ‖ student) per row, eq. (4), in nats: `(…, rows, classes)` each to `(…, rows)`.

    The teacher's posteriors are probabilities. A class with probability 0 contributes nothing.
    """
    return (torch.xlogy(teacher, teacher) - teacher * log_p).sum(-1)


def distillation(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T²·KL(teacher ‖ student) of two sets of logits `(…, rows, classes)` at temperature T, `(…)`.

    The loss is summed over classes and averaged over rows. The teacher is a constant. T² keeps the size of gradients
    independent of T (Hinton et al.).
    """
    target = torch.softmax(teacher.detach() / temperature, -1)
    return temperature**2 * kl_rows(target, torch.log_softmax(student / temperature, -1)).mean(-1)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return rows of `(…, n, columns)` at indices `(k,)`, or at indices `(…, k)` per stacked node."""
    if rows.dim() == 1:
        return values.index_select(-2, rows)
    return values.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, values.shape[-1]))
