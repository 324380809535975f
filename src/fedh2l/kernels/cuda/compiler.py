"""Compilation of CUDA kernels for given shapes at the start of a run.

It uses `cuda.bindings`, which PyTorch for CUDA on Linux installs. A compiler or the CUDA toolkit is not needed.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import ceil
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("fedh2l")

STATIC = 48 * 1024
"""Shared memory of a block in bytes, without opting in to more."""
C_TYPES = {int: ctypes.c_longlong, float: ctypes.c_double}
TYPES = {torch.float32: "float", torch.float64: "double"}
THREADS = 256
"""Threads per block in kernels on vectors."""
BLOCKS = 2048
"""Largest number of blocks per vector. It keeps a GPU busy. Each block strides over the vector."""


class Kernel:
    """A compiled kernel. Its arguments are tensors, integers (`long long`) and floats (`double`)."""

    def __init__(self, binary: bytes, name: str, shared: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        _enter_context()
        self._module = checked(driver.cuModuleLoadData(binary))
        self._function = checked(driver.cuModuleGetFunction(self._module, name.encode()))
        self._shared = shared
        if shared > STATIC:
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(self._function, most, shared))

    def __call__(self, grid: Sequence[int], threads: int, *arguments: Tensor | float | None) -> None:
        """Launch it on the current stream. `None` is a null pointer."""
        _enter_context()
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments)
        types = tuple(C_TYPES.get(type(a), ctypes.c_void_p) for a in arguments)
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch.cuda.current_stream().cuda_stream
        launch = self._driver.cuLaunchKernel
        checked(launch(self._function, x, y, z, threads, 1, 1, self._shared, stream, (values, types), 0))


def _enter_context() -> None:
    """Make PyTorch's context current. Threads of backward passes may not have one yet."""
    from cuda.bindings import driver

    if not int(checked(driver.cuCtxGetCurrent())):
        device = checked(driver.cuDeviceGet(torch.cuda.current_device()))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))


def checked(answer: tuple[Any, ...]) -> Any:
    """Return CUDA's result. Raise an error if its status is not success."""
    status, *rest = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return rest[0] if rest else None


def rows_of(vectors: Tensor) -> tuple[int, int, int]:
    """Return for vectors `(…, size)`: blocks per vector, number of vectors, and size."""
    size = vectors.shape[-1]
    return max(1, min(BLOCKS, ceil(size / THREADS))), vectors.numel() // max(size, 1), size


def can_take(vectors: Tensor, others: Tensor) -> bool:
    """Return whether kernels support these two tensors together."""
    alike = vectors.shape == others.shape and vectors.dtype == others.dtype and vectors.device == others.device
    return alike and vectors.is_cuda and vectors.dtype in TYPES and available(vectors.device)


@cache
def available(device: torch.device) -> bool:
    """Return whether kernels can be compiled for a GPU. One is compiled as a test."""
    try:
        with torch.cuda.device(device):
            kernel("adam.cu", "adam", torch.float32, {})
    except (ImportError, OSError, RuntimeError) as error:
        log.info("fedh2l runs without its CUDA kernels: %s", str(error).strip().splitlines()[0])
        return False
    return True


_kernels: dict[tuple[Any, ...], Kernel] = {}
_binaries: dict[tuple[Any, ...], bytes] = {}
"""Compiled files. A file may have several kernels."""


def kernel(file: str, name: str, dtype: torch.dtype, constants: Mapping[str, int], shared: int = 0) -> Kernel:
    """Return the kernel `name` of a file for the current device. Constants that start with # are only defined."""
    compiled = (torch.cuda.current_device(), file, dtype, *constants.items())
    key = (name, *compiled)
    if key not in _kernels:
        defined = [f"#define {word[1:]}" for word in constants if word.startswith("#")]
        numbers = ", ".join(f"{word} = {value}" for word, value in constants.items() if not word.startswith("#"))
        source = (files("fedh2l.kernels.cuda") / file).read_text()
        head = [*defined, f"typedef {TYPES[dtype]} REAL;", f"constexpr int {numbers};" if numbers else ""]
        if compiled not in _binaries:
            _binaries[compiled] = _compiled("\n".join([*head, source]), file)
        _kernels[key] = Kernel(_binaries[compiled], name, shared)
    return _kernels[key]


def _compiled(source: str, file: str) -> bytes:
    from cuda.bindings import nvrtc

    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17"]
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        report = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, report))
        raise RuntimeError(f"{file} could not be compiled: {report.decode()}")
    binary: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, binary))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return binary
