"""Without certificates nothing starts, unless somebody asks for it, on one machine."""

from __future__ import annotations

import json
import subprocess
import sys

import grpc
import pytest
from test_server import Answers, Listener

from conftest import train
from fedh2l.errors import ConfigError
from fedh2l.peer.refusals import PeerRefusedError
from fedh2l.peer.rehearsal import PEER, Rehearsal, free_ports
from fedh2l.peer.settings import load_peer
from fedh2l.peer.transport.auth import FROM, InsecureLoopback, require_loopback
from fedh2l.peer.transport.client import SERVICE
from town import NAMES, rehearsal


def without_certificates(tmp_path, *changes: str) -> Rehearsal:
    made = rehearsal(tmp_path / "there", "run.rounds=15", *changes)
    for name in NAMES:
        for file in ("node.pem", "node.key"):
            (made.folder / name / "keys" / file).unlink()
        path = made.folder / name / PEER
        path.write_text(path.read_text().replace("[peer]", f'[peer]\nname = "{name}"'))
    roster = made.folder / "roster.toml"
    roster.write_text("\n".join(line for line in roster.read_text().splitlines() if not line.startswith("pin")))
    return made


def test_it_does_not_start(tmp_path, cli):
    made = without_certificates(tmp_path)
    refused = cli("peer", made.folder / "M0" / PEER)
    assert refused.returncode == 2
    assert "a peer needs certificates" in refused.stderr


def test_a_member_without_a_pin(tmp_path):
    made = rehearsal(tmp_path / "there", "run.rounds=15")
    lines = (made.folder / "roster.toml").read_text().splitlines()
    del lines[max(place for place, line in enumerate(lines) if line.startswith("pin"))]
    (made.folder / "roster.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="member 'M60' has no pin"):
        load_peer(made.folder / "M0" / PEER)


def test_asked_for_it_trains_as_ever(tmp_path, federation):
    made = without_certificates(tmp_path)
    command = [sys.executable, "-m", "fedh2l", "peer"]
    running = {
        name: subprocess.Popen([*command, str(made.folder / name / PEER), "--insecure"], stderr=subprocess.PIPE)
        for name in NAMES
    }
    said = {name: process.communicate(timeout=90)[1].decode() for name, process in running.items()}
    assert [process.returncode for process in running.values()] == [0] * 4, said
    assert "running without certificates" in said["M0"]
    models, _, _ = train(federation("run.rounds=15"), tmp_path / "here")
    for name in NAMES:
        folder = made.folder / name / "run"
        assert (folder / "models" / f"{name}-last.safetensors").read_bytes() == models[f"{name}-last.safetensors"]
        kinds = {json.loads(line)["kind"] for line in (folder / "audit.jsonl").read_text().splitlines()}
        assert kinds == {"start", "greeting", "posteriors", "head", "goodbye"}


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("127.0.0.1", "0.0.0.0", "peer.listen works only on this machine"),
        ('name = "M0"', "", "a peer must be given its name"),
        ('name = "M0"', 'name = "M90"', "'M90' is not a member"),
    ],
)
def test_what_does_not_start_all_the_same(tmp_path, old, new, why):
    made = without_certificates(tmp_path)
    path = made.folder / "M0" / PEER
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line if line.startswith("status") else line.replace(old, new) for line in lines))
    with pytest.raises(ConfigError, match=why):
        load_peer(path, insecure=True)


def test_a_roster_with_other_machines(tmp_path):
    made = without_certificates(tmp_path)
    roster = made.folder / "roster.toml"
    roster.write_text(roster.read_text().replace(made.addresses["M60"], "10.0.0.7:7443"))
    with pytest.raises(ConfigError, match=r"a federation works only on this machine, .*, not at 10\.0\.0\.7:7443"):
        load_peer(made.folder / "M0" / PEER, insecure=True)


def test_who_is_on_this_machine_alone():
    for address in ("127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1"):
        require_loopback("it", address)
    for address in ("0.0.0.0:1", "10.0.0.1:1", "[::]:1", "north.example:1", "localhost.example:1", "nonsense"):
        with pytest.raises(ConfigError):
            require_loopback("it", address)


def test_strangers_are_turned_away():
    circle, desk = InsecureLoopback("a", {"a": "", "b": ""}), Answers(None)
    (port,) = free_ports(1)
    listener = Listener(circle, desk, f"127.0.0.1:{port}", 100, "ab")
    listener.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/Teach")
            for metadata in ((), ((FROM, "c"),)):
                with pytest.raises(grpc.RpcError) as refused:
                    call(b"", timeout=5, metadata=metadata)
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            call(b"", timeout=5, metadata=((FROM, "b"),))
        assert desk.heard == [("b", b"")]
        with pytest.raises(PeerRefusedError, match="'c' is not a member"):
            InsecureLoopback("c", {"a": ""})
        with pytest.raises(ConfigError, match="only on this machine"):
            circle.dial("b", "10.0.0.1:1", 1)
    finally:
        listener.stop(0)
