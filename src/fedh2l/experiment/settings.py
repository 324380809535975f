"""Settings of a run that do not depend on the method or the data: the `[run]` section."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, field_validator

from fedh2l.errors import ConfigError
from fedh2l.hardware import resolve_device
from fedh2l.section import Section
from fedh2l.training.compute import Compute


class RunSettings(Section):
    """The `[run]` section."""

    rounds: int = Field(2000, ge=1, description="Number of rounds. A round is one local step on every node.")
    seed: int = Field(0, ge=0, description="Random seed.")
    device: str = Field(
        "auto", description="Device: cpu, cuda, cuda:N or auto. With auto, a GPU is used if there is one."
    )
    engine: Literal["auto", "local", "processes", "batched", "ray"] = Field(
        "auto",
        description="Where nodes run. With local, they are threads of one process. With processes, there is one "
        "process per core, at most one per node. With batched, nodes of one architecture are one "
        "computation. With ray, nodes run on a cluster. With auto, the engine is batched on a GPU if "
        "possible, processes for long runs on three or more cores, and else local.",
    )
    threads: int = Field(
        1,
        ge=1,
        le=1024,
        description="Threads within one operation. Runs are equal bit for bit only with equal threads.",
    )
    dtype: Literal["float32", "float64"] = Field("float32", description="Type of parameters and inputs.")
    precision: Literal["float32", "bf16"] = Field(
        "float32",
        description="bf16 runs models in mixed precision, which is faster on a GPU. Parameters, losses, the projection "
        "and messages keep run.dtype.",
    )
    micro_batch: int | None = Field(
        None,
        ge=1,
        description="Rows that pass through a model at a time, to save memory. Gradients are summed, and each forward "
        "pass runs twice. Batch norm sees this many rows.",
    )
    kernels: Literal["auto", "off"] = Field(
        "auto",
        description="Compiled kernels for small models. With auto, they are used where this machine can compile them. "
        "With off, nothing is compiled and PyTorch computes everything. Runs are equal bit for bit only with equal "
        "kernels.",
    )
    batch_size: int = Field(32, ge=1, description="Samples per local batch.")
    eval_every: int = Field(50, ge=1, description="Rounds between evaluations on validation data.")
    checkpoint_every: int | Literal["auto"] = Field(
        "auto", description="Rounds between checkpoints. auto spends 2 % of the time on them. 0 turns them off."
    )
    keep_checkpoint: bool = Field(
        False,
        description="Whether a finished run keeps a last checkpoint of 200 MB or more, so that it can be extended "
        "later. Smaller ones are always kept.",
    )
    selection: Literal["best", "last"] = Field(
        "best",
        description="Model to report: the best on the pooled validation data (the latest among equals), or the last.",
    )
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="EMA decay. If set, the averaged weights are evaluated and saved. 0 turns it off."
    )
    out: str | None = Field(None, description="Directory of the run. By default a new one in runs/.")

    @field_validator("checkpoint_every")
    @classmethod
    def _auto_or_a_count(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be 'auto' or at least 0")
        return value

    @property
    def selection_rule(self) -> str:
        """The selection rule in words, to show with results."""
        if self.selection == "last":
            return "last model"
        return f"best model on pooled validation ACC, the latest of equals, evaluated every {self.eval_every} rounds"

    @property
    def compute(self) -> Compute:
        """Precision, micro-batch size and kernels of the models."""
        return Compute(self.precision == "bf16", self.micro_batch, self.kernels == "auto")

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    def resolved(self) -> RunSettings:
        """Return the settings with `auto` replaced by its value on this machine."""
        if self.engine == "ray" and self.device not in ("auto", "cpu"):
            raise ConfigError(
                f"run.device = '{self.device}': with run.engine = 'ray', leave run.device at auto. To compute on GPUs, "
                f"set ray.num_gpus or nodes.*.resources = {{num_gpus = …}}"
            )
        if self.engine == "processes" and self.device not in ("auto", "cpu"):
            raise ConfigError(f"run.device = '{self.device}': with run.engine = 'processes', leave it at auto")
        on_cpu = self.engine in ("ray", "processes")
        return self.model_copy(update={"device": "cpu" if on_cpu else str(resolve_device(self.device))})


class RaySettings(Section):
    """The `[ray]` section: how `run.engine = "ray"` uses a cluster."""

    address: str | None = Field(
        None,
        description="Address of a Ray cluster. By default RAY_ADDRESS. Without either, Ray starts on this machine.",
    )
    num_cpus: float = Field(1.0, ge=0, description="CPUs per node. The resources of a node override it.")
    num_gpus: float = Field(0.0, ge=0, description="GPUs per node, or a share of one. Above 0, nodes compute on it.")
    actors: int = Field(0, ge=0, description="Processes that share the nodes. 0 gives each node its own process.")
    restarts: int = Field(10, ge=0, description="Largest number of restarts of failed nodes per run.")
    patience: float = Field(300.0, gt=0, description="Seconds to wait for room on the cluster.")
