"""How a run goes, whatever the method and the data: the `[run]` section."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch
from pydantic import Field, ValidationInfo, field_validator

from fedh2l.errors import ConfigError
from fedh2l.section import Section


class RunSettings(Section):
    """The `[run]` section."""

    rounds: int = Field(2000, ge=1, description="rounds: one optimiser step on local data per node each")
    seed: int = Field(0, ge=0, description="everything random follows from it")
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto: a GPU if there is one")
    engine: Literal["auto", "local", "batched", "ray"] = Field(
        "auto",
        description="what runs the nodes: local, all in one process; batched, nodes of one architecture as one "
        "computation; ray, on a cluster; auto: batched on a GPU where it can be, else local",
    )
    threads: int = Field(
        1, ge=1, le=1024, description="threads within one operation; results repeat bit for bit at equal threads"
    )
    processes: int | Literal["auto"] = Field(
        "auto",
        description="processes that run.engine = 'local' deals the nodes to on a CPU; 1: threads of one process; auto: "
        "one a node where there are cores for three or more and the run is long",
    )
    dtype: Literal["float32", "float64"] = Field("float32", description="type of parameters and inputs")
    precision: Literal["float32", "bf16"] = Field(
        "float32",
        description="bf16: passes through models are in mixed precision, quicker on a GPU; parameters, losses, "
        "projection and messages stay as run.dtype says",
    )
    micro_batch: int | None = Field(
        None,
        ge=1,
        description="rows that go through a model at a time, for batches that do not fit in memory: their gradients "
        "add up, and each pass forward is done twice; batch norm sees so many rows",
    )
    batch_size: int = Field(32, ge=1, description="samples of a local batch")
    eval_every: int = Field(50, ge=1, description="rounds between evaluations on validation data")
    checkpoint_every: int | Literal["auto"] = Field(
        "auto", description="rounds between checkpoints; auto: as often as 2 % of the run time allows, 0: never"
    )
    selection: Literal["best", "last"] = Field(
        "best",
        description="which model of a node counts: best on pooled validation data, the latest of equals, or the last",
    )
    average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="decay of a moving average of each node's weights, which is then what counts as its model; 0: none",
    )
    out: str | None = Field(None, description="directory of the run; a new one under runs/ if not given")

    @field_validator("checkpoint_every", "processes")
    @classmethod
    def _auto_or_a_count(cls, value: int | str, info: ValidationInfo) -> int | str:
        least = {"checkpoint_every": 0, "processes": 1}[str(info.field_name)]
        if isinstance(value, int) and value < least:
            raise ValueError(f"must be 'auto' or at least {least}")
        return value

    @property
    def selection_rule(self) -> str:
        """How models were selected, in words, for wherever numbers are shown."""
        if self.selection == "last":
            return "last model"
        return f"best model on pooled validation ACC, the latest of equals, evaluated every {self.eval_every} rounds"

    @property
    def compute(self) -> Compute:
        """How passes through models are computed."""
        return Compute(self.precision == "bf16", self.micro_batch)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of parameters and inputs."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def resolved(self) -> RunSettings:
        """The same settings with what `auto` stands for on this machine."""
        if self.engine == "ray" and self.device not in ("auto", "cpu"):
            raise ConfigError(
                f"run.device = '{self.device}': with run.engine = 'ray' a node computes on a GPU if it asks for one, "
                f"by ray.num_gpus or nodes.*.resources = {{num_gpus = …}}; leave run.device at auto"
            )
        device = "cpu" if self.engine == "ray" else str(resolve_device(self.device))
        engine = "local" if self.engine == "auto" and device == "cpu" else self.engine
        return self.model_copy(update={"device": device, "engine": engine})


class Compute(NamedTuple):
    """How passes through a model are computed."""

    bf16: bool = False
    rows: int | None = None
    """How many at a time."""


AS_USUAL = Compute()


class RaySettings(Section):
    """The `[ray]` section: how `run.engine = "ray"` uses a cluster."""

    address: str | None = Field(
        None, description="of a Ray cluster; without one RAY_ADDRESS is used, and else Ray is started on this machine"
    )
    num_cpus: float = Field(1.0, ge=0, description="CPUs that a node asks for, unless its resources say otherwise")
    num_gpus: float = Field(
        0.0, ge=0, description="GPUs, or the share of one, that a node asks for; above 0 it uses it"
    )
    actors: int = Field(0, ge=0, description="processes that the nodes are dealt to; 0: each node has its own")
    restarts: int = Field(10, ge=0, description="how many times nodes that died are started again in a run")
    patience: float = Field(300.0, gt=0, description="seconds to wait for room on the cluster")


CORES = "FEDH2L_CORES"
"""Environment variable: how many cores a process may use; all that it is allowed to run on if not set."""


def available_cores() -> int:
    """How many cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get(CORES, "")
    return max(1, min(allowed, int(wanted))) if wanted.isdecimal() else allowed


def resolve_device(name: str) -> torch.device:
    """The device of that name, if it is there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"run.device: '{name}' is not a device; use cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"run.device: '{name}' is not there: {torch.cuda.device_count()} CUDA devices are visible; use cpu or auto"
        )
    return device
