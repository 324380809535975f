"""Keys, requests and certificates of members: their fields and their files.

A member generates its own key and sends only a certificate request to the authority (`authority.py`). Peers identify a
member by its name and by the pin of its public key. A renewed certificate keeps both. Only the owner can read key
files.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedh2l.errors import FedH2LError, shown
from fedh2l.files import UnreadableError, check_regular, write_atomically
from fedh2l.protocol.roster import check_name

SOON = timedelta(days=30)
"""Certificates should be renewed within this time before they expire."""

LONGEST = 253
"""Maximum number of characters of a name in a certificate, equal to the limit for host names."""
NODE_KEY, NODE_REQUEST, NODE_CERTIFICATE = "node.key", "node.csr", "node.pem"


UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)
"""Exceptions that `cryptography` raises for malformed fields. It parses a field only on access."""


class PKIError(FedH2LError):
    """A key, request or certificate is invalid, or its file cannot be used."""


def pin_of(key: Any) -> str:
    """Return the pin of a public key: `sha256//` and the hash of its SubjectPublicKeyInfo, in curl's format."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return f"sha256//{base64.b64encode(hashlib.sha256(der).digest()).decode()}"


def now() -> datetime:
    """Return the current time in UTC without fractions of a second, as certificates store it."""
    return datetime.now(UTC).replace(microsecond=0)


@dataclass(frozen=True)
class About:
    """Name, hosts, pin, expiry and serial number of a certificate or request."""

    name: str
    hosts: tuple[str, ...]
    pin: str
    until: datetime | None = None
    serial: int | None = None

    @staticmethod
    def of(subject: x509.Certificate | x509.CertificateSigningRequest) -> About:
        """Read the fields of a certificate or request."""
        try:
            return About._read(subject)
        except UNREADABLE as error:
            raise PKIError(f"it cannot be read: {error}") from None

    @staticmethod
    def _read(subject: x509.Certificate | x509.CertificateSigningRequest) -> About:
        names = subject.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if len(names) != 1:
            raise PKIError("it does not carry exactly one common name")
        try:
            found = subject.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            hosts = [str(host) for kind in (x509.DNSName, x509.IPAddress) for host in found.get_values_for_type(kind)]
        except x509.ExtensionNotFound:
            hosts = []
        name, pin = str(names[0].value), pin_of(subject.public_key())
        for text in (name, *hosts):
            if not text.isprintable() or not text.isascii() or not 0 < len(text) <= LONGEST:
                raise PKIError(f"it names {shown(text, 80)!r}, which is no name of a node or host")
        if isinstance(subject, x509.Certificate):
            return About(name, tuple(hosts), pin, subject.not_valid_after_utc, subject.serial_number)
        return About(name, tuple(hosts), pin)


# Files


def write_private(path: Path, data: bytes) -> None:
    """Create a file that only its owner can ever read. It is created completely or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # a killed process with the same id may have left it
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(part, path)
        finally:
            part.unlink()
    except FileExistsError:
        raise PKIError(f"'{path}' exists already, and a key is never overwritten") from None
    except OSError as error:
        raise PKIError(f"cannot write '{path}': {error.strerror}") from error


def write(path: Path, data: bytes) -> None:
    """Write a file atomically, so that it stays complete if the process is killed."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise PKIError(f"cannot write '{path}': {error.strerror}") from error


def read(path: Path) -> bytes:
    try:
        check_regular(path)
        return path.read_bytes()
    except OSError as error:
        raise PKIError(f"cannot read '{path}': {error.strerror}") from error
    except UnreadableError as error:
        raise PKIError(f"cannot read '{path}': {error}") from error


def read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate of a PEM file."""
    try:
        return x509.load_pem_x509_certificate(read(path))
    except UNREADABLE:
        raise PKIError(f"'{path}' holds no certificate") from None


def read_request(path: Path) -> x509.CertificateSigningRequest:
    """Return a certificate request. Raise `PKIError` if its own key did not sign it."""
    try:
        request = x509.load_pem_x509_csr(read(path))
        valid = request.is_signature_valid
    except UNREADABLE:
        raise PKIError(f"'{path}' holds no certificate request") from None
    if not valid:
        raise PKIError(f"'{path}': the request is not signed by the key that it names")
    return request


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a private key. Raise `PKIError` if other users of this machine can read its file."""
    data = read(path)
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise PKIError(f"'{path}' can be read by other users of this machine; chmod 600 it")
    try:
        key = serialization.load_pem_private_key(data, None)
    except UNREADABLE:
        raise PKIError(f"'{path}' holds no private key without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise PKIError(f"'{path}' holds a key that is not of an elliptic curve")
    return key


def key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key as PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def pem(thing: x509.Certificate | x509.CertificateSigningRequest | x509.CertificateRevocationList) -> bytes:
    """Encode a certificate, request or revocation list as PEM."""
    return thing.public_bytes(serialization.Encoding.PEM)


def folder_for(path: Path) -> None:
    """Create a folder that only its owner can read."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PKIError(f"cannot make the folder '{path}': {error.strerror}") from error


# Operations of a member


def request(folder: Path, name: str, hosts: Sequence[str]) -> tuple[Path, bool]:
    """Write a certificate request beside the key. Return its path, and whether the key is new.

    An existing key is used again, so that the member keeps its pin.
    """
    check_name(name)
    if not hosts:
        raise PKIError("a peer needs at least one host name or address, so that others can reach it")
    folder_for(folder)
    path = folder / NODE_KEY
    new = not path.exists()
    key = ec.generate_private_key(ec.SECP256R1()) if new else read_key(path)
    if new:
        write_private(path, key_bytes(key))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    built = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(alternatives(hosts), False)
    write(folder / NODE_REQUEST, pem(built.sign(key, hashes.SHA256())))
    return folder / NODE_REQUEST, new


def alternatives(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    """Return hosts as a certificate extension."""
    found: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not host.isascii() or not host or any(sign in host for sign in "/:@* \t\n"):
                raise PKIError(f"'{host}' is not a host name or an IP address") from None
            found.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(found)


def issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Return whether an authority signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (*UNREADABLE, InvalidSignature):
        return False
    return True


@dataclass(frozen=True)
class Identity:
    """A member's own key and certificate, validated."""

    about: About
    certificate: bytes
    key: bytes
    authority: bytes
    signer: ec.EllipticCurvePrivateKey
    files: tuple[Path, Path]
    """Paths of the certificate and the key."""

    @staticmethod
    def load(certificate: Path, key: Path, authority: Path) -> Identity:
        """Load and validate the files, so that faults are reported at the start."""
        own, signer, root = read_certificate(certificate), read_key(key), read_certificate(authority)
        about = About.of(own)
        if pin_of(signer.public_key()) != about.pin:
            raise PKIError(f"'{key}' is not the key of the certificate '{certificate}'")
        if not issued_by(own, root):
            raise PKIError(f"'{certificate}' was not issued by the authority '{authority}'")
        present = now()
        if not own.not_valid_before_utc <= present <= own.not_valid_after_utc:
            raise PKIError(
                f"'{certificate}' is valid from {own.not_valid_before_utc:%Y-%m-%d %H:%M} to "
                f"{own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and now it is {present:%Y-%m-%d %H:%M}; renew it with "
                f"fedh2l pki request and sign"
            )
        return Identity(about, pem(own), read(key), pem(root), signer, (certificate, key))

    @property
    def ends_soon(self) -> bool:
        """Whether the certificate should be renewed."""
        assert self.about.until is not None
        return self.about.until - now() < SOON
