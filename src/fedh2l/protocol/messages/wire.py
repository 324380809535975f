"""The byte form of messages: one header, then the arrays of the kind. `docs/protocol.md` describes every field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedh2l.errors import MessageError
from fedh2l.protocol.messages.base import HEADER, ITEM_SIZES, Kind, Message
from fedh2l.protocol.messages.encodings import CODES, PLAIN, Encoding
from fedh2l.protocol.messages.kinds import KINDS, Features, Posteriors, Vector
from fedh2l.protocol.roster import RESERVED, Roster

SCHEMA = 1
MAGIC = b"FH2L"
SERVER = RESERVED

_SERVER_PLACE = 2**32 - 1
_FLAGGED = 1
_TYPES = {"<f4": np.float32, "<f2": np.float16, "<u1": np.uint8}
"""Types to decode to. All other types are decoded to int64."""


def encoded_size(kind: Kind, encoding: str, shape: Sequence[int], flagged: bool = True) -> int:
    """Return the bytes of the byte form of a message of `shape`, equal to `len(encode(…))`."""
    if kind not in KINDS or (kind != Posteriors.kind and encoding != str(PLAIN)):
        raise MessageError(f"there is no message '{kind}' in encoding '{encoding}'")
    return HEADER.size + KINDS[kind].payload_size_of(shape, flagged, Encoding.of(encoding))


def encode(message: Message, roster: Roster) -> bytes:
    """Return the byte form of a message."""
    shape = message.shape
    header = HEADER.pack(
        MAGIC,
        SCHEMA,
        message.code,
        message.encoding.code,
        roster.digest,
        _SERVER_PLACE if message.sender == SERVER else roster.index[message.sender],
        message.round,
        shape[0],
        shape[-1] if len(shape) > 1 else 1,
        (_FLAGGED if message.flagged else 0) | message.encoding.kept << 8,
    )
    types = [item for item, _ in message.layout(shape, message.flagged, message.encoding)]
    arrays = [tensor.detach().cpu().numpy() for tensor in message.arrays()]
    return header + b"".join(array.astype(item).tobytes() for array, item in zip(arrays, types, strict=True))


def round_of(data: bytes) -> int:
    """Return the round in the header of a message, without checking the rest."""
    return int(_header(data)[6])


def _header(data: bytes) -> tuple[Any, ...]:
    if len(data) < HEADER.size:
        raise MessageError(f"{len(data)} bytes are shorter than a header")
    return HEADER.unpack_from(data)


def decode(data: bytes, roster: Roster, most: int | None = None) -> Message:
    """Decode a message. Raise `MessageError` if it is malformed or belongs to another federation.

    The values are checked by `faults`. A few bytes may decode to many numbers, so `most` limits their count. It
    protects receivers against messages that expand too far.
    """
    magic, schema, code, encoding, digest, place, round, rows, columns, flags = _header(data)
    if magic != MAGIC:
        raise MessageError("not a fedh2l message")
    if schema != SCHEMA:
        raise MessageError(f"schema version {schema}, but {SCHEMA} is supported here")
    kind = next((kind for kind in KINDS.values() if kind.code == code), None)
    written = next((Encoding(name, flags >> 8) for name, number in CODES.items() if number == encoding), None)
    if kind is None or written is None or not _sound(kind, written) or flags & 0xFF & ~_FLAGGED:
        raise MessageError(f"unknown kind {code}, encoding {encoding} or flags {flags}")
    if digest != roster.digest:
        raise MessageError("the message belongs to another federation")
    if place >= len(roster.names) and place != _SERVER_PLACE:
        raise MessageError(f"sender {place} is not in the roster")
    shape = _shape(kind, rows, columns, len(data) - HEADER.size)
    flagged = bool(flags & _FLAGGED)
    expected = HEADER.size + kind.payload_size_of(shape, flagged, written)
    if rows < 1 or columns < 1 or len(data) != expected:
        raise MessageError(f"{len(data)} bytes where {expected} belong to {rows} rows of {columns} columns")
    if most is not None and math.prod(shape) > most:
        raise MessageError(f"{rows} rows of {columns} columns, where there are at most {most} numbers")
    arrays, start = [], HEADER.size
    for item, size in kind.layout(shape, flagged, written):
        count = math.prod(size)
        array = np.frombuffer(data, item, count, start).reshape(size)
        arrays.append(torch.from_numpy(array.astype(_TYPES.get(item, np.int64))))
        start += count * ITEM_SIZES[item]
    sender = SERVER if place == _SERVER_PLACE else roster.names[place]
    return kind.read(sender, round, arrays, shape, written)


def _sound(kind: type[Message], encoding: Encoding) -> bool:
    """Return whether messages of a kind can have an encoding."""
    if kind is not Posteriors:
        return encoding == PLAIN
    return 0 < encoding.kept < 100 if encoding.name == "topk" else not encoding.kept


def _shape(kind: type[Message], rows: int, columns: int, body: int) -> tuple[int, ...]:
    """Return the shape given by a header. The width of features follows from the length of the message."""
    if issubclass(kind, Vector):
        if columns != 1:
            raise MessageError(f"a vector of {columns} columns")
        return (rows,)
    if kind is Features:
        return rows, max(0, body // max(rows, 1) - 4 * columns - 2) // 4, columns
    return rows, columns
