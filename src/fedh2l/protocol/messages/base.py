"""The base class of messages: a sender, a round, tensors with a fixed layout, and possible faults.

A message has a tensor form for nodes in one process, and a byte form (`wire.py`) for the network. Its size depends only
on its shape, so every engine counts the same bytes without encoding. Tensors may have leading dimensions for stacked
nodes. Shapes and sizes are those of one node's message.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from fedh2l.errors import MessageError
from fedh2l.protocol.messages.encodings import PLAIN, Encoding

Kind = Literal["posteriors", "logits", "parameters", "gradients", "features", "scalars"]
Layout = list[tuple[str, tuple[int, ...]]]
"""Arrays of a message in byte order: NumPy type and shape."""

ITEM_SIZES = {"<f4": 4, "<f2": 2, "<u4": 4, "<u2": 2, "<u1": 1}

HEADER = struct.Struct("<4sHBB16sIIIHH")
"""Magic, schema, kind, encoding, federation digest, sender's index in the roster, round, rows, columns, flags."""


@dataclass(frozen=True)
class Message(ABC):
    """One message of a node or of a server."""

    sender: str
    round: int

    kind: ClassVar[Kind]
    code: ClassVar[int]
    """Number of the kind in the byte form."""
    FAULTS: ClassVar[tuple[str, ...]]
    """Reasons to reject it, in the order of the flags of `faults`. The first is values that are not finite."""

    encoding: Encoding = field(default=PLAIN, kw_only=True)
    """Format of the values."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the dimensions that determine its size."""

    @property
    @abstractmethod
    def flagged(self) -> bool:
        """Return whether the optional part is present."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return its tensors, in the order of `assemble`."""

    def arrays(self) -> list[Tensor]:
        """Return its encoded tensors, in the order of `layout`."""
        return self.tensors()

    @classmethod
    @abstractmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        """Return the arrays of a message of this shape."""

    @classmethod
    def read(cls, sender: str, round: int, arrays: list[Tensor], shape: Sequence[int], encoding: Encoding) -> Self:
        """Return a message from encoded tensors, in the order of `layout`."""
        flagged = len(arrays) > len(cls.layout(shape, False, encoding))
        return cls.assemble(sender, round, arrays, flagged)

    @classmethod
    @abstractmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        """Return a message from its tensors."""

    @abstractmethod
    def faults(self, labels: Tensor | None = None) -> Tensor:
        """Return which of `FAULTS` it has, as booleans `(…, faults)` on its device, without a transfer to the host.

        `labels` are those of the sender's public batch, if the message is about one.
        """

    def explain(self, fault: int, labels: Tensor | None = None) -> str:
        """Describe a fault, given by its index in `FAULTS`."""
        return f"it sent {self.FAULTS[fault]}"

    @classmethod
    def payload_size_of(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> int:
        """Return the bytes after the header of a message of this shape."""
        return sum(ITEM_SIZES[item] * math.prod(size) for item, size in cls.layout(shape, flagged, encoding))

    @property
    def payload_size(self) -> int:
        """Return the bytes without the header, as papers count them."""
        return self.payload_size_of(self.shape, self.flagged, self.encoding)

    @property
    def encoded_size(self) -> int:
        """Return the bytes of the byte form."""
        return HEADER.size + self.payload_size

    def to(self, device: torch.device) -> Self:
        """Return the same message on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        moved |= {name: tuple(t.to(device) for t in v) for name, v in values.items() if isinstance(v, tuple)}
        return replace(self, **moved)

    def remade(self, sender: str, round: int, tensors: list[Tensor]) -> Self:
        """Return a message of this kind and encoding with other tensors."""
        return replace(self.assemble(sender, round, tensors, self.flagged), encoding=self.encoding)

    def check_shape(self, *agreed: int) -> None:
        """Raise an error if the message does not have the agreed shape. The host knows shapes without a transfer."""
        if self.shape != agreed:
            raise MessageError(
                f"the {self.kind} of '{self.sender}' in round {self.round} have shape {self.shape}, "
                f"where {agreed} was agreed"
            )


def not_finite(tensor: Tensor, dimensions: int) -> Tensor:
    """Return whether any value in the trailing dimensions is NaN or infinite, `(…)`."""
    return ~torch.isfinite(tensor).flatten(-dimensions).all(-1) if dimensions else ~torch.isfinite(tensor)


def correct_count(scores: Tensor, labels: Tensor) -> Tensor:
    """Count rows `(…, rows, classes)` with their largest value at the label. Ties go to the lowest class."""
    return (scores.argmax(-1) == labels).sum(-1)
