"""The losses of the paper, as pure functions of tensors.

Every function reduces the trailing dimensions it names and keeps whatever stands before them, so the same code
serves one node, and many nodes stacked in a leading dimension. Students enter as log-posteriors, `log_softmax` of
their logits, computed once for both losses.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_rows(log_p: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row: log-posteriors `(…, rows, classes)`, labels `(…, rows)` to `(…, rows)`."""
    return -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, eq. (1): logits `(…, rows, classes)`, labels `(…, rows)` to `(…)`."""
    return cross_entropy_rows(torch.log_softmax(logits, -1), labels).mean(-1)


def kl_rows(teacher: Tensor, log_p: Tensor) -> Tensor:
    """KL(teacher ‖ student) of each row, eq. (4), in nats: `(…, rows, classes)` each to `(…, rows)`.

    The teacher's posteriors are probabilities; a class to which it gives 0 contributes nothing.
    """
    return (torch.xlogy(teacher, teacher) - teacher * log_p).sum(-1)


def distillation(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """T²·KL(teacher ‖ student) of two sets of logits `(…, rows, classes)` at temperature T, to `(…)`.

    Summed over classes, averaged over rows; the teacher is a constant. T² keeps gradients of one size (Hinton et al.).
    """
    target = torch.softmax(teacher.detach() / temperature, -1)
    return temperature**2 * kl_rows(target, torch.log_softmax(student / temperature, -1)).mean(-1)


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Rows of `(…, n, columns)` at indices `(k,)`, or at indices `(…, k)` of each stacked node's own."""
    if rows.dim() == 1:
        return values.index_select(-2, rows)
    return values.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, values.shape[-1]))


def correct_count(scores: Tensor, labels: Tensor) -> Tensor:
    """How many rows `(…, rows, classes)` have their largest value at the label; ties go to the lowest class."""
    return (scores.argmax(-1) == labels).sum(-1)
