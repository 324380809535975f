"""The kinds of messages. FedH2L sends the first; the others are what the methods that it is compared with send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedh2l.errors import MessageError
from fedh2l.losses import correct_count
from fedh2l.messages.base import Kind, Layout, Message, not_finite
from fedh2l.messages.encodings import PLAIN, Encoding

ROW_SUM_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Posteriors(Message):
    """A teaching signal: a node's posteriors on its own public batch of a round, and how many it got right."""

    values: Tensor
    """`(rows, classes)`; each row a distribution over the classes."""
    correct: Tensor | None
    """0…rows, an integer tensor `()`; None when the public data has no labels."""
    codes: tuple[Tensor, ...] = ()
    """How the sender wrote the values, where that is not in float32; whoever reads them needs it no more."""

    kind: ClassVar[Kind] = "posteriors"
    code: ClassVar[int] = 1
    FAULTS: ClassVar[tuple[str, ...]] = (
        "values that are not finite",
        "negative values",
        f"rows that do not sum to 1 within {ROW_SUM_TOLERANCE:g}",
        "a count of correct answers that its posteriors do not have",
    )

    @classmethod
    def of(
        cls, sender: str, round: int, probabilities: Tensor, labels: Tensor | None, encoding: Encoding = PLAIN
    ) -> Self:
        """The signal of a node, in exactly the values that its receivers will decode."""
        codes = encoding.written(probabilities.detach())
        values = encoding.read(codes, probabilities.shape[-1])
        correct = None if labels is None else correct_count(values, labels)
        return cls(sender, round, values, correct, () if encoding == PLAIN else tuple(codes), encoding=encoding)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and classes."""
        return tuple(self.values.shape[-2:])

    @property
    def flagged(self) -> bool:
        """Whether it says how many were right."""
        return self.correct is not None

    @property
    def accuracy(self) -> Tensor:
        """The teacher's confidence Acc of eq. (3), in 0…1, `()`."""
        if self.correct is None:
            raise MessageError(f"the signal of '{self.sender}' has no count of correct answers")
        return self.correct.to(torch.float64) / self.values.shape[-2]

    def tensors(self) -> list[Tensor]:
        """The count, if any, then the values."""
        return [self.values] if self.correct is None else [self.correct, self.values]

    def arrays(self) -> list[Tensor]:
        """The count, if any, then the values as they are written."""
        codes = self.codes or self.encoding.written(self.values)
        return [*codes] if self.correct is None else [self.correct, *codes]

    @classmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        """The count comes first."""
        rows, classes = shape
        return [("<u4", ())] * flagged + encoding.arrays(rows, classes)

    @classmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        """From count and values."""
        return cls(sender, round, tensors[-1], tensors[0] if flagged else None)

    @classmethod
    def read(cls, sender: str, round: int, arrays: list[Tensor], shape: Sequence[int], encoding: Encoding) -> Self:
        """From the count, if there is one, and the values as they are written."""
        count = len(arrays) - len(encoding.arrays(*shape))
        values = encoding.read(arrays[count:], shape[-1])
        return cls(sender, round, values, arrays[0] if count else None, encoding=encoding)

    def faults(self, labels: Tensor | None = None) -> Tensor:
        """A receiver that holds the labels counts again."""
        values = self.values
        counts_differ = torch.zeros(values.shape[:-2], dtype=torch.bool, device=values.device)
        if labels is not None and self.correct is not None:
            counts_differ = correct_count(values, labels) != self.correct
        # A comparison with NaN is false, so these are phrased to catch it too.
        return torch.stack(
            [
                not_finite(values, 2),
                ~(values >= 0).flatten(-2).all(-1),
                ~((values.sum(-1) - 1).abs() <= ROW_SUM_TOLERANCE).all(-1),
                counts_differ,
            ],
            -1,
        )


