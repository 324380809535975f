"""What a peer refuses, over the wire, from strangers and from members: every reason stands in a log, and none stops it.

Members here are test senders with certificates that are in order. What fails in the TLS handshake never reaches the
peer; it is in gRPC's own log, on standard error, and in that of whoever dialled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
import torch

from fedh2l.peer.peer import Peer
from fedh2l.peer.pki import authority as authorities
from fedh2l.peer.pki import certificates
from fedh2l.peer.pki.authority import Authority
from fedh2l.peer.rehearsal import PEER
from fedh2l.peer.settings import load_peer
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.client import SERVICE
from fedh2l.peer.transport.handshake import RosterDigests
from fedh2l.peer.transport.inbox import AHEAD
from fedh2l.peer.transport.server import SLACK
from fedh2l.protocol.messages import Posteriors, encode
from fedh2l.runs.directory import RunDirectory
from members import join
from town import rehearsal


@dataclass
class Door:
    """The peer M0, which listens, and the keys of M20, who knocks."""

    folder: Path
    peer: Peer
    founder: Authority

    @property
    def keys(self) -> Path:
        return self.folder / "M20" / "keys"

    def knock(self, method: str, message: bytes, keys: Path | None) -> str:
        """Calls as the holder of `keys`, or without any; returns how it was refused, or OK."""
        root = (self.folder / "M0" / "keys" / "node.pem").read_bytes()
        pair = [(keys / file).read_bytes() for file in ("node.key", "node.pem")] if keys else [None, None]
        address = f"127.0.0.1:{self.peer.listener.port}"
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(root, *pair)) as channel:
            try:
                channel.unary_unary(f"/{SERVICE}/{method}")(message, timeout=10)
            except grpc.RpcError as refused:
                return f"{refused.code().name}: {refused.details()}"
        return "OK"

    def teach(self, sender: str) -> str:
        """A sound signal of this round."""
        signal = self.signal(sender, self.peer.inbox._round)
        return self.knock("Teach", self.encoded(signal), self.folder / sender / "keys")

    def signal(self, sender: str = "M20", round: int = 1) -> Posteriors:
        rows, classes = self.peer.roster_version.shape(sender)
        values = torch.softmax(torch.randn(rows, classes, generator=torch.Generator().manual_seed(1)), -1)
        return Posteriors.of(sender, round, values, self.peer.roster_version.labels(sender, round))

    def encoded(self, signal: Posteriors) -> bytes:
        return pb.Signal(posteriors=encode(signal, self.peer.roster_version.roster)).SerializeToString()

    def hello(self, **charter) -> pb.Hello:
        """M20's greeting, of a roster in which some things are different."""
        own = self.peer.roster_version.roster_file
        other = replace(own, agreement=own.agreement.model_copy(update=charter))
        return RosterDigests.of([other], self.peer.roster_version.bundle.classes).hello("M20", 1)


@pytest.fixture
def door(tmp_path) -> Iterator[Door]:
    made = rehearsal(tmp_path / "there", "run.rounds=1000")
    peer = Peer(load_peer(made.folder / "M0" / PEER), RunDirectory.claim(tmp_path / "run", ""))
    peer.listener.start()
    try:
        door = Door(made.folder, peer, Authority(made.folder / "authority"))
        yield door
        assert door.teach("M40") == "OK"  # whatever came before, a sound signal of another member is taken
    finally:
        peer.listener.stop(0)
        peer.audit.close()
        peer.local_nodes.close()


# In the handshake


def stranger(door: Door, monkeypatch) -> Path:
    other = Authority.found(door.folder / "other", "rehearsal")
    join(other, door.folder / "stranger", "M20", 365, ["127.0.0.1"])
    return door.folder / "stranger"


def expired(door: Door, monkeypatch) -> Path:
    monkeypatch.setattr(authorities, "now", lambda: certificates.now() - timedelta(days=500))
    join(Authority(door.folder / "authority"), door.keys, "M20", 365, ["127.0.0.1"])
    return door.keys


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (lambda door, monkeypatch: None, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        (stranger, "unable to get local issuer certificate"),
        (expired, "certificate has expired"),
    ],
    ids=["no certificate", "another authority", "expired"],
)
def test_refused_in_the_handshake(door, monkeypatch, capfd, keys, why):
    assert door.knock("Teach", b"", keys(door, monkeypatch)).startswith("UNAVAILABLE")
    said = ""
    end = time.monotonic() + 10
    while why not in said:
        assert time.monotonic() < end, said
        said += capfd.readouterr().err
        time.sleep(0.05)


# By the certificate, for every call


