"""Which engine runs a federation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fedh2l.engines.base import Engine
from fedh2l.engines.batched import BatchedEngine, obstacle
from fedh2l.engines.local import LocalEngine
from fedh2l.errors import ConfigError
from fedh2l.federation import Federation

log = logging.getLogger("fedh2l")


def engines_for(federations: Sequence[Federation]) -> list[Engine]:
    """An engine for each of some federations that differ by seed or data alone; they may share one computation."""
    settings = federations[0].settings
    if settings.engine == "ray":
        ray = ray_module("fedh2l.engines.ray", "run.engine")
        return [ray.RayEngine(federation) for federation in federations]
    engines = [LocalEngine(f.learners(), f.method, f.roster, f.settings.rounds) for f in federations]
    if settings.engine == "local" or (settings.engine == "auto" and settings.device == "cpu"):
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


def ray_module(name: str, key: str) -> Any:
    """A module of ours that needs Ray; `key` is what asked for it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(f"{key}: 'ray' needs Ray, which is not installed; pip install 'fedh2l[ray]'") from None
