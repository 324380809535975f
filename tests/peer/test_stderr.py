"""Others write nothing to the standard error of a peer: gRPC would print the text of their frames."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from http2 import PREFACE, SETTINGS, connect, frame, goaway, tls

FORGED = b"x\n\x1b[31m2026-11-20T00:00:00 error forged line\n"


def speak(town, rounds: int = 20) -> None:
    """A member sends such frames to the port of M0, and any user to its status."""
    authority = town.folder / "authority" / "ca.pem"
    for _ in range(rounds):
        for address, context in (
            (town.rehearsed.addresses["M0"], tls(town.folder / "M20" / "keys", authority)),
            (town.rehearsed.status["M0"], None),
        ):
            with contextlib.suppress(OSError), connect(address, context) as made:
                made.sendall(goaway(FORGED))
                time.sleep(0.02)


def answer(town, name: str, ready: threading.Event, answered: threading.Event) -> None:
    """Be the server of a member that answers each call in this way."""
    host, _, port = town.rehearsed.addresses[name].rpartition(":")
    context = tls(town.folder / name / "keys", town.folder / "authority" / "ca.pem", server=True)
    with socket.create_server((host, int(port))) as listening:
        listening.settimeout(30)
        ready.set()
        while not answered.is_set():
            with contextlib.suppress(OSError):
                made = context.wrap_socket(listening.accept()[0], server_side=True)
                with made:
                    made.settimeout(5)
                    if made.recv(len(PREFACE)):
                        made.sendall(frame(SETTINGS, 0, 0) + goaway(FORGED))
                        time.sleep(0.2)
                        answered.set()


def test_no_frame_of_another_reaches_standard_error(town, monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    made = town("run.rounds=1000")
    ready, answered = threading.Event(), threading.Event()
    server = threading.Thread(target=answer, args=(made, "M40", ready, answered))
    server.start()
    ready.wait(10)
    made.start("M0")
    made.until(lambda: "cannot be reached" in made.log("M0"))
    speak(made)
    server.join(30)
    assert answered.is_set()
    time.sleep(0.5)
    assert "forged" not in made.log("M0")
    assert "\x1b" not in made.log("M0")
    assert all(" warning " in line or " info " in line for line in made.log("M0").splitlines()), made.log("M0")
