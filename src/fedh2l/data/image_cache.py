"""A cache of decoded images on disk. The key is the content of the image files and the way they are decoded.

An entry has an array of bytes, `<key>.npy`, and a note, `<key>.json`, that names the originals. Only their owner can
read them, since they hold the same pixels as the originals. They stay when the originals are deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedh2l.data.images import Fit, decode, file_content
from fedh2l.errors import DataError, shown
from fedh2l.files import PRIVATE, UnreadableError, json_object, private_folder, read_array, write_atomically
from fedh2l.hardware import available_cores

log = logging.getLogger("fedh2l")

CACHE = "FEDH2L_CACHE"
"""Environment variable: the folder of the cache."""
VERSION = "images-1"
"""Part of the key. Change it when the same file would be decoded to other bytes."""
DAY = 24 * 3600
AT_ONCE = 256
"""Images to decode before they are written."""
ARRAY, NOTE, PART = ".npy", ".json", ".part"
OURS = re.compile(r"[0-9a-f]{64}\.(npy|json)|\.[0-9a-f]{64}\.json\.partial|[0-9a-f]{16}\w*\.part")
"""Names of files that this module writes. It never changes other files."""


def cache_folder() -> Path:
    """Return the folder of the cache."""
    chosen = os.environ.get(CACHE)
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else (Path(home) if home else Path.home() / ".cache") / "fedh2l" / "images"


def decoded(title: str, files: Sequence[Path], mode: str, size: tuple[int, int], fit: Fit) -> NDArray[np.uint8]:
    """Return all images `(files, channels, height, width)`, mapped from their cache file. Write it if there is none.

    The key depends on the content of the files, their order, and the way they are decoded. It does not depend on their
    place or names.
    """
    with ThreadPoolExecutor(available_cores()) as pool:
        sums = list(pool.map(lambda path: hashlib.sha256(file_content(path)).digest(), files))
        how = f"{VERSION} {mode} {size[0]}x{size[1]} {fit}".encode()
        key = hashlib.sha256(b"".join([how, *sums])).hexdigest()
        path = cache_folder() / f"{key}{ARRAY}"
        _tidy(path.parent)
        channels = 1 if mode == "L" else 3
        shape = (len(files), channels, size[1], size[0])
        found = _mapped(path, shape)
        if found is not None:
            _note(path, title, files)
            return found
        make = _making(path, shape)
        with make as array, _progress(title, len(files)) as advance:
            for start in range(0, len(files), AT_ONCE):
                part = files[start : start + AT_ONCE]
                for place, pixels in enumerate(
                    pool.map(lambda p: decode(p, file_content(p), mode, size, fit), part), start
                ):
                    array[place] = pixels
                    advance(1)
    made = _mapped(path, shape)
    if made is None:
        raise DataError(f"'{path}', the images just decoded, cannot be read")
    _note(path, title, files)
    return made


def _mapped(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """Map a cache file. Return None if it is missing or damaged."""
    try:
        array = read_array(path)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise DataError(
            f"decoded images in '{path}' cannot be read: {error}; name another folder in {CACHE}"
        ) from error
    except (OSError, UnreadableError) as error:
        log.warning("'%s' is damaged (%s); its images are decoded again", path, error)
        return None
    return array if array.dtype == np.uint8 and array.shape == shape else None


@contextmanager
def _making(path: Path, shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
    """Yield a new array that appears at `path` once it is complete. Several processes may write the same one."""
    try:
        private_folder(path.parent)
        handle, name = tempfile.mkstemp(PART, path.stem[:16], path.parent)  # readable by its owner only
        os.close(handle)
    except OSError as error:
        raise DataError(
            f"decoded images cannot be kept in '{path.parent}': {error}; name another folder in {CACHE}"
        ) from error
    try:
        array = np.lib.format.open_memmap(name, "w+", np.uint8, shape)
        _reserve(name)
        yield array
        array.flush()
        os.replace(name, path)
    except OSError as error:
        raise DataError(
            f"decoded images ({np.prod(shape) / 1e6:.0f} MB) cannot be written to '{path.parent}': {error}. "
            f"Name another folder in {CACHE}"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _reserve(name: str) -> None:
    """Reserve the disk space of a file. On a full disk, writing to a mapped file would end the process."""
    if hasattr(os, "posix_fallocate"):
        with open(name, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(name))


def _tidy(folder: Path) -> None:
    """Close the cache to other users, and remove unfinished files of killed processes."""
    if not folder.is_dir():
        return
    with contextlib.suppress(OSError):  # a cache that cannot be written can still be read
        private_folder(folder)
        for path in _files(folder):
            about = path.stat()
            if path.suffix == PART and time.time() - about.st_mtime > DAY:
                path.unlink()
            elif about.st_mode & 0o077:
                path.chmod(PRIVATE)


def _note(path: Path, title: str, files: Sequence[Path]) -> None:
    """Write which images an entry has. The file's time is the time of the last use."""
    about = {"data": title, "folder": os.path.commonpath([file.absolute().parent for file in files])}
    with contextlib.suppress(OSError):  # see above
        write_atomically(path.with_suffix(NOTE), json.dumps(about).encode(), private=True)


@dataclass(frozen=True)
class Entry:
    """The decoded images of one domain."""

    key: str
    images: int | None
    """Number of images. None if the file is damaged."""
    size: int
    """Size in bytes."""
    used: float
    """Time of the last use, in seconds since 1970."""
    data: str
    """Dataset and domain. Empty if not known."""
    folder: str
    """Folder of the originals at the last use. Empty if not known."""


def entries(folder: Path) -> list[Entry]:
    """Return this user's entries in a folder, the last used first."""
    found = [_entry(path) for path in _files(folder) if path.suffix == ARRAY]
    return sorted(found, key=lambda entry: -entry.used)


def _entry(path: Path) -> Entry:
    note = path.with_suffix(NOTE)
    try:
        about = json_object(note.read_bytes())
    except (OSError, UnreadableError):
        about = {}
    try:
        images = int(read_array(path).shape[0])
    except (OSError, UnreadableError, IndexError):
        images = None
    used = (note if about else path).stat().st_mtime
    return Entry(path.stem, images, path.stat().st_size, used, str(about.get("data", "")), str(about.get("folder", "")))


def clear(folder: Path, older_than: float | None = None) -> tuple[int, int]:
    """Remove this user's entries and unfinished files. Return the number of entries and of bytes.

    With `older_than`, entries that were used in this number of days stay.
    """
    limit = math.inf if older_than is None else time.time() - older_than * DAY
    keep = {entry.key for entry in entries(folder) if entry.used > limit}
    count = freed = 0
    for path in _files(folder):
        about = path.stat()
        if path.stem in keep or (path.suffix not in (ARRAY, NOTE) and about.st_mtime > limit):
            continue
        path.unlink()
        count, freed = count + (path.suffix == ARRAY), freed + about.st_size
    return count, freed


def _files(folder: Path) -> list[Path]:
    """Return this user's cache files in a folder. Links are not followed, since they lead to files outside."""
    there = [path for path in folder.iterdir() if OURS.fullmatch(path.name)] if folder.is_dir() else []
    there = [path for path in there if not path.is_symlink()]
    return [path for path in there if not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()]


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, or write a log line elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        log.info("reading %d images of %s", total, title)
        yield lambda count: None
        return
    columns = (
        TextColumn("reading images of {task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(shown(title), total=total)
        yield lambda count: bar.advance(task, count)
