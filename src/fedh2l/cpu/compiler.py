"""Functions in C, compiled for this processor and the shapes at hand while a run starts.

That takes a C compiler, as `torch.compile` does; without one, PyTorch does the work. What was compiled is kept in the
user's cache, which nobody else may write to, for the same source, compiler and processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

log = logging.getLogger("fedh2l")

COMPILER = "FEDH2L_CC"
"""Environment variable: the C compiler; empty: none, so that PyTorch does everything."""
OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
PATIENCE = 120
"""Seconds that a compiler is given."""

_libraries: dict[tuple[str, ...], ctypes.CDLL | None] = {}
_one_at_a_time = threading.Lock()


def library(file: str, constants: Mapping[str, int]) -> ctypes.CDLL | None:
    """The functions of a file, compiled with `constants`; they run without Python's lock. None: they cannot be had."""
    key = (file, *(f"-D{name}={value}" for name, value in constants.items()))
    if key not in _libraries:
        with _one_at_a_time:
            if key not in _libraries:
                _libraries[key] = _loaded(*key)
    return _libraries[key]


def _loaded(file: str, *definitions: str) -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        return None
    command, version = compiler
    source = (files("fedh2l.cpu") / file).read_text()
    described = "\0".join([source, *command, version, *OPTIONS, *definitions, _processor()])
    name = f"{Path(file).stem}-{hashlib.sha256(described.encode()).hexdigest()[:32]}.so"
    try:
        folder = _cache()
        if folder is not None:
            path = folder / name
            if not path.exists():
                _compile(command, source, definitions, path)
            return ctypes.CDLL(str(path))
        with tempfile.TemporaryDirectory(prefix="fedh2l-") as own:
            path = Path(own) / name
            _compile(command, source, definitions, path)
            return ctypes.CDLL(str(path))  # it stays in memory when its file is gone
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.info("without functions of its own for this processor: %s", (said.strip().splitlines() or ["?"])[0])
        return None


def _compile(command: list[str], source: str, definitions: tuple[str, ...], path: Path) -> None:
    """Leaves a whole file or none, however many processes do this at once."""
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        arguments = [*command, *OPTIONS, *definitions, "-x", "c", "-", "-o", unfinished]
        subprocess.run(arguments, input=source, text=True, capture_output=True, check=True, timeout=PATIENCE)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


@cache
def _compiler() -> tuple[list[str], str] | None:
    """How it is called, and which one it is."""
    command = shlex.split(os.environ.get(COMPILER, "cc"))
    if not command or shutil.which(command[0]) is None:
        return None
    try:
        asked = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=PATIENCE)
    except (OSError, subprocess.SubprocessError):
        return None
    return command, asked.stdout


@cache
def _processor() -> str:
    """What code for this processor may need: a home directory can be that of several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    kept = ("vendor_id", "model name", "flags", "Features", "CPU part", "isa")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


@cache
def _cache() -> Path | None:
    """Where compiled functions are kept; None: nowhere that is ours alone."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "fedh2l"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except (OSError, RuntimeError):  # there may be no home
        return None
    ours = not hasattr(os, "getuid") or (about.st_uid == os.getuid() and not about.st_mode & 0o022)
    return folder if ours and os.access(folder, os.W_OK) else None
