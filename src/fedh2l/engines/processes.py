"""Nodes side by side in processes of one machine, where there are cores enough for that to pay.

Threads of one Python process wait for each other between operations, so four nodes in threads are no faster than one
after the other with all cores to itself. In processes of their own they share nothing but what they send.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedh2l.engines.actor import Leg, Size, dealt, luggage
from fedh2l.engines.spread import SpreadEngine
from fedh2l.engines.worker import Sealed, Worker, checked, sealed, unsealed
from fedh2l.errors import RunError
from fedh2l.federation import Federation
from fedh2l.settings import available_cores
from fedh2l.topology import Graph

RESTARTS = 10
"""How many times processes that died are started again in a run."""


class UnsendableError(RunError):
    """A node cannot be taken to another process: something in it cannot be written down, or read there."""


class Heard(NamedTuple):
    """What nodes hear in an exchange."""

    round: int
    senders: Graph
    """Whose messages are for whom; a server's answer stands under the name of its receiver."""
    messages: Mapping[str, Sealed]


class ProcessEngine(SpreadEngine):
    """Runs the rounds of a federation whose nodes are dealt to some processes."""

    def __init__(self, federation: Federation, processes: int) -> None:
        learners = federation.learners()
        super().__init__(federation, learners, dealt(federation.members, processes))
        cores = max(1, available_cores() // len(self.groups))
        self._restarts = 0
        self._workers: list[Worker] = []
        try:
            common, parts = luggage(federation, self.method, learners)
            for group in self.groups:
                self._workers.append(Worker([parts[node.name] for node in group], common, cores))
            checked([worker.answer() for worker in self._workers])
        except BaseException as error:
            self._end()
            for learner in self._given.values():
                learner.release()
            if isinstance(error, (RunError, TypeError, AttributeError, pickle.PicklingError)):
                raise UnsendableError(str(error).strip().splitlines()[0]) from error
            raise

    def advance(self, first: int, last: int, keep_going: Callable[[int], bool]) -> int:
        """Legs up to the next exchange, each beginning with what was heard in the one before."""
        reached, heard, going = first - 1, None, True
        while reached < last and going:
            rounds = self._until_exchange(reached + 1, last)
            reached, exchanges = rounds[-1], self.method.exchanges(rounds[-1])
            teachers = self.method.teachers(self.roster, reached) if exchanges and self.method.decentralised else {}
            sent, sizes = self._leg(rounds, heard, exchanges, teachers)
            heard = self._exchange(reached, sent, sizes, teachers) if exchanges else None
            for round in rounds:
                going = keep_going(round) and going
        if heard is not None:
            self._leg(range(0), heard, False, {})
        self._round_done = reached
        return reached

    def _leg(
        self, rounds: range, heard: Heard | None, sends: bool, teachers: Graph
    ) -> tuple[dict[str, Sealed], dict[str, Size]]:
        """All processes do these rounds; returns what their nodes send to those they teach, and its sizes."""
        requests = []
        for group in self.groups:
            expects = {node.name: teachers[node.name] for node in group} if teachers else {}
            ears = {node.name: heard.senders[node.name] for node in group} if heard else {}
            needed = {sender: heard.messages[sender] for each in ears.values() for sender in each} if heard else {}
            requests.append(("leg", Leg((heard.round, ears) if heard else None, rounds, sends, expects), needed))
        sent: dict[str, Sealed] = {}
        sizes: dict[str, Size] = {}
        for outbox, size in self._told(requests):
            sent |= outbox
            sizes |= size
        return sent, sizes

    def _exchange(self, round: int, sent: Mapping[str, Sealed], sizes: Mapping[str, Size], teachers: Graph) -> Heard:
        """Between nodes messages are passed on unread; a server reads them."""
        if self.method.decentralised:
            self.ledger.heard(teachers, sizes.__getitem__)
            return Heard(round, teachers, sent)
        said = self.hub.answers({name: unsealed(message) for name, message in sent.items()}, round)
        distinct = {id(answer): answer for (answer,) in said.values()}
        written = {key: sealed(answer) for key, answer in distinct.items()}
        answers = {name: written[id(answer)] for name, (answer,) in said.items()}
        return Heard(round, {name: (name,) for name in self.roster.names}, answers)

    def revive(self) -> list[str]:
        """Starts the processes that are gone again; all of them have to be restored then."""
        lost = [place for place, worker in enumerate(self._workers) if not worker.alive()]
        self._restarts += len(lost)
        if self._restarts > RESTARTS:
            raise RunError(f"processes of nodes died {self._restarts} times; is there enough memory for all of them?")
        for place in lost:
            self._workers[place].restart()
        checked([self._workers[place].answer() for place in lost])
        return [node.name for place in lost for node in self.groups[place]]

    def _ask(self, question: str, *arguments: Any) -> list[Any]:
        return self._told([("ask", question, *arguments)] * len(self._workers))

    def _hand_out(self, question: str, parts: Sequence[Any]) -> None:
        self._told([("ask", question, part) for part in parts])

    def _told(self, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What all say, each to its own request; after a loss, `revive` hears those who were asked to their end."""
        for worker, request in zip(self._workers, requests, strict=True):
            worker.tell(*request)
        return checked([worker.answer() for worker in self._workers])

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()
