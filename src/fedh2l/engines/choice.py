"""Choice of the engine that runs an experiment."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fedh2l.engines.base import Engine
from fedh2l.engines.batched.engine import BatchedEngine, obstacle
from fedh2l.engines.local import LocalEngine
from fedh2l.engines.processes import ProcessEngine, UnsendableError
from fedh2l.errors import ConfigError
from fedh2l.experiment.experiment import Experiment
from fedh2l.hardware import available_cores

log = logging.getLogger("fedh2l")

PAYS = 3
"""Parallel nodes from which processes are faster than threads."""
LONG = 500
"""Rounds from which it pays to start processes, which takes some seconds."""


def engines_for(experiments: Sequence[Experiment]) -> list[Engine]:
    """Return one engine for each of several experiments. Engines may share one computation.

    The experiments must differ only by seed or data.
    """
    settings = experiments[0].settings
    if settings.engine == "ray":
        ray = ray_module("fedh2l.engines.ray", "run.engine")
        return [ray.RayEngine(experiment) for experiment in experiments]
    if settings.device == "cpu" and settings.engine in ("auto", "processes"):
        return [_on_cores(experiment) for experiment in experiments]
    engines = [LocalEngine(f.learners(), f.method, f.roster, f.settings.rounds) for f in experiments]
    if settings.engine == "local":
        return list(engines)
    reason = obstacle(engines)
    if settings.engine == "auto" and reason is not None:
        log.info("nodes are run one after the other, since %s", reason)
        return list(engines)
    try:
        return list(BatchedEngine.of(engines))
    except ConfigError as error:
        if settings.engine == "batched":
            raise
        log.info("nodes are run one after the other: %s", error)
        return list(engines)


def _on_cores(experiment: Experiment) -> Engine:
    """Return an engine with nodes in processes, if `run.engine` requires it or if that is faster, else in threads."""
    settings = experiment.settings
    processes = max(1, min(len(experiment.members), available_cores() // settings.threads))
    if settings.engine == "processes" or (processes >= PAYS and settings.rounds >= LONG):
        try:
            return ProcessEngine(experiment, processes)
        except UnsendableError as error:
            if settings.engine == "processes":
                raise ConfigError(f"run.engine = 'processes': nodes cannot be sent to a process: {error}") from error
            log.info("nodes run in threads, because they cannot be sent to a process: %s", error)
    return LocalEngine(experiment.learners(), experiment.method, experiment.roster, settings.rounds)


def ray_module(name: str, key: str) -> Any:
    """Import a module of fedh2l that needs Ray. `key` is the setting that requires it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(f"{key}: 'ray' needs Ray, which is not installed; pip install 'fedh2l[ray]'") from None
