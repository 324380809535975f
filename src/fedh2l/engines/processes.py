"""Engine that runs nodes in parallel processes of one machine, if it has enough cores for a gain in speed.

Threads of one Python process block each other between operations. Four nodes in threads are therefore no faster than
four nodes in sequence with all cores for each. Nodes in separate processes share nothing except their messages.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedh2l.engines.actor import Size, WorkUnit, dealt, init_payload
from fedh2l.engines.remote import RemoteEngine
from fedh2l.engines.worker import Sealed, Worker, checked, sealed, unsealed
from fedh2l.errors import RunError
from fedh2l.experiment.experiment import Experiment
from fedh2l.hardware import available_cores
from fedh2l.protocol.topology import Graph

RESTARTS = 10
"""Maximum number of process restarts in a run."""


class UnsendableError(RunError):
    """A node cannot be pickled, or cannot be unpickled in another process."""


class Heard(NamedTuple):
    """Messages that nodes receive in an exchange."""

    senders: Graph
    """Senders per receiver. A server's answer has the name of its receiver."""
    messages: Mapping[str, Sealed]


class ProcessEngine(RemoteEngine):
    """Runs the nodes of an experiment in several processes."""

    def __init__(self, experiment: Experiment, processes: int) -> None:
        learners = experiment.learners()
        super().__init__(experiment, learners, dealt(experiment.members, processes))
        cores = max(1, available_cores() // len(self.groups))
        self._restarts = 0
        self._workers: list[Worker] = []
        try:
            common, parts = init_payload(experiment, self.method, learners)
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
        """Run rounds in units, each up to the next exchange. Return the last round that was done.

        Each unit first delivers the messages of the unit before.
        """
        reached, heard, going = first - 1, None, True
        while reached < last and going:
            rounds = self._until_exchange(reached + 1, last)
            reached, exchanges = rounds[-1], self.method.exchanges(rounds[-1])
            teachers = self.method.teachers(self.roster, reached) if exchanges and self.method.decentralised else {}
            sent, sizes = self._leg(rounds, heard)
            heard = self._exchange(reached, sent, sizes, teachers) if exchanges else None
            for round in rounds:
                going = keep_going(round) and going
        if heard is not None:
            self._leg(range(0), heard)
        self._round_done = reached
        return reached

    def _leg(self, rounds: range, heard: Heard | None) -> tuple[dict[str, Sealed], dict[str, Size]]:
        """Run these rounds in all processes. Return the messages of the nodes, and their sizes."""
        requests = []
        for group in self.groups:
            ears = {node.name: heard.senders[node.name] for node in group} if heard else {}
            needed = {sender: heard.messages[sender] for each in ears.values() for sender in each} if heard else {}
            requests.append(("leg", WorkUnit(ears if heard else None, rounds), needed))
        sent: dict[str, Sealed] = {}
        sizes: dict[str, Size] = {}
        for outbox, size in self._told(requests):
            sent |= outbox
            sizes |= size
        return sent, sizes

    def _exchange(self, round: int, sent: Mapping[str, Sealed], sizes: Mapping[str, Size], teachers: Graph) -> Heard:
        """Return the messages to deliver. Messages between nodes stay encoded, and a server decodes them."""
        if self.method.decentralised:
            self.ledger.heard(teachers, sizes.__getitem__)
            return Heard(teachers, sent)
        replies = self.router.answers({name: unsealed(message) for name, message in sent.items()}, round)
        distinct = {id(answer): answer for (answer,) in replies.values()}
        written = {key: sealed(answer) for key, answer in distinct.items()}
        answers = {name: written[id(answer)] for name, (answer,) in replies.items()}
        return Heard({name: (name,) for name in self.roster.names}, answers)

    def revive(self) -> list[str]:
        """Restart the lost processes. Return the names of their nodes. All processes must be restored afterwards."""
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
        """Send each process its request. Return all answers.

        If a process is lost, `revive` reads the answers of the others.
        """
        for worker, request in zip(self._workers, requests, strict=True):
            worker.tell(*request)
        return checked([worker.answer() for worker in self._workers])

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()
