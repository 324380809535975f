"""The other peers as this one sees them: who is there, who is late, who is done, and a courier to each."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.circle import Circle
from fedh2l.peer.courier import Contact, Courier
from fedh2l.peer.handshake import Agreed
from fedh2l.peer.transport import Line

MOST_STRIKES, FORGIVEN = 6, 20
"""After how many misses no more is added to the wait, and after how many answers in time they are forgotten."""


class Neighbours:
    """Couriers to those who take part, now or soon, and what is known of them."""

    def __init__(self, circle: Circle, agreed: Agreed, audit: AuditLog, hello: Callable[[], pb.Hello]) -> None:
        self._circle, self._agreed, self._audit, self._hello = circle, agreed, audit, hello
        self.couriers: dict[str, Courier] = {}
        self.addresses: dict[str, str] = {}
        self.late: set[str] = set()
        """Who did not answer in time the last time, or has left; not waited for until heard from again."""
        self.finished: set[str] = set()
        """Who says that it has done its last round."""
        self._strikes: Counter[str] = Counter()
        self._in_time: Counter[str] = Counter()
        self._deaf_until: dict[str, float] = {}
        self._calls: dict[tuple[str, str], list[float]] = {}
        self._lock = threading.Lock()

    def keep(self, addresses: Mapping[str, str], goodbye: pb.Goodbye, seconds: float) -> None:
        """From now on couriers to these; whoever is no longer there is told goodbye, and not waited for."""
        moved = [name for name in self.couriers if addresses.get(name) != self.addresses[name]]
        for name in moved:
            self.couriers.pop(name).ask_to_end(goodbye, time.monotonic() + seconds)
        self.addresses = dict(addresses)
        for name, address in addresses.items():
            if name not in self.couriers:
                line = Line(self._circle, name, address)
                self.couriers[name] = Courier(line, self._agreed, self._audit, self._hello)
                self.couriers[name].start()

    def close(self, goodbye: pb.Goodbye, seconds: float) -> None:
        """What was sent last is delivered, as far as there is time; then nothing more is sent."""
        end = time.monotonic() + seconds
        for courier in self.couriers.values():
            courier.ask_to_end(goodbye, end)
        for courier in self.couriers.values():
            courier.join(end)

    def contact(self, name: str) -> Contact:
        """How it goes with one of them; with who is no longer there, not at all."""
        courier = self.couriers.get(name)
        return courier.contact if courier is not None else Contact()

    def send(self, names: Iterable[str], round: int, payload: bytes) -> None:
        """Leaves a signal for all of these who can still use it."""
        for name in names:
            if not self.says_done(name):
                self.couriers[name].send(round, payload)

    def says_done(self, name: str) -> bool:
        """Whether it says that it has done its last round."""
        return name in self.finished or self.contact(name).finished

    def is_there(self, name: str) -> bool:
        """Whether it can be reached."""
        return self.contact(name).state == "up"

    def greets(self, name: str, finished: bool) -> None:
        """It has greeted, so it is there."""
        (self.finished.add if finished else self.finished.discard)(name)
        courier = self.couriers.get(name)
        if courier is not None and courier.contact.state != "up":
            courier.wake()

    # Who is waited for

    def missed(self, name: str, deadline: float) -> None:
        """It did not answer in time; if that was not the first time, it is not waited for for a while, ever longer."""
        with self._lock:
            self.late.add(name)
            self._in_time[name] = 0
            wait = deadline * (2 ** min(self._strikes[name], MOST_STRIKES) - 1)
            self._strikes[name] += 1
            self._deaf_until[name] = time.monotonic() + wait

    def answered(self, name: str) -> None:
        """It did, in a round that waited for it."""
        with self._lock:
            self._in_time[name] += 1
            if self._in_time[name] >= FORGIVEN:
                self._strikes[name] = 0

    def heard(self, name: str) -> bool:
        """A signal of it has come, if only an old one; whether it is waited for again from now on."""
        if name not in self.late or time.monotonic() < self._deaf_until.get(name, 0.0):
            return False
        self.late.discard(name)
        return True

    def too_often(self, name: str, kind: str, most: int, seconds: float) -> bool:
        """Whether somebody has made a call of some kind more than so often in so many seconds."""
        present = time.monotonic()
        with self._lock:
            recent = [when for when in self._calls.get((name, kind), ()) if present - when < seconds]
            if len(recent) < most:
                self._calls[name, kind] = [*recent, present]
                return False
            return True
