"""The data of a mutual step: public batches and teachers' posteriors, and their losses, eqs. (3) to (5)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedh2l.data.domain import Samples
from fedh2l.protocol.messages import Message, Posteriors
from fedh2l.training.learner import Learner
from fedh2l.training.losses import cross_entropy_rows, kl_rows


class Mixed(NamedTuple):
    """The second image of each mixed row."""

    labels: Tensor
    """Its label, `(rows,)`."""
    own: Tensor
    """The share of the row's own image, `(rows,)`."""

    @staticmethod
    def of(batches: Sequence[Samples]) -> Mixed | None:
        """Return the mixture of batches, or None. Either all batches are mixed or none is."""
        mixtures = [(batch.labels, *batch.mixture) for batch in batches if batch.mixture is not None]
        if not mixtures:
            return None
        others = [labels.gather(-1, other) for labels, _, other in mixtures]
        return Mixed(torch.cat(others, -1), torch.cat([own for _, own, _ in mixtures], -1))


class Lesson(NamedTuple):
    """The rows of all teachers of a mutual step, concatenated, so public batches may differ in size.

    Stacked students add a leading dimension.
    """

    inputs: Tensor
    """`(rows, …)`"""
    teacher: Tensor
    """Posteriors of the teacher of the row, `(rows, classes)`."""
    confidence: Tensor
    """Accuracy of that teacher on its batch, Acc_j in the paper. 1 without labels. `(rows,)`"""
    weight: Tensor
    """The row's share of the loss, 1 / (teachers · rows of its teacher), `(rows,)`."""
    labels: Tensor | None = None
    """`(rows,)`, or None without labels."""
    mixed: Mixed | None = None

    @staticmethod
    def of(node: Learner, inbox: Sequence[Message], rows: int) -> Lesson:
        """Return the lesson of an inbox, with the public batches of its messages."""
        signals = [message for message in inbox if isinstance(message, Posteriors)]
        batches = [node.public_batch(signal.sender, signal.round, rows) for signal in signals]
        return Lesson.join(signals, batches, node.seed_set.labelled)

    @staticmethod
    def join(signals: Sequence[Posteriors], batches: Sequence[Samples], labelled: bool = True) -> Lesson:
        """Return the lesson of messages and their batches."""
        dim = batches[0].labels.dim() - 1  # 1 for stacked students
        values = [signal.values for signal in signals]
        return Lesson(
            inputs=torch.cat([batch.inputs for batch in batches], dim),
            teacher=torch.cat(values, -2),
            confidence=torch.cat([_confidence(signal) for signal in signals], -1),
            weight=_row_weights(tuple(batch.labels.shape[-1] for batch in batches), batches[0].labels.device),
            labels=torch.cat([batch.labels for batch in batches], dim) if labelled else None,
            mixed=Mixed.of(batches) if labelled else None,
        )


def _confidence(signal: Posteriors) -> Tensor:
    rows = signal.values[..., 0]
    return torch.ones_like(rows) if signal.correct is None else signal.accuracy.unsqueeze(-1).expand(rows.shape)


@lru_cache(256)
def _row_weights(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    weights = [torch.full((n,), 1 / (len(sizes) * n), dtype=torch.float64) for n in sizes]
    return torch.cat(weights).to(device)


def mutual_losses(logits: Tensor, lesson: Lesson, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return ℓ_CE of eq. (5) and ℓ_KL of eq. (3) for a student's logits `(rows, classes)`, `()` each.

    Without labels ℓ_CE is 0. At temperature T, ℓ_KL is T²·KL of posteriors ∝ p^(1/T), the softmax of logits / T.
    """
    log_p = torch.log_softmax(logits, -1)
    weight, teacher = lesson.weight.to(logits.dtype), lesson.teacher.to(logits.dtype)
    if temperature == 1:
        rows = kl_rows(teacher, log_p)
    else:
        softer = torch.softmax(torch.log(teacher) / temperature, -1)
        rows = temperature**2 * kl_rows(softer, torch.log_softmax(logits / temperature, -1))
    kl = (weight * lesson.confidence.to(logits.dtype) * rows).sum(-1)
    if lesson.labels is None:
        return torch.zeros_like(kl), kl
    rows = cross_entropy_rows(log_p, lesson.labels)
    if lesson.mixed is not None:
        rows = torch.lerp(cross_entropy_rows(log_p, lesson.mixed.labels), rows, lesson.mixed.own.to(rows.dtype))
    return (weight * rows).sum(-1), kl


class LessonCache:
    """Lessons in a node's memory, by slot, so checkpoints and stacked nodes include them."""

    def __init__(self, memory: dict[str, Tensor]) -> None:
        self._memory = memory

    def put(self, slot: int, lesson: Lesson | None) -> None:
        """Replace the lesson of a slot. None empties it."""
        self.clear(slot)
        if lesson is None:
            return
        kept = lesson._asdict()
        kept["weight"] = lesson.weight.expand(lesson.confidence.shape).clone()  # one per stacked student
        mixed = kept.pop("mixed")
        if mixed is not None:
            kept |= {"other": mixed.labels, "own": mixed.own}
        self._memory |= {f"lesson.{slot}.{name}": value for name, value in kept.items() if value is not None}

    def get(self, slot: int) -> Lesson | None:
        prefix = f"lesson.{slot}."
        kept = {name.removeprefix(prefix): value for name, value in self._memory.items() if name.startswith(prefix)}
        if not kept:
            return None
        mixed = Mixed(kept.pop("other"), kept.pop("own")) if "own" in kept else None
        return Lesson(**kept, mixed=mixed)

    def clear(self, slot: int | None = None) -> None:
        """Empty a slot, or all slots."""
        prefix = "lesson." if slot is None else f"lesson.{slot}."
        for name in [name for name in self._memory if name.startswith(prefix)]:
            del self._memory[name]
