"""Compilation of C functions for this processor and for given shapes, at their first call.

This needs a C compiler, like `torch.compile`. Without one, PyTorch computes everything. Compiled functions are stored
in the user's cache, which other users cannot write to. The key is the source, the compiler and the processor.
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
"""Environment variable: the C compiler. If empty, PyTorch does everything."""
OPTIONS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
PATIENCE = 60
"""Time limit of the compiler in seconds."""


def library(file: str, **constants: int) -> ctypes.CDLL | None:
    """Return the functions of a file, compiled with `constants`, or None. They run without Python's global lock."""
    return _library(file, tuple(constants.items()))


def call(function: Callable[..., Any], *values: Tensor | float | None) -> None:
    """Call a C function with addresses of tensors, `long`, `double` and null. The tensors live until it returns."""
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
    source = (files("fedh2l.kernels.cpu") / file).read_text()
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
            return kept or ctypes.CDLL(str(path))  # it stays in memory after its file is deleted
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        log.warning(
            "%s cannot be compiled here, so PyTorch replaces it. This is slower, and results differ by rounding: %s "
            "(to compile nothing, set run.kernels = \"off\")", file, (output.strip().splitlines() or ["?"])[0],
        )  # fmt: skip
        if isinstance(error, subprocess.TimeoutExpired):
            _hangs.append(True)
        return None


_hangs: list[bool] = []
"""Not empty after the compiler has timed out. It is not called again."""


def _kept(path: Path) -> ctypes.CDLL | None:
    """Load a compiled file. Return None if it is missing, damaged, or writable by others."""
    try:
        return ctypes.CDLL(str(path)) if _is_ours(path) else None
    except OSError:
        return None


def _compile(command: list[str], source: str, path: Path) -> None:
    """Compile to a complete file or to none. Threads and processes may do this at the same time."""
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
    done = subprocess.run(command, input=given, check=True, **options)  # noqa: S603 - the compiler that the user names
    return str(done.stdout)


@cache
def _found() -> tuple[list[str], str] | None:
    """Return the compiler's command and version."""
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
    """Return the properties of the processor that compiled code needs. Several machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    kept = ("vendor_id", "model name", "flags", "Features", "CPU part", "isa")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))


@cache
def _cache() -> Path | None:
    """Return the folder of compiled functions, or None if others can write to it."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = base if base.is_absolute() else Path.home() / ".cache"
        folder = base / "fedh2l" / "code"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        if _is_ours(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home directory
        return None
    log.warning("'%s' is not used for compiled code, because others can write to it", folder)
    return None


def _is_ours(path: Path) -> bool:
    """Return whether only this user can have written the file. It will be executed."""
    try:
        about = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return not hasattr(os, "getuid") or (about.st_uid == os.getuid() and not about.st_mode & 0o022)
