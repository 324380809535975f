"""Training state on disk: one file a checkpoint, written whole or not at all, and checked when it is read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedh2l.errors import RunError

log = logging.getLogger("fedh2l")

_MAGIC = b"fedh2l-checkpoint-1 "
_HEAD = len(_MAGIC) + 64 + 1  # magic, SHA-256 in hexadecimal, newline
KEEP = 2
"""A damaged newest checkpoint falls back to the one before."""


class Checkpoint(NamedTuple):
    """What a training needs to go on: tensors, and plain values that JSON can hold."""

    round: int
    tensors: dict[str, Tensor]
    plain: dict[str, Any]


def write_atomically(path: Path, *parts: bytes) -> None:
    """Writes under a temporary name, syncs, and renames, so that `path` is either absent, old or complete."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_exclusively(path: Path, data: bytes) -> None:
    """As `write_atomically`, but raises FileExistsError if `path` is there already."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    write_atomically(partial, data)
    try:
        os.link(partial, path)
    except OSError:
        if path.exists():
            raise FileExistsError(path) from None
        os.replace(partial, path)  # a file system without links
    else:
        partial.unlink()


def pack(checkpoint: Checkpoint) -> bytes:
    """The bytes of a checkpoint: a line with the SHA-256 of the rest, then safetensors."""
    return b"".join(_packed(checkpoint))


def _packed(checkpoint: Checkpoint) -> tuple[bytes, bytes]:
    """Both parts of it, which together would be one copy more: of large models it is gigabytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    plain = json.dumps({"round": checkpoint.round, **checkpoint.plain})
    body = save_tensors(tensors, metadata={"plain": plain})
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n", body


def unpack(data: bytes) -> Checkpoint:
    """The checkpoint in `data`; anything but exactly what `pack` wrote raises `RunError`."""
    if len(data) < _HEAD + 8 or not data.startswith(_MAGIC) or data[_HEAD - 1 : _HEAD] != b"\n":
        raise RunError("it is not a fedh2l checkpoint, or is cut short")
    body = data[_HEAD:]
    if hashlib.sha256(body).hexdigest().encode() != data[len(_MAGIC) : _HEAD - 1]:
        raise RunError("its SHA-256 does not match its content")
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    plain = json.loads(header["__metadata__"]["plain"])
    return Checkpoint(plain.pop("round"), load_tensors(body), plain)


def _name(round: int) -> str:
    return f"round-{round:09d}.ckpt"


class CheckpointFolder:
    """The checkpoints of one run, newest last; older ones than the last two are removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint and drops what it makes superfluous."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / _name(checkpoint.round)
        write_atomically(path, *_packed(checkpoint))
        for old in self.paths()[:-KEEP]:
            old.unlink()
        return path

    def drop_after(self, round: int) -> None:
        """Removes checkpoints of later rounds: damaged ones that a resume passed over, which are worth nothing now."""
        for path in self.paths():
            if path.name > _name(round):
                path.unlink()

    def clear(self) -> None:
        """Removes all of them, and their folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def paths(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        return sorted(self.folder.glob("round-*.ckpt"))

    def newest(self) -> tuple[Path, Checkpoint] | None:
        """The newest checkpoint that is sound and where it is, or None; says so about any that is not."""
        for path in reversed(self.paths()):
            try:
                return path, unpack(path.read_bytes())
            except (RunError, OSError) as error:
                log.warning("checkpoint %s is damaged (%s); trying the one before", path.name, error)
        return None
