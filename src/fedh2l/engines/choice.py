"""Which engine runs a federation."""

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
"""Nodes at work at once, from which on processes are quicker than threads."""
LONG = 500
"""Rounds from which on it pays to start processes, which takes some seconds."""


def engines_for(federations: Sequence[Federation]) -> list[Engine]:
    """An engine for each of some federations that differ by seed or data alone; they may share one computation."""
    settings = federations[0].settings
    if settings.engine == "ray":
        ray = ray_module("fedh2l.engines.ray", "run.engine")
        return [ray.RayEngine(federation) for federation in federations]
    if settings.device == "cpu" and settings.engine != "batched":
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
    """Nodes in threads, or in processes where that is asked for or pays."""
    settings = federation.settings
    processes = settings.processes
    if processes == "auto":
        at_once = min(len(federation.members), available_cores() // settings.threads)
        processes = at_once if at_once >= PAYS and settings.rounds >= LONG else 1
    if processes > 1:
        try:
            return ProcessEngine(federation, processes)
        except UnsendableError as error:
            if settings.processes != "auto":
                raise ConfigError(f"run.processes = {processes}: nodes cannot be sent to processes: {error}") from error
            log.info("nodes are run in threads, since they cannot be sent to processes: %s", error)
    return LocalEngine(federation.learners(), federation.method, federation.roster, settings.rounds)


def ray_module(name: str, key: str) -> Any:
    """A module of ours that needs Ray; `key` is what asked for it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(f"{key}: 'ray' needs Ray, which is not installed; pip install 'fedh2l[ray]'") from None
