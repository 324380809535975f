"""Nodes on a Ray cluster, or in processes of one machine: an actor for each, or for each of a few groups.

Actors hand their messages to each other through Ray's object store; the driver says who hears whom, counts, and is
the server where a method has one. It hands out work ahead of what is done, so that no actor waits for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import (
    RayTaskError,
)
from torch import Tensor, nn

from fedh2l.domain import Samples
from fedh2l.engines.base import Engine, Fault, NodesLostError, Which, raise_earliest
from fedh2l.engines.hub import Hub
from fedh2l.engines.ray_actor import Common, Leg, Part, Size, part_of
from fedh2l.engines.ray_fleet import LOST, Fleet
from fedh2l.errors import FedH2LError
from fedh2l.federation import Federation
from fedh2l.learner import Learner
from fedh2l.methods.base import Method
from fedh2l.node import Node
from fedh2l.topology import Graph

log = logging.getLogger("fedh2l")

AHEAD = 3
"""How many legs are handed out before the first of them is done."""
LEG = 10
"""Rounds without an exchange that an actor does at a time, at most, so that a run can be stopped soon."""


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


class RayEngine(Engine):
    """Runs the rounds of a federation whose nodes are in Ray actors."""

    fragile = True

    def __init__(self, federation: Federation) -> None:
        self.roster = federation.roster
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
        self._fleet = Fleet(federation.members, federation.ray)
        self._fleet.start(*_luggage(federation, self.method, learners))
        self._home = {node.name: place for place, group in enumerate(self._fleet.groups) for node in group}
        """In which actor each node is."""
        self._flying: deque[Flight] = deque()
        self._sets: tuple[Sequence[Samples], Any] | None = None
        self._going = True
        self._round_done = 0

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
        return self._fleet.replace_lost()

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
        for place, actor in enumerate(self._fleet.actors):
            heard = (
                (post.round, {node.name: post.heard[node.name] for node in self._fleet.groups[place]}) if post else None
            )
            outboxes = post.outboxes[place] if post else ()
            results.append(actor.leg.options(num_returns=2).remote(Leg(heard, rounds, sends), *outboxes))
        teachers = self.method.teachers(self.roster, rounds[-1]) if sends and self.method.decentralised else None
        self._flying.append(Flight(rounds, teachers, [sizes for _, sizes in results]))
        return [outbox for outbox, _ in results]

    def _post(self, round: int, outboxes: Sequence[Any]) -> Post:
        """Directs what was sent in a round to those who hear it, each actor getting what its nodes need."""
        teachers = self._flying[-1].teachers if self._flying else None
        if teachers is not None:
            needed = [
                sorted({self._home[sender] for node in group for sender in teachers[node.name]})
                for group in self._fleet.groups
            ]
            return Post(round, teachers, [tuple(outboxes[place] for place in places) for places in needed])
        sent = {sender: message for outbox in ray.get(list(outboxes)) for sender, message in outbox.items()}
        answers = {name: answer for name, (answer,) in self.hub.answers(sent, round).items()}
        if len({id(answer) for answer in answers.values()}) == 1:
            everybody = ray.put(answers)
            posted = [(everybody,) for _ in self._fleet.groups]
        else:
            posted = [(ray.put({node.name: answers[node.name] for node in group}),) for group in self._fleet.groups]
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
            return list(ray.get([actor.ask.remote(question, *arguments) for actor in self._fleet.actors]))

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
                    for actor, group in zip(self._fleet.actors, self._fleet.groups, strict=True)
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
            self._fleet.end()
            for learner in self._given.values():
                learner.release()


def _luggage(federation: Federation, method: Method, learners: Sequence[Learner]) -> tuple[Common, dict[str, Part]]:
    """What actors start with: what is common to all nodes, and what is each one's own."""
    settings, first = federation.settings, learners[0]
    assert first.validation is not None
    common = Common(
        method, federation.optimizer, settings.batch_size, settings.torch_dtype, settings.threads, first.seed_set,
        first.validation,
    )  # fmt: skip
    nodes = zip(federation.members, learners, strict=True)
    return common, {node.name: part_of(node, learner, settings.seed) for node, learner in nodes}


def _names(group: Sequence[Node]) -> set[str]:
    return {node.name for node in group}
