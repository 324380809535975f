"""The kinds of messages. FedH2L sends posteriors. The methods that it is compared with send the other kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedh2l.errors import MessageError
from fedh2l.protocol.messages.base import Kind, Layout, Message, correct_count, not_finite
from fedh2l.protocol.messages.encodings import PLAIN, Encoding

ROW_SUM_TOLERANCE = 1e-4
MISCOUNT = "a count of correct answers that its posteriors do not give on its public batch"


@dataclass(frozen=True)
class Posteriors(Message):
    """A teacher's posteriors on its own public batch of a round, and the number of correct ones."""

    values: Tensor
    """`(rows, classes)`. Each row is a distribution over the classes."""
    correct: Tensor | None
    """0…rows, an integer tensor `()`. None if the public data has no labels."""
    codes: tuple[Tensor, ...] = ()
    """The encoded values, on the sender's side and if the encoding is not float32. Receivers do not need them."""

    kind: ClassVar[Kind] = "posteriors"
    code: ClassVar[int] = 1
    FAULTS: ClassVar[tuple[str, ...]] = (
        "values that are not finite",
        "negative values",
        f"rows that do not sum to 1 within {ROW_SUM_TOLERANCE:g}",
        MISCOUNT,
    )

    @classmethod
    def of(
        cls, sender: str, round: int, probabilities: Tensor, labels: Tensor | None, encoding: Encoding = PLAIN
    ) -> Self:
        """Return a node's message, with exactly the values that its receivers will decode."""
        codes = encoding.written(probabilities.detach())
        values = encoding.read(codes, probabilities.shape[-1])
        correct = None if labels is None else correct_count(values, labels)
        return cls(sender, round, values, correct, () if encoding == PLAIN else tuple(codes), encoding=encoding)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return rows and classes."""
        return tuple(self.values.shape[-2:])

    @property
    def flagged(self) -> bool:
        """Return whether it has the number of correct answers."""
        return self.correct is not None

    @property
    def accuracy(self) -> Tensor:
        """Return the teacher's confidence Acc of eq. (3), in 0…1, `()`."""
        if self.correct is None:
            raise MessageError(f"the signal of '{self.sender}' has no count of correct answers")
        return self.correct.to(torch.float64) / self.values.shape[-2]

    def tensors(self) -> list[Tensor]:
        """Return the number of correct answers, if any, then the values."""
        return [self.values] if self.correct is None else [self.correct, self.values]

    def arrays(self) -> list[Tensor]:
        """Return the number of correct answers, if any, then the encoded values."""
        codes = self.codes or self.encoding.written(self.values)
        return [*codes] if self.correct is None else [self.correct, *codes]

    @classmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        """Return the arrays. The number of correct answers comes first."""
        rows, classes = shape
        return [("<u4", ())] * flagged + encoding.arrays(rows, classes)

    @classmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        return cls(sender, round, tensors[-1], tensors[0] if flagged else None)

    @classmethod
    def read(cls, sender: str, round: int, arrays: list[Tensor], shape: Sequence[int], encoding: Encoding) -> Self:
        """Return a message from the number of correct answers, if any, and the encoded values."""
        count = len(arrays) - len(encoding.arrays(*shape))
        values = encoding.read(arrays[count:], shape[-1])
        return cls(sender, round, values, arrays[0] if count else None, encoding=encoding)

    def faults(self, labels: Tensor | None = None) -> Tensor:
        """Return the faults. A receiver that has the labels counts the correct answers again."""
        values = self.values
        counts_differ = torch.zeros(values.shape[:-2], dtype=torch.bool, device=values.device)
        if labels is not None and self.correct is not None:
            counts_differ = correct_count(values, labels) != self.correct
        # A comparison with NaN is false. In this form, NaN counts as a fault.
        return torch.stack(
            [
                not_finite(values, 2),
                ~(values >= 0).flatten(-2).all(-1),
                ~((values.sum(-1) - 1).abs() <= ROW_SUM_TOLERANCE).all(-1),
                counts_differ,
            ],
            -1,
        )

    def explain(self, fault: int, labels: Tensor | None = None) -> str:
        """Describe a fault, with both counts if the labels are known."""
        if fault != self.FAULTS.index(MISCOUNT) or labels is None or self.correct is None:
            return super().explain(fault, labels)
        given = int(correct_count(self.values, labels))
        return (
            f"it reported {int(self.correct)} correct answers, but its posteriors give {given} on its public batch of "
            f"round {self.round}"
        )


