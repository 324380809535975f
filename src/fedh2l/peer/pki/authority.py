"""The certificate authority of a federation. Its founder runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import Field, field_validator

from fedh2l.errors import ConfigError, shown
from fedh2l.files import UnreadableError, json_value
from fedh2l.peer.pki.certificates import (
    About,
    PKIError,
    alternatives,
    folder_for,
    key_bytes,
    now,
    pem,
    pin_of,
    read,
    read_certificate,
    read_key,
    write,
    write_private,
)
from fedh2l.protocol.roster import check_name
from fedh2l.section import Section

AUTHORITY_DAYS = 3650
MEMBER_DAYS = 365
MOST_DAYS = 36500
BACKDATED = timedelta(hours=1)
"""Certificates are valid from shortly before they are made, so that clocks may differ."""

AUTHORITIES_SINCE = 1950
"""Earliest year that a certificate can encode."""

USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
"""Uses of a key that a certificate can allow."""

CA_KEY, CA_CERTIFICATE, REVOKED, LEDGER = "ca.key", "ca.pem", "revoked.pem", "issued.json"


class Issued(Section):
    """A record of one issued certificate."""

    name: str
    hosts: list[str]
    pin: str
    serial: str = Field(pattern="^[1-9a-f][0-9a-f]{0,39}$")
    until: str
    revoked: str | None

    @field_validator("serial")
    @classmethod
    def _fits(cls, serial: str) -> str:
        if int(serial, 16) >= 2**159:
            raise ValueError("it is longer than a serial number can be")
        return serial

    @field_validator("until", "revoked")
    @classmethod
    def _is_time(cls, text: str | None) -> str | None:
        if text is not None and datetime.fromisoformat(text).year < AUTHORITIES_SINCE:
            raise ValueError("it is too long ago")
        return text


class Authority:
    """Signs requests, records the issued certificates, and revokes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate = read_certificate(folder / CA_CERTIFICATE)
        self._key = read_key(folder / CA_KEY)
        if pin_of(self._key.public_key()) != pin_of(self.certificate.public_key()):
            raise PKIError(f"'{folder / CA_KEY}' is not the key of '{folder / CA_CERTIFICATE}'")

    @staticmethod
    def found(folder: Path, federation: str, days: int = AUTHORITY_DAYS) -> Authority:
        """Create an authority with an empty revocation list."""
        if not 1 <= len(federation) <= 64:
            raise PKIError("the name of a federation has 1 to 64 characters")
        _check_days(days)
        folder_for(folder)
        key = ec.generate_private_key(ec.SECP256R1())
        write_private(folder / CA_KEY, key_bytes(key))
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, federation)])
        built = (
            _builder(name, name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        write(folder / CA_CERTIFICATE, pem(built.sign(key, hashes.SHA256())))
        write(folder / LEDGER, b"[]\n")
        authority = Authority(folder)
        authority._publish([])
        return authority

    @property
    def federation(self) -> str:
        return About.of(self.certificate).name

    def issued(self) -> list[dict[str, Any]]:
        """Return all issued certificates, oldest first: name, hosts, pin, serial, until and time of revocation."""
        path = self.folder / LEDGER
        try:
            entries = json_value(read(path))
            if not isinstance(entries, list):
                raise UnreadableError("it holds no list")
            return [Issued.read(entry, f"entry {place}").model_dump() for place, entry in enumerate(entries, 1)]
        except (UnreadableError, ConfigError) as error:
            raise PKIError(f"'{path}' is damaged: {shown(error)}") from None

    def sign(self, request: x509.CertificateSigningRequest, days: int = MEMBER_DAYS) -> x509.Certificate:
        """Sign a certificate with the name, hosts and key of a request. Other requested fields are ignored.

        A name stays bound to its first key until that certificate is revoked.
        """
        about = About.of(request)
        check_name(about.name)
        if about.name == self.federation:
            raise PKIError(f"the request of '{about.name}' has the name of the federation; choose another one")
        if not about.hosts:
            raise PKIError(f"the request of '{about.name}' names no host")
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise PKIError(f"the request of '{about.name}' is for a key that is not of an elliptic curve")
        entries = self.issued()
        _check_binding(about, entries)
        until = self._end(days)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, about.name)])
        built = (
            _builder(subject, self.certificate.subject, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(alternatives(about.hosts), critical=False)
            .add_extension(self._identifier(), critical=False)
        )
        certificate = built.sign(self._key, hashes.SHA256())
        entry = {
            "name": about.name, "hosts": list(about.hosts), "pin": about.pin,
            "serial": f"{certificate.serial_number:x}", "until": until.isoformat(), "revoked": None,
        }  # fmt: skip
        self._keep_book([*entries, entry])
        return certificate

    def _end(self, days: int) -> datetime:
        _check_days(days)
        until = now() + timedelta(days=days)
        if until > self.certificate.not_valid_after_utc:
            raise PKIError(
                f"a certificate of {days} days would outlive the authority, which ends on "
                f"{self.certificate.not_valid_after_utc:%Y-%m-%d}"
            )
        return until

    def revoke(self, who: str) -> list[dict[str, Any]]:
        """Revoke all certificates of a name, or the one with a serial number. Return the revoked entries."""
        entries = self.issued()
        wanted = [entry for entry in entries if who in (entry["name"], entry["serial"]) and entry["revoked"] is None]
        if not wanted:
            known = "" if any(who in (e["name"], e["serial"]) for e in entries) else ", and never had one"
            raise PKIError(f"'{who}' has no valid certificate of this authority{known}")
        for entry in wanted:
            entry["revoked"] = now().isoformat()
        self._keep_book(entries)
        self._publish(entries)
        return wanted

    def _publish(self, entries: Sequence[dict[str, Any]]) -> None:
        """Write the signed revocation list for all members."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now())
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(int(now().timestamp())), critical=False)
            .add_extension(self._identifier(), critical=False)
        )
        for entry in entries:
            if entry["revoked"] is not None:
                revoked = x509.RevokedCertificateBuilder().serial_number(int(entry["serial"], 16))
                when = datetime.fromisoformat(entry["revoked"])
                builder = builder.add_revoked_certificate(revoked.revocation_date(when).build())
        write(self.folder / REVOKED, pem(builder.sign(self._key, hashes.SHA256())))

    def _identifier(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())

    def _keep_book(self, entries: Sequence[dict[str, Any]]) -> None:
        write(self.folder / LEDGER, (json.dumps(entries, indent=1) + "\n").encode())


def _check_binding(about: About, entries: Sequence[dict[str, Any]]) -> None:
    """Refuse a name with a valid certificate for another key, and a key of another name."""
    for entry in entries:
        if entry["revoked"] is None and entry["name"] == about.name and entry["pin"] != about.pin:
            raise PKIError(
                f"'{about.name}' has a certificate for another key ({entry['pin']}). If that key is lost or "
                f"replaced, revoke the certificate first: fedh2l pki revoke {about.name}"
            )
        if entry["name"] != about.name and entry["pin"] == about.pin:
            raise PKIError(f"the key of this request is already that of '{entry['name']}'")


def _usage(*allowed: str) -> x509.KeyUsage:
    """Return the uses of a key, of which only these are allowed."""
    return x509.KeyUsage(**{use: use in allowed for use in USES})


def _check_days(days: int) -> None:
    if not 1 <= days <= MOST_DAYS:
        raise PKIError(f"a certificate is valid for at least one day, and at most {MOST_DAYS:,}")


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, days: int) -> x509.CertificateBuilder:
    start = now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - BACKDATED)
        .not_valid_after(start + timedelta(days=days))
    )
