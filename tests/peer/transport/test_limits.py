"""What a peer's port bears: too much, nothing at all, and noise; others are answered meanwhile, or soon after."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

import grpc
import pytest
from test_server import LARGEST, Town, refused

from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport import server as transport
from fedh2l.peer.transport.client import SERVICE
from fedh2l.peer.transport.server import SLACK, Listener


@pytest.fixture
def town(tmp_path):
    made = Town(tmp_path)
    yield made
    made.listener.stop(0)


def test_what_is_too_large_is_measured_and_a_little_more_is_not_even_read(town):
    code, details = refused(town, "b", payload=pb.Signal(posteriors=b"x" * (LARGEST + 1)).SerializeToString())
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "too large")
    code, _ = refused(town, "b", payload=b"x" * (LARGEST + SLACK + 1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_noise_on_the_port_changes_nothing(town, caplog):
    with caplog.at_level(logging.ERROR):
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\x00" * 200, b"\xff" * 5000):
            with socket.create_connection(("127.0.0.1", town.listener.port), 5) as plain:
                plain.sendall(noise)
    assert town.greet("b", town.servicer.agreed, 1).round == 5


def test_who_connects_and_says_nothing_makes_room_again(town, monkeypatch):
    monkeypatch.setattr(transport, "HANDSHAKE", 1.0)
    monkeypatch.setattr(transport, "CONNECTIONS", 8)
    listener = Listener(town.auth("a"), town.servicer, "127.0.0.1:0", LARGEST, "abc")
    listener.start()
    before = len(os.listdir("/proc/self/fd"))
    idle = [socket.create_connection(("127.0.0.1", listener.port), 5) for _ in range(100)]
    try:
        time.sleep(0.3)
        assert len(os.listdir("/proc/self/fd")) - before - len(idle) <= 8 + 4 * 3 + 2
        time.sleep(1.5)
        address = f"127.0.0.1:{listener.port}"
        assert (
            town.line("b", address=address).greet(town.servicer.agreed, town.servicer.agreed.hello("b", 1), 5).round
            == 5
        )
    finally:
        for each in idle:
            each.close()
        listener.stop(0)


def test_who_calls_and_says_nothing_holds_up_nobody_else(town):
    """Who calls is looked at before it is listened to, and may call only so often at a time."""
    silence = threading.Event()

    def nothing():
        silence.wait(20)
        yield b""

    own = town.folder / "b"
    pair = [(own / file).read_bytes() for file in ("node.key", "node.pem")]
    trusted = (town.folder / "a" / "node.pem").read_bytes()
    with grpc.secure_channel(town.address, grpc.ssl_channel_credentials(trusted, *pair)) as channel:
        calls = [channel.stream_unary(f"/{SERVICE}/Teach").future(nothing(), timeout=3) for _ in range(20)]
        assert town.greet("c", town.servicer.agreed, 1).round == 5
        assert all(call.exception(10) is not None for call in calls)
    silence.set()
