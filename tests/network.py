"""Machines that are none: network namespaces, with a network between them that is slow and loses packets.

The kernel's own `tc netem` does that, where it is built in. Where it is not, packets go through TUN devices and this
process, which holds each of them back for a while and drops some: to the peers' kernels it is the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

SET_INTERFACE, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
NEW_NETWORK = 0x40000000
MOST = 65536


class NotAllowedError(Exception):
    """This machine does not let us."""


def ip(*words: str, tool: str = "ip") -> None:
    try:
        done = subprocess.run([tool, *words], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NotAllowedError(f"there is no {tool} on this machine") from error
    if done.returncode:
        raise NotAllowedError(f"{tool} {' '.join(words)}: {done.stderr.strip()}")


class Network(ABC):
    """Namespaces with an address each, between which every packet takes `delay` ± `jitter` seconds, one way."""

    def __init__(self, names: Sequence[str], delay: float, jitter: float, loss: float) -> None:
        self.delay, self.jitter, self.loss = delay, jitter, loss
        tag = f"fh2l{os.getpid()}"
        self.spaces = {name: f"{tag}-{place}" for place, name in enumerate(names)}
        self.addresses = {name: f"10.77.0.{place + 1}" for place, name in enumerate(names)}
        try:
            for space in self.spaces.values():
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
            self.connect()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def connect(self) -> None:
        """Puts a network between the namespaces."""

    def within(self, name: str) -> list[str]:
        """What stands before a command that is run on one of these machines."""
        return ["nsenter", f"--net=/run/netns/{self.spaces[name]}"]

    def close(self) -> None:
        """Takes everything away again."""
        for space in self.spaces.values():
            _remove(space)


class Netem(Network):
    """A bridge, and the kernel's emulator on every line to it."""

    def connect(self) -> None:
        ip("netns", "add", self.router)
        ip("-n", self.router, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.router, "link", "set", "bridge", "up")
        for place, (name, space) in enumerate(self.spaces.items()):
            ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{place}", "netns", self.router)
            ip("-n", self.router, "link", "set", f"port{place}", "master", "bridge", "up")
            ip("-n", space, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            how = ["delay", f"{1e3 * self.delay:g}ms", f"{1e3 * self.jitter:g}ms", "loss", f"{100 * self.loss:g}%"]
            ip("-n", space, "qdisc", "add", "dev", "eth0", "root", "netem", *how, tool="tc")

    @property
    def router(self) -> str:
        return next(iter(self.spaces.values())) + "-hub"

    def close(self) -> None:
        _remove(self.router)
        super().close()


class Tun(Network):
    """Every packet is read here, and written to where it goes when it is time, or never."""

    def connect(self) -> None:
        self.lost = self.passed = 0
        self._ends, self._wake = os.pipe()
        self._lines: dict[bytes, int] = {}
        for name, space in self.spaces.items():
            self._lines[socket.inet_aton(self.addresses[name])] = _tun_in(space)
            ip("-n", space, "address", "add", f"{self.addresses[name]}/24", "dev", "tun0")
            ip("-n", space, "link", "set", "tun0", "up")
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        dice, under_way = random.Random(0), []
        lines = list(self._lines.values())
        while True:
            left = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select([*lines, self._ends], [], [], left)
            if self._ends in ready:
                return
            for line in ready:
                packet = os.read(line, MOST)
                target = self._lines.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if target is None or dice.random() < self.loss:
                    self.lost += target is not None
                    continue
                due = time.monotonic() + self.delay + dice.uniform(-self.jitter, self.jitter)
                heapq.heappush(under_way, (due, self.passed, target, packet))
                self.passed += 1
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(under_way)
                os.write(target, packet)

    def close(self) -> None:
        if hasattr(self, "_thread"):
            os.write(self._wake, b"x")
            self._thread.join()
        for line in getattr(self, "_lines", {}).values():
            os.close(line)
        super().close()


def _remove(space: str) -> None:
    with contextlib.suppress(NotAllowedError):
        ip("netns", "del", space)


def _tun_in(space: str) -> int:
    """A TUN device in another namespace, from a thread that goes there."""
    found: list[int | OSError] = []

    def make() -> None:
        try:
            with open(f"/run/netns/{space}") as there:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(there.fileno(), NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), "setns")
            line = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(line, SET_INTERFACE, struct.pack("16sH22x", b"tun0", TUN_WITHOUT_HEADER))
            found.append(line)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise NotAllowedError(f"no TUN device: {found[0]}")
    return found[0]
