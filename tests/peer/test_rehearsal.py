"""Real peers on one machine: what they learn, and what becomes of it when they die."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

from conftest import MLPS, TINY
from fedh2l.errors import ConfigError
from fedh2l.extras import needs
from fedh2l.peer.peer import Peer
from fedh2l.peer.refusals import PeerRefusedError
from fedh2l.peer.rehearsal import PEER
from fedh2l.peer.settings import load_peer
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.sender import Contact
from fedh2l.runs.directory import RunDirectory
from town import NAMES, rehearsal

LONG = ["run.rounds=1000", "run.checkpoint_every=20"]
"""Long enough for a peer to start again, on a busy machine, before the others are done."""


def test_a_peer_that_is_killed_comes_back_and_goes_on_with_the_others(town):
    made = town(*LONG, deadline=1.0)
    made.start(*NAMES)
    made.until(lambda: made.round("M20") >= 60)
    made.kill("M20")
    reached = made.round("M0")
    made.until(lambda: made.round("M0") >= reached + 40)  # the others do not wait for it
    made.start("M20")
    results = made.finish()
    assert "'M20' is lost in round" in made.log("M0")
    assert "goes on after round" in made.log("M20")
    assert results["M20"]["peer"]["skipped"] > 0
    assert all(results[name]["peer"]["skipped"] == 0 for name in ("M0", "M40", "M60"))


@pytest.mark.slow
def test_a_peer_that_comes_late(town):
    made = town(*LONG, deadline=1.0)
    made.start("M0", "M20", "M40")
    made.until(lambda: made.round("M0") >= 40)
    made.start("M60")
    results = made.finish()
    assert results["M60"]["peer"]["skipped"] >= 30
    assert "'M60' is there" in made.log("M0")


@pytest.mark.slow
def test_all_of_them_down_and_up_again(town):
    made = town(*LONG, deadline=1.0)
    made.start(*NAMES)
    made.until(lambda: made.round("M0") >= 60)
    for name in NAMES:
        made.kill(name)
    made.start(*NAMES)
    made.finish()
    assert all("goes on after round" in made.log(name) for name in NAMES)


def test_asked_to_stop_a_peer_saves_says_goodbye_and_ends_well(town):
    made = town("run.rounds=1000", "run.checkpoint_every=20", deadline=5.0)
    made.start(*NAMES)
    made.until(lambda: made.round("M40") >= 40)
    assert made.kill("M40", signal.SIGTERM) == 0
    assert "has stopped and is saved" in made.log("M40")
    made.until(lambda: "'M40' leaves after round" in made.log("M0"))
    made.edit("M40", ("[12]", "[13]"))
    made.start("M40")
    made.until(lambda: made.dead("M40"))
    assert "the checkpoint is of a peer with another size of models" in made.log("M40")
    assert "Traceback" not in made.log("M40")
    made.edit("M40", ("[13]", "[12]"))
    made.start("M40")
    assert made.finish()["M40"]["rounds"] == 1000


@pytest.mark.slow
def test_below_quorum_a_peer_waits_for_the_others(town):
    made = town("run.rounds=60", deadline=0.5, quorum=2, below_quorum="pause")
    made.start("M0", "M20")
    made.until(lambda: "paused in round 1" in made.log("M0"))
    assert made.round("M0") == 0
    made.start("M40", "M60")
    made.finish()


@pytest.mark.slow
def test_asynchronous_peers_never_wait(town):
    made = town("run.rounds=1500", "run.eval_every=100", mode="asynchronous", staleness=50, quorum=2, linger=0)
    made.start("M0", "M20", "M40")
    results = made.finish()
    assert set(results) == {"M0", "M20", "M40"}
    assert all(result["peer"]["conflicts"][1] > 0 for result in results.values())  # all have heard others
    assert all("did not answer" not in made.log(name) for name in results)


@pytest.mark.slow
def test_back_when_the_others_are_nearly_done(town):
    """It learns that they are, does the last round, and ends; nobody is waited for who is done."""
    made = town("run.rounds=150", deadline=1.0, linger=60.0)
    made.start(*NAMES)
    made.until(lambda: made.round("M20") >= 40)
    made.kill("M20")
    made.until(lambda: all("done; stays up to 60 s for M20" in made.log(name) for name in NAMES if name != "M20"))
    made.start("M20")
    began = time.monotonic()
    results = made.finish()
    assert time.monotonic() - began < 40
    assert results["M20"]["rounds"] == 150
    assert results["M20"]["peer"]["skipped"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("field", ["seed", "ema_decay", "pins"])
def test_who_holds_another_roster_is_refused_and_the_others_go_on(town, field):
    made = town("run.rounds=60", deadline=1.0, linger=1.0)
    folder = made.rehearsed.folder
    charter = made.rehearsed.roster_file
    changes = {
        "seed": ("seed = 0", "seed = 5"),
        "ema_decay": ("ema_decay = 0.0", "ema_decay = 0.9"),
        "pins": (charter.pins["M40"], "sha256//" + base64.b64encode(b"k" * 32).decode()),  # an impostor's key
    }
    other = (folder / "roster.toml").read_text().replace(*changes[field])
    assert other != (folder / "roster.toml").read_text()
    (folder / "other.toml").write_text(other)
    made.edit("M60", ("../roster.toml", "../other.toml"))
    made.start(*NAMES)
    made.until(lambda: all(made.processes[name].poll() is not None for name in NAMES[:3]))
    assert f"holds another roster, which differs in: {field}." in made.log("M0")
    assert all(made.directory(name).result() for name in NAMES[:3])
    assert "'M60' is there" not in made.log("M0")
    made.kill("M60")


def test_from_the_command_line(cli, process, tmp_path):
    two = [change for change in MLPS if change.startswith(("nodes.0.", "nodes.1."))]
    settings = [word for change in (*TINY, *two, "data.angles=[0,20]") for word in ("--set", change)]
    there = cli("rehearse", "--rounds", 20, *settings, "--json", "--out", "there")
    assert there.returncode == 0, there.stderr
    here = cli("run", "--rounds", 20, *settings, "--json", "--out", "here")
    found, expected = (json.loads(run.stdout.splitlines()[-1]) for run in (there, here))
    assert {key for key in found if found[key] != expected[key]} == {"seconds"}
    assert "of posteriors on public data crossed between the nodes" in there.stderr
    again = process("peer", "there/M0/peer.toml")
    assert "has already done its last round" in again.stderr
    (tmp_path / "there" / "M0" / "keys" / "node.pem").unlink()
    assert process("peer", "there/M0/peer.toml").returncode == 2


@pytest.mark.slow
def test_nothing_private_is_in_what_left(tmp_path):
    """Every payload on record is as long as posteriors on public data are, and no other kind is there."""
    made = rehearsal(tmp_path / "there", "run.rounds=10")
    made.run()
    size = next(iter(made.result(0.0).bytes["edges"].values())) // 10
    for name in NAMES:
        lines = (made.folder / name / "run" / "audit.jsonl").read_text().splitlines()
        posteriors = [json.loads(line) for line in lines if json.loads(line)["kind"] == "posteriors"]
        assert len(posteriors) == 30
        assert {entry["bytes"] for entry in posteriors} == {size}
        assert os.stat(made.folder / name / "keys" / "secret").st_mode & 0o077 == 0


def test_one_voice_alone_moves_nobody(tmp_path):
    """Of three others, two must say that the federation is elsewhere; and whoever is done is not waited for."""
    made = rehearsal(tmp_path / "there", "run.rounds=1000")
    config = load_peer(made.folder / "M0" / PEER)
    peer = Peer(config, RunDirectory.claim(tmp_path / "run", "x"))
    try:
        near, desk = peer.peers, peer.servicer
        peer._around = (peer.history.all, peer.history.all)  # nobody is dialled
        peer.round = peer._sent = 10

        def said(**rounds: int) -> int:
            for name, round in rounds.items():
                near.senders[name] = SimpleNamespace(contact=Contact(state="up", round=round))
            peer._catch_up()
            return peer.round

        assert said(M20=999_999) == 10
        peer.progress._with_others -= peer.timing.patience + 1  # nobody else was there for that long
        assert said(M20=999_999) == 10  # this peer could not have trained a round since its last one
        peer.progress.timer.restore(
            [0.1, 0.25, time.time() - 50.2]
        )  # at four rounds per second, it could have trained 200
        assert said(M20=999_999) == 10 + 200
        peer.round = 10
        assert said(M20=999_999, M40=11) == 10
        assert said(M20=999_999, M40=12, M60=11) == 11
        desk.left("M40", pb.Goodbye(round=1000, finished=True))
        assert near.finished == {"M40"}
        hello = peer.agreed.hello("M20", 1)
        for _ in range(10):
            desk.greeted("M20", hello)
        with pytest.raises(PeerRefusedError, match="greets more than 10 times"):
            desk.greeted("M20", hello)
    finally:
        peer.audit.close()


@pytest.mark.slow
def test_stopped_below_quorum_a_round_does_not_count(town):
    made = town("run.rounds=40", deadline=0.5, quorum=2, below_quorum="pause")
    made.start("M0", "M20")
    for _ in range(2):
        made.until(lambda: "paused in round 1" in made.log("M0"))
        (made.rehearsed.folder / "M0" / "peer.log").write_text("")
        assert made.kill("M0", signal.SIGTERM) == 0
        assert [path.name for path in made.directory("M0").checkpoints.paths()] == ["round-000000000.ckpt"]
        made.start("M0")
    made.start("M40", "M60")
    assert made.finish()["M0"]["rounds"] == 40


def test_an_empty_secret_is_none(tmp_path):
    made = rehearsal(tmp_path / "there", "run.rounds=10")
    (made.folder / "M0" / "keys" / "secret").write_text("")
    with pytest.raises(ConfigError, match="too short to be a secret"):
        load_peer(made.folder / "M0" / PEER)


def test_without_what_it_needs_the_message_says_what_to_install():
    needs("peer", "torch.nn")
    with pytest.raises(ConfigError, match=r"this needs no_such.module and nor_this; pip install 'fedh2l\[peer\]'"):
        needs("peer", "torch", "no_such.module", "nor_this")