@pytest.mark.parametrize("method", ["Greet", "Teach", "Witness", "Leave"])
def test_not_in_the_roster(door, caplog, method):
    join(door.founder, door.folder / "M80", "M80", 365, ["127.0.0.1"])
    assert "PERMISSION_DENIED" in door.knock(method, b"", door.folder / "M80")
    assert "turned away: " in caplog.text
    assert "'M80' is not in the roster" in caplog.text


@pytest.mark.parametrize("method", ["Greet", "Teach", "Witness", "Leave"])
def test_revoked(door, caplog, method):
    door.founder.revoke("M20")
    assert "PERMISSION_DENIED" in door.knock(method, b"", door.keys)
    assert "is revoked" in caplog.text


# By what it says


def named(hello: pb.Hello, **changes) -> pb.Hello:
    for key, value in changes.items():
        setattr(hello, key, value)
    return hello


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (lambda door: named(door.hello(), name="M40"), "'M20' greets under another name than that of its certificate"),
        (lambda door: door.hello(seedset="1" * 64), "differs in: seedset"),
        (lambda door: door.hello(rounds=2000, seed=9), "differs in: rounds, seed"),
        (lambda door: named(door.hello(), protocol=1), "uses version 1 of the protocol, this peer 2"),
    ],
    ids=["name", "seed set", "roster", "protocol"],
)
def test_greetings(door, caplog, hello, why):
    assert "FAILED_PRECONDITION" in door.knock("Greet", hello(door).SerializeToString(), door.keys)
    assert why in caplog.text


def same(door: Door, **changes) -> bytes:
    return door.encoded(replace(door.signal(), **changes))


def full(value: float, door: Door) -> torch.Tensor:
    return torch.full_like(door.signal().values, value)


def with_negative(door: Door) -> bytes:
    values = door.signal().values
    values[0, 0], values[0, 1] = -0.5, values[0, 1] + values[0, 0] + 0.5
    return same(door, values=values)


SIGNALS: dict[str, tuple[Callable[[Door], bytes], str]] = {
    "another's name": (lambda door: door.encoded(door.signal("M40")), "its sender is 'M40'"),
    "future": (lambda door: door.encoded(door.signal(round=AHEAD + 2)), f"it is of round {AHEAD + 2}"),
    "shape": (lambda door: same(door, values=full(0.1, door)[:-1]), "should have shape (8, 10) and a count"),
    "nan": (lambda door: same(door, values=full(float("nan"), door)), "not finite"),
    "negative": (with_negative, "negative"),
    "sum": (lambda door: same(door, values=full(0.2, door)), "sum to 1"),
    "accuracy": (lambda door: same(door, correct=door.signal().correct + 1), "count of correct"),
    "cap": (lambda door: pb.Signal(posteriors=bytes(door.peer.history.largest("M20") + 1)).SerializeToString(),
            "bytes, but at most 364 are accepted"),
    "random bytes": (lambda door: pb.Signal(posteriors=b"\x8f\x03" * 90).SerializeToString(), "not a fedh2l message"),
    "not even a signal": (lambda door: b"\xff" * 40, "40 bytes that are not the canonical form of a Signal"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SIGNALS)
def test_signals(door, caplog, kind):
    make, why = SIGNALS[kind]
    code = "ABORTED" if kind == "future" else "INVALID_ARGUMENT"
    assert door.knock("Teach", make(door), door.keys).startswith(code)
    assert why in caplog.text
    assert door.peer.inbox.heard == {}


def test_replayed(door, caplog):
    assert door.teach("M20") == "OK"
    assert "INVALID_ARGUMENT: seen before" in door.knock("Teach", door.encoded(door.signal()), door.keys)
    assert "a signal of round 1 has already arrived" in caplog.text
    door.peer.inbox.enter(2)
    assert "round is past" in door.knock("Teach", door.encoded(door.signal()), door.keys)


def test_far_over_the_cap_nothing_is_read(door):
    """That much only gRPC can refuse; a little less is measured, above."""
    most = door.peer.history.largest("M20") + SLACK
    huge = pb.Signal(posteriors=bytes(100 * most)).SerializeToString()
    assert "RESOURCE_EXHAUSTED" in door.knock("Teach", huge, door.keys)


def test_a_head_that_another_signed(door, caplog):
    forged = pb.Head(length=5, hash="0" * 64, signature="AAAA")
    assert "FAILED_PRECONDITION" in door.knock("Witness", forged.SerializeToString(), door.keys)
    assert "'M20' sent a head of its audit log that it did not sign" in caplog.text
    assert not (door.peer.witnesses.path("M20")).exists()
