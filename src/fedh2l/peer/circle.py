"""Who may be spoken to, and how a connection to them is made.

Between organisations that is gRPC over TLS 1.3 with certificates on both ends (`Sealed`). TLS verifies that the other
end holds a certificate of the federation's authority. What it cannot know is checked for every call from the
certificate itself: that it is a member's, with the pinned key, and not revoked. Who calls is whom the certificate
names, whatever a message says.
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
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedh2l.errors import ConfigError, FedH2LError
from fedh2l.peer.certificates import Identity, Revocations, refusal
from fedh2l.peer.charter import parse_address

log = logging.getLogger("fedh2l.peer")

FROM = "fedh2l-from"
"""Under which the name of the caller stands beside a call, where there are no certificates."""
OPTIONS = [("grpc.enable_retries", 0)]
BELIEVED = 10.0
"""Seconds after which a certificate is looked at again, if nothing else has changed."""
MOST_VERDICTS = 1000


class PeerRefusedError(FedH2LError):
    """Another peer is not who it should be, or has agreed on something else; or it says so of this one."""


class Circle(ABC):
    """The members that this peer speaks to now."""

    name: str
    """Of this peer."""
    members: frozenset[str]
    """Who is in the roster that holds, or in one that will."""

    @abstractmethod
    def admit(self, pins: Mapping[str, str]) -> None:
        """From now on these, and nobody else."""

    @abstractmethod
    def caller(self, context: grpc.ServicerContext) -> str:
        """Who makes a call; raises `PeerRefusedError` if that is nobody who may."""

    @abstractmethod
    def bind(self, server: grpc.Server, address: str) -> int:
        """Has a server listen, and says at which port."""

    @abstractmethod
    def dial(self, member: str, address: str, timeout: float) -> grpc.Channel:
        """A connection; raises `PeerRefusedError` if somebody else answers, and `OSError` if nobody does."""

    @abstractmethod
    def check(self, member: str) -> None:
        """Raises `PeerRefusedError` if a member who was met may no longer be spoken to."""

    @property
    def signature(self) -> Sequence[tuple[str, str]]:
        """What stands beside every call that this peer makes."""
        return ()

    def key_of(self, member: str) -> Any:
        """The public key by which a member is known, of whom a call is being answered; None if there are none."""
        return None


class Sealed(Circle):
    """Members by their certificates; `pins` are those of their keys."""

    def __init__(self, identity: Identity, pins: Mapping[str, str], revoked: Path | None = None) -> None:
        self.identity, self.name = identity, identity.about.name
        self.authority = x509.load_pem_x509_certificate(identity.authority)
        self._revoked = Revocations(self.authority, revoked)
        self._met: dict[str, x509.Certificate] = {}
        """The certificate that each of those who were met has shown last."""
        self._verdicts: dict[tuple[object, ...], tuple[float, str | None]] = {}
        self.admit(pins)
        if self.name not in self.members:
            raise PeerRefusedError(f"this peer's certificate is that of '{self.name}', who is not a member")
        problem = self.refusal(_der(identity.certificate), self.name)
        if problem:
            raise PeerRefusedError(f"this peer would be refused by all others: {problem}")

    def admit(self, pins: Mapping[str, str]) -> None:  # noqa: D102 - as in Circle
        self._pins, self.members = dict(pins), frozenset(pins)

    def refusal(self, der: bytes, name: str) -> str | None:
        """Why a certificate is not that of the member of this name, or None."""
        pin = self._pins.get(name)
        if pin is None:
            return f"'{name}' is not in the roster"
        return self._verdict(der, name, pin)

    def _verdict(self, der: bytes, name: str, pin: str) -> str | None:
        """As `refusal` says; worked out anew after a while, for certificates end, and when another list holds."""
        key, now = (der, name, pin, self._revoked.version), time.monotonic()
        known = self._verdicts.get(key)
        if known is None or now - known[0] > BELIEVED:
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.clear()
            known = self._verdicts[key] = (now, refusal(der, name, pin, self.authority, self._revoked))
        return known[1]

    def check(self, member: str) -> None:  # noqa: D102 - as in Circle
        certificate = self._met.get(member)
        if certificate is None:
            return
        problem = self.refusal(certificate.public_bytes(serialization.Encoding.DER), member)
        if problem:
            raise PeerRefusedError(f"'{member}': {problem}")

    def caller(self, context: grpc.ServicerContext) -> str:  # noqa: D102 - as in Circle
        about = context.auth_context()
        version = b"".join(about.get("ssl_tls_version", ()))
        if version != b"TLSv1.3":
            raise PeerRefusedError(f"{context.peer()} speaks {version.decode() or 'without TLS'}, not TLSv1.3")
        names: list[str] = [value.decode(errors="replace") for value in about.get("x509_common_name", ())]
        pems = list(about.get("x509_pem_cert", ()))
        if len(names) != 1 or len(pems) != 1:
            raise PeerRefusedError(f"{context.peer()} shows no certificate with one name")
        try:
            certificate = x509.load_pem_x509_certificate(pems[0])
        except ValueError as error:
            raise PeerRefusedError(f"{context.peer()}: its certificate cannot be read: {error}") from None
        problem = self.refusal(certificate.public_bytes(serialization.Encoding.DER), names[0])
        if problem:
            raise PeerRefusedError(f"{context.peer()} as '{names[0]}': {problem}")
        self._met[names[0]] = certificate
        return names[0]

    def key_of(self, member: str) -> Any:  # noqa: D102 - as in Circle
        return self._met[member].public_key()

    def bind(self, server: grpc.Server, address: str) -> int:  # noqa: D102 - as in Circle
        pair = [(self.identity.key, self.identity.certificate)]
        credentials = grpc.ssl_server_credentials(pair, self.identity.authority, require_client_auth=True)
        port: int = server.add_secure_port(address, credentials)
        return port

    def dial(self, member: str, address: str, timeout: float) -> grpc.Channel:
        """Pinned to the certificate that the member shows."""
        der = shown_certificate(self.identity, address, timeout)
        problem = self.refusal(der, member)
        if problem:
            raise PeerRefusedError(f"{address}, where '{member}' should be: {problem}")
        self._met[member] = x509.load_der_x509_certificate(der)
        root = self._met[member].public_bytes(serialization.Encoding.PEM)
        credentials = grpc.ssl_channel_credentials(root, self.identity.key, self.identity.certificate)
        return grpc.secure_channel(address, credentials, options=OPTIONS)


class Open(Circle):
    """Members by what they say of themselves, with no certificates at all: for trying things out on one machine."""

    def __init__(self, name: str, pins: Mapping[str, str]) -> None:
        self.name = name
        self.admit(pins)
        if name not in self.members:
            raise PeerRefusedError(f"'{name}' is not a member")

    def admit(self, pins: Mapping[str, str]) -> None:  # noqa: D102 - as in Circle
        self.members = frozenset(pins)

    def check(self, member: str) -> None:  # noqa: D102 - as in Circle
        if member not in self.members:
            raise PeerRefusedError(f"'{member}' is not in the roster")

    @property
    def signature(self) -> Sequence[tuple[str, str]]:  # noqa: D102 - as in Circle
        return ((FROM, self.name),)

    def caller(self, context: grpc.ServicerContext) -> str:  # noqa: D102 - as in Circle
        said = dict(context.invocation_metadata()).get(FROM, "")
        if said not in self.members:
            raise PeerRefusedError(f"{context.peer()}: '{said}' is not in the roster")
        return str(said)

    def bind(self, server: grpc.Server, address: str) -> int:  # noqa: D102 - as in Circle
        require_loopback("without certificates, a peer", address)
        port: int = server.add_insecure_port(address)
        return port

    def dial(self, member: str, address: str, timeout: float) -> grpc.Channel:  # noqa: D102 - as in Circle
        require_loopback("without certificates, a peer", address)
        socket.create_connection(parse_address(address), timeout).close()  # says at once if nobody is there
        return grpc.insecure_channel(address, options=OPTIONS)


def require_loopback(what: str, address: str) -> None:
    """Refuses an address that other machines can reach."""
    try:
        host, _ = parse_address(address)
    except ValueError as error:
        raise ConfigError(f"'{address}': {error}") from None
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise ConfigError(f"{what} is for this machine alone: 127.0.0.1, [::1] or localhost, not {address}")


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def shown_certificate(identity: Identity, address: str, timeout: float) -> bytes:
    """The certificate that whoever is at an address shows, verified up to the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the pin says who it is; gRPC checks the name once more
    context.load_verify_locations(cadata=identity.authority.decode())
    context.load_cert_chain(*identity.files)
    try:
        with (
            socket.create_connection(parse_address(address), timeout) as plain,
            context.wrap_socket(plain) as secured,
        ):
            found = secured.getpeercert(binary_form=True)
    except ssl.SSLError as error:
        raise PeerRefusedError(f"{address} does not show a certificate of this federation: {error}") from error
    if not found:
        raise PeerRefusedError(f"{address} shows no certificate")
    return found
