"""Counts of the bytes sent between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fedh2l.protocol.messages import SERVER, Message
from fedh2l.protocol.topology import Graph


class Weighed(Protocol):
    """A message, or another object with the sizes of one."""

    @property
    def encoded_size(self) -> int:
        """Bytes of the encoded message."""

    @property
    def payload_size(self) -> int:
        """Bytes without the header."""


class Ledger:
    """Counts every message that an engine delivers, by its encoded size."""

    def __init__(self) -> None:
        self.edges: Counter[str] = Counter()
        """Bytes from sender to receiver, under 'sender->receiver'."""
        self.payload = 0
        """Bytes without headers, counted once per receiver."""
        self.multicast = 0
        """Bytes with headers, counted once per message."""

    @property
    def total(self) -> int:
        """Bytes with headers, counted once per receiver."""
        return sum(self.edges.values())

    def heard(self, graph: Graph, like: Callable[[str], Weighed], times: int = 1) -> None:
        """Count `times` exchanges in which each node receives from its teachers in `graph`.

        `like` returns a message of a sender's size.
        """
        receivers: dict[str, list[str]] = {}
        for name, teachers in graph.items():
            for teacher in teachers:
                receivers.setdefault(teacher, []).append(name)
        for sender, names in receivers.items():
            self.add(sender, names, like(sender), times)

    def answered(self, answers: Mapping[str, Message], times: int = 1) -> None:
        """Count `times` answers of a server to each node. An answer to several nodes is one message."""
        together: dict[int, list[str]] = {}
        for name, answer in answers.items():
            together.setdefault(id(answer), []).append(name)
        for names in together.values():
            self.add(SERVER, names, answers[names[0]], times)

    def add(self, sender: str, receivers: Sequence[str], like: Weighed, times: int = 1) -> None:
        """Count `times` messages of one sender, each as large as `like`, to each of `receivers`."""
        size = like.encoded_size * times
        for receiver in receivers:
            self.edges[f"{sender}->{receiver}"] += size
        self.payload += like.payload_size * len(receivers) * times
        self.multicast += size if receivers else 0

    def summary(self, rounds: int) -> dict[str, Any]:
        """Return the `bytes` of a result."""
        return {
            "total": self.total,
            "per_round": self.total / rounds,
            "payload": self.payload,
            "multicast": self.multicast,
            "edges": dict(sorted(self.edges.items())),
        }

    def state(self) -> dict[str, Any]:
        """Return the counts for a checkpoint."""
        return {"edges": dict(self.edges), "payload": self.payload, "multicast": self.multicast}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the counts from a checkpoint."""
        self.edges = Counter({edge: int(size) for edge, size in state["edges"].items()})
        self.payload, self.multicast = int(state["payload"]), int(state["multicast"])
