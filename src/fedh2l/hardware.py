"""The machine: cores, devices, and copies to a device."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fedh2l.errors import ConfigError

CORES = "FEDH2L_CORES"
"""Environment variable: number of cores that a process may use. By default all that it may run on."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get(CORES, "")
    return max(1, min(allowed, int(wanted))) if wanted.isdecimal() else allowed


def resolve_device(name: str) -> torch.device:
    """Return the device of that name. Refuse one that does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"run.device: '{name}' is not a device. Use cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"run.device: '{name}' does not exist: {torch.cuda.device_count()} CUDA devices are visible. "
            "Use cpu or auto"
        )
    return device


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from the host to a device. Unlike a plain copy, this does not wait for a busy GPU."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
