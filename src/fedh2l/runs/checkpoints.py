"""Checkpoints on disk: one file per checkpoint, written atomically and verified when it is read."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedh2l.errors import RunError, shown
from fedh2l.files import json_object, private_folder, write_atomically

log = logging.getLogger("fedh2l")

_MAGIC = b"fedh2l-checkpoint-1 "
_HEAD = len(_MAGIC) + 64 + 1  # magic, SHA-256 in hexadecimal, newline
KEEP = 2
"""Checkpoints to keep. If the newest is damaged, the one before is used."""


class Checkpoint(NamedTuple):
    """The state of a training: tensors, and plain values that JSON can hold."""

    round: int
    tensors: dict[str, Tensor]
    plain: dict[str, Any]


def pack(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a checkpoint: a line with the SHA-256 of the rest, then safetensors."""
    return b"".join(_packed(checkpoint))


def _packed(checkpoint: Checkpoint) -> tuple[bytes, bytes]:
    """Return the two parts of a checkpoint. Joining them would copy gigabytes for large models."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    plain = json.dumps({"round": checkpoint.round, **checkpoint.plain})
    body = save_tensors(tensors, metadata={"plain": plain})
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n", body


def unpack(data: bytes) -> Checkpoint:
    """Return the checkpoint in `data`. Raise `RunError` for anything but the exact output of `pack`."""
    if len(data) < _HEAD + 8 or not data.startswith(_MAGIC) or data[_HEAD - 1 : _HEAD] != b"\n":
        raise RunError("it is not a fedh2l checkpoint, or is cut short")
    body = data[_HEAD:]
    if hashlib.sha256(body).hexdigest().encode() != data[len(_MAGIC) : _HEAD - 1]:
        raise RunError("its SHA-256 does not match its content")
    try:
        header = json_object(body[8 : 8 + int.from_bytes(body[:8], "little")])
        plain = json_object(header["__metadata__"]["plain"])
        return Checkpoint(int(plain.pop("round")), load_tensors(body), plain)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RunError(f"it does not hold what a checkpoint does ({shown(error, 80)})") from error


@contextmanager
def restoring(where: Path | str) -> Iterator[None]:
    """Raise `RunError` if a checkpoint has a correct checksum, but content that does not fit the run."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise RunError(
            f"the checkpoint in '{where}' does not fit this run ({type(error).__name__}: {shown(error, 200)}). It was "
            "changed, or another version of fedh2l wrote it"
        ) from error


def _name(round: int) -> str:
    return f"round-{round:09d}.ckpt"


class CheckpointFolder:
    """The checkpoints of one run. Only the last two are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint and remove older ones."""
        private_folder(self.folder)
        path = self.folder / _name(checkpoint.round)
        write_atomically(path, *_packed(checkpoint), private=True)
        for old in self.paths()[:-KEEP]:
            old.unlink()
        return path

    def drop_after(self, round: int) -> None:
        """Remove checkpoints of later rounds. A resume has skipped them because they are damaged."""
        for path in self.paths():
            if path.name > _name(round):
                path.unlink()

    def keep_only(self, round: int) -> None:
        """Remove all checkpoints but that of one round, and the folder if it is empty."""
        for path in self.paths():
            if path.name != _name(round):
                path.unlink()
        if not self.paths():
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def round(self) -> int:
        """Round in the name of the newest checkpoint, or 0. The file is not read, and may be damaged."""
        return max((int(path.stem.partition("-")[2]) for path in self.paths()), default=0)

    def paths(self) -> list[Path]:
        """Return all complete checkpoints, oldest first."""
        return sorted(self.folder.glob("round-*.ckpt"))

    def newest(self) -> tuple[Path, Checkpoint] | None:
        """Return the newest sound checkpoint and its path, or None. Log a warning for each damaged one."""
        for path in reversed(self.paths()):
            try:
                return path, unpack(path.read_bytes())
            except (RunError, OSError) as error:
                log.warning("checkpoint %s is damaged (%s); trying the one before", path.name, error)
        return None
