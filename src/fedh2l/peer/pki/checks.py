"""Checks of the certificates that other members present."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedh2l.errors import shown
from fedh2l.peer.pki.certificates import UNREADABLE, About, PKIError, issued_by, now, read
from fedh2l.peer.refusals import Refusal

log = logging.getLogger("fedh2l.peer")


class Revocations:
    """Revoked serial numbers from the authority's list, which is reloaded when it changes. Empty without a list."""

    def __init__(self, authority: x509.Certificate, path: Path | None = None) -> None:
        self._authority, self._path = authority, path
        self._version = _version(path)
        self._serials = self._read()

    def _read(self) -> set[int]:
        if self._path is None:
            return set()
        key = self._authority.public_key()
        try:
            found = x509.load_pem_x509_crl(read(self._path))
            signed = isinstance(key, ec.EllipticCurvePublicKey) and found.is_signature_valid(key)
            serials = {entry.serial_number for entry in found}
        except UNREADABLE:
            raise PKIError(f"'{self._path}' holds no revocation list") from None
        if not signed:
            raise PKIError(f"'{self._path}' is not signed by the authority of this federation")
        return serials

    @property
    def version(self) -> object:
        """A value that changes with the list. Reading it reloads a changed list."""
        version = _version(self._path)
        if version != self._version:
            self._version = version
            try:
                self._serials = self._read()
            except PKIError as error:
                log.error("the previous list of revocations stays in force: %s", error)
        return version

    def __contains__(self, certificate: x509.Certificate) -> bool:
        _ = self.version  # reloads a changed list
        return certificate.serial_number in self._serials


def _version(path: Path | None) -> tuple[int, int] | None:
    """Return a value that changes when the file is rewritten."""
    try:
        about = path.stat() if path else None
    except OSError:
        return None
    return (about.st_mtime_ns, about.st_ino) if about else None


class Problem(NamedTuple):
    """A reason to reject a certificate."""

    reason: Refusal
    text: str


def refusal(der: bytes, name: str, pin: str, authority: x509.Certificate, revoked: Revocations) -> Problem | None:
    """Return why a certificate does not belong to the named member, or None if it does.

    TLS has already verified the certificate. This function adds the checks of name, pin and revocation, and repeats
    those of issuer and validity.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        about = About.of(certificate)
    except (ValueError, PKIError) as error:
        return Problem(Refusal.NO_CERTIFICATE, f"its certificate cannot be read: {shown(error)}")
    if not issued_by(certificate, authority):
        return Problem(Refusal.OTHER_AUTHORITY, "its certificate is not of this federation's authority")
    if about.name != name:
        return Problem(Refusal.OTHER_NAME, f"its certificate is that of '{about.name}', not of '{name}'")
    if about.pin != pin:
        return Problem(Refusal.OTHER_KEY, f"its key is {about.pin}, but the roster pins {pin}")
    if certificate in revoked:
        return Problem(Refusal.REVOKED, f"its certificate {certificate.serial_number:x} is revoked")
    if not certificate.not_valid_before_utc <= now() <= certificate.not_valid_after_utc:
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        return Problem(Refusal.NOT_VALID_NOW, f"its certificate was valid until {until}")
    return None
