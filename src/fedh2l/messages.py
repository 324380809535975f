"""What may cross between nodes: one schema, one encoder, one validator.

A message has a tensor form, which nodes in one process hand to each other, and a byte form, which goes over a network.
`encoded_size` is the length of the byte form without making it, so every engine counts the same bytes.
`docs/protocol.md` gives the layout field by field.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedh2l.errors import MessageError
from fedh2l.losses import correct_count
from fedh2l.roster import Roster

SCHEMA = 1
MAGIC = b"FH2L"

Kind = Literal["posteriors"]
Encoding = Literal["float32"]
KIND_CODES: dict[Kind, int] = {"posteriors": 1}
ENCODING_CODES: dict[Encoding, int] = {"float32": 1}

_HEADER = struct.Struct("<4sHBB16sIIIHH")
"""Magic, schema, kind, encoding, federation digest, sender's place in the roster, round, rows, classes, flags."""
_COUNT = struct.Struct("<I")
_HAS_COUNT = 1

ROW_SUM_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Posteriors:
    """A teaching signal: a node's posteriors on its own public batch of a round, and how many it got right."""

    sender: str
    round: int
    values: Tensor
    """`(rows, classes)`; each row a distribution over the classes."""
    correct: Tensor | None
    """0…rows, an integer tensor `()`; None when the public data has no labels."""

    kind: Kind = "posteriors"
    encoding: Encoding = "float32"

    @staticmethod
    def of(sender: str, round: int, probabilities: Tensor, labels: Tensor | None) -> Posteriors:
        """The signal of a node, in exactly the values that its receivers will decode."""
        values = probabilities.detach().to(torch.float32)
        return Posteriors(sender, round, values, None if labels is None else correct_count(values, labels))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and classes."""
        return self.values.shape[-2], self.values.shape[-1]

    @property
    def accuracy(self) -> Tensor:
        """The teacher's confidence Acc of eq. (3), in 0…1, `()`."""
        if self.correct is None:
            raise MessageError(f"the signal of '{self.sender}' has no count of correct answers")
        return self.correct.to(torch.float64) / self.values.shape[-2]

    @property
    def payload_size(self) -> int:
        """Bytes of what the paper counts: the values and the accuracy, with no header."""
        return payload_size(self.kind, self.encoding, self.shape, counted=self.correct is not None)

    @property
    def encoded_size(self) -> int:
        """Bytes of the byte form."""
        return _HEADER.size + self.payload_size


def payload_size(kind: Kind, encoding: Encoding, shape: tuple[int, int], counted: bool = True) -> int:
    """Bytes behind the header of a message of `shape` (rows, classes)."""
    if kind not in KIND_CODES or encoding not in ENCODING_CODES:
        raise MessageError(f"there is no message '{kind}' in encoding '{encoding}'")
    return 4 * shape[0] * shape[1] + (_COUNT.size if counted else 0)


def encoded_size(kind: Kind, encoding: Encoding, shape: tuple[int, int], counted: bool = True) -> int:
    """Bytes of the byte form of a message of `shape` (rows, classes), equal to `len(encode(…))`."""
    return _HEADER.size + payload_size(kind, encoding, shape, counted)


def encode(message: Posteriors, roster: Roster) -> bytes:
    """The byte form."""
    rows, classes = message.shape
    header = _HEADER.pack(
        MAGIC,
        SCHEMA,
        KIND_CODES[message.kind],
        ENCODING_CODES[message.encoding],
        roster.digest,
        roster.index[message.sender],
        message.round,
        rows,
        classes,
        _HAS_COUNT if message.correct is not None else 0,
    )
    count = b"" if message.correct is None else _COUNT.pack(int(message.correct))
    return header + count + message.values.detach().cpu().to(torch.float32).numpy().astype("<f4").tobytes()


def decode(data: bytes, roster: Roster) -> Posteriors:
    """The tensor form of `data`; whatever is not a well-formed message of this federation raises `MessageError`.

    What the values are worth is for `faults` to say.
    """
    if len(data) < _HEADER.size:
        raise MessageError(f"{len(data)} bytes are shorter than a header")
    magic, schema, kind, encoding, digest, place, round, rows, classes, flags = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise MessageError("not a fedh2l message")
    if schema != SCHEMA:
        raise MessageError(f"schema version {schema}, but {SCHEMA} is spoken here")
    if kind not in KIND_CODES.values() or encoding not in ENCODING_CODES.values() or flags & ~_HAS_COUNT:
        raise MessageError(f"unknown kind {kind}, encoding {encoding} or flags {flags}")
    if digest != roster.digest:
        raise MessageError("the message belongs to another federation")
    if place >= len(roster.names):
        raise MessageError(f"sender {place} is not in the roster")
    counted = bool(flags & _HAS_COUNT)
    expected = encoded_size("posteriors", "float32", (rows, classes), counted)
    if rows < 1 or classes < 1 or len(data) != expected:
        raise MessageError(f"{len(data)} bytes where {expected} belong to {rows} rows of {classes} classes")
    body = _HEADER.size + (_COUNT.size if counted else 0)
    values = torch.from_numpy(np.frombuffer(data, "<f4", offset=body).reshape(rows, classes).astype(np.float32))
    correct = torch.tensor(_COUNT.unpack_from(data, _HEADER.size)[0]) if counted else None
    return Posteriors(roster.names[place], round, values, correct)


FAULTS = (
    "values that are not finite",
    "negative values",
    f"rows that do not sum to 1 within {ROW_SUM_TOLERANCE:g}",
    "a count of correct answers that its posteriors do not have",
)
"""Why a receiver refuses a message, in the order of the flags of `faults`."""


def faults(message: Posteriors, labels: Tensor | None) -> Tensor:
    """Which of `FAULTS` a message has, as booleans `(4,)` on its device, with nothing read by the host.

    `labels` are those of the sender's public batch, which every receiver holds.
    """
    values = message.values
    counts_differ = torch.zeros((), dtype=torch.bool, device=values.device)
    if labels is not None and message.correct is not None:
        counts_differ = correct_count(values, labels) != message.correct
    # A comparison with NaN is false, so the last three are phrased to catch it too.
    return torch.stack(
        [
            ~torch.isfinite(values).all(),
            ~(values >= 0).all(),
            ~((values.sum(-1) - 1).abs() <= ROW_SUM_TOLERANCE).all(),
            counts_differ,
        ]
    )


def check_shape(message: Posteriors, rows: int, classes: int) -> None:
    """Refuses a message that is not of the agreed shape; shapes are known to the host, so this one raises."""
    if message.shape != (rows, classes):
        raise MessageError(
            f"the signal of '{message.sender}' in round {message.round} has shape {message.shape}, "
            f"where {(rows, classes)} was agreed"
        )
