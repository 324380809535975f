"""Ray actors for the nodes of an experiment, on a cluster or on this machine."""

from __future__ import annotations

import logging
import math
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from fedh2l.engines.actor import Actor, Common, Part
from fedh2l.errors import ConfigError, RunError
from fedh2l.experiment.settings import RaySettings
from fedh2l.hardware import available_cores
from fedh2l.plugins import search
from fedh2l.training.node import Node

log = logging.getLogger("fedh2l")

T = TypeVar("T")

LOST = (RayActorError, ObjectLostError, OutOfMemoryError, WorkerCrashedError, NodeDiedError)
"""Ray's exceptions for a lost process or machine."""


class RayActor(Actor):
    """An actor in a process of the cluster, on a GPU if Ray assigned one."""

    def __init__(self, stored: Sequence[Any], cores: int, paths: Sequence[str]) -> None:
        for path in paths:
            search(path)
        parts, common = ray.get(list(stored))
        super().__init__(parts, common, cores, "cuda" if ray.get_gpu_ids() else "cpu")


class ActorGroup:
    """One actor per group of nodes, restarted when it dies. The constructor connects to the cluster."""

    def __init__(self, groups: Sequence[Sequence[Node]], settings: RaySettings) -> None:
        self.settings = settings
        self.groups = groups
        self.actors: list[Any] = []
        self._wants = [_wanted([node.resources for node in group], settings) for group in self.groups]
        self._started = connect(settings, sum(want["num_cpus"] for want in self._wants))
        self._restarts = 0

    def start(self, common: Common, parts: Mapping[str, Part]) -> None:
        """Start all actors. Their initial data stays in the object store for restarts."""
        try:
            self._common = ray.put(common)
            self._parts = [self._sent(place, [parts[node.name] for node in g]) for place, g in enumerate(self.groups)]
            self.actors += [self._actor(place) for place in range(len(self.groups))]
            self._await(self.actors)
        except BaseException:
            self.end()
            raise

    def _sent(self, place: int, parts: Sequence[Part]) -> Any:
        try:
            return ray.put(list(parts))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            why = str(error.__cause__ or error).strip().splitlines()[0]
            raise ConfigError(f"{self._who(place)} cannot be sent to another process: {why}") from error

    def _actor(self, place: int) -> Any:
        wanted = self._wants[place]
        cores = max(1, int(wanted["num_cpus"]))
        try:
            made = ray.remote(RayActor).options(**wanted, max_restarts=0, max_task_retries=0)
            return made.remote([self._parts[place], self._common], cores, sys.path)
        except ValueError as error:
            why = " ".join(str(part).strip() for part in error.args)
            raise ConfigError(f"resources of {self._who(place)}: {why}") from None

    def _await(self, actors: Sequence[Any]) -> None:
        """Wait until the actors are running. Raise `RunError` if the cluster has no room for them."""
        began = time.monotonic()
        waiting = [actor.ask.remote("parameter_bytes") for actor in actors]
        told = False
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=5)
            try:
                ray.get(done)
            except (*LOST, RayTaskError) as error:
                why = str(error).strip().splitlines()[-1].strip()
                raise RunError(f"a node could not be started on the Ray cluster: {why}") from error
            seconds = time.monotonic() - began
            if waiting and seconds > self.settings.patience:
                raise RunError(
                    f"{len(waiting)} of {len(actors)} actors found no place on the Ray cluster within {seconds:.0f} s; "
                    f"it has {_resources(ray.cluster_resources())}, free are {_resources(ray.available_resources())}. "
                    f"Ask for less in nodes.*.resources or [ray], or raise ray.patience"
                )
            if waiting and not told and seconds > 20:
                told = True
                log.warning("%d actors wait for room on the Ray cluster", len(waiting))

    def _who(self, place: int) -> str:
        return ", ".join(f"node '{node.name}'" for node in self.groups[place])

    def replace_lost(self) -> list[str]:
        """Restart the lost actors. Return the names of their nodes."""
        lost = [place for place, actor in enumerate(self.actors) if not _alive(actor)]
        self._restarts += len(lost)
        if self._restarts > self.settings.restarts:
            raise RunError(
                f"{self._who(lost[0])} died, and nodes were restarted {self.settings.restarts} times before "
                f"(ray.restarts); is there enough memory for all of them?"
            )
        for place in lost:
            ray.kill(self.actors[place])  # it may be alive but unreachable
            self.actors[place] = self._actor(place)
        self._await([self.actors[place] for place in lost])
        return [node.name for place in lost for node in self.groups[place]]

    def end(self) -> None:
        """Stop the actors, and Ray if it was started for them."""
        for actor in self.actors:
            ray.kill(actor)
        if self._started:
            ray.shutdown()


def connect(settings: RaySettings, cpus: float = 0) -> bool:
    """Connect to the cluster, or start Ray on this machine. Return whether Ray must be shut down afterwards.

    `cpus` is the number of CPUs that the actors will request. On this machine it may exceed the number of cores.
    """
    if ray.is_initialized():
        return False
    address = settings.address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            _knock(address)
            ray.init(address=address, **quiet)
        else:
            there = max(available_cores(), math.ceil(cpus))
            patiently(lambda: ray.init(address="local", num_cpus=there, include_dashboard=False, **quiet))
    except (OSError, RayError, RuntimeError, ValueError) as error:
        where = f"at '{address}'" if address else "on this machine"
        raise RunError(f"cannot reach Ray {where}: {error}") from error
    return True


def patiently(start: Callable[[], T]) -> T:
    """Return the result of `start`, with up to three attempts.

    Ray's daemons have half a minute to start, which is too short on a busy machine.
    """
    attempts = 0
    while True:
        try:
            return start()
        except Exception as error:  # Ray has no specific exception for slow daemons
            attempts += 1
            if attempts == 3:
                raise RuntimeError(str(error)) from error
            log.warning("Ray did not start on this machine (%s); it is tried again", error)


def _knock(address: str) -> None:
    """Raise `OSError` if the address does not answer. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if "://" not in address and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _wanted(asked: Sequence[Mapping[str, float]], settings: RaySettings) -> dict[str, Any]:
    """Return the resources that an actor requests: the sum of its nodes' requests."""
    total: dict[str, float] = {}
    for resources in asked:
        for key, amount in {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus, **resources}.items():
            total[key] = total.get(key, 0) + amount
    wanted: dict[str, Any] = {key: total.pop(key) for key in ("num_cpus", "num_gpus", "memory") if key in total}
    return wanted | {"resources": total}


def _alive(actor: Any) -> bool:
    try:
        ray.get(actor.ask.remote("parameter_bytes"), timeout=60)
    except (*LOST, GetTimeoutError):
        return False
    return True


def _resources(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(key, 0):g} {key}" for key in ("CPU", "GPU"))
