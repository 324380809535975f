"""Nodes on a Ray cluster, or in processes of one machine: an actor for each, or for each of a few groups.

Actors hand their messages to each other through Ray's object store; the driver says who hears whom, counts, and is
the server where a method has one. It hands out work ahead of what is done, so that no actor waits for it.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import ray
import torch
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
from torch import Tensor, nn

from fedh2l.domain import Samples
from fedh2l.engines.base import Engine, Fault, NodesLostError, Which, raise_earliest
from fedh2l.engines.hub import Hub
from fedh2l.engines.residents import Residents
from fedh2l.errors import ConfigError, FedH2LError, RunError
from fedh2l.federation import Federation
from fedh2l.learner import Learner
from fedh2l.messages import Message
from fedh2l.methods.base import Method
from fedh2l.node import Node
from fedh2l.optimizers import OptimizerSettings
from fedh2l.plugins import search
from fedh2l.sampling import node_secret
from fedh2l.seedset import SeedSet
from fedh2l.settings import CORES, RaySettings, available_cores
from fedh2l.topology import Graph

log = logging.getLogger("fedh2l")

LOST = (RayActorError, ObjectLostError, OutOfMemoryError, WorkerCrashedError, NodeDiedError)
"""How Ray says that a process or machine is gone."""
AHEAD = 3
"""How many legs are handed out before the first of them is done."""
LEG = 10
"""Rounds without an exchange that an actor does at a time, at most, so that a run can be stopped soon."""


class Part(NamedTuple):
    """What an actor needs to take a node over: how to build it, and its state."""

    node: Node
    secret: str
    networks: dict[str, nn.Module]
    state: dict[str, Tensor]


class Common(NamedTuple):
    """What all nodes have in common."""

    method: Method
    optimizer: OptimizerSettings
    batch_size: int
    dtype: torch.dtype
    threads: int
    seed_set: SeedSet
    validation: Samples


class Leg(NamedTuple):
    """What an actor does at a time: it learns from an exchange, does some rounds, and sends."""

    heard: tuple[int, Graph] | None
    """The round of the exchange, and whom each node hears in it."""
    rounds: range
    sends: bool


class Flight(NamedTuple):
    """A leg that all actors were given."""

    rounds: range
    teachers: Graph | None
    """Who hears whom in the exchange at its end, where there is no server."""
    sizes: list[Any]


class Post(NamedTuple):
    """What was sent in a round and is to be heard at the start of the next leg."""

    round: int
    heard: Graph
    """Whose messages are for whom; a server's answer stands under the name of its receiver."""
    outboxes: list[tuple[Any, ...]]
    """For each actor, the objects that hold what its nodes hear."""


class Size(NamedTuple):
    """What the ledger wants to know of a message."""

    encoded_size: int
    payload_size: int


class NodeActor:
    """Some nodes of a federation, in a process of their own."""

    def __init__(self, stored: Sequence[Any], cores: int, paths: Sequence[str]) -> None:
        for path in paths:
            search(path)
        os.environ[CORES] = str(cores)
        parts: Sequence[Part]
        common: Common
        parts, common = ray.get(list(stored))
        torch.set_num_threads(common.threads)  # Ray sets it to the number of CPUs it was asked for
        self.device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        self.method = common.method
        seed_set = common.seed_set.to(self.device, common.dtype)
        validation = common.validation.to(self.device, common.dtype)
        learners = []
        for part in parts:
            learner = Learner(
                part.node, seed_set, part.secret, common.optimizer, common.batch_size, self.device, common.dtype,
                validation,
            )  # fmt: skip
            for name, module in part.networks.items():
                learner.further(name, module)
            learner.restore(part.state)
            learners.append(learner)
        self.residents = Residents(learners, common.method)

    def leg(self, leg: Leg, *outboxes: Mapping[str, Message]) -> tuple[dict[str, Message], dict[str, Size]]:
        """Does what `leg` says; returns what the nodes send, and how large that is."""
        if leg.heard is not None:
            round, heard = leg.heard
            sent = {sender: message.to(self.device) for outbox in outboxes for sender, message in outbox.items()}
            self.residents.receive(
                {name: [sent[sender] for sender in senders] for name, senders in heard.items()}, round
            )
        for round in leg.rounds:
            self.residents.local_steps(round)
        if not leg.sends:
            return {}, {}
        sends = self.residents.emit(leg.rounds[-1])
        sizes = {sender: Size(message.encoded_size, message.payload_size) for sender, message in sends.items()}
        return {sender: message.to(torch.device("cpu")) for sender, message in sends.items()}, sizes

    def ask(self, question: str, *arguments: Any) -> Any:
        """What the nodes say to one of the questions that `Residents` answers, on the CPU."""
        answer = getattr(self.residents, question)
        return _elsewhere(answer(*(self._here(argument) for argument in arguments)) if callable(answer) else answer)

    def _here(self, argument: Any) -> Any:
        if isinstance(argument, Message):
            return argument.to(self.device)
        if isinstance(argument, (list, tuple)) and argument and isinstance(argument[0], Samples):
            return [samples.to(self.device, samples.inputs.dtype) for samples in argument]
        return argument


