"""Engine that runs nodes in Ray actors, with one actor per node or per group of nodes.

Actors exchange messages through Ray's object store. The driver selects the receivers, counts the messages, and runs the
server if the method has one. It submits work in advance, so that no actor waits for the driver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayTaskError

from fedh2l.engines.actor import Size, WorkUnit, dealt, init_payload
from fedh2l.engines.actor_group import LOST, ActorGroup
from fedh2l.engines.base import NodesLostError
from fedh2l.engines.remote import RemoteEngine
from fedh2l.errors import FedH2LError
from fedh2l.experiment.experiment import Experiment
from fedh2l.protocol.topology import Graph

AHEAD = 3
"""Maximum number of submitted units that are not done."""


class PendingUnit(NamedTuple):
    """A unit that was submitted to all actors."""

    rounds: range
    teachers: Graph | None
    """Senders per receiver in the exchange at its end. None if there is a server or no exchange."""
    sizes: list[Any]


class Post(NamedTuple):
    """Messages of a round, which the next unit delivers first."""

    heard: Graph
    """Senders per receiver. A server's answer has the name of its receiver."""
    outboxes: list[tuple[Any, ...]]
    """References to the objects with the messages for each actor's nodes."""


class RayEngine(RemoteEngine):
    """Runs the nodes of an experiment in Ray actors."""

    def __init__(self, experiment: Experiment) -> None:
        learners = experiment.learners()
        super().__init__(experiment, learners, dealt(experiment.members, experiment.ray.actors))
        self._actors = ActorGroup(self.groups, experiment.ray)
        self._actors.start(*init_payload(experiment, self.method, learners))
        self._flying: deque[PendingUnit] = deque()
        self._going = True

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate Ray's exceptions: raise an actor's own error, or `NodesLostError` for a lost actor."""
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
        """Restart the lost actors. Return the names of their nodes. All actors must be restored afterwards."""
        self._discard()
        return self._actors.replace_lost()

    def _discard(self) -> None:
        """Wait for all submitted units and ignore their results."""
        for ref in [ref for pending in self._flying for ref in pending.sizes]:
            with suppress(Exception):
                ray.get(ref)
        self._flying.clear()

    # Rounds

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Run rounds in units, each up to the next exchange. Return the last round that was done."""
        self._going = True
        reached, post = first - 1, None
        with self._translated():
            while reached < last and self._going:
                rounds = self._until_exchange(reached + 1, last)
                outboxes = self._fly(rounds, post)
                reached, post = rounds[-1], None
                if self.method.exchanges(reached):
                    if not self.method.decentralised:
                        self._land(0, keep_going)  # the server needs the messages of all nodes
                    post = self._post(reached, outboxes)
                self._land(AHEAD, keep_going)
            if post is not None:
                self._fly(range(0), post)
            self._land(0, keep_going)
        self._round_done = reached
        return reached

    def _fly(self, rounds: range, post: Post | None) -> list[Any]:
        """Submit a unit, with the messages to deliver first. Return references to the outboxes."""
        sends = bool(rounds) and self.method.exchanges(rounds[-1])
        results = []
        for place, actor in enumerate(self._actors.actors):
            heard = {node.name: post.heard[node.name] for node in self.groups[place]} if post else None
            outboxes = post.outboxes[place] if post else ()
            results.append(actor.unit.options(num_returns=2).remote(WorkUnit(heard, rounds), *outboxes))
        teachers = self.method.teachers(self.roster, rounds[-1]) if sends and self.method.decentralised else None
        self._flying.append(PendingUnit(rounds, teachers, [sizes for _, sizes in results]))
        return [outbox for outbox, _ in results]

    def _post(self, round: int, outboxes: Sequence[Any]) -> Post:
        """Route the messages of a round. Each actor gets those that its nodes need."""
        teachers = self._flying[-1].teachers if self._flying else None
        if teachers is not None:
            needed = [
                sorted({self._home[sender] for node in group for sender in teachers[node.name]})
                for group in self.groups
            ]
            return Post(teachers, [tuple(outboxes[place] for place in places) for places in needed])
        sent = {sender: message for outbox in ray.get(list(outboxes)) for sender, message in outbox.items()}
        answers = {name: answer for name, (answer,) in self.router.answers(sent, round).items()}
        if len({id(answer) for answer in answers.values()}) == 1:
            everybody = ray.put(answers)
            posted = [(everybody,) for _ in self.groups]
        else:
            posted = [(ray.put({node.name: answers[node.name] for node in group}),) for group in self.groups]
        return Post({name: (name,) for name in self.roster.names}, posted)

    def _land(self, ahead: int, keep_going: Callable[[int], bool]) -> None:
        """Wait until at most `ahead` units are not done. Count the messages of the others."""
        while len(self._flying) > ahead:
            pending = self._flying[0]
            sizes: dict[str, Size] = {}
            for part in ray.get(pending.sizes):
                sizes |= part
            self._flying.popleft()
            if pending.teachers is not None:
                self.ledger.heard(pending.teachers, sizes.__getitem__)
            for round in pending.rounds:
                self._going = keep_going(round) and self._going

    # Requests

    def _ask(self, question: str, *arguments: Any) -> list[Any]:
        with self._translated():
            return list(ray.get([actor.ask.remote(question, *arguments) for actor in self._actors.actors]))

    def _hand_out(self, question: str, parts: Sequence[Any]) -> None:
        with self._translated():
            pairs = zip(self._actors.actors, parts, strict=True)
            ray.get([actor.ask.remote(question, part) for actor, part in pairs])

    def _stored(self, value: Any) -> Any:
        return ray.put(value)

    def _end(self) -> None:
        self._actors.end()
