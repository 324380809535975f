"""What is in a process that some nodes of a federation live in, and what it is sent."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedh2l.domain import Samples
from fedh2l.engines.residents import Residents
from fedh2l.federation import Federation
from fedh2l.learner import Learner
from fedh2l.messages import Message
from fedh2l.methods.base import Method
from fedh2l.node import Node
from fedh2l.optimizers import OptimizerSettings
from fedh2l.sampling import node_secret
from fedh2l.seedset import SeedSet
from fedh2l.settings import CORES, Compute
from fedh2l.topology import Graph


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
    compute: Compute
    decay: float


class Leg(NamedTuple):
    """What an actor does at a time: it learns from an exchange, does some rounds, and sends."""

    heard: tuple[int, Graph] | None
    """The round of the exchange, and whom each node hears in it."""
    rounds: range
    sends: bool
    expects: Graph = {}  # noqa: RUF012
    """Whom each node will hear when all have sent."""


class Size(NamedTuple):
    """What the ledger wants to know of a message."""

    encoded_size: int
    payload_size: int


class Actor:
    """Some nodes of a federation, in a process of their own with so many cores."""

    def __init__(self, parts: Sequence[Part], common: Common, cores: int, device: str) -> None:
        os.environ[CORES] = str(cores)
        torch.set_num_threads(common.threads)
        self.device = torch.device(device)
        seed_set = common.seed_set.to(self.device, common.dtype)
        validation = common.validation.to(self.device, common.dtype)
        learners = []
        for part in parts:
            learner = Learner(
                part.node, seed_set, part.secret, common.optimizer, common.batch_size, self.device, common.dtype,
                validation, common.compute, common.decay,
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

    def anticipate(self, leg: Leg) -> None:
        """What can be done after a leg before the messages of the others come."""
        if leg.expects:
            self.residents.anticipate(leg.expects, leg.rounds[-1])

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


def part_of(node: Node, learner: Learner, seed: int) -> Part:
    """A node as its learner is now, with tensors of its own."""
    model = copy.deepcopy(node.model) if isinstance(node.model, nn.Module) else node.model
    networks = {name: copy.deepcopy(network.module) for name, network in learner.networks.items()}
    alike = replace(node, model=model, weights=None)  # its state brings them
    return Part(alike, node_secret(seed, node.name), networks, learner.state())


def luggage(federation: Federation, method: Method, learners: Sequence[Learner]) -> tuple[Common, dict[str, Part]]:
    """What actors start with: what is common to all nodes, and what is each one's own."""
    settings, first = federation.settings, learners[0]
    assert first.validation is not None
    common = Common(
        method, federation.optimizer, settings.batch_size, settings.torch_dtype, settings.threads, first.seed_set,
        first.validation, settings.compute, settings.average,
    )  # fmt: skip
    nodes = zip(federation.members, learners, strict=True)
    return common, {node.name: part_of(node, learner, settings.seed) for node, learner in nodes}


def dealt(nodes: Sequence[Node], actors: int) -> list[list[Node]]:
    """Nodes in as many groups as there are to be actors, neighbours together; 0: each has its own."""
    count = min(actors or len(nodes), len(nodes))
    edges = [len(nodes) * place // count for place in range(count + 1)]
    return [list(nodes[a:b]) for a, b in pairwise(edges)]
