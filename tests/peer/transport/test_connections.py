"""Connections to a peer's port: nobody holds more of them, or holds them longer, than is right."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from test_server import LARGEST, SIGNAL, Town, channel

from fedh2l.peer.rehearsal import PEER
from fedh2l.peer.settings import load_peer
from fedh2l.peer.transport import connections
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport import server as transport
from fedh2l.peer.transport.client import SERVICE
from fedh2l.peer.transport.connections import EACH, parse_peer
from fedh2l.peer.transport.server import Listener

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd") and not os.path.isdir("/dev/fd"), reason="no list")


@pytest.fixture
def town(tmp_path) -> Iterator[Town]:
    made = Town(tmp_path)
    yield made
    made.listener.stop(0)


def reopen(town: Town) -> None:
    """With the limits that hold now."""
    town.listener.stop(0)
    town.listener = Listener(town.auth("a"), town.servicer, town.address, LARGEST, "abc")
    town.listener.start()


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def secured(folder, address: str, authority) -> ssl.SSLSocket:
    """A TLS connection with a member's certificate, on which nothing is said."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority)
    context.load_cert_chain(folder / "node.pem", folder / "node.key")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    made = context.wrap_socket(socket.create_connection((host, int(port)), 5))
    made.settimeout(0.0)
    return made


def is_closed(made: ssl.SSLSocket) -> bool:
    try:
        while made.recv(4096):
            pass
    except (ssl.SSLWantReadError, BlockingIOError):
        return False
    except OSError:
        return True
    return True


def silent(town: Town, count: int, name: str = "b") -> list[ssl.SSLSocket]:
    return [secured(town.folder / name, town.address, town.folder / "authority" / "ca.pem") for _ in range(count)]


def test_who_says_nothing_is_disconnected(town, monkeypatch):
    monkeypatch.setattr(connections, "NAMELESS", 0.5)
    idle = silent(town, 3)
    until(lambda: all(map(is_closed, idle)))
    assert "is closed: no call of a member" in town.servicer.refused[0]


def test_strangers_make_room_for_strangers(town, monkeypatch):
    monkeypatch.setattr(connections, "FROM_ONE_ADDRESS", 5)
    first = silent(town, 5)
    time.sleep(0.6)
    later = silent(town, 5)
    until(lambda: all(map(is_closed, first)))
    assert not any(map(is_closed, later))
    assert town.greet("c", town.servicer.agreed, 1).round == 5


def test_a_member_has_a_few_connections(town):
    channels = [channel(town, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(EACH + 3)]
    states: list[list[grpc.ChannelConnectivity]] = [[] for _ in channels]
    for made, seen in zip(channels, states, strict=True):
        made.subscribe(seen.append)
        made.unary_unary(f"/{SERVICE}/Teach")(SIGNAL, timeout=10)
    until(lambda: sum(bool(seen) and seen[-1] is not grpc.ChannelConnectivity.READY for seen in states) == 3)
    assert any(f"at most {EACH} connections" in why for why in town.servicer.refused)
    time.sleep(0.6)
    assert sum(seen[-1] is grpc.ChannelConnectivity.READY for seen in states) == EACH
    for made in channels:
        made.close()


def test_revocation_closes_connections(town):
    line = town.line("b")
    broken: list[bool] = []
    line.open(5, lambda: broken.append(True))
    assert line.call("Teach", pb.Signal(posteriors=b"xyz"), pb.Receipt, 5).round == 5
    other = town.line("c")
    assert other.call("Teach", pb.Signal(posteriors=b"xyz"), pb.Receipt, 5).round == 5
    town.founder.revoke("b")
    until(lambda: line.is_broken and bool(broken))
    assert any("'b'" in why and "revoked" in why for why in town.servicer.refused)
    assert not other.is_broken
    line.close()
    other.close()


def test_who_is_refused_is_disconnected(town):
    town.join("d")
    pair = [(town.folder / "d" / file).read_bytes() for file in ("node.key", "node.pem")]
    trusted = (town.folder / "a" / "node.pem").read_bytes()
    states: list[grpc.ChannelConnectivity] = []
    with grpc.secure_channel(town.address, grpc.ssl_channel_credentials(trusted, *pair)) as made:
        made.subscribe(states.append)
        with pytest.raises(grpc.RpcError, match="not in the roster"):
            made.unary_unary(f"/{SERVICE}/Teach")(SIGNAL, timeout=10)
        until(lambda: grpc.ChannelConnectivity.READY in states and states[-1] is not grpc.ChannelConnectivity.READY)


@pytest.mark.parametrize("limit", ["IDLE", "OLDEST"])
def test_a_connection_ends_without_calls_and_with_age(town, monkeypatch, limit):
    monkeypatch.setattr(transport, limit, 1.0)
    reopen(town)
    line = town.line("b")
    assert line.call("Teach", pb.Signal(posteriors=b"xyz"), pb.Receipt, 5).round == 5
    until(lambda: line.is_broken)
    line.open(5)
    assert line.call("Teach", pb.Signal(posteriors=b"xyz"), pb.Receipt, 5).round == 5
    line.close()


def test_how_grpc_names_who_calls():
    assert parse_peer("ipv4:127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse_peer("ipv6:%5B::1%5D:80") == ("::1", 80)
    assert parse_peer("ipv6:%5B::ffff:10.0.0.1%5D:80") == ("10.0.0.1", 80)
    assert parse_peer("unix:/tmp/x") is None


@pytest.mark.slow
def test_a_revoked_member_locks_out_nobody(request, tmp_path):
    """Real peers. A revoked member opens connections as fast as it can, while an honest one restarts."""
    town = request.getfixturevalue("town_of_peers")
    made = town("run.rounds=100000", "run.eval_every=5", deadline=2.0)
    made.start("M0", "M20", "M40")
    made.until(lambda: made.round("M0") >= 20)
    from fedh2l.peer.pki.authority import Authority

    Authority(made.folder / "authority").revoke("M60")
    address = load_peer(made.folder / "M0" / PEER).settings.listen
    keys, authority = made.folder / "M60" / "keys", made.folder / "authority" / "ca.pem"
    held: list[ssl.SSLSocket] = []

    def crowd(count: int) -> None:
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(secured(keys, address, authority))

    crowd(200)
    made.kill("M20")
    made.start("M20")
    before = made.round("M20")
    end = time.monotonic() + 20
    while time.monotonic() < end and made.round("M20") <= before + 20:
        crowd(10)
        time.sleep(0.05)
    assert made.round("M20") > before + 20, made.log("M20")
    assert "too many connections without a call" in made.log("M0")
    made.until(lambda: sum(not is_closed(each) for each in held) <= connections.FROM_ONE_ADDRESS, 15)


@pytest.fixture
def town_of_peers(tmp_path):
    from fedh2l.peer.membership.roster_sections import Timing
    from town import Town as Peers
    from town import rehearsal

    made = []

    def make(*changes: str, **timing) -> Peers:
        made.append(Peers(rehearsal(tmp_path / "peers", *changes, timing=Timing(**timing))))
        return made[-1]

    yield make
    for each in made:
        each.close()
