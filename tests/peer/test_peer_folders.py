"""The folder of a peer that was started before: it fits, or the peer says what does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedh2l.errors import RunError
from fedh2l.peer.peer import Peer
from fedh2l.peer.rehearsal import PEER
from fedh2l.peer.settings import load_peer
from fedh2l.runs.checkpoints import Checkpoint, pack, unpack
from fedh2l.runs.directory import RunDirectory
from town import rehearsal


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """A federation in which M0 has done its last round."""
    made = rehearsal(tmp_path_factory.mktemp("ended") / "town", "run.rounds=10")
    folder, path = made.folder, made.folder / "M0" / PEER
    path.write_text(path.read_text().replace(made.addresses["M0"], "127.0.0.1:0", 1))
    with opened(folder) as peer:
        peer.recorder.directory.sign(peer.recorder.inputs)
        peer.recorder.clock.start()
        peer.round = 10
        peer.recorder.arrive(10, look=True)
        peer.checkpoint()
        peer._finish()
    return folder


@pytest.fixture
def town(ended, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(ended, tmp_path / "town"))


@contextmanager
def opened(folder: Path) -> Iterator[Peer]:
    out = folder / "M0" / "run"
    peer = Peer(load_peer(folder / "M0" / PEER), RunDirectory(out) if out.exists() else RunDirectory.claim(out, "x"))
    try:
        yield peer
    finally:
        peer.audit.close()
        peer.local_nodes.close()


def resumed(folder: Path) -> Peer:
    with opened(folder) as peer:
        peer._resume()
    return peer


def test_what_has_ended_is_not_trained_again(town):
    assert resumed(town).finished


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        ("roster.toml", 'name = "fedh2l"', 'name = "fedh2l"\ninterval = 5', "the result is of another agreement"),
        ("roster.toml", "seed = 0", "seed = 7", "the result is of another agreement"),
        ("M0/peer.toml", "lr = 0.001", "lr = 0.5", "the result is of a peer with another optimizer"),
    ],
)
def test_a_result_of_other_terms_is_not_returned(town, file, old, new, why):
    text = (town / file).read_text()
    assert old in text, text
    (town / file).write_text(text.replace(old, new))
    with pytest.raises(RunError, match=f"{why}.*name another peer.out"):
        resumed(town)


def test_killed_before_its_first_checkpoint_it_has_no_metrics_of_lost_rounds(town):
    run = town / "M0" / "run"
    shutil.rmtree(run / "checkpoints")
    (run / "result.json").unlink()
    assert '"round": 10' in (run / "metrics.jsonl").read_text()
    assert resumed(town).round == 0
    assert (run / "metrics.jsonl").read_text() == ""


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda plain: plain.pop(key)


def with_(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda plain: plain.update(values)


ODD = [without("skipped"), with_(skipped="x"), with_(tempo=["x"]), with_(tempo=[None, 1]), with_(finished=5),
       without("settings"), with_(settings=[])]  # fmt: skip


@pytest.mark.parametrize("change", ODD)
def test_odd_values_of_a_checkpoint(town, change):
    (town / "M0" / "run" / "result.json").unlink()
    path = town / "M0" / "run" / "checkpoints" / "round-000000010.ckpt"
    found = unpack(path.read_bytes())
    change(found.plain)
    path.write_bytes(pack(Checkpoint(*found)))
    with pytest.raises(RunError, match="does not fit this run"):
        resumed(town)


@pytest.mark.parametrize("change", [without("done"), with_(done=5), without("agreed"), with_(settings=[])])
def test_odd_values_of_a_result(town, change):
    path = town / "M0" / "run" / "result.json"
    found = json.loads(path.read_text())
    change(found["peer"])
    path.write_text(json.dumps(found))
    with pytest.raises(RunError, match=r"not one of this version's peers.*name another peer.out"):
        resumed(town)
