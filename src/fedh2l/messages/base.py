"""What every message has: a sender, a round, tensors of a fixed layout, and reasons to refuse it.

A message has a tensor form, which nodes in one process hand to each other, and a byte form (`wire.py`), which goes
over a network. Its size follows from its shape alone, so every engine counts the same bytes without making them.
Tensors may have leading dimensions for stacked nodes; shapes and sizes are those of one node's message.
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
from fedh2l.messages.encodings import PLAIN, Encoding

Kind = Literal["posteriors", "logits", "parameters", "gradients", "features", "scalars"]
Layout = list[tuple[str, tuple[int, ...]]]
"""The arrays of a message in the order of its bytes: NumPy type and shape."""

ITEM_SIZES = {"<f4": 4, "<f2": 2, "<u4": 4, "<u2": 2, "<u1": 1}

HEADER = struct.Struct("<4sHBB16sIIIHH")
"""Magic, schema, kind, encoding, federation digest, sender's place in the roster, round, rows, columns, flags."""


@dataclass(frozen=True)
class Message(ABC):
    """One message of a node, or of a server."""

    sender: str
    round: int

    kind: ClassVar[Kind]
    code: ClassVar[int]
    """What stands for the kind in the byte form."""
    FAULTS: ClassVar[tuple[str, ...]]
    """Why a receiver refuses it, in the order of the flags of `faults`."""

    encoding: Encoding = field(default=PLAIN, kw_only=True)
    """How values are written."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """What the sizes follow from; each kind says what it holds."""

    @property
    @abstractmethod
    def flagged(self) -> bool:
        """Whether the optional part is there."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """What it consists of; `assemble` makes it of them again."""

    def arrays(self) -> list[Tensor]:
        """What is written of it, in the order of `layout`."""
        return self.tensors()

    @classmethod
    @abstractmethod
    def layout(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> Layout:
        """The arrays of a message of this shape."""

    @classmethod
    def read(cls, sender: str, round: int, arrays: list[Tensor], shape: Sequence[int], encoding: Encoding) -> Self:
        """A message from what was written, in the order of `layout`."""
        flagged = len(arrays) > len(cls.layout(shape, False, encoding))
        return cls.assemble(sender, round, arrays, flagged)

    @classmethod
    @abstractmethod
    def assemble(cls, sender: str, round: int, tensors: list[Tensor], flagged: bool) -> Self:
        """A message from its tensors."""

    @abstractmethod
    def faults(self, labels: Tensor | None = None) -> Tensor:
        """Which of `FAULTS` it has, as booleans `(…, faults)` on its device, with nothing read by the host.

        `labels` are those of the sender's public batch, where the message speaks of one.
        """

    @classmethod
    def payload_size_of(cls, shape: Sequence[int], flagged: bool, encoding: Encoding = PLAIN) -> int:
        """Bytes behind the header of a message of this shape."""
        return sum(ITEM_SIZES[item] * math.prod(size) for item, size in cls.layout(shape, flagged, encoding))

    @property
    def payload_size(self) -> int:
        """Bytes of what a paper counts, with no header."""
        return self.payload_size_of(self.shape, self.flagged, self.encoding)

    @property
    def encoded_size(self) -> int:
        """Bytes of the byte form."""
        return HEADER.size + self.payload_size

    def to(self, device: torch.device) -> Self:
        """The same message on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        moved |= {name: tuple(t.to(device) for t in v) for name, v in values.items() if isinstance(v, tuple)}
        return replace(self, **moved)

    def remade(self, sender: str, round: int, tensors: list[Tensor]) -> Self:
        """A message of this kind and encoding of other tensors."""
        return replace(self.assemble(sender, round, tensors, self.flagged), encoding=self.encoding)

    def check_shape(self, *agreed: int) -> None:
        """Refuses a message that is not of the agreed shape; shapes are known to the host, so this one raises."""
        if self.shape != agreed:
            raise MessageError(
                f"the {self.kind} of '{self.sender}' in round {self.round} have shape {self.shape}, "
                f"where {agreed} was agreed"
            )


def not_finite(tensor: Tensor, dimensions: int) -> Tensor:
    """Whether any value of the trailing dimensions is NaN or infinite, `(…)`."""
    return ~torch.isfinite(tensor).flatten(-dimensions).all(-1) if dimensions else ~torch.isfinite(tensor)
