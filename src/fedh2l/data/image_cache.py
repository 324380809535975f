"""Images decoded once: arrays of bytes on disk, found again by what is in the files and how they were read."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedh2l.data.images import Fit, decode, file_content
from fedh2l.errors import DataError
from fedh2l.settings import available_cores

log = logging.getLogger("fedh2l")

CACHE = "FEDH2L_CACHE"
"""Environment variable: the folder of decoded images."""
VERSION = "images-1"
"""Part of the key: to be changed when a file would become other bytes."""
DAY = 24 * 3600
AT_ONCE = 256
"""Images that are decoded before they are written."""


def cache_folder() -> Path:
    """Where decoded images are kept; it may be emptied at any time."""
    chosen = os.environ.get(CACHE)
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else (Path(home) if home else Path.home() / ".cache") / "fedh2l" / "images"


def decoded(title: str, files: Sequence[Path], mode: str, size: tuple[int, int], fit: Fit) -> NDArray[np.uint8]:
    """All images `(files, channels, height, width)`, mapped from a file that is made if there is none.

    Its key is what the files hold, in their order, and how they are read; where files are and what they are called
    makes no difference.
    """
    with ThreadPoolExecutor(available_cores()) as pool:
        sums = list(pool.map(lambda path: hashlib.sha256(file_content(path)).digest(), files))
        how = f"{VERSION} {mode} {size[0]}x{size[1]} {fit}".encode()
        key = hashlib.sha256(b"".join([how, *sums])).hexdigest()
        path = cache_folder() / f"{key}.npy"
        channels = 1 if mode == "L" else 3
        shape = (len(files), channels, size[1], size[0])
        found = _mapped(path, shape)
        if found is not None:
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
    return made


def _mapped(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """What is there, if it is whole."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise DataError(
            f"decoded images in '{path}' cannot be read: {error}; name another folder in {CACHE}"
        ) from error
    except (OSError, ValueError, EOFError) as error:
        log.warning("'%s' is damaged (%s); its images are decoded again", path, error)
        return None
    return array if array.dtype == np.uint8 and array.shape == shape else None


@contextmanager
def _making(path: Path, shape: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
    """A new array that is at `path` when it is complete, and not before; several processes may make the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy(path.parent)
        handle, name = tempfile.mkstemp(".part", path.stem[:16], path.parent)
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
        os.chmod(name, 0o666 & ~_umask())  # a folder may be shared
        os.replace(name, path)
    except OSError as error:
        raise DataError(
            f"decoded images ({np.prod(shape) / 1e6:.0f} MB) cannot be written to '{path.parent}': {error}; "
            f"name another folder in {CACHE}"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _reserve(name: str) -> None:
    """Takes up the room of a file now: where a disk is full, writing to a mapped file would end the process."""
    if hasattr(os, "posix_fallocate"):
        with open(name, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(name))


def _tidy(folder: Path) -> None:
    """Removes what processes that were killed left behind."""
    for left in folder.glob("*.part"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > DAY:
                left.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, a line in the log elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        log.info("reading %d images of %s", total, title)
        yield lambda count: None
        return
    columns = (TextColumn("reading images of {task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
