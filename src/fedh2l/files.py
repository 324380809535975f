"""Atomic writes, and reads that check the content of text, JSON, TOML, array and tensor files."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

METADATA = "fedh2l"
"""The entry of a safetensors file's metadata that describes its content."""
LARGEST = 2**256
"""Largest whole number. A larger one may not fit a float."""
DEEPEST = 100
"""Largest nesting depth of tables and lists."""
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
"""Modes of files and folders that only their owner may read: models, checkpoints, transcripts, logs, decoded images."""


class UnreadableError(ValueError):
    """The content of a file is invalid. The message gives the reason, without the path."""


def write_atomically(path: Path, *parts: bytes, private: bool = False) -> None:
    """Write under a temporary name, sync and rename, so that `path` is either absent, old or complete.

    A private file is readable only by its owner, from the first byte on.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # an existing file would keep its mode
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE if private else 0o666)
    with open(handle, "wb") as file:
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
    """Write like `write_atomically`, but raise FileExistsError if `path` exists."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    write_atomically(partial, data)
    try:
        os.link(partial, path)
    except OSError:
        if path.exists():
            partial.unlink()
            raise FileExistsError(path) from None
        os.replace(partial, path)  # a file system without links
    else:
        partial.unlink()


def is_leftover(path: Path, name: str) -> bool:
    """Return whether a process left this file when it was killed in `write_exclusively`, writing `name`."""
    return path.is_file() and re.fullmatch(rf"\.+{re.escape(name)}\.\d+(\.partial)+", path.name) is not None


def private_folder(path: Path) -> None:
    """Make a folder that only its owner may enter, or restrict an existing folder of the user."""
    path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    about = path.stat()
    if os.name == "posix" and about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) & 0o077:
        path.chmod(PRIVATE_FOLDER)


def private_opener(path: str, flags: int) -> int:
    """Open a file such that a new one is readable only by its owner. Use as `open(path, mode, opener=…)`."""
    return os.open(path, flags, PRIVATE)


def check_regular(path: Path) -> None:
    """Raise `UnreadableError` for a named pipe, a socket or a device. Reading them may never end."""
    try:
        kind = path.stat().st_mode
    except (OSError, ValueError):  # opening it tells why
        return
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise UnreadableError("it is not a regular file")


def read_text(path: Path) -> str:
    """Return the text in a file. Raise `UnreadableError` or FileNotFoundError."""
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(str(error.strerror)) from error
    except UnicodeDecodeError:
        raise UnreadableError("it holds bytes that are not UTF-8 text") from None
    except ValueError as error:  # an invalid path
        raise UnreadableError(str(error)) from None


def json_value(text: str | bytes) -> Any:
    """Return the JSON value in a text. Raise `UnreadableError` if there is none."""
    try:
        return _sound(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it holds no JSON that can be read ({error})") from None


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object in a text. Raise `UnreadableError` for anything else."""
    found = json_value(text)
    if not isinstance(found, dict):
        raise UnreadableError(f"it holds {type(found).__name__} where an object was expected")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raise `UnreadableError` or FileNotFoundError."""
    text = read_text(path)
    try:
        found: dict[str, Any] = _sound(tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it is not valid TOML: {error}") from error
    return found


def _sound(value: Any) -> Any:
    """Return the value. Refuse null characters in texts, huge numbers, and nesting that is too deep to process."""
    level = [value]
    for _ in range(DEEPEST):
        if any("\x00" in each for each in level if isinstance(each, str)):
            raise ValueError("a text has a null character")
        if any(abs(each) > LARGEST for each in level if isinstance(each, int)):
            raise ValueError("a number is too large")
        holders = [each for each in level if isinstance(each, (dict, list))]
        if not holders:
            return value
        level = [each for one in holders for each in (one.values() if isinstance(one, dict) else one)]
    raise ValueError("it is nested too deeply")


def read_array(path: Path) -> NDArray[Any]:
    """Return the array in a .npy file. Raise `UnreadableError` or OSError.

    The file is memory-mapped, so a false header cannot allocate memory.
    """
    check_regular(path)
    try:
        import numpy as np  # commands that read no arrays start faster without it

        return np.lib.format.open_memmap(path, "r")
    except OSError:
        raise
    except Exception as error:  # NumPy parses the header as Python, which can fail in any way
        raise UnreadableError(str(error)) from error


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors in a safetensors file. Raise `UnreadableError` if it is damaged."""
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = json_object((file.metadata() or {}).get(METADATA, "{}"))
            return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except UnreadableError:
        raise
    except (OSError, SafetensorError, ValueError, TypeError, RuntimeError, KeyError) as error:
        raise UnreadableError(str(error)) from error
