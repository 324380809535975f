"""What is between the nodes: the server of methods that have one, and the count of all that crosses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from fedh2l.engines.base import Fault
from fedh2l.engines.residents import refused, under
from fedh2l.learner import Learner
from fedh2l.ledger import Ledger
from fedh2l.messages import SERVER, Message
from fedh2l.methods.base import Method
from fedh2l.roster import Roster
from fedh2l.server import Server

log = logging.getLogger("fedh2l")


class Hub:
    """The server, which answers, and the ledger, which counts; making one gives everybody what they start with."""

    def __init__(self, method: Method, learners: Sequence[Learner], roster: Roster, rounds: int) -> None:
        self.method = method
        self.roster = roster
        self.ledger = Ledger()
        self.server = Server(roster, learners[0].optimizer, learners[0].parameters.device)
        method.prepare(self.server, learners)
        for learner in learners:
            method.equip(learner)
        if not method.decentralised and not any(method.exchanges(round) for round in range(1, rounds + 1)):
            log.warning("%s exchanges nothing within %d rounds: its interval is longer", method.title, rounds)
        self._sent: list[tuple[Message, Tensor]] = []

    def answers(self, sent: Mapping[str, Message], round: int) -> dict[str, list[Message]]:
        """The inbox of each node: what the server makes of what all of them sent."""
        messages = [sent[name] for name in self.roster.names]
        self.server.seed_torch(round)
        answers = self.method.aggregate(self.server, messages, round)
        for message in messages:
            self.ledger.add(message.sender, [SERVER], message)
        self.ledger.answered({name: answers[name] for name in self.roster.names})
        for answer in {id(answer): answer for answer in answers.values()}.values():
            self._sent.append((answer, answer.faults()))
        return {name: [answers[name]] for name in self.roster.names}

    def closing(self, round: int, count: bool) -> Message | None:
        """What the server sends to every node at the end, counted if asked for."""
        message = self.method.closing(self.server, round)
        if message is not None and count:
            self.ledger.add(SERVER, self.roster.names, message)
        return message

    def faults(self) -> list[Fault]:
        """What is unsound in the server's answers since the last call; an answer follows from what nodes sent."""
        found = refused(self._sent, order=1.5)
        self._sent = []
        return found

    def state(self) -> dict[str, Tensor]:
        """Everything that the next exchange depends on, under the server's name."""
        return {f"{SERVER}/{key}": value for key, value in self.server.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Hands the server its own of an engine's state."""
        self._sent = []
        self.server.restore(under(SERVER, state))
