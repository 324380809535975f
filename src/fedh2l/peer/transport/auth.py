"""Authentication of other peers, and the connections to them.

Between organisations, peers use gRPC over TLS 1.3 with certificates on both ends (`Sealed`). TLS verifies that the
certificate comes from the federation's authority. Each call is then checked against the roster: the certificate must
belong to a member, have the pinned key, and not be revoked. Only the certificate determines the name of the caller.
Names inside messages are not trusted.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedh2l.errors import ConfigError, shown
from fedh2l.peer.pki.certificates import Identity
from fedh2l.peer.pki.checks import Problem, Revocations, refusal
from fedh2l.peer.refusals import PeerRefusedError, Refusal
from fedh2l.peer.transport.proxy import channel_options, connect, parse_address

log = logging.getLogger("fedh2l.peer")

FROM = "fedh2l-from"
"""Metadata key for the name of the caller. Used only without certificates."""
METADATA = 1024
"""Maximum size of the headers of a call or of an answer in bytes."""
OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.enable_retries", 0),
    ("grpc.max_metadata_size", METADATA),
    ("grpc.absolute_max_metadata_size", METADATA),
]
BELIEVED = 10.0
"""Lifetime in seconds of a cached result of checking a certificate."""
MOST_VERDICTS = 1000


class Caller(NamedTuple):
    """Authenticated caller of a remote procedure."""

    name: str
    certificate: bytes = b""
    """DER encoding. Empty without certificates."""


class PeerAuth(ABC):
    """The members that this peer accepts, and the transport to reach them."""

    name: str
    """Name of this peer."""
    members: frozenset[str]
    """Members of the current and all later roster versions, and recent former members."""

    @abstractmethod
    def admit(self, pins: Mapping[str, str]) -> None:
        """Replace the accepted members. `pins` maps their names to the pins of their keys."""

    @abstractmethod
    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Return the caller. Raise `PeerRefusedError` if it is not an accepted member."""

    @abstractmethod
    def refusal(self, certificate: bytes, name: str) -> Problem | None:
        """Return why a certificate does not belong to the named member, or None if it does."""

    @abstractmethod
    def bind(self, server: grpc.Server, address: str) -> int:
        """Add a listening port to a server and return its number."""

    @abstractmethod
    def dial(self, member: str, address: str, timeout: float) -> grpc.Channel:
        """Open a channel. Raise `PeerRefusedError` if another party answers, and `OSError` if there is no answer."""

    @abstractmethod
    def check(self, member: str) -> None:
        """Raise `PeerRefusedError` if a member is no longer accepted."""

    @property
    def signature(self) -> Sequence[tuple[str, str]]:
        """Metadata that this peer adds to every call."""
        return ()

    def key_of(self, member: str) -> Any:
        """Return the public key of a member during its call, or None without certificates."""
        return None


