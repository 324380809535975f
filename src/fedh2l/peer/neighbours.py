"""The other peers as this one sees them: who is there, who is late, who is done, and a courier to each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.circle import Circle
from fedh2l.peer.courier import Contact, Courier
from fedh2l.peer.handshake import Agreed
from fedh2l.peer.transport import Line

GREETINGS = (10, 10.0)
"""How many calls of one kind of one member, other than signals, are answered within how many seconds."""


class Neighbours:
    """Couriers to those who take part, now or soon."""

    def __init__(self, circle: Circle, agreed: Agreed, audit: AuditLog, hello: Callable[[], pb.Hello]) -> None:
        self._circle, self._agreed, self._audit, self._hello = circle, agreed, audit, hello
        self.couriers: dict[str, Courier] = {}
        self.addresses: dict[str, str] = {}
        self.late: set[str] = set()
        """Who did not answer in time the last time; not waited for until heard from again."""
        self.finished: set[str] = set()
        """Who has done its last round, and will not be heard again."""
        self._calls: dict[tuple[str, str], list[float]] = {}
        self._lock = threading.Lock()

    def keep(self, addresses: Mapping[str, str], goodbye: pb.Goodbye, seconds: float) -> None:
        """From now on couriers to these; whoever is no longer among them is told goodbye, and not waited for."""
        gone = [self.couriers.pop(name) for name in list(self.couriers) if name not in addresses]
        self.addresses = dict(addresses)
        for name, address in addresses.items():
            if name not in self.couriers:
                line = Line(self._circle, name, address)
                self.couriers[name] = Courier(line, self._agreed, self._audit, self._hello)
                self.couriers[name].start()
        for courier in gone:
            courier.ask_to_end(goodbye, time.monotonic() + seconds)

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
            if not self.is_done(name):
                self.couriers[name].send(round, payload)

    def is_done(self, name: str) -> bool:
        """Whether it has said that it has done its last round."""
        return name in self.finished or self.contact(name).finished

    def is_there(self, name: str) -> bool:
        """Whether it can be reached."""
        return self.contact(name).state == "up"

    def heard_from(self, name: str, hello: pb.Hello) -> None:
        """It has greeted, so it is there."""
        (self.finished.add if hello.finished else self.finished.discard)(name)
        courier = self.couriers.get(name)
        if courier is not None and courier.contact.state != "up":
            courier.wake()

    def too_often(self, name: str, kind: str) -> bool:
        """Whether somebody has made a call of some kind again and again just now."""
        many, within = GREETINGS
        present = time.monotonic()
        with self._lock:
            recent = [when for when in self._calls.get((name, kind), ()) if present - when < within]
            if len(recent) < many:
                recent.append(present)
                self._calls[name, kind] = recent
                return False
            return True
