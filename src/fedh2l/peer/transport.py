"""How peers reach each other: gRPC over TLS 1.3, with certificates on both ends.

TLS verifies that the other end holds a certificate of the federation's authority. What it cannot know is checked for
every call from the certificate itself: that it is a member's, with the pinned key, and not revoked. Who calls is whom
the certificate names, whatever a message says.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from google.protobuf.message import DecodeError

from fedh2l.errors import FedH2LError
from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.certificates import Identity, Revocations, refusal
from fedh2l.peer.charter import Charter, differences, parse_address
from fedh2l.peer.mailbox import Reason, Refused

log = logging.getLogger("fedh2l.peer")

PROTOCOL = 1
SERVICE = "fedh2l.v1.Peer"
SLACK = 4096
"""Bytes beyond the largest message that are still read, so that what is too large can be measured and logged."""
AT_ONCE = 2
"""Calls of one member that are answered at a time."""
ALIVE = 20.0
"""Seconds of silence after which a connection is asked whether anybody is still there."""
ROUND = "fedh2l-round"
"""Under which the round of a peer stands beside its refusal of a signal."""


class PeerRefusedError(FedH2LError):
    """Another peer is not who it should be, or has agreed on something else; or it says so of this one."""


class Circle:
    """Who may be spoken to: the members, by their certificates."""

    def __init__(self, identity: Identity, charter: Charter, revoked: Path | None = None) -> None:
        self.identity, self.charter = identity, charter
        self.authority = x509.load_pem_x509_certificate(identity.authority)
        self._revoked = Revocations(self.authority, revoked)
        if identity.about.name not in charter.names:
            raise PeerRefusedError(f"this peer's certificate is that of '{identity.about.name}', who is not a member")
        problem = self.refusal(_der(identity.certificate), identity.about.name)
        if problem:
            raise PeerRefusedError(f"this peer would be refused by all others: {problem}")

    @property
    def name(self) -> str:
        """Of this peer."""
        return self.identity.about.name

    def refusal(self, der: bytes, name: str) -> str | None:
        """Why a certificate is not that of the member of this name, or None."""
        if name not in self.charter.pins:
            return f"'{name}' is not in the roster"
        return refusal(der, name, self.charter.pins[name], self.authority, self._revoked)

    def caller(self, context: grpc.ServicerContext) -> str:
        """Who makes a call; raises `PeerRefusedError` if that is nobody who may."""
        about = context.auth_context()
        version = b"".join(about.get("ssl_tls_version", ()))
        if version != b"TLSv1.3":
            raise PeerRefusedError(f"{context.peer()} speaks {version.decode() or 'without TLS'}, not TLSv1.3")
        names: list[str] = [value.decode(errors="replace") for value in about.get("x509_common_name", ())]
        pems = list(about.get("x509_pem_cert", ()))
        if len(names) != 1 or len(pems) != 1:
            raise PeerRefusedError(f"{context.peer()} shows no certificate with one name")
        try:
            der = _der(pems[0])
        except ValueError as error:
            raise PeerRefusedError(f"{context.peer()}: its certificate cannot be read: {error}") from None
        problem = self.refusal(der, names[0])
        if problem:
            raise PeerRefusedError(f"{context.peer()} as '{names[0]}': {problem}")
        return names[0]


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


class Desk(ABC):
    """What a peer answers; the caller is always a member."""

    @abstractmethod
    def greeted(self, caller: str, hello: pb.Hello) -> pb.Hello:
        """To a handshake; raises `PeerRefusedError` if there can be none."""

    @abstractmethod
    def present(self) -> int:
        """The round that this peer is in."""

    @abstractmethod
    def taught(self, caller: str, posteriors: bytes) -> None:
        """Takes a signal; raises `Refused` if it is not used."""

    @abstractmethod
    def left(self, caller: str, goodbye: pb.Goodbye) -> None:
        """Takes a goodbye."""

    @abstractmethod
    def turned_away(self, why: str) -> None:
        """A call was refused before it got this far."""


@dataclass(frozen=True)
class Agreed:
    """What a handshake compares."""

    digest: bytes
    canonical: str

    @staticmethod
    def of(charter: Charter, classes: tuple[str, ...]) -> Agreed:
        """Of this peer."""
        canonical = json.dumps(charter.canonical(classes), sort_keys=True, separators=(",", ":"))
        return Agreed(charter.roster(classes).digest, canonical)

    def hello(self, name: str, round: int) -> pb.Hello:
        """The greeting of this peer."""
        return pb.Hello(protocol=PROTOCOL, name=name, digest=self.digest, canonical=self.canonical, round=round)

    def check(self, caller: str, hello: pb.Hello) -> None:
        """Raises `PeerRefusedError`, and says why, if this peer and another have not agreed on the same."""
        if hello.protocol != PROTOCOL:
            raise PeerRefusedError(f"'{caller}' speaks version {hello.protocol} of the protocol, this peer {PROTOCOL}")
        if hello.name != caller:
            raise PeerRefusedError(f"'{caller}' says that it is '{hello.name}'")
        if hello.digest == self.digest:
            return
        try:
            theirs = json.loads(hello.canonical)
            found = differences(json.loads(self.canonical), theirs if isinstance(theirs, dict) else {})
        except (ValueError, RecursionError):
            found = ["what it agreed on cannot be read"]
        why = "; ".join(found[:20]) or "its digest is not that of what it says it agreed on"
        raise PeerRefusedError(f"'{caller}' has agreed on something else: {why}")


class Listener:
    """The server of a peer."""

    def __init__(self, circle: Circle, desk: Desk, address: str, largest: int) -> None:
        options = [
            ("grpc.max_receive_message_length", largest + SLACK),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", int(1000 * ALIVE)),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        self._circle, self._desk = circle, desk
        self._free = {name: threading.Semaphore(AT_ONCE) for name in circle.charter.names}
        threads = 4 + AT_ONCE * len(self._free)  # no member can keep all of them busy
        pool = ThreadPoolExecutor(threads, "fedh2l-answers")
        handlers = grpc.method_handlers_generic_handler(SERVICE, self._methods())
        self._server = grpc.server(pool, [handlers], options=options)
        identity = circle.identity
        pair = [(identity.key, identity.certificate)]
        credentials = grpc.ssl_server_credentials(pair, identity.authority, require_client_auth=True)
        try:
            self.port: int = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise PeerRefusedError(f"cannot listen on {address}: {error}") from error

    def start(self) -> None:
        """From now on others are answered."""
        self._server.start()

    def stop(self, grace: float = 1.0) -> None:
        """No more calls; those that are being answered may end."""
        self._server.stop(grace).wait()

    def _methods(self) -> dict[str, Any]:
        desk = self._desk
        return {
            "Greet": self._handler(pb.Hello, desk.greeted),
            "Teach": self._handler(pb.Signal, lambda who, signal: desk.taught(who, signal.posteriors)),
            "Leave": self._handler(pb.Goodbye, desk.left),
        }

    def _handler(self, kind: Any, answer: Callable[[str, Any], Any]) -> Any:
        """Looks at who calls before it reads what they say: who may not call, or says nothing, holds up nobody."""

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            try:
                caller = self._circle.caller(context)
            except PeerRefusedError as refused:
                self._desk.turned_away(str(refused))
                context.abort(grpc.StatusCode.PERMISSION_DENIED, str(refused))
            if not self._free[caller].acquire(blocking=False):
                context.abort(grpc.StatusCode.UNAVAILABLE, f"{AT_ONCE} calls of '{caller}' are being answered")
            try:
                return self._answered(caller, requests, context, kind, answer)
            finally:
                self._free[caller].release()

        return grpc.stream_unary_rpc_method_handler(handle)

    def _answered(self, caller: str, requests: Iterator[bytes], context: Any, kind: Any, answer: Any) -> bytes:
        request = next(requests, b"")
        try:
            message = kind.FromString(request)
        except DecodeError as error:
            self._desk.turned_away(f"'{caller}' sent {len(request)} bytes that are not a {kind.__name__}: {error}")
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {kind.__name__}")
        try:
            said = answer(caller, message)
        except PeerRefusedError as refused:
            self._desk.turned_away(str(refused))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused))
        except Refused as refused:
            context.set_trailing_metadata(((ROUND, str(self._desk.present())),))
            early = refused.reason is Reason.FUTURE  # then it may be sent again
            code = grpc.StatusCode.ABORTED if early else grpc.StatusCode.INVALID_ARGUMENT
            context.abort(code, f"{refused.reason}: {refused}")
        reply: bytes = (said or pb.Receipt(round=self._desk.present())).SerializeToString()
        return reply


class Line:
    """This peer's connection to one member, pinned to the certificate that the member shows."""

    def __init__(self, circle: Circle, member: str, address: str) -> None:
        self._circle, self.me, self.member, self.address = circle, circle.name, member, address
        self._channel: grpc.Channel | None = None

    def open(self, timeout: float) -> None:
        """Connects; raises `PeerRefusedError` if somebody else answers, and `OSError` if nobody does."""
        self.close()
        der = shown_certificate(self._circle.identity, self.address, timeout)
        problem = self._circle.refusal(der, self.member)
        if problem:
            raise PeerRefusedError(f"{self.address}, where '{self.member}' should be: {problem}")
        root = x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
        identity = self._circle.identity
        credentials = grpc.ssl_channel_credentials(root, identity.key, identity.certificate)
        self._channel = grpc.secure_channel(self.address, credentials, options=[("grpc.enable_retries", 0)])

    def call(self, method: str, message: Any, reply: Any, timeout: float) -> Any:
        """Asks, and waits for the answer; `grpc.RpcError` as gRPC raises it."""
        assert self._channel is not None
        ask = self._channel.unary_unary(f"/{SERVICE}/{method}", type(message).SerializeToString, reply.FromString)
        return ask(message, timeout=timeout)

    def greet(self, agreed: Agreed, hello: pb.Hello, timeout: float) -> pb.Hello:
        """Shakes hands; raises `PeerRefusedError` if the two have not agreed on the same."""
        try:
            answer: pb.Hello = self.call("Greet", hello, pb.Hello, timeout)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION):
                raise PeerRefusedError(f"'{self.member}' refuses this peer: {error.details()}") from None
            raise
        agreed.check(self.member, answer)
        return answer

    def close(self) -> None:
        """Hangs up."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def shown_certificate(identity: Identity, address: str, timeout: float) -> bytes:
    """The certificate that whoever is at an address shows, verified up to the authority."""
    host, port = parse_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the pin says who it is; gRPC checks the name once more
    context.load_verify_locations(cadata=identity.authority.decode())
    context.load_cert_chain(*identity.files)
    try:
        with socket.create_connection((host, port), timeout) as plain, context.wrap_socket(plain) as secured:
            found = secured.getpeercert(binary_form=True)
    except ssl.SSLError as error:
        raise PeerRefusedError(f"{address} does not show a certificate of this federation: {error}") from error
    if not found:
        raise PeerRefusedError(f"{address} shows no certificate")
    return found