class MutualTLS(PeerAuth):
    """Authenticates members by their certificates. `pins` maps names to the pins of their keys."""

    def __init__(
        self, identity: Identity, pins: Mapping[str, str], revoked: Path | None = None, proxy: str | None = None
    ) -> None:
        self.identity, self.name, self._proxy = identity, identity.about.name, proxy
        self.authority = x509.load_pem_x509_certificate(identity.authority)
        self._revoked = Revocations(self.authority, revoked)
        self._met: dict[str, x509.Certificate] = {}
        """Latest certificate of each member."""
        self._verdicts: dict[tuple[object, ...], tuple[float, Problem | None]] = {}
        self.admit(pins)
        if self.name not in self.members:
            raise PeerRefusedError(f"this peer's certificate is that of '{self.name}', which is not a member")
        problem = self.refusal(_der(identity.certificate), self.name)
        if problem:
            raise PeerRefusedError(f"this peer would be refused by all others: {problem.text}")

    def admit(self, pins: Mapping[str, str]) -> None:
        self._pins, self.members = dict(pins), frozenset(pins)

    def refusal(self, certificate: bytes, name: str) -> Problem | None:
        pin = self._pins.get(name)
        if pin is None:
            return Problem(Refusal.NOT_A_MEMBER, f"'{shown(name, 80)}' is not in the roster")
        return self._verdict(certificate, name, pin)

    def _verdict(self, der: bytes, name: str, pin: str) -> Problem | None:
        """Return the cached result of `refusal`.

        It is computed again after `BELIEVED` seconds, because certificates expire, and when the revocation list
        changes.
        """
        key, now = (der, name, pin, self._revoked.version), time.monotonic()
        known = self._verdicts.get(key)
        if known is None or now - known[0] > BELIEVED:
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.clear()
            known = self._verdicts[key] = (now, refusal(der, name, pin, self.authority, self._revoked))
        return known[1]

    def check(self, member: str) -> None:
        certificate = self._met.get(member)
        if certificate is None:
            return
        problem = self.refusal(certificate.public_bytes(serialization.Encoding.DER), member)
        if problem:
            raise PeerRefusedError(f"'{member}': {problem.text}", problem.reason)

    def caller(self, context: grpc.ServicerContext) -> Caller:
        about = context.auth_context()
        version = b"".join(about.get("ssl_tls_version", ()))
        if version != b"TLSv1.3":
            text = f"{context.peer()} connects with {version.decode() or 'no TLS'}, not TLSv1.3"
            raise PeerRefusedError(text, Refusal.NO_CERTIFICATE)
        names: list[str] = [value.decode(errors="replace") for value in about.get("x509_common_name", ())]
        pems = list(about.get("x509_pem_cert", ()))
        if len(names) != 1 or len(pems) != 1:
            raise PeerRefusedError(f"{context.peer()} shows no certificate with one name", Refusal.NO_CERTIFICATE)
        try:
            certificate = x509.load_pem_x509_certificate(pems[0])
        except ValueError as error:
            text = f"{context.peer()}: its certificate cannot be read: {shown(error)}"
            raise PeerRefusedError(text, Refusal.NO_CERTIFICATE) from None
        der = certificate.public_bytes(serialization.Encoding.DER)
        problem = self.refusal(der, names[0])
        if problem:
            raise PeerRefusedError(f"{context.peer()} as '{shown(names[0], 80)}': {problem.text}", problem.reason)
        self._met[names[0]] = certificate
        return Caller(names[0], der)

    def key_of(self, member: str) -> Any:
        return self._met[member].public_key()

    def bind(self, server: grpc.Server, address: str) -> int:
        pair = [(self.identity.key, self.identity.certificate)]
        credentials = grpc.ssl_server_credentials(pair, self.identity.authority, require_client_auth=True)
        port: int = server.add_secure_port(address, credentials)
        return port

    def dial(self, member: str, address: str, timeout: float) -> grpc.Channel:
        """Open a channel that trusts only the certificate that the member shows."""
        der = shown_certificate(self.identity, address, timeout, self._proxy)
        problem = self.refusal(der, member)
        if problem:
            raise PeerRefusedError(f"{address}, where '{member}' should be: {problem.text}", problem.reason)
        self._met[member] = x509.load_der_x509_certificate(der)
        root = self._met[member].public_bytes(serialization.Encoding.PEM)
        credentials = grpc.ssl_channel_credentials(root, self.identity.key, self.identity.certificate)
        return grpc.secure_channel(address, credentials, options=[*OPTIONS, *channel_options(self._proxy)])


class InsecureLoopback(PeerAuth):
    """Identifies members by metadata, without certificates. Only for trials on one machine."""

    def __init__(self, name: str, pins: Mapping[str, str]) -> None:
        self.name = name
        self.admit(pins)
        if name not in self.members:
            raise PeerRefusedError(f"'{name}' is not a member")

    def admit(self, pins: Mapping[str, str]) -> None:
        self.members = frozenset(pins)

    def check(self, member: str) -> None:
        if member not in self.members:
            raise PeerRefusedError(f"'{member}' is not in the roster", Refusal.NOT_A_MEMBER)

    @property
    def signature(self) -> Sequence[tuple[str, str]]:
        return ((FROM, self.name),)

    def refusal(self, certificate: bytes, name: str) -> Problem | None:
        if name in self.members:
            return None
        return Problem(Refusal.NOT_A_MEMBER, f"'{shown(name, 80)}' is not in the roster")

    def caller(self, context: grpc.ServicerContext) -> Caller:
        name = str(dict(context.invocation_metadata()).get(FROM, ""))
        problem = self.refusal(b"", name)
        if problem:
            raise PeerRefusedError(f"{context.peer()}: {problem.text}", problem.reason)
        return Caller(name)

    def bind(self, server: grpc.Server, address: str) -> int:
        require_loopback("without certificates, a peer", address)
        port: int = server.add_insecure_port(address)
        return port

    def dial(self, member: str, address: str, timeout: float) -> grpc.Channel:
        require_loopback("without certificates, a peer", address)
        socket.create_connection(parse_address(address), timeout).close()  # fails at once if there is no server
        return grpc.insecure_channel(address, options=[*OPTIONS, *channel_options(None)])


def require_loopback(what: str, address: str) -> None:
    """Raise `ConfigError` for an address that other machines can reach."""
    try:
        host, _ = parse_address(address)
    except ValueError as error:
        raise ConfigError(f"'{address}': {error}") from None
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise ConfigError(f"{what} works only on this machine, at 127.0.0.1, [::1] or localhost, not at {address}")


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def shown_certificate(identity: Identity, address: str, timeout: float, proxy: str | None = None) -> bytes:
    """Return the certificate that the server at an address shows, verified up to the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the pin identifies the server; gRPC checks the name again
    context.load_verify_locations(cadata=identity.authority.decode())
    context.load_cert_chain(*identity.files)
    try:
        with (
            connect(address, timeout, proxy) as plain,
            context.wrap_socket(plain) as secured,
        ):
            found = secured.getpeercert(binary_form=True)
    except ssl.SSLError as error:
        raise PeerRefusedError(f"{address} does not show a certificate of this federation: {error}") from error
    if not found:
        raise PeerRefusedError(f"{address} shows no certificate")
    return found
