"""The server of methods that have one, and the ledger of all messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from fedh2l.engines.base import Fault
from fedh2l.engines.ledger import Ledger
from fedh2l.engines.local_nodes import refused, under
from fedh2l.methods.base import Method
from fedh2l.protocol.messages import SERVER, Message
from fedh2l.protocol.roster import Roster
from fedh2l.training.node_learner import NodeLearner
from fedh2l.training.server import Server

log = logging.getLogger("fedh2l")


class MessageRouter:
    """Server and ledger of an experiment. Construction prepares the state of the server and the nodes."""

    def __init__(self, method: Method, learners: Sequence[NodeLearner], roster: Roster, rounds: int) -> None:
        self.method = method
        self.roster = roster
        self.ledger = Ledger()
        first = learners[0].network
        self.server = Server(roster, first.optimizer, first.parameters.device, first.compute.exactly())
        method.prepare(self.server, learners)
        if not method.decentralised and not any(method.exchanges(round) for round in range(1, rounds + 1)):
            log.warning("%s exchanges nothing within %d rounds: its interval is longer", method.title, rounds)
        self._sent: list[tuple[Message, Tensor]] = []

    def answers(self, sent: Mapping[str, Message], round: int) -> dict[str, list[Message]]:
        """Return each node's inbox: the server's answer to the messages of all nodes."""
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
        """Return the server's last message to every node. `count` adds it to the ledger."""
        message = self.method.closing(self.server, round)
        if message is not None and count:
            self.ledger.add(SERVER, self.roster.names, message)
        return message

    def faults(self) -> list[Fault]:
        """Return the faults of the server's answers since the last call.

        They count as later than faults of the nodes' messages, which can cause them.
        """
        found = refused(self._sent, order=1.5)
        self._sent = []
        return found

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next exchange depends on, under the server's name."""
        return {f"{SERVER}/{key}": value for key, value in self.server.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the server from an engine's state."""
        self._sent = []
        self.server.restore(under(SERVER, state))
