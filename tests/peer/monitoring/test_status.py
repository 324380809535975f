"""How a peer is: what it says to whoever runs it, while it waits, trains and is done; and how it says it."""

from __future__ import annotations

import json
import logging
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from fedh2l.cli.logs import LogFormat, use_format
from fedh2l.errors import ConfigError, RunError
from fedh2l.peer.monitoring.status import ask
from fedh2l.peer.rehearsal import PEER, free_ports
from fedh2l.peer.settings import load_peer
from fedh2l.peer.transport.client import SERVICE as MEMBER
from town import rehearsal


def serving(address: str, service: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def metrics(address: str) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


@pytest.mark.slow
def test_from_waiting_to_done(town, cli):
    made = town("run.rounds=600", "run.eval_every=20", deadline=1.0, quorum=2, below_quorum="pause", linger=20.0)
    (port,) = free_ports(1)
    exposed = f"127.0.0.1:{port}"
    made.edit("M0", ("[peer]", f'[peer]\nmetrics = "{exposed}"'))
    address = made.rehearsed.status["M0"]
    made.start("M0", "M20")
    made.until(lambda: "paused in round 1" in made.log("M0"))
    state = made.state("M0")
    assert (state.node, state.federation, state.version, state.round, state.rounds) == ("M0", "rehearsal", 1, 1, 600)
    assert (state.phase, state.accuracy, state.conflict_rate, state.skipped) == ("paused", -1, -1, 0)
    others = {peer.name: peer for peer in state.peers}
    assert list(others) == ["M20", "M40", "M60"]
    assert (others["M20"].state, others["M40"].state) == ("up", "down")
    assert "refused" in others["M60"].reason  # the connection
    made.until(lambda: not serving(address, MEMBER))
    assert serving(address, "")
    assert metrics(exposed)["fedh2l_paused",] == 1

    made.start("M40", "M60")
    made.until(lambda: made.round("M0") >= 40)
    made.until(lambda: serving(address, MEMBER))
    shown = cli("status", address, "--json")
    said = json.loads(shown.stdout)
    assert said["phase"] in ("training", "waiting")
    assert 0 < said["accuracy"] <= 100
    assert all(peer["state"] == "up" and int(peer["heard"]) >= 30 for peer in said["peers"])
    found = metrics(exposed)
    assert found["fedh2l_peer_up", "M60"] == 1
    assert found["fedh2l_round",] >= 40
    assert 0 < found["fedh2l_validation_accuracy",] <= 1
    assert 0 <= found["fedh2l_conflict_rate",] <= 1
    assert found["fedh2l_sent_bytes_total", "M20"] >= 30 * 364  # of 8 rows, 10 classes

    made.kill("M60")
    made.until(lambda: {p.name: p.state for p in made.state("M0").peers}["M60"] == "down")
    table = cli("status", address)
    assert "M60" in table.stderr
    assert "down" in table.stderr
    made.until(lambda: made.state("M0").phase == "done")  # it stays for M60
    assert {peer.name: peer.state for peer in made.state("M0").peers}["M20"] == "done"
    made.start("M60")
    assert made.finish()["M60"]["peer"]["skipped"] > 0


def test_nobody_answers(cli):
    (port,) = free_ports(1)
    gone = cli("status", f"127.0.0.1:{port}")
    assert gone.returncode == 2
    assert "no peer answers at" in gone.stderr
    with pytest.raises(RunError):
        ask(f"localhost:{port}", 1)
    for wrong in ("10.0.0.1:7444", "nowhere"):
        assert cli("status", wrong).returncode == 2


@pytest.mark.parametrize("key", ["status", "metrics"])
def test_both_are_for_this_machine_alone(tmp_path, key):
    made = rehearsal(tmp_path / "there", "run.rounds=10")
    path = made.folder / "M0" / PEER
    lines = [line for line in path.read_text().splitlines() if not line.startswith("status")]
    path.write_text("\n".join(lines).replace("[peer]", f'[peer]\n{key} = "0.0.0.0:7444"'))
    with pytest.raises(ConfigError, match=f"peer.{key} works only on this machine"):
        load_peer(path)


def test_a_port_that_is_taken_is_named(town):
    made = town("run.rounds=10")
    made.edit("M0", (made.rehearsed.status["M0"], made.rehearsed.addresses["M0"]))
    made.start("M0")
    made.until(lambda: made.dead("M0"))
    assert made.processes["M0"].returncode == 2
    assert "peer.status: cannot listen on" in made.log("M0")
    assert "Traceback" not in made.log("M0")


def test_logs_for_programs(town, process):
    made = town("run.rounds=20", "data.angles=[0,20]", nodes=2)
    other = made.rehearsed.start("M20")
    spoken = process("peer", made.folder / "M0" / PEER, "--log-format", "json")
    assert other.wait(60) == 0
    lines = [json.loads(line) for line in spoken.stderr.splitlines()]
    assert all({"time", "level", "node", "message"} <= set(line) for line in lines)
    assert {line["node"] for line in lines} == {"M0"}
    evaluated = [line for line in lines if "validation_ACC" in line]
    assert [line["round"] for line in evaluated] == [10, 20]
    left = [line for line in lines if "leaves after round" in line["message"]]
    assert {line["peer"] for line in left} <= {"M20"}


def test_a_line_for_each_event(capsys):
    log, before = logging.getLogger("fedh2l.peer"), list(logging.getLogger().handlers)
    try:
        use_format(LogFormat.TEXT, "M0")
        log.warning("a long line %s", "x" * 300)
        try:
            raise ValueError("told\x1b[2J\n2026-11-19 error forged")
        except ValueError:
            log.exception("failed")
    finally:
        for handler in list(logging.getLogger().handlers):
            logging.getLogger().removeHandler(handler)
        for handler in before:
            logging.getLogger().addHandler(handler)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.split(" ", 1)[1] == f"warning a long line {'x' * 300}"
    assert rest[0].endswith("failed")
    assert rest[-2:] == ["  ValueError: told\\x1b[2J", "  2026-11-19 error forged"]