def _elsewhere(answer: Any) -> Any:
    if isinstance(answer, Tensor):
        return answer.detach().cpu().clone()  # a view would be sent with all that it is a view of
    return {key: _elsewhere(value) for key, value in answer.items()} if isinstance(answer, dict) else answer


class RayEngine(Engine):
    """Runs the rounds of a federation whose nodes are in Ray actors."""

    fragile = True

    def __init__(self, federation: Federation) -> None:
        self.roster = federation.roster
        self.settings = federation.ray
        learners = federation.learners()
        self.method = federation.method.fitted(learners, federation.settings.rounds)
        self.hub = Hub(self.method, learners, self.roster, federation.settings.rounds)
        self.ledger = self.hub.ledger
        self._bytes = sum(learner.parameters.nbytes for learner in learners)
        self._given = {
            learner.name: learner
            for learner, node in zip(learners, federation.members, strict=True)
            if isinstance(node.model, nn.Module)
        }
        """Those whose module is the caller's: what they learn is brought back to it."""
        self._groups = _dealt(federation.members, self.settings.actors)
        self._wants = [_wanted([node.resources for node in group], self.settings) for group in self._groups]
        self._actors: list[Any] = []
        self._flying: deque[Flight] = deque()
        self._started = connect(self.settings, self._wants)
        try:
            self._send(federation, learners)
            self._actors += [self._actor(place) for place in range(len(self._groups))]
            self._await(self._actors)
        except BaseException:
            self._end()
            raise
        self._sets: tuple[Sequence[Samples], Any] | None = None
        self._going = True
        self._round_done = 0
        self._restarts = 0

    # Actors

    def _send(self, federation: Federation, learners: Sequence[Learner]) -> None:
        """Puts what actors start with where they find it, also those that are started again."""
        common = Common(
            self.method, federation.optimizer, federation.settings.batch_size, federation.settings.torch_dtype,
            federation.settings.threads, learners[0].seed_set, _validation(learners[0]),
        )  # fmt: skip
        self._common = ray.put(common)
        self._parts = []
        named = {learner.name: learner for learner in learners}
        for place, group in enumerate(self._groups):
            parts = [_part(node, named[node.name], federation.settings.seed) for node in group]
            try:
                self._parts.append(ray.put(parts))
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                why = str(error.__cause__ or error).strip().splitlines()[0]
                raise ConfigError(f"{self._who(place)} cannot be sent to another process: {why}") from error

    def _actor(self, place: int) -> Any:
        wanted = self._wants[place]
        cores = max(1, int(wanted["num_cpus"]))
        try:
            made = ray.remote(NodeActor).options(**wanted, max_restarts=0, max_task_retries=0)
            return made.remote([self._parts[place], self._common], cores, sys.path)
        except ValueError as error:
            why = " ".join(str(part).strip() for part in error.args)
            raise ConfigError(f"resources of {self._who(place)}: {why}") from None

    def _await(self, actors: Sequence[Any]) -> None:
        """Until actors are at work; says so if the cluster has no room for them."""
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
        return ", ".join(f"node '{node.name}'" for node in self._groups[place])

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Ray's errors as ours: what an actor raised on purpose, and that one is gone."""
        try:
            yield
        except RayTaskError as error:
            self._discard()
            if isinstance(error.cause, FedH2LError):
                raise error.cause from None
            if isinstance(error.cause, LOST):
                raise NodesLostError from None
            raise
        except LOST:
            raise NodesLostError from None

    def revive(self) -> list[str]:
        """Starts the actors that are gone again; all of them have to be restored then."""
        self._discard()
        lost = [place for place, actor in enumerate(self._actors) if not _alive(actor)]
        self._restarts += len(lost)
        if self._restarts > self.settings.restarts:
            raise RunError(
                f"{self._who(lost[0])} died, and nodes were restarted {self.settings.restarts} times before "
                f"(ray.restarts); is there enough memory for all of them?"
            )
        for place in lost:
            ray.kill(self._actors[place])  # it may only be out of reach
            self._actors[place] = self._actor(place)
        self._await([self._actors[place] for place in lost])
        return [node.name for place in lost for node in self._groups[place]]

    def _discard(self) -> None:
        """Waits for the legs that are under way to end, one way or the other."""
        for ref in [ref for flight in self._flying for ref in flight.sizes]:
            with suppress(Exception):
                ray.get(ref)
        self._flying.clear()

    # Rounds

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Hands out rounds in legs, each up to the next exchange."""
        self._going = True
        reached, post = first - 1, None
        with self._translated():
            while reached < last and self._going:
                rounds = self._until_exchange(reached + 1, last)
                outboxes = self._fly(rounds, post)
                reached, post = rounds[-1], None
                if self.method.exchanges(reached):
                    if not self.method.decentralised:
                        self._land(0, keep_going)  # the server answers when all have sent
                    post = self._post(reached, outboxes)
                self._land(AHEAD, keep_going)
            if post is not None:
                self._fly(range(0), post)
            self._land(0, keep_going)
        self._round_done = reached
        return reached

    def _until_exchange(self, first: int, last: int) -> range:
        end = min(last, first + LEG - 1)
        return range(first, next((round for round in range(first, end) if self.method.exchanges(round)), end) + 1)

    def _fly(self, rounds: range, post: Post | None) -> list[Any]:
        """Hands out a leg of these rounds, with what is to be heard before; returns where the outboxes will be."""
        sends = bool(rounds) and self.method.exchanges(rounds[-1])
        results = []
        for place, actor in enumerate(self._actors):
            heard = (post.round, {node.name: post.heard[node.name] for node in self._groups[place]}) if post else None
            outboxes = post.outboxes[place] if post else ()
            results.append(actor.leg.options(num_returns=2).remote(Leg(heard, rounds, sends), *outboxes))
        teachers = self.method.teachers(self.roster, rounds[-1]) if sends and self.method.decentralised else None
        self._flying.append(Flight(rounds, teachers, [sizes for _, sizes in results]))
        return [outbox for outbox, _ in results]

    def _post(self, round: int, outboxes: Sequence[Any]) -> Post:
        """Directs what was sent in a round to those who hear it, each actor getting what its nodes need."""
        teachers = self._flying[-1].teachers if self._flying else None
        if teachers is not None:
            home = {node.name: place for place, group in enumerate(self._groups) for node in group}
            needed = [
                sorted({home[sender] for node in group for sender in teachers[node.name]}) for group in self._groups
            ]
            return Post(round, teachers, [tuple(outboxes[place] for place in places) for places in needed])
        sent = {sender: message for outbox in ray.get(list(outboxes)) for sender, message in outbox.items()}
        answers = {name: answer for name, (answer,) in self.hub.answers(sent, round).items()}
        if len({id(answer) for answer in answers.values()}) == 1:
            everybody = ray.put(answers)
            posted = [(everybody,) for _ in self._groups]
        else:
            posted = [(ray.put({node.name: answers[node.name] for node in group}),) for group in self._groups]
        return Post(round, {name: (name,) for name in self.roster.names}, posted)

    def _land(self, ahead: int, keep_going: Callable[[int], bool]) -> None:
        """Waits until no more legs are under way than that, and counts what was sent in those that are done."""
        while len(self._flying) > ahead:
            flight = self._flying[0]
            sizes: dict[str, Size] = {}
            for part in ray.get(flight.sizes):
                sizes |= part
            self._flying.popleft()
            if flight.teachers is not None:
                self.ledger.heard(flight.teachers, sizes.__getitem__)
            for round in flight.rounds:
                self._going = keep_going(round) and self._going

    # Questions

    def _ask(self, question: str, *arguments: Any) -> list[Any]:
        """What each actor says."""
        with self._translated():
            return list(ray.get([actor.ask.remote(question, *arguments) for actor in self._actors]))

    def _named(self, question: str, *arguments: Any) -> dict[str, Any]:
        """What the actors say of their nodes, in roster order."""
        said = {name: value for part in self._ask(question, *arguments) for name, value in part.items()}
        return {name: said[name] for name in self.roster.names if name in said}

    def verify(self) -> None:
        """Asks all."""
        found: list[Fault] = [fault for part in self._ask("faults", self._round_done) for fault in part]
        raise_earliest(found + self.hub.faults())

    def series(self) -> dict[str, dict[str, list[float]]]:
        """Asks all."""
        return self._named("series")

    def complete(self, count: bool) -> None:
        """Through the object store, once for all."""
        message = self.hub.closing(self._round_done, count)
        if message is not None:
            self._ask("complete", ray.put(message))

    def validate(self) -> dict[str, int]:
        """Asks all."""
        return self._named("validate")

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        """Asks all; the sets are handed out once."""
        return self._named("correct", self._stored(sets))

    def validate_views(self) -> dict[str, dict[str, int]]:
        """Asks all."""
        counts: dict[str, dict[str, int]] = {}
        for part in self._ask("validate_views"):
            for view, right in part.items():
                counts.setdefault(view, {}).update(right)
        return counts

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        """Asks all; those of other nodes have nothing to say."""
        return self._named("correct_view", view, list(names), self._stored(sets))

    def _stored(self, sets: Sequence[Samples]) -> Any:
        if self._sets is None or self._sets[0] is not sets:
            self._sets = (sets, ray.put(list(sets)))
        return self._sets[1]

    def keep_best(self, names: Iterable[str]) -> None:
        """Tells all."""
        self._ask("keep_best", list(names))

    def select(self, which: Which) -> None:
        """Tells all."""
        self._ask("select", which)

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """Asks all."""
        return self._named("state_dicts")

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        """Asks all."""
        return self._named("logits", inputs)

    def state(self) -> dict[str, Tensor]:
        """The same as the local engine's, so that either may go on from it."""
        return {key: value for part in self._ask("state") for key, value in part.items()} | self.hub.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Hands each actor the states of its own nodes."""
        with self._translated():
            ray.get(
                [
                    actor.ask.remote("restore", {k: v for k, v in state.items() if k.split("/")[0] in _names(group)})
                    for actor, group in zip(self._actors, self._groups, strict=True)
                ]
            )
        self.hub.restore(state)

    @property
    def parameter_bytes(self) -> int:
        """Of all nodes."""
        return self._bytes

    def close(self) -> None:
        """Brings back what the caller's modules learned, and ends the actors."""
        try:
            if self._given:
                learned = self.state_dicts()
                for name, learner in self._given.items():
                    learner.module.load_state_dict(learned[name])
        except NodesLostError:
            log.warning("a node is gone, so the modules that were given keep their initial weights")
        finally:
            self._end()
            for learner in self._given.values():
                learner.release()

    def _end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._started:
            ray.shutdown()


