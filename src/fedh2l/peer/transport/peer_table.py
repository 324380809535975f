"""Connection state of the other peers, and a sender thread for each."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from fedh2l.peer.audit import AuditLog
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.auth import PeerAuth
from fedh2l.peer.transport.client import PeerClient
from fedh2l.peer.transport.handshake import RosterDigests
from fedh2l.peer.transport.sender import Contact, Sender

GRACE = 0.5
"""Seconds without a connection after which a member is lost and not awaited."""
MOST_STRIKES, FORGIVEN = 6, 20
"""Number of misses after which the wait stops growing, and number of timely answers that reset it."""


HEADS = 300.0
"""Seconds between two messages with the head of the audit log."""


class PeerTable:
    """Sender threads for current and future members, and the state of each member."""

    def __init__(self, auth: PeerAuth, agreed: RosterDigests, audit: AuditLog, hello: Callable[[], pb.Hello]) -> None:
        self._auth, self._agreed, self._audit, self._hello = auth, agreed, audit, hello
        self.senders: dict[str, Sender] = {}
        self.addresses: dict[str, str] = {}
        self.late: set[str] = set()
        """Members that missed the last deadline or have left. They are not awaited until their next message."""
        self.finished: set[str] = set()
        """Members that report that they have done their last round."""
        self._strikes: Counter[str] = Counter()
        self._in_time: Counter[str] = Counter()
        self._deaf_until: dict[str, float] = {}
        self._calls: dict[tuple[str, str], list[float]] = {}
        self._lock = threading.Lock()
        self._told = time.monotonic()

    def tell_heads(self) -> None:
        """Send the head of the audit log to all members, if the last time is `HEADS` seconds ago."""
        if time.monotonic() - self._told > HEADS:
            self._told = time.monotonic()
            for sender in self.senders.values():
                sender.tell_head()

    def keep(self, addresses: Mapping[str, str], goodbye: pb.Goodbye, seconds: float) -> None:
        """Replace the receivers. Removed members get a goodbye, whose delivery is not awaited."""
        moved = [name for name in self.senders if addresses.get(name) != self.addresses[name]]
        for name in moved:
            self.senders.pop(name).ask_to_end(goodbye, time.monotonic() + seconds)
        self.addresses = dict(addresses)
        for name, address in addresses.items():
            if name not in self.senders:
                line = PeerClient(self._auth, name, address)
                self.senders[name] = Sender(line, self._agreed, self._audit, self._hello)
                self.senders[name].start()

    def close(self, goodbye: pb.Goodbye, seconds: float) -> None:
        """Deliver the last messages and a goodbye within `seconds`. Nothing is sent afterwards."""
        end = time.monotonic() + seconds
        for sender in self.senders.values():
            sender.ask_to_end(goodbye, end)
        for sender in self.senders.values():
            sender.join(end)

    def contact(self, name: str) -> Contact:
        """Return the connection state of a member. It is empty for a former member."""
        sender = self.senders.get(name)
        return sender.contact if sender is not None else Contact()

    def send(self, names: Iterable[str], round: int, payload: bytes) -> None:
        """Queue a message for those of the members that are not done."""
        for name in names:
            if not self.says_done(name):
                self.senders[name].send(round, payload)

    def says_done(self, name: str) -> bool:
        """Return whether a member reports that it has done its last round."""
        return name in self.finished or self.contact(name).finished

    def is_there(self, name: str) -> bool:
        """Return whether a member is connected."""
        return self.contact(name).state == "up"

    def greets(self, name: str, finished: bool) -> None:
        """Record a greeting from a member, and connect to it if it is not connected."""
        (self.finished.add if finished else self.finished.discard)(name)
        sender = self.senders.get(name)
        if sender is not None and sender.contact.state != "up":
            sender.wake()

    # Late and lost members

    def is_lost(self, name: str, begins: bool) -> bool:
        """Return whether a member has been unreachable for more than `GRACE` seconds.

        At the start of training, a member without any connection so far is not lost. It may not have started yet.
        """
        contact = self.contact(name)
        if contact.lost_at is None or (begins and not contact.met):
            return False
        return time.monotonic() - contact.lost_at > GRACE

    def missed(self, name: str, deadline: float) -> None:
        """Record a missed deadline. After repeated misses, a member is not awaited for increasingly long times."""
        with self._lock:
            self.late.add(name)
            self._in_time[name] = 0
            wait = deadline * (2 ** min(self._strikes[name], MOST_STRIKES) - 1)
            self._strikes[name] += 1
            self._deaf_until[name] = time.monotonic() + wait

    def answered(self, name: str) -> None:
        """Record that a member answered before the deadline."""
        with self._lock:
            self._in_time[name] += 1
            if self._in_time[name] >= FORGIVEN:
                self._strikes[name] = 0

    def heard(self, name: str) -> bool:
        """Record a message of any round from a member. Return whether this ends its lateness."""
        if name not in self.late or time.monotonic() < self._deaf_until.get(name, 0.0):
            return False
        self.late.discard(name)
        return True

    def too_often(self, name: str, kind: str, most: int, seconds: float) -> bool:
        """Return whether a member has exceeded `most` calls of a kind in `seconds`. Count the call if not."""
        present = time.monotonic()
        with self._lock:
            recent = [when for when in self._calls.get((name, kind), ()) if present - when < seconds]
            if len(recent) < most:
                self._calls[name, kind] = [*recent, present]
                return False
            return True
