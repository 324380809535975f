"""Real TLS on loopback: members reach each other, and nobody else reaches them."""

from __future__ import annotations

import socket
import ssl
from datetime import timedelta

import grpc
import pytest

from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.peer.pki import authority as authorities
from fedh2l.peer.pki import certificates
from fedh2l.peer.pki.authority import Authority
from fedh2l.peer.refusals import PeerRefusedError, Reason, Refusal, Refused, read_refusal
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.auth import MutualTLS
from fedh2l.peer.transport.client import SERVICE, PeerClient
from fedh2l.peer.transport.handshake import RosterDigests
from fedh2l.peer.transport.server import Listener, Servicer
from members import CLASSES, join

LARGEST = 2000


class Answers(Servicer):
    """A desk that remembers."""

    def __init__(self, agreed: RosterDigests) -> None:
        self.agreed, self.heard, self.refused = agreed, [], []

    def greeted(self, caller, hello):
        self.agreed.check(caller, hello, 5)
        return self.agreed.hello("a", 5)

    def taught(self, caller, posteriors):
        if len(posteriors) > LARGEST:
            raise Refused(Reason.TOO_LARGE, f"{len(posteriors)} bytes")
        self.heard.append((caller, posteriors))

    def left(self, caller, goodbye):
        self.heard.append((caller, goodbye.round))

    def told(self, caller, head):
        self.heard.append((caller, head.length))

    def present(self):
        return 5

    def turned_away(self, caller, reason, why):
        self.refused.append(why)


