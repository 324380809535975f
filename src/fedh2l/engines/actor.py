"""Actors, which run some nodes of an experiment in one process, and the data that they receive."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedh2l.data.domain import Samples
from fedh2l.engines.local_nodes import Inboxes, LocalNodes, Outbox
from fedh2l.engines.rounds import Done, Exchange, rounds
from fedh2l.experiment.experiment import Experiment
from fedh2l.hardware import CORES
from fedh2l.methods.base import Method
from fedh2l.protocol.messages import Message
from fedh2l.protocol.sampling import node_secret
from fedh2l.protocol.topology import Graph
from fedh2l.training.node import Node
from fedh2l.training.node_learner import NodeLearner, Training


class Part(NamedTuple):
    """A node and its state. An actor builds the learner from them."""

    node: Node
    secret: str
    networks: dict[str, nn.Module]
    state: dict[str, Tensor]


class Common(NamedTuple):
    """Settings and data that all nodes share."""

    method: Method
    training: Training
    threads: int


class WorkUnit(NamedTuple):
    """A unit of work for an actor: receive the messages of an exchange, run some rounds, and send."""

    heard: Graph | None
    """Senders per node in the preceding exchange. None if there was none."""
    rounds: range
    """Only the last round may have an exchange."""


class Size(NamedTuple):
    """Sizes of a message that the ledger counts."""

    encoded_size: int
    payload_size: int


class Actor:
    """Runs some nodes of an experiment in one process with `cores` cores."""

    def __init__(self, parts: Sequence[Part], common: Common, cores: int, device: str) -> None:
        os.environ[CORES] = str(cores)
        torch.set_num_threads(common.threads)
        self.device = torch.device(device)
        training, learners = common.training.to(self.device), []
        for part in parts:
            learner = NodeLearner(part.node, training, part.secret)
            for name, module in part.networks.items():
                learner.further(name, module)
            learner.restore(part.state)
            learners.append(learner)
        self.local_nodes = LocalNodes(learners, common.method)
        self._rounds: Iterator[Exchange[Outbox, Inboxes] | Done] = iter(())
        self._exchange: Exchange[Outbox, Inboxes] | None = None
        """Exchange whose incoming messages are missing."""

    def unit(self, unit: WorkUnit, *outboxes: Mapping[str, Message]) -> tuple[dict[str, Message], dict[str, Size]]:
        """Run a unit of work. Return the messages of the nodes, and their sizes."""
        if unit.heard is not None:
            sent = {sender: message.to(self.device) for outbox in outboxes for sender, message in outbox.items()}
            self._finish({name: [sent[sender] for sender in senders] for name, senders in unit.heard.items()})
        self._rounds = rounds(self.local_nodes, self.local_nodes.method, unit.rounds)
        for event in self._rounds:
            if isinstance(event, Exchange):  # only in the last round
                self._exchange = event
                sizes = {name: Size(message.encoded_size, message.payload_size) for name, message in event.sent.items()}
                return {name: message.to(torch.device("cpu")) for name, message in event.sent.items()}, sizes
        return {}, {}

    def _finish(self, inboxes: Inboxes) -> None:
        """Finish the round that waits for messages."""
        assert self._exchange is not None
        self._exchange.inboxes = inboxes
        for _ in self._rounds:
            pass
        self._exchange = None

    def ask(self, question: str, *arguments: Any) -> Any:
        """Call a method or read a property of `LocalNodes`. Return the result on the CPU."""
        answer = getattr(self.local_nodes, question)
        return _elsewhere(answer(*(self._here(argument) for argument in arguments)) if callable(answer) else answer)

    def _here(self, argument: Any) -> Any:
        if isinstance(argument, Message):
            return argument.to(self.device)
        if isinstance(argument, (list, tuple)) and argument and isinstance(argument[0], Samples):
            return [samples.to(self.device, samples.inputs.dtype) for samples in argument]
        return argument


def _elsewhere(answer: Any) -> Any:
    if isinstance(answer, Tensor):
        return answer.detach().cpu().clone()  # a view would be pickled with all of its storage
    return {key: _elsewhere(value) for key, value in answer.items()} if isinstance(answer, dict) else answer


def part_of(node: Node, learner: NodeLearner, seed: int) -> Part:
    """Return a node with the current state of its learner, in copied tensors."""
    model = copy.deepcopy(node.model) if isinstance(node.model, nn.Module) else node.model
    networks = {name: copy.deepcopy(network.module) for name, network in learner.networks.items()}
    alike = replace(node, model=model, weights=None)  # the state contains the weights
    return Part(alike, node_secret(seed, node.name), networks, learner.state())


def init_payload(
    experiment: Experiment, method: Method, learners: Sequence[NodeLearner]
) -> tuple[Common, dict[str, Part]]:
    """Return the data that actors start with: the common data, and the part of each node."""
    settings = experiment.settings
    nodes = zip(experiment.members, learners, strict=True)
    parts = {node.name: part_of(node, learner, settings.seed) for node, learner in nodes}
    return Common(method, experiment.training(), settings.threads), parts


def dealt(nodes: Sequence[Node], actors: int) -> list[list[Node]]:
    """Split nodes into as many groups of neighbours as there are actors. 0 means one group per node."""
    count = min(actors or len(nodes), len(nodes))
    edges = [len(nodes) * place // count for place in range(count + 1)]
    return [list(nodes[a:b]) for a, b in pairwise(edges)]