@dataclass(frozen=True)
class Logits(Message):
    """What a network says of samples that sender and receiver both know, before the softmax."""

    values: Tensor
    """`(rows, classes)`"""

    kind: ClassVar[Kind] = "logits"
    code: ClassVar[int] = 2
    FAULTS: ClassVar[tuple[str, ...]] = ("logits that are not finite",)

    @classmethod
    def of(cls, sender: str, round: int, logits: Tensor) -> Self:
        """In exactly the values that will be decoded."""
        return cls(sender, round, logits.detach().to(torch.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and classes."""
        return tuple(self.values.shape[-2:])

    @property
    def flagged(self) -> bool:
        """There is no optional part."""
        return False

    def tensors(self) -> list[Tensor]:
        """The values."""
        return [self.values]

    @classmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        """Row by row."""
        return [("<f4", tuple(shape))]

    @classmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        """From the values."""
        return cls(sender, round, tensors[0])

    def faults(self, labels: Tensor | None = None) -> Tensor:
        """Only finite values."""
        return not_finite(self.values, 2).unsqueeze(-1)


@dataclass(frozen=True)
class Vector(Message):
    """One vector, and perhaps a loss beside it."""

    values: Tensor
    """`(length,)`"""
    loss: Tensor | None = None
    """A training loss of the sender, `()`."""

    FAULTS: ClassVar[tuple[str, ...]] = ("values that are not finite",)

    @classmethod
    def of(cls, sender: str, round: int, values: Tensor, loss: Tensor | None = None) -> Self:
        """In exactly the values that will be decoded."""
        said = None if loss is None else loss.detach().to(torch.float32)
        return cls(sender, round, values.detach().to(torch.float32, copy=True), said)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of the vector."""
        return (self.values.shape[-1],)

    @property
    def flagged(self) -> bool:
        """Whether it has a loss."""
        return self.loss is not None

    def tensors(self) -> list[Tensor]:
        """The loss, if any, then the values."""
        return [self.values] if self.loss is None else [self.loss, self.values]

    @classmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        """The loss comes first."""
        return [("<f4", ())] * flagged + [("<f4", tuple(shape))]

    @classmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        """From loss and values."""
        return cls(sender, round, tensors[-1], tensors[0] if flagged else None)

    def faults(self, labels: Tensor | None = None) -> Tensor:
        """Only finite values."""
        unsound = not_finite(self.values, 1)
        return (unsound if self.loss is None else unsound | not_finite(self.loss, 0)).unsqueeze(-1)


@dataclass(frozen=True)
class Parameters(Vector):
    """The trained parameters of a network and its averaged buffers."""

    kind: ClassVar[Kind] = "parameters"
    code: ClassVar[int] = 3


@dataclass(frozen=True)
class Gradients(Vector):
    """A gradient with respect to the trained parameters, and the buffers after the forward pass."""

    kind: ClassVar[Kind] = "gradients"
    code: ClassVar[int] = 4


@dataclass(frozen=True)
class Features(Message):
    """What a network computes inside, and at its end, for samples that only the sender has, with their labels."""

    values: Tensor
    """`(rows, width)`"""
    logits: Tensor
    """`(rows, classes)`"""
    labels: Tensor
    """`(rows,)`, class indices."""

    kind: ClassVar[Kind] = "features"
    code: ClassVar[int] = 5
    FAULTS: ClassVar[tuple[str, ...]] = ("features or logits that are not finite", "labels of no class")

    @classmethod
    def of(cls, sender: str, round: int, features: Tensor, logits: Tensor, labels: Tensor) -> Self:
        """In exactly the values that will be decoded."""
        return cls(sender, round, features.detach().to(torch.float32), logits.detach().to(torch.float32), labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, width and classes."""
        return (*self.values.shape[-2:], self.logits.shape[-1])

    @property
    def flagged(self) -> bool:
        """There is no optional part."""
        return False

    def tensors(self) -> list[Tensor]:
        """Features, logits, labels."""
        return [self.values, self.logits, self.labels]

    @classmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        """Three arrays, one after the other."""
        rows, width, classes = shape
        return [("<f4", (rows, width)), ("<f4", (rows, classes)), ("<u2", (rows,))]

    @classmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        """From the three arrays."""
        return cls(sender, round, *tensors)

    def faults(self, labels: Tensor | None = None) -> Tensor:
        """Finite values, and labels that are classes."""
        of_no_class = ((self.labels < 0) | (self.labels >= self.logits.shape[-1])).any(-1)
        return torch.stack([not_finite(self.values, 2) | not_finite(self.logits, 2), of_no_class], -1)


@dataclass(frozen=True)
class Scalars(Vector):
    """A few numbers."""

    kind: ClassVar[Kind] = "scalars"
    code: ClassVar[int] = 6


KINDS: dict[Kind, type[Message]] = {
    message.kind: message for message in (Posteriors, Logits, Parameters, Gradients, Features, Scalars)
}
