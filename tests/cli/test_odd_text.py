"""What others write reaches the terminal and logs escaped, in lines of this program only."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedh2l.cli.console import PlainLines, err, notice, say
from fedh2l.errors import ConfigError, FedH2LError
from fedh2l.peer.monitoring.status import LOCAL
from fedh2l.peer.pki.authority import Authority
from fedh2l.peer.pki.certificates import pem
from fedh2l.peer.transport import fedh2l_pb2 as pb
from odd import EVIL


def clean(text: str) -> bool:
    return all(line.isprintable() and not line.startswith("FORGED") for line in text.split("\n"))


def test_each_way_to_print(capsys):
    for tell in (say, notice, err.print):
        tell(EVIL)
        printed = "".join(capsys.readouterr())
        assert clean(printed), tell
        assert "[red]x[/red]" in printed, tell
    record = logging.makeLogRecord({"msg": "%s", "args": (EVIL,)})
    assert clean(PlainLines().format(record))


def test_an_error_has_lines_of_its_own():
    assert str(ConfigError(f"a: {EVIL}", "b: 1")).split("\n")[1:] == ["b: 1"]
    assert clean(str(FedH2LError(EVIL)))


@pytest.mark.parametrize(
    ("name", "host"),
    [(EVIL[:40], "n.example"), ("north", "n.example\r\nFORGED\x1b[2J"), ("[red]x", "n"), ("north", "[link=http://x]n")],
)
def test_requests_are_signed_and_shown_without_harm(tmp_path, invoke, name, host):
    Authority.found(tmp_path / "authority", "zoo")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    hosts = x509.SubjectAlternativeName([x509.DNSName(host)])
    built = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(hosts, False)
    (tmp_path / "n.csr").write_bytes(pem(built.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())))
    for command in (["sign", "--yes", "--dir", tmp_path / "authority"], ["show"]):
        _, out, errors = invoke("pki", *command, tmp_path / "n.csr")
        assert clean(out + errors)
    code, out, errors = invoke("pki", "list", "--dir", tmp_path / "authority")
    assert code == 0
    assert clean(out + errors)


def test_status_of_another_program(invoke):
    """Whatever listens on the port may answer anything."""
    neighbour = pb.Neighbour(name=EVIL, state=EVIL, reason=EVIL, refused={EVIL: 1})
    state = pb.State(node=EVIL, federation=EVIL, phase=EVIL, turned_away={EVIL: 3}, peers=[neighbour])
    answer = grpc.unary_unary_rpc_method_handler(lambda question, context: state.SerializeToString())
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(LOCAL, {"Status": answer})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        for options in ([], ["--json"]):
            code, out, errors = invoke("status", f"127.0.0.1:{port}", *options)
            assert code == 0
            assert clean(out + errors)
            assert "[red]x[/red]" in out + errors
    finally:
        server.stop(0).wait()