class Town:
    """A federation of a, b and c, of which a listens."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.founder = Authority.found(folder / "authority", "zoo")
        for name in "abc":
            self.join(name)
        self.roster_file = self.read(rounds=100)
        self.servicer = Answers(RosterDigests.of([self.roster_file], CLASSES))
        self.listener = Listener(self.auth("a"), self.servicer, "127.0.0.1:0", LARGEST, "abc")
        self.listener.start()
        self.address = f"127.0.0.1:{self.listener.port}"

    def join(self, name, founder=None, days=365):
        return join(founder or self.founder, self.folder / name, name, days, ["127.0.0.1"])

    def read(self, **changes) -> RosterFile:
        members = [{"name": n, "address": f"127.0.0.1:{9000 + i}", "pin": self.pin(n)} for i, n in enumerate("abc")]
        return RosterFile.read({"federation": "zoo", "seedset": "0" * 64, "members": members, **changes})

    def pin(self, name) -> str:
        return certificates.About.of(certificates.read_certificate(self.folder / name / "node.pem")).pin

    def identity(self, name, root="authority") -> certificates.Identity:
        own = self.folder / name
        return certificates.Identity.load(own / "node.pem", own / "node.key", self.folder / root / "ca.pem")

    def auth(self, name, charter=None) -> MutualTLS:
        return MutualTLS(
            self.identity(name), (charter or self.roster_file).pins, self.folder / "authority" / "revoked.pem"
        )

    def line(self, name, address=None, charter=None, member="a") -> PeerClient:
        line = PeerClient(self.auth(name, charter), member, address or self.address)
        line.open(5)
        return line

    def greet(self, name, agreed, round) -> pb.Hello:
        return self.line(name).greet(agreed, agreed.hello(name, round), 5)

    def call(self, name, method, payload: bytes, root=None) -> bytes:
        """As whoever holds these files, with none of our checks in between."""
        own = self.folder / name
        trusted = root or (self.folder / "a" / "node.pem").read_bytes()
        pair = [(own / file).read_bytes() for file in ("node.key", "node.pem")] if name else [None, None]
        with grpc.secure_channel(self.address, grpc.ssl_channel_credentials(trusted, *pair)) as channel:
            return channel.unary_unary(f"/{SERVICE}/{method}")(payload, timeout=10)


@pytest.fixture
def town(tmp_path):
    made = Town(tmp_path)
    yield made
    made.listener.stop(0)


def refused(town, name, method="Teach", payload=b"", **how) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        town.call(name, method, payload, **how)
    assert town.servicer.heard == []
    return error.value.code(), error.value.details()


def test_members_talk(town):
    assert town.greet("b", town.servicer.agreed, 3).round == 5
    line = town.line("b")
    assert line.call("Teach", pb.Signal(posteriors=b"xyz"), pb.Receipt, 5).round == 5
    assert line.call("Leave", pb.Goodbye(round=9), pb.Receipt, 5).round == 5
    assert town.servicer.heard == [("b", b"xyz"), ("b", 9)]
    assert town.servicer.refused == []


def test_without_a_certificate_there_is_no_connection(town):
    code, details = refused(town, "")
    assert code is grpc.StatusCode.UNAVAILABLE, details


def test_a_certificate_of_another_authority(town):
    other = Authority.found(town.folder / "other", "zoo")
    town.join("stranger", other)
    code, _ = refused(town, "stranger")
    assert code is grpc.StatusCode.UNAVAILABLE


def test_the_right_authority_but_not_a_member(town):
    town.join("d")
    code, details = refused(town, "d")
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert details == "not in the roster"
    assert "'d' is not in the roster" in town.servicer.refused[0]
    with pytest.raises(PeerRefusedError, match="which is not a member"):
        town.auth("d")


def test_a_member_with_another_key(town):
    town.founder.revoke("b")
    (town.folder / "b" / "node.key").unlink()
    town.join("b")
    code, details = refused(town, "b")
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert details == "another key than the roster pins"
    assert "but the roster pins" in town.servicer.refused[0]
    with pytest.raises(PeerRefusedError, match="would be refused by all others"):
        town.auth("b")


def test_an_expired_certificate(town, monkeypatch):
    monkeypatch.setattr(authorities, "now", lambda: certificates.now() - timedelta(days=500))
    expired = Authority(town.folder / "authority")
    town.join("b", expired, days=365)
    code, _ = refused(town, "b")
    assert code is grpc.StatusCode.UNAVAILABLE  # TLS itself refuses it
    with pytest.raises(certificates.PKIError, match="renew it"):
        town.identity("b")


def test_a_revoked_certificate(town, caplog):
    assert town.call("b", "Teach", pb.Signal(posteriors=b"1").SerializeToString())
    town.servicer.heard.clear()
    town.founder.revoke("b")
    code, details = refused(town, "b")
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "is revoked" in details


def test_a_damaged_list_of_what_is_revoked_changes_nothing(town, caplog):
    town.founder.revoke("b")
    assert refused(town, "b")[0] is grpc.StatusCode.PERMISSION_DENIED
    (town.folder / "authority" / "revoked.pem").write_text("torn")
    assert refused(town, "b")[0] is grpc.StatusCode.PERMISSION_DENIED
    assert "the previous list of revocations stays in force" in caplog.text


def test_a_renewed_certificate_of_the_same_key_is_welcome(town):
    town.join("b")
    assert town.greet("b", town.servicer.agreed, 1).round == 5


def test_older_tls_is_refused(town):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(town.folder / "authority" / "ca.pem")
    context.load_cert_chain(town.folder / "b" / "node.pem", town.folder / "b" / "node.key")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", town.listener.port), 5) as plain,
        context.wrap_socket(plain) as secured,
    ):
        secured.sendall(http2_call(f"/{SERVICE}/Teach", pb.Signal(posteriors=b"x").SerializeToString()))
        secured.settimeout(5)
        while secured.recv(4096) and not town.servicer.refused:
            pass
    assert "TLSv1.2" in town.servicer.refused[0]
    assert town.servicer.heard == []


def http2_call(path: str, message: bytes) -> bytes:
    """A gRPC call in HTTP/2, by hand: preface, settings, headers, data."""

    def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
        return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body

    def text(value: str) -> bytes:
        return len(value).to_bytes(1, "big") + value.encode()

    fields = {":method": "POST", ":scheme": "https", ":path": path, ":authority": "127.0.0.1", "te": "trailers"}
    fields |= {"content-type": "application/grpc"}
    headers = b"".join(b"\x00" + text(key) + text(value) for key, value in fields.items())
    body = b"\x00" + len(message).to_bytes(4, "big") + message
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return preface + frame(4, 0, 0, b"") + frame(1, 4, 1, headers) + frame(0, 1, 1, body)


def test_a_server_that_is_not_the_member(town):
    """Another member at its address, who could read what was not meant for it."""
    with pytest.raises(PeerRefusedError, match="its certificate is that of 'a', not of 'c'"):
        town.line("b", member="c")


def test_a_server_that_shows_no_certificate_of_ours(tmp_path, town):
    other = Town(tmp_path / "elsewhere")
    try:
        with pytest.raises(PeerRefusedError, match="does not show a certificate of this federation"):
            town.line("b", address=other.address)
    finally:
        other.listener.stop(0)


def test_nobody_there(town):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(OSError, match=r"."):
        town.line("b", address=f"127.0.0.1:{port}")


def hello(agreed, **changes) -> bytes:
    message = agreed.hello("b", 1)
    for key, value in changes.items():
        setattr(message if key in ("protocol", "name") else message.agreements[0], key, value)
    return message.SerializeToString()


def test_who_has_agreed_on_something_else(town):
    other = RosterDigests.of([town.read(rounds=100, seed=9, method={"name": "fedh2l", "kl_weight": 0.0})], CLASSES)
    code, details = refused(town, "b", "Greet", hello(other))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details == "another roster: method, seed"
    assert "differs in: method, seed." in town.servicer.refused[0]
    with pytest.raises(PeerRefusedError, match="'a' refuses this peer: another roster, which differs in: method, seed"):
        town.greet("b", other, 1)
    other_set = RosterDigests.of([town.read(rounds=100, seedset="1" * 64)], CLASSES)
    assert refused(town, "b", "Greet", hello(other_set))[1] == "another roster: seedset"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"protocol": 1}, "uses version 1 of the protocol, this peer 2"),
        ({"name": "c"}, "'b' greets under another name than that of its certificate"),
        ({"digest": b"0" * 16}, "differs in: its digest"),
        ({"digest": b"0" * 15}, "invalid agreements"),
        ({"fields": b"0" * 99}, "invalid agreements"),
        ({"fields": b"0" * 56}, "fields that do not match its digest"),
        ({"version": 0}, "invalid agreements"),
    ],
)
def test_greetings_that_are_none(town, changes, why):
    code, details = refused(town, "b", "Greet", hello(town.servicer.agreed, **changes))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details in ("an unsound greeting", "another version of the protocol", "another roster")
    assert why in town.servicer.refused[0]


def test_random_bytes_and_unknown_methods(town):
    code, _ = refused(town, "b", payload=b"\xff\xff\xff\xff")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "'b' sent 4 bytes that are not the canonical form of a Signal" in town.servicer.refused[0]
    code, _ = refused(town, "b", method="Parameters", payload=b"")
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_a_port_that_is_taken(town):
    with pytest.raises(PeerRefusedError, match="cannot listen on"):
        Listener(town.auth("a"), town.servicer, town.address, LARGEST, "abc")


def test_a_signal_from_the_future_may_be_sent_again(town, monkeypatch):
    def early(caller, posteriors):
        raise Refused(Reason.FUTURE, "it is of round 900")

    monkeypatch.setattr(town.servicer, "taught", early)
    code, _ = refused(town, "b", payload=pb.Signal(posteriors=b"x").SerializeToString())
    assert code is grpc.StatusCode.ABORTED


# Nothing else on the wire


def with_unknown_field(message, size=2800) -> bytes:
    """Field 15 of the message, which the schema does not have."""
    return (
        message.SerializeToString() + b"\x7a" + (size % 128 | 128).to_bytes(1) + (size // 128).to_bytes(1) + bytes(size)
    )


SIGNAL = pb.Signal(posteriors=b"xyz").SerializeToString()


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("Teach", with_unknown_field(pb.Signal(posteriors=b"xyz"))),
        ("Leave", with_unknown_field(pb.Goodbye(round=3))),
        ("Witness", with_unknown_field(pb.Head(length=3))),
        ("Teach", SIGNAL + SIGNAL),  # the last of two values counts
        ("Leave", b"\x08\x83\x00"),  # the number 3 in more bytes than it needs
        ("Leave", b"\x10\x01\x08\x03"),  # fields in another order
    ],
)
def test_bytes_that_say_more_than_the_message(town, method, data):
    code, details = refused(town, "b", method, data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "bytes that are not the canonical form of the message"
    assert "are not the canonical form" in town.servicer.refused[0]


def test_an_unknown_field_within_a_greeting(town):
    greeting = town.servicer.agreed.hello("b", 1)
    inner = with_unknown_field(greeting.agreements[0], 200)
    del greeting.agreements[:]
    data = (
        greeting.SerializeToString() + b"\x2a" + (len(inner) % 128 | 128).to_bytes(1) + (len(inner) // 128).to_bytes(1)
    )
    assert refused(town, "b", "Greet", data + inner)[1] == "bytes that are not the canonical form of the message"


def channel(town, **how) -> grpc.Channel:
    pair = [(town.folder / "b" / file).read_bytes() for file in ("node.key", "node.pem")]
    trusted = (town.folder / "a" / "node.pem").read_bytes()
    return grpc.secure_channel(town.address, grpc.ssl_channel_credentials(trusted, *pair), **how)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ([], {"metadata": (("note", "x" * 200),)}),
        ([], {"metadata": (("note-bin", b"x" * 200),)}),
        ([("grpc.primary_user_agent", "a few words")], {}),
    ],
)
def test_metadata_that_does_not_belong_to_a_call(town, options, call):
    with channel(town, options=options) as made, pytest.raises(grpc.RpcError) as error:
        made.unary_unary(f"/{SERVICE}/Teach")(SIGNAL, timeout=10, **call)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details() == "unexpected metadata"
    assert "metadata that does not belong to a call" in town.servicer.refused[0]
    assert town.servicer.heard == []


def test_much_metadata_is_not_even_read(town):
    with channel(town) as made, pytest.raises(grpc.RpcError) as error:
        made.unary_unary(f"/{SERVICE}/Teach")(SIGNAL, timeout=10, metadata=(("note", "x" * 5200),))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_compressed_messages_are_refused(town):
    with channel(town) as made, pytest.raises(grpc.RpcError) as error:
        made.unary_unary(f"/{SERVICE}/Teach")(bytes(500), timeout=10, compression=grpc.Compression.Gzip)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_second_message_in_a_call(town):
    with channel(town) as made, pytest.raises(grpc.RpcError) as error:
        made.stream_unary(f"/{SERVICE}/Teach")(iter([SIGNAL, SIGNAL]), timeout=10)
    assert error.value.details() == "not exactly one message"
    assert town.servicer.heard == []


def test_a_refusal_carries_no_text_of_its_sender():
    for text in ("another roster: method, seed", "round is past", "not in the roster"):
        assert read_refusal(text) != Refusal.UNKNOWN
    for text in (None, "", "hello", "another roster: hello", "another roster: seed, seed", "round is past: hello"):
        assert read_refusal(text) == Refusal.UNKNOWN


@pytest.mark.parametrize("where", ["unknown field", "initial metadata", "trailing metadata"])
def test_answers_that_say_more(town, monkeypatch, where):
    """A dishonest server; the caller takes nothing from it."""
    handle = town.listener._answered

    def answered(caller, requests, context, kind, answer):
        reply = handle(caller, requests, context, kind, answer)
        if where == "initial metadata":
            context.send_initial_metadata((("note", "x"),))
        if where == "trailing metadata":
            context.set_trailing_metadata((("note", "x"),))
        return reply + b"\x7a\x01x" if where == "unknown field" else reply

    monkeypatch.setattr(town.listener, "_answered", answered)
    line = town.line("b")
    with pytest.raises(PeerRefusedError, match=r"canonical form of a Receipt|unexpected metadata"):
        line.call("Teach", pb.Signal(posteriors=b"xyz"), pb.Receipt, 5)


def test_an_error_of_this_peer_is_told_to_its_operator_alone(town, monkeypatch):
    """gRPC sends the text of an exception, and that may name or quote files."""

    def damaged(caller, posteriors):
        raise RuntimeError("cannot read '/home/me/patients'")

    monkeypatch.setattr(town.servicer, "taught", damaged)
    code, details = refused(town, "b", payload=SIGNAL)
    assert (code, details) == (grpc.StatusCode.INTERNAL, "this peer failed")
    assert "could not be answered: RuntimeError: cannot read '/home/me/patients'" in town.servicer.refused[-1]
