"""Choice of the engine that runs a federation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fedh2l.engines.base import Engine
from fedh2l.engines.batched import BatchedEngine, obstacle
from fedh2l.engines.local import LocalEngine
from fedh2l.engines.processes import ProcessEngine, UnsendableError
from fedh2l.errors import ConfigError
from fedh2l.federation import Federation
from fedh2l.settings import available_cores

log = logging.getLogger("fedh2l")

PAYS = 3
"""Parallel nodes from which processes are faster than threads."""
LONG = 500
"""Rounds from which it pays to start processes, which takes some seconds."""


def engines_for(federations: Sequence[Federation]) -> list[Engine]:
    """Return one engine for each of several federations. Engines may share one computation.

    The federations must differ only by seed or data.
    """
    settings = federations[0].settings
    if settings.engine == "ray":
        ray = ray_module("fedh2l.engines.ray", "run.engine")
        return [ray.RayEngine(federation) for federation in federations]
    if settings.device == "cpu" and settings.engine in ("auto", "processes"):
        return [_on_cores(federation) for federation in federations]
    engines = [LocalEngine(f.learners(), f.method, f.roster, f.settings.rounds) for f in federations]
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


def _on_cores(federation: Federation) -> Engine:
    """Return an engine with nodes in processes, if `run.engine` requires it or if that is faster, else in threads."""
    settings = federation.settings
    processes = max(1, min(len(federation.members), available_cores() // settings.threads))
    if settings.engine == "processes" or (processes >= PAYS and settings.rounds >= LONG):
        try:
            return ProcessEngine(federation, processes)
        except UnsendableError as error:
            if settings.engine == "processes":
                raise ConfigError(f"run.engine = 'processes': nodes cannot be sent to a process: {error}") from error
            log.info("nodes run in threads, because they cannot be sent to a process: %s", error)
    return LocalEngine(federation.learners(), federation.method, federation.roster, settings.rounds)


def ray_module(name: str, key: str) -> Any:
    """Import a module of fedh2l that needs Ray. `key` is the setting that requires it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(f"{key}: 'ray' needs Ray, which is not installed; pip install 'fedh2l[ray]'") from None