@dataclass(frozen=True)
class Logits(Message):
    """Logits of a network on samples that sender and receiver both have."""

    values: Tensor
    """`(rows, classes)`"""

    kind: ClassVar[Kind] = "logits"
    code: ClassVar[int] = 2
    FAULTS: ClassVar[tuple[str, ...]] = ("logits that are not finite",)

    @classmethod
    def of(cls, sender: str, round: int, logits: Tensor) -> Self:
        """Return a message with exactly the values that will be decoded."""
        return cls(sender, round, logits.detach().to(torch.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return rows and classes."""
        return tuple(self.values.shape[-2:])

    @property
    def flagged(self) -> bool:
        """Return False: there is no optional part."""
        return False

    def tensors(self) -> list[Tensor]:
        return [self.values]

    @classmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        return [("<f4", tuple(shape))]

    @classmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        return cls(sender, round, tensors[0])

    def faults(self, labels: Tensor | None = None) -> Tensor:
        """Return whether values are not finite."""
        return not_finite(self.values, 2).unsqueeze(-1)


@dataclass(frozen=True)
class Vector(Message):
    """One vector, with an optional loss."""

    values: Tensor
    """`(length,)`"""
    loss: Tensor | None = None
    """A training loss of the sender, `()`."""

    FAULTS: ClassVar[tuple[str, ...]] = ("values that are not finite",)

    @classmethod
    def of(cls, sender: str, round: int, values: Tensor, loss: Tensor | None = None) -> Self:
        """Return a message with exactly the values that will be decoded."""
        kept = None if loss is None else loss.detach().to(torch.float32)
        return cls(sender, round, values.detach().to(torch.float32, copy=True), kept)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the length of the vector."""
        return (self.values.shape[-1],)

    @property
    def flagged(self) -> bool:
        """Return whether it has a loss."""
        return self.loss is not None

    def tensors(self) -> list[Tensor]:
        """Return the loss, if any, then the values."""
        return [self.values] if self.loss is None else [self.loss, self.values]

    @classmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        """Return the arrays. The loss comes first."""
        return [("<f4", ())] * flagged + [("<f4", tuple(shape))]

    @classmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        return cls(sender, round, tensors[-1], tensors[0] if flagged else None)

    def faults(self, labels: Tensor | None = None) -> Tensor:
        """Return whether values or loss are not finite."""
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
    """Features, logits and labels of samples that only the sender has."""

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
        """Return a message with exactly the values that will be decoded."""
        return cls(sender, round, features.detach().to(torch.float32), logits.detach().to(torch.float32), labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return rows, width and classes."""
        return (*self.values.shape[-2:], self.logits.shape[-1])

    @property
    def flagged(self) -> bool:
        """Return False: there is no optional part."""
        return False

    def tensors(self) -> list[Tensor]:
        """Return features, logits and labels."""
        return [self.values, self.logits, self.labels]

    @classmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        """Return the three arrays."""
        rows, width, classes = shape
        return [("<f4", (rows, width)), ("<f4", (rows, classes)), ("<u2", (rows,))]

    @classmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        return cls(sender, round, *tensors)

    def faults(self, labels: Tensor | None = None) -> Tensor:
        """Return whether values are not finite, and whether labels are not classes."""
        of_no_class = ((self.labels < 0) | (self.labels >= self.logits.shape[-1])).any(-1)
        return torch.stack([not_finite(self.values, 2) | not_finite(self.logits, 2), of_no_class], -1)


@dataclass(frozen=True)
class Scalars(Vector):
    """A vector of a few numbers."""

    kind: ClassVar[Kind] = "scalars"
    code: ClassVar[int] = 6


KINDS: dict[Kind, type[Message]] = {
    message.kind: message for message in (Posteriors, Logits, Parameters, Gradients, Features, Scalars)
}
