"""Certificates: only who holds a key gets one, and only what it should say."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from fedh2l.errors import ConfigError
from fedh2l.peer.pki import certificates, checks
from fedh2l.peer.pki.authority import Authority
from fedh2l.peer.pki.certificates import About, Identity, PKIError
from fedh2l.peer.pki.checks import Revocations, refusal
from members import join

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")


@pytest.fixture
def founder(tmp_path):
    return Authority.found(tmp_path / "authority", "four hospitals")


def der(certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def load(founder, folder) -> Identity:
    return Identity.load(folder / "node.pem", folder / "node.key", founder.folder / "ca.pem")


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_the_owners_alone(founder, tmp_path):
    before = os.umask(0)
    try:
        join(founder, tmp_path / "north")
    finally:
        os.umask(before)
    for folder, key in ((founder.folder, "ca.key"), (tmp_path / "north", "node.key")):
        assert mode(folder) & 0o077 == 0
        assert mode(folder / key) == 0o600


def test_a_key_that_others_can_read_is_refused(founder, tmp_path):
    join(founder, tmp_path / "north")
    (tmp_path / "north" / "node.key").chmod(0o640)
    with pytest.raises(PKIError, match="can be read by other users of this machine; chmod 600"):
        load(founder, tmp_path / "north")


def test_a_key_is_never_overwritten(founder, tmp_path):
    with pytest.raises(PKIError, match="a key is never overwritten"):
        Authority.found(founder.folder, "again")
    join(founder, tmp_path / "north")
    before = (tmp_path / "north" / "node.key").read_bytes()
    _, new = certificates.request(tmp_path / "north", "north", ["elsewhere.example"])
    assert not new
    assert (tmp_path / "north" / "node.key").read_bytes() == before


@needs_openssl
def test_a_key_is_written_after_a_process_with_the_same_id_was_killed(tmp_path):
    (tmp_path / f".node.key.{os.getpid()}.part").write_text("half")
    certificates.write_private(tmp_path / "node.key", b"whole")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("node.key", b"whole")]


def test_a_certificate_says_what_openssl_reads_too(founder, tmp_path):
    """OpenSSL verifies the chain, the purpose and the list of what is revoked."""
    join(founder, tmp_path / "north")
    root, own = founder.folder / "ca.pem", tmp_path / "north" / "node.pem"

    def verify(*more):
        command = ["openssl", "verify", "-CAfile", root, *more, own]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True)

    for purpose in ("sslserver", "sslclient"):
        assert verify("-x509_strict", "-purpose", purpose).returncode == 0, verify("-purpose", purpose).stderr
    assert verify("-crl_check", "-CRLfile", founder.folder / "revoked.pem").returncode == 0
    founder.revoke("north")
    after = verify("-crl_check", "-CRLfile", founder.folder / "revoked.pem")
    assert "certificate revoked" in after.stdout + after.stderr
    text = subprocess.run(
        ["openssl", "x509", "-in", str(own), "-noout", "-text"], capture_output=True, text=True
    ).stdout
    assert "CA:FALSE" in text
    assert "IP Address:10.0.0.1" in text
    assert "prime256v1" in text


@needs_openssl
def test_a_pin_is_what_curl_pins(founder, tmp_path):
    join(founder, tmp_path / "north")
    pipeline = (
        f"openssl x509 -in {tmp_path}/north/node.pem -pubkey -noout | openssl pkey -pubin -outform der "
        f"| openssl dgst -sha256 -binary | openssl base64"
    )
    hashed = subprocess.run(pipeline, shell=True, capture_output=True, text=True).stdout.strip()
    assert load(founder, tmp_path / "north").about.pin == f"sha256//{hashed}"


def test_renewing_keeps_the_pin_and_another_key_does_not_get_the_name(founder, tmp_path):
    first = join(founder, tmp_path / "north")
    again = join(founder, tmp_path / "north", hosts=["moved.example"])
    assert About.of(first).pin == About.of(again).pin
    assert first.serial_number != again.serial_number
    assert About.of(again).hosts == ("moved.example",)
    with pytest.raises(PKIError, match="'north' has a certificate for another key"):
        join(founder, tmp_path / "impostor", "north")
    founder.revoke("north")
    replaced = join(founder, tmp_path / "impostor", "north")
    assert About.of(replaced).pin != About.of(first).pin


def test_one_key_cannot_be_two_members(founder, tmp_path):
    join(founder, tmp_path / "north")
    path, _ = certificates.request(tmp_path / "north", "south", ["s.example"])
    with pytest.raises(PKIError, match="the key of this request is already that of 'north'"):
        founder.sign(certificates.read_request(path))


def test_a_request_for_somebody_elses_key_is_refused(tmp_path):
    certificates.request(tmp_path / "north", "north", ["n.example"])
    request = x509.load_pem_x509_csr((tmp_path / "north" / "node.csr").read_bytes())
    forged = bytearray(request.public_bytes(serialization.Encoding.DER))
    forged[-1] ^= 1
    path = tmp_path / "forged.csr"
    path.write_bytes(x509.load_der_x509_csr(bytes(forged)).public_bytes(serialization.Encoding.PEM))
    with pytest.raises(PKIError, match="not signed by the key that it names"):
        certificates.read_request(path)


def test_a_request_gets_a_name_hosts_and_a_key_and_nothing_else(founder):
    key = ec.generate_private_key(ec.SECP256R1())
    built = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "north")]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("n.example")]), critical=False)
    )
    signed = founder.sign(built.sign(key, hashes.SHA256()))
    assert not signed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize(
    ("name", "hosts", "kind", "why"),
    [
        ("no/slash", ["n.example"], "ec", "use 1 to 63 letters"),
        ("server", ["n.example"], "ec", "this name is kept"),
        ("north", [], "ec", "names no host"),
        ("north", ["n.example"], "rsa", "not of an elliptic curve"),
    ],
)
def test_what_the_authority_does_not_sign(founder, name, hosts, kind, why):
    key = ec.generate_private_key(ec.SECP256R1()) if kind == "ec" else rsa.generate_private_key(65537, 2048)
    built = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    )
    if hosts:
        built = built.add_extension(x509.SubjectAlternativeName([x509.DNSName(h) for h in hosts]), critical=False)
    with pytest.raises((PKIError, ConfigError), match=why):
        founder.sign(built.sign(key, hashes.SHA256()))
    assert founder.issued() == []


def test_lifetimes(founder, tmp_path, monkeypatch):
    assert not load_fresh(founder, tmp_path, "a", 365).ends_soon
    assert load_fresh(founder, tmp_path, "b", 29).ends_soon
    with pytest.raises(PKIError, match="would outlive the authority"):
        join(founder, tmp_path / "c", "c", days=4000)
    later = certificates.now() + timedelta(days=400)
    monkeypatch.setattr(certificates, "now", lambda: later)
    with pytest.raises(PKIError, match="renew it with fedh2l pki request and sign"):
        load(founder, tmp_path / "a")


def load_fresh(founder, tmp_path, name, days):
    join(founder, tmp_path / name, name, days)
    return load(founder, tmp_path / name)


def test_what_does_not_belong_together(founder, tmp_path):
    join(founder, tmp_path / "north")
    join(founder, tmp_path / "south", "south")
    other = Authority.found(tmp_path / "other", "another")
    north = tmp_path / "north"
    with pytest.raises(PKIError, match="is not the key of the certificate"):
        Identity.load(north / "node.pem", tmp_path / "south" / "node.key", founder.folder / "ca.pem")
    with pytest.raises(PKIError, match="was not issued by the authority"):
        Identity.load(north / "node.pem", north / "node.key", other.folder / "ca.pem")
    with pytest.raises(PKIError, match="is not signed by the authority of this federation"):
        Revocations(founder.certificate, other.folder / "revoked.pem")
    (founder.folder / "ca.key").unlink()
    (founder.folder / "ca.key").write_bytes((north / "node.key").read_bytes())
    (founder.folder / "ca.key").chmod(0o600)
    with pytest.raises(PKIError, match="is not the key of"):
        Authority(founder.folder)


def test_why_a_certificate_is_refused(founder, tmp_path, monkeypatch):
    north, south = join(founder, tmp_path / "north"), join(founder, tmp_path / "south", "south")
    other = Authority.found(tmp_path / "other", "another")
    stranger = join(other, tmp_path / "stranger")
    pin, root = About.of(north).pin, founder.certificate

    def why(certificate, name="north", pinned=pin, listed=None):
        problem = refusal(certificate, name, pinned, root, Revocations(root, listed))
        return problem and problem.text

    assert why(der(north)) is None
    assert "cannot be read" in why(b"\x30\x03nonsense")
    assert why(der(stranger)) == "its certificate is not of this federation's authority"
    assert why(der(south)) == "its certificate is that of 'south', not of 'north'"
    assert "but the roster pins" in why(der(north), pinned=About.of(south).pin)
    founder.revoke(f"{north.serial_number:x}")
    assert "is revoked" in why(der(north), listed=founder.folder / "revoked.pem")
    assert why(der(south), "south", About.of(south).pin, founder.folder / "revoked.pem") is None
    later = certificates.now() + timedelta(days=400)
    monkeypatch.setattr(checks, "now", lambda: later)
    assert "was valid until" in why(der(north))


def test_revoking_what_was_never_signed(founder):
    with pytest.raises(PKIError, match="has no valid certificate of this authority, and never had one"):
        founder.revoke("nobody")


@pytest.mark.parametrize("host", ["a b", "http://x", "x:80", "*", "ünïcode", ""])
def test_hosts_that_are_none(tmp_path, host):
    with pytest.raises(PKIError, match="is not a host name or an IP address"):
        certificates.request(tmp_path, "north", [host])


@pytest.mark.parametrize("called", ["ca", "revoked"])
def test_a_request_overwrites_nothing_by_how_it_is_called(founder, tmp_path, invoke, called):
    certificates.request(tmp_path / "keys", "north", ["north.example"])
    before = (founder.folder / f"{called}.pem").read_bytes()
    shutil.copy(tmp_path / "keys" / "node.csr", founder.folder / f"{called}.csr")
    code, _, err = invoke("pki", "sign", "--yes", "--dir", founder.folder, founder.folder / f"{called}.csr")
    assert code == 2
    assert "is no certificate of 'north'; rename the request" in " ".join(err.split())
    assert (founder.folder / f"{called}.pem").read_bytes() == before
    for _ in range(2):  # a renewed one replaces its own
        assert invoke("pki", "sign", "--yes", "--dir", founder.folder, tmp_path / "keys" / "node.csr")[0] == 0


def test_from_the_command_line(cli, tmp_path):
    assert cli("pki", "init", "--federation", "hospitals").returncode == 0
    made = cli("pki", "request", "--name", "north", "--host", "n.example", "--host", "127.0.0.1", "--dir", "north")
    assert made.returncode == 0, made.stderr
    shown = cli("pki", "show", "north/node.csr").stdout
    assert "name: north\nhosts: n.example, 127.0.0.1\nkey: sha256//" in shown
    assert cli("pki", "sign", "north/node.csr", input="n\n").returncode == 2
    assert not (tmp_path / "north" / "node.pem").exists()
    signed = cli("pki", "sign", "north/node.csr", input="y\n")
    assert signed.returncode == 0, signed.stderr
    assert "until: " in cli("pki", "show", "north/node.pem").stdout
    assert Identity.load(*(tmp_path / p for p in ("north/node.pem", "north/node.key", "authority/ca.pem")))
    assert "Used the key" in cli("pki", "request", "--name", "north", "--host", "n2", "--dir", "north").stderr
    assert cli("pki", "revoke", "north", "--yes").returncode == 0
    assert "revoked 20" in cli("pki", "list").stderr
    again = cli("pki", "init", "--federation", "hospitals")
    assert again.returncode == 2
    assert "a key is never overwritten" in again.stderr
    assert len(Authority(tmp_path / "authority").issued()) == 1
