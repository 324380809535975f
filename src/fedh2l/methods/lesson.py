"""What a student learns from in a mutual step, and the losses of it: eqs. (3) to (5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.losses import cross_entropy_rows, kl_rows
from fedh2l.messages import Encoding, Posteriors

Confidence = Literal["accuracy", "right", "label", "certain", "none"]
"""How much a teacher is believed: `FedH2L.confidence`."""


class Mixed(NamedTuple):
    """What each row is mixed with."""

    labels: Tensor
    """Of the other image, `(rows,)`."""
    own: Tensor
    """How much of the row is its own, `(rows,)`."""

    @staticmethod
    def of(batches: Sequence[Samples]) -> Mixed | None:
        """Of batches of which all or none are mixed."""
        mixtures = [(batch.labels, *batch.mixture) for batch in batches if batch.mixture is not None]
        if not mixtures:
            return None
        others = [labels.gather(-1, other) for labels, _, other in mixtures]
        return Mixed(torch.cat(others, -1), torch.cat([own for _, own, _ in mixtures], -1))


class Lesson(NamedTuple):
    """What a student learns from in one mutual step: the rows of all its teachers, one after the other.

    Rows rather than teachers are the unit, so public batches may differ in size. All may have a leading dimension of
    students that are stacked; `weight` has it in a lesson that was kept.
    """

    labels: Tensor | None
    """`(rows,)`; None: nobody knows them."""
    teacher: Tensor
    """Posteriors `(rows, classes)` of the teacher whose data a row is."""
    confidence: Tensor
    """How much that teacher is believed there, Acc_j in the paper, `(rows,)`."""
    weight: Tensor
    """A row's share of the loss, 1 / (teachers · rows of its teacher), `(rows,)`."""
    mixed: Mixed | None = None
    """What else is in the images, if they are mixed."""

    @staticmethod
    def of(
        inbox: Sequence[Posteriors],
        batches: Sequence[Samples],
        confidence: Confidence = "accuracy",
        labelled: bool = True,
    ) -> Lesson:
        """The signals of an inbox beside the public batches that they speak of."""
        rows = batches[0].labels.dim() - 1  # where rows are counted: behind the dimension of nodes, if there is one
        sizes = [batch.labels.shape[-1] for batch in batches]
        labels = torch.cat([batch.labels for batch in batches], rows)
        teacher = torch.cat([message.values for message in inbox], -2)
        if confidence == "accuracy":
            believed = torch.cat([m.accuracy.unsqueeze(-1).expand(m.values.shape[:-1]) for m in inbox], -1)
        else:
            believed = _belief(confidence, teacher, labels)
        return Lesson(
            labels=labels if labelled else None,
            teacher=teacher,
            confidence=believed,
            weight=_shares(tuple(sizes), batches[0].labels.device),
            mixed=Mixed.of(batches) if labelled else None,
        )


class Shelf:
    """Lessons that a node keeps in its memory, each at a place, with the inputs that it is about."""

    def __init__(self, memory: dict[str, Tensor]) -> None:
        self._memory = memory

    def put(self, place: int, inputs: Tensor, lesson: Lesson) -> None:
        """Instead of what is there. All tensors have the dimension of nodes, if the lesson is of several."""
        self.clear(place)
        kept = {"inputs": inputs, "teacher": lesson.teacher, "confidence": lesson.confidence}
        kept["weight"] = lesson.weight.expand(lesson.confidence.shape).clone()
        if lesson.labels is not None:
            kept["labels"] = lesson.labels
        if lesson.mixed is not None:
            kept |= {"other": lesson.mixed.labels, "own": lesson.mixed.own}
        self._memory |= {f"lesson.{place}.{name}": value for name, value in kept.items()}

    def at(self, place: int) -> tuple[Tensor, Lesson] | None:
        """Inputs and lesson; None: there is none."""
        start = f"lesson.{place}."
        kept = {name.removeprefix(start): value for name, value in self._memory.items() if name.startswith(start)}
        if not kept:
            return None
        mixed = Mixed(kept["other"], kept["own"]) if "own" in kept else None
        lesson = Lesson(kept.get("labels"), kept["teacher"], kept["confidence"], kept["weight"], mixed)
        return kept["inputs"], lesson

    def clear(self, place: int | None = None) -> None:
        """Drops the lesson at a place, or all."""
        start = "lesson." if place is None else f"lesson.{place}."
        for name in [name for name in self._memory if name.startswith(start)]:
            del self._memory[name]


SAID, RIGHT = "said", "right of it"
"""Under which a node remembers what it said, from sending it to learning from it."""


def note_own(memory: dict[str, Tensor], signal: Posteriors) -> None:
    """Remembers what a node says, which is a lesson for it too."""
    memory |= {SAID: signal.values} | ({} if signal.correct is None else {RIGHT: signal.correct})


def take_own(memory: dict[str, Tensor], name: str, round: int, encoding: Encoding) -> Posteriors:
    """What the node said in this round; it is remembered no longer."""
    return Posteriors(name, round, memory.pop(SAID), memory.pop(RIGHT, None), encoding=encoding)


def _belief(confidence: Confidence, teacher: Tensor, labels: Tensor) -> Tensor:
    """How much each row of a teacher's posteriors is believed, by its label or by itself, `(rows,)`."""
    if confidence == "right":
        return (teacher.argmax(-1) == labels).to(teacher.dtype)
    if confidence == "label":
        return teacher.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if confidence == "certain":
        return 1 + torch.xlogy(teacher, teacher).sum(-1) / math.log(teacher.shape[-1])
    return torch.ones_like(teacher[..., 0])


@lru_cache(256)
def _shares(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """What each row counts when teachers count alike, `(rows,)`; made once."""
    shares = [torch.full((n,), 1 / (len(sizes) * n), dtype=torch.float64) for n in sizes]
    return torch.cat(shares).to(device)


def mutual_losses(logits: Tensor, lesson: Lesson, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """ℓ_CE of eq. (5) and ℓ_KL of eq. (3), `()` each, of a student's logits `(rows, classes)` on a lesson.

    Without labels the first is 0.

    At a temperature T, ℓ_KL is T²·KL of posteriors ∝ p^(1/T), which is what softmax makes of logits divided by T.
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