def connect(settings: RaySettings, wants: Sequence[Mapping[str, Any]]) -> bool:
    """Connects to the cluster, or starts Ray on this machine; whether it was started, and so is to be ended."""
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
            cpus = sum(want["num_cpus"] for want in wants)  # a machine of one's own may be shared out more than once
            ray.init(
                address="local", num_cpus=max(available_cores(), int(-(-cpus // 1))), include_dashboard=False, **quiet
            )
    except (OSError, RayError, RuntimeError, ValueError) as error:
        where = f"at '{address}'" if address else "on this machine"
        raise RunError(f"cannot reach Ray {where}: {error}") from error
    return True


def _knock(address: str) -> None:
    """Raises OSError if nobody answers there; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" not in address and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def _dealt(nodes: Sequence[Node], actors: int) -> list[list[Node]]:
    """Nodes in as many groups as there are to be actors, neighbours together; 0: each has its own."""
    count = min(actors or len(nodes), len(nodes))
    edges = [len(nodes) * place // count for place in range(count + 1)]
    return [list(nodes[a:b]) for a, b in pairwise(edges)]


def _wanted(asked: Sequence[Mapping[str, float]], settings: RaySettings) -> dict[str, Any]:
    """What an actor asks the cluster for: the sum of what its nodes do."""
    total: dict[str, float] = {}
    for resources in asked:
        for key, amount in {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus, **resources}.items():
            total[key] = total.get(key, 0) + amount
    wanted: dict[str, Any] = {key: total.pop(key) for key in ("num_cpus", "num_gpus", "memory") if key in total}
    return wanted | {"resources": total}


def _part(node: Node, learner: Learner, seed: int) -> Part:
    """A node as its learner is now, with tensors of its own."""
    model = copy.deepcopy(node.model) if isinstance(node.model, nn.Module) else node.model
    networks = {name: copy.deepcopy(network.module) for name, network in learner.networks.items()}
    alike = Node(node.name, model, node.domain, node.model_args, node.resources)
    return Part(alike, node_secret(seed, node.name), networks, learner.state())


def _validation(learner: Learner) -> Samples:
    assert learner.validation is not None
    return learner.validation


def _names(group: Sequence[Node]) -> set[str]:
    return {node.name for node in group}


def _alive(actor: Any) -> bool:
    try:
        ray.get(actor.ask.remote("parameter_bytes"), timeout=60)
    except (*LOST, GetTimeoutError):
        return False
    return True


def _resources(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(key, 0):g} {key}" for key in ("CPU", "GPU"))
