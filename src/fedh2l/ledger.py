"""How many bytes have crossed between nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedh2l.messages import Message


class Ledger:
    """Counts every message that an engine delivers, by the length of its byte form."""

    def __init__(self) -> None:
        self.edges: Counter[str] = Counter()
        """Bytes from sender to receiver, under 'sender->receiver'."""
        self.payload = 0
        """Without headers, a copy per receiver."""
        self.multicast = 0
        """With headers, each message once however many receive it."""

    @property
    def total(self) -> int:
        """With headers, a copy per receiver."""
        return sum(self.edges.values())

    def count(self, message: Message, receivers: Sequence[str]) -> None:
        """One message, delivered to each of `receivers`."""
        self.add(message.sender, receivers, message, 1)

    def add(self, sender: str, receivers: Sequence[str], like: Message, times: int) -> None:
        """So many messages of one sender, each as large as `like`, delivered to each of `receivers`."""
        size = like.encoded_size * times
        for receiver in receivers:
            self.edges[f"{sender}->{receiver}"] += size
        self.payload += like.payload_size * len(receivers) * times
        self.multicast += size if receivers else 0

    def summary(self, rounds: int) -> dict[str, Any]:
        """The `bytes` of a result."""
        return {
            "total": self.total,
            "per_round": self.total / rounds,
            "payload": self.payload,
            "multicast": self.multicast,
            "edges": dict(sorted(self.edges.items())),
        }

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"edges": dict(self.edges), "payload": self.payload, "multicast": self.multicast}

    def restore(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.edges = Counter(state["edges"])
        self.payload, self.multicast = state["payload"], state["multicast"]
