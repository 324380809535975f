"""Common base of the engines that run nodes in several processes."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fedh2l.data.domain import Samples
from fedh2l.engines.base import Engine, Fault, NodesLostError, Which, raise_earliest
from fedh2l.engines.router import MessageRouter
from fedh2l.experiment.experiment import Experiment
from fedh2l.training.node import Node
from fedh2l.training.node_learner import NodeLearner

log = logging.getLogger("fedh2l")

LEG = 10
"""Maximum number of rounds per unit without an exchange, so that a run can be stopped soon."""


class RemoteEngine(Engine):
    """Passes the calls of an engine to actors with groups of nodes. The server and the ledger are in this process."""

    fragile = True

    def __init__(
        self, experiment: Experiment, learners: Sequence[NodeLearner], groups: Sequence[Sequence[Node]]
    ) -> None:
        self.roster = experiment.roster
        self.groups = groups
        self.method = experiment.method.fitted(learners, experiment.settings.rounds)
        self.router = MessageRouter(self.method, learners, self.roster, experiment.settings.rounds)
        self.ledger = self.router.ledger
        self._bytes = sum(learner.parameters.nbytes for learner in learners)
        self._given = {
            learner.name: learner
            for learner, node in zip(learners, experiment.members, strict=True)
            if isinstance(node.model, nn.Module)
        }
        """Learners of the caller's modules, which get the trained weights at the end."""
        self._home = {node.name: place for place, group in enumerate(groups) for node in group}
        """Index of the actor of each node."""
        self._sets: tuple[Sequence[Samples], Any] | None = None
        self._round_done = 0

    @abstractmethod
    def _ask(self, question: str, *arguments: Any) -> list[Any]:
        """Call a method of each actor. Return the results."""

    @abstractmethod
    def _hand_out(self, question: str, parts: Sequence[Any]) -> None:
        """Call a method of each actor with that actor's part."""

    @abstractmethod
    def _end(self) -> None:
        """Stop the actors."""

    def _stored(self, value: Any) -> Any:
        """Return a form of the value that many actors can share."""
        return value

    def _until_exchange(self, first: int, last: int) -> range:
        """Return the rounds up to the next exchange, at most `LEG` of them."""
        end = min(last, first + LEG - 1)
        return range(first, next((round for round in range(first, end) if self.method.exchanges(round)), end) + 1)

    def _named(self, question: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of each actor. Return the results by node, in roster order."""
        results = {name: value for part in self._ask(question, *arguments) for name, value in part.items()}
        return {name: results[name] for name in self.roster.names if name in results}

    def verify(self) -> None:
        found: list[Fault] = [fault for part in self._ask("faults") for fault in part]
        raise_earliest(found + self.router.faults())

    def series(self) -> dict[str, dict[str, list[float]]]:
        return self._named("series")

    def complete(self, count: bool) -> None:
        message = self.router.closing(self._round_done, count)
        if message is not None:
            self._ask("take", self._stored(message))

    def validate(self) -> dict[str, int]:
        return self._named("validate")

    def correct(self, sets: Sequence[Samples]) -> dict[str, list[int]]:
        return self._named("correct", self._stored_sets(sets))

    def validate_views(self) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for part in self._ask("validate_views"):
            for view, right in part.items():
                counts.setdefault(view, {}).update(right)
        return counts

    def correct_view(self, view: str, names: Sequence[str], sets: Sequence[Samples]) -> dict[str, list[int]]:
        return self._named("correct_view", view, list(names), self._stored_sets(sets))

    def _stored_sets(self, sets: Sequence[Samples]) -> Any:
        if self._sets is None or self._sets[0] is not sets:
            self._sets = (sets, self._stored(list(sets)))
        return self._sets[1]

    def keep_best(self, names: Iterable[str]) -> None:
        self._ask("keep_best", list(names))

    def select(self, which: Which) -> None:
        self._ask("select", which)

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        return self._named("state_dicts")

    def logits(self, inputs: Tensor) -> dict[str, Tensor]:
        return self._named("logits", inputs)

    def state(self) -> dict[str, Tensor]:
        """Return the same state as the local engine, so that either engine can resume from it."""
        return {key: value for part in self._ask("state") for key, value in part.items()} | self.router.state()

    def restore(self, state: Mapping[str, Tensor], round: int = 0) -> None:
        """Send each actor the states of its nodes."""
        self._round_done = round
        parts: list[dict[str, Tensor]] = [{} for _ in self.groups]
        for key, value in state.items():
            place = self._home.get(key.split("/")[0])
            if place is not None:
                parts[place][key] = value
        self._hand_out("restore", parts)
        self.router.restore(state)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of all nodes."""
        return self._bytes

    def close(self) -> None:
        """Copy the trained weights into the caller's modules, and stop the actors."""
        try:
            if self._given:
                learned = self.state_dicts()
                for name, learner in self._given.items():
                    learner.module.load_state_dict(learned[name])
        except NodesLostError:
            log.warning("a node is lost, so your modules keep their initial weights")
        finally:
            self._end()
            for learner in self._given.values():
                learner.release()
