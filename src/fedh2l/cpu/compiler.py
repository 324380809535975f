"""Functions in C, compiled for this processor and the shapes at hand when they are first called.

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
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor

log = logging.getLogger("fedh2l")

COMPILER = "FEDH2L_CC"
"""Environment variable: the C compiler; empty: none, so that PyTorch does everything."""
OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
PATIENCE = 60
"""Seconds that a compiler is given."""


def library(file: str, **constants: int) -> ctypes.CDLL | None:
    """The functions of a file, compiled with `constants`; they run without Python's lock. None: they cannot be had."""
    return _library(file, tuple(constants.items()))


def call(function: Callable[..., Any], *values: Tensor | float | None) -> None:
    """Calls a function in C with addresses of tensors, which live until it has returned, `long`, `double` and null."""
    function(*(_passed(value) for value in values))


def _passed(value: Tensor | float | None) -> Any:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return ctypes.c_long(value) if isinstance(value, int) else ctypes.c_double(value)


@cache
def _library(file: str, constants: tuple[tuple[str, int], ...]) -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        return None
    command, version = compiler
    source = (files("fedh2l.cpu") / file).read_text()
    definitions = [f"-D{name}={value}" for name, value in constants]
    described = "\0".join([source, *command, version, *OPTIONS, *definitions, _processor()])
    name = f"{Path(file).stem}-{hashlib.sha256(described.encode()).hexdigest()[:32]}.so"
    try:
        with ExitStack() as stack:
            folder = _cache() or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedh2l-")))
            path = folder / name
            kept = _kept(path)
            if kept is None:
                _compile([*command, *OPTIONS, *definitions], source, path)
            return kept or ctypes.CDLL(str(path))  # it stays in memory when its file is gone
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning(
            "%s cannot be compiled here, so PyTorch does its work, more slowly and to rounding: %s (%s= in the "
            "environment says that there is no compiler)", file, (said.strip().splitlines() or ["?"])[0], COMPILER,
        )  # fmt: skip
        if isinstance(error, subprocess.TimeoutExpired):
            _hangs.append(True)
        return None


_hangs: list[bool] = []
"""Whether the compiler was waited for in vain; once is enough."""


def _kept(path: Path) -> ctypes.CDLL | None:
    """What was compiled before, if it is there, ours alone, and whole."""
    try:
        return ctypes.CDLL(str(path)) if _is_ours(path) else None
    except OSError:
        return None


def _compile(command: list[str], source: str, path: Path) -> None:
    """Leaves a whole file or none, however many threads and processes do this at once."""
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        _run([*command, "-x", "c", "-", "-o", unfinished, "-lm"], source)
        if not os.path.getsize(unfinished):
            raise OSError(f"'{shlex.join(command[:1])}' wrote nothing")
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def _run(command: list[str], given: str = "") -> str:
    options: Any = {"encoding": "utf-8", "errors": "replace", "capture_output": True, "timeout": PATIENCE}
    return str(subprocess.run(command, input=given, check=True, **options).stdout)


@cache
def _found() -> tuple[list[str], str] | None:
    """How the compiler is called, and which one it is."""
    try:
        command = shlex.split(os.environ.get(COMPILER, "cc"))
        if not command or shutil.which(command[0]) is None:
            return None
        return command, _run([*command, "--version"])
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _compiler() -> tuple[list[str], str] | None:
    return None if _hangs else _found()


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
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = base if base.is_absolute() else Path.home() / ".cache"
        folder = base / "fedh2l" / "code"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        if _is_ours(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # there may be no home
        return None
    log.warning("'%s' is not kept for what is compiled, since others can write there", folder)
    return None


def _is_ours(path: Path) -> bool:
    """Whether there is something that nobody else can have written: it is going to be run."""
    try:
        about = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return not hasattr(os, "getuid") or (about.st_uid == os.getuid() and not about.st_mode & 0o022)
