"""Limits on the connections to a peer's port.

gRPC accepts connections and terminates TLS itself, and exposes only calls. This module therefore finds the process's
own sockets on the port. It closes connections without a call from a member, connections of revoked or removed members,
and connections above a member's limit.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

log = logging.getLogger("fedh2l.peer")

SWEEP = 0.25
"""Seconds between two checks of all connections."""
NAMELESS = 10.0
"""Seconds within which a new connection must make a call as a member."""
EACH = 4
"""Connections per member. Above the limit, the oldest are closed."""
STRANGERS, FROM_ONE_ADDRESS = 128, 32
"""Connections without a call from a member, in total and per address. Above a limit, the oldest are closed."""
DESCRIPTORS = (Path("/proc/self/fd"), Path("/dev/fd"))
"""Folders that may list the open files of a process."""

Peer = tuple[str, int]
"""Address and port of the remote end."""


@dataclass
class Connection:
    since: float
    member: str = ""
    """Empty until the connection makes a call as a member."""
    certificate: bytes = b""
    condemned: str = ""
    """Reason to close the connection at the next check. Empty if there is none."""
    is_closed: bool = False


class Ending(NamedTuple):
    """A connection to close, and the reason."""

    peer: Peer
    member: str
    why: str


class Connections:
    """Watches the connections to a port.

    `refusal` returns why a certificate does not belong to a member, or None. `tell` is called for each closed
    connection with the member, a short reason, and a text for the log.
    """

    def __init__(
        self, refusal: Callable[[bytes, str], str | None], tell: Callable[[str, str, str], None] = lambda *_: None
    ) -> None:
        self._refusal, self._tell = refusal, tell
        self._known: dict[Peer, Connection] = {}
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fedh2l-connections", daemon=True)
        self._port = 0

    def start(self, port: int) -> None:
        self._port = port
        if _descriptors() is None:
            log.warning("this system does not show a process its sockets, so connections are not limited by member")
            return
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def identify(self, peer: str, member: str, certificate: bytes) -> None:
        """Record that a call came from a member. `peer` is in gRPC's format."""
        found = parse_peer(peer)
        if found is not None:
            with self._lock:
                connection = self._known.setdefault(found, Connection(time.monotonic()))
                connection.member, connection.certificate = member, certificate

    def condemn(self, peer: str, why: str) -> None:
        """Mark a connection for closing after a refused call. The answer to the call is still sent."""
        found = parse_peer(peer)
        if found is not None:
            with self._lock:
                self._known.setdefault(found, Connection(time.monotonic())).condemned = why

    def close(self, peer: str) -> None:
        """Close a connection at once, without waiting for the answers to its calls."""
        found = parse_peer(peer)
        if found is None:
            return
        with self._closing:
            with self._lock:
                self._known.setdefault(found, Connection(time.monotonic())).is_closed = True
            with _sockets(self._port) as sockets, suppress(OSError, KeyError):
                sockets[found].shutdown(socket.SHUT_RDWR)

    def is_closed(self, peer: str) -> bool:
        """Return whether a connection was closed by `close`. Calls that it made before may still arrive.

        If it is being closed, wait for that, because an answer would make room for the next call.
        """
        with self._lock:
            connection = self._known.get(parse_peer(peer) or ("", 0))
        if connection is None or not connection.is_closed:
            return False
        with self._closing:
            return True

    def _watch(self) -> None:
        while not self._stop.wait(SWEEP):
            try:
                self.sweep()
            except Exception:  # keep the thread alive
                log.exception("looking at the connections failed")

    def sweep(self) -> None:
        """Close the connections that should not be open."""
        with _sockets(self._port) as found:
            for ending in self._endings(set(found), time.monotonic()):
                with suppress(OSError):
                    found[ending.peer].shutdown(socket.SHUT_RDWR)
                who = f"of '{ending.member}' " if ending.member else ""
                where = f"{ending.peer[0]}:{ending.peer[1]}"
                self._tell(ending.member, ending.why, f"a connection {who}from {where} is closed: {ending.why}")

    def _endings(self, present: set[Peer], now: float) -> list[Ending]:
        with self._lock:
            just_now = {peer for peer, connection in self._known.items() if now - connection.since < NAMELESS}
            self._known = {peer: self._known.get(peer, Connection(now)) for peer in present | just_now}
            known = [(peer, connection) for peer, connection in self._known.items() if peer in present]
            known.sort(key=lambda item: -item[1].since)  # youngest first
        endings, places = [], Counter[str]()
        for peer, connection in known:
            why = self._why_not(peer, connection, places, now)
            if why:
                endings.append(Ending(peer, connection.member, why))
        return endings

    def _why_not(self, peer: Peer, connection: Connection, places: Counter[str], now: float) -> str:
        """Return why a connection should be closed, or an empty string. `places` counts the younger connections."""
        if connection.condemned:
            return connection.condemned
        if not connection.member:
            if now - connection.since > NAMELESS:
                return f"no call of a member in {NAMELESS:g} s"
            places.update(("", f"from {peer[0]}"))
            too_many = places[""] > STRANGERS or places[f"from {peer[0]}"] > FROM_ONE_ADDRESS
            return "too many connections without a call of a member" if too_many else ""
        refused = self._refusal(connection.certificate, connection.member)
        if refused:
            return refused
        member = f"member {connection.member}"
        places[member] += 1
        return f"a member has at most {EACH} connections" if places[member] > EACH else ""


def parse_peer(text: str) -> Peer | None:
    """Return address and port of `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`, the formats of gRPC."""
    kind, _, rest = unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    """Normalise an address. An IPv4-mapped IPv6 address becomes an IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _descriptors() -> Path | None:
    return next((folder for folder in DESCRIPTORS if folder.is_dir()), None)


@contextmanager
def _sockets(port: int) -> Iterator[dict[Peer, socket.socket]]:
    """Yield the connected sockets of this process with this local port, by remote end.

    The sockets are duplicates. They stay valid if the process closes the originals meanwhile.
    """
    folder, found = _descriptors(), dict[Peer, socket.socket]()
    try:
        for name in os.listdir(folder) if folder else ():
            mine = _duplicate(int(name))
            if mine is None:
                continue
            peer = _other_end(mine, port)
            if peer is None:
                mine.close()
            else:
                found[peer] = mine
        yield found
    finally:
        for mine in found.values():
            mine.close()


def _duplicate(descriptor: int) -> socket.socket | None:
    try:
        copied = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copied)
    except OSError:  # not a socket
        os.close(copied)
        return None


def _other_end(mine: socket.socket, port: int) -> Peer | None:
    try:
        if mine.family not in (socket.AF_INET, socket.AF_INET6) or mine.getsockname()[1] != port:
            return None
        host, other, *_ = mine.getpeername()
    except OSError:
        return None
    return _plain(host), other
