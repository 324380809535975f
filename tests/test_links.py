"""Symbolic links in directories that others have made: no file outside is written, removed or sent."""

from __future__ import annotations

import os
import shutil

import pytest

import fedh2l
from conftest import blobs
from fedh2l.data.image_cache import _tidy
from fedh2l.errors import RunError
from fedh2l.runs.directory import RunDirectory

HEX = "ab" * 32


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    out = tmp_path_factory.mktemp("ended") / "run"
    fedh2l.train(nodes(), rounds=2, out=out)
    return out


def nodes() -> list[fedh2l.Node]:
    return [fedh2l.Node(name, "mlp", blobs(name), {"hidden": [4]}) for name in "ab"]


def resume(out) -> None:
    fedh2l.train(nodes(), rounds=4, out=out, resume=True)


@pytest.mark.parametrize("name", ["models", "checkpoints", "config.toml", "metrics.jsonl", "result.json"])
def test_a_run_with_links_is_not_resumed(ended, tmp_path, name):
    out, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(ended, out)
    if not (out / name).exists():
        (out / name).mkdir()
    (out / name).rename(outside)
    (out / name).symlink_to(outside)
    before = {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()}
    with pytest.raises(RunError, match=f"'{out / name}' is a symbolic link, and a run could change files outside"):
        resume(out)
    assert before == {path: path.read_bytes() for path in [outside, *outside.rglob("*")] if path.is_file()}


def test_a_link_to_a_run_is_resumed(ended, tmp_path):
    """Users may keep their runs elsewhere."""
    shutil.copytree(ended, tmp_path / "kept")
    (tmp_path / "run").symlink_to(tmp_path / "kept")
    resume(tmp_path / "run")
    assert RunDirectory(tmp_path / "kept").rounds() == 4


def test_a_peer_with_links_does_not_go_on(invoke, tmp_path):
    pytest.importorskip("grpc")
    from fedh2l.peer.rehearsal import PEER
    from town import rehearsal

    made = rehearsal(tmp_path / "town", "run.rounds=10")
    out = made.folder / "M0" / "run"
    RunDirectory.claim(out, "x")
    (tmp_path / "outside").mkdir()
    (out / "audit.jsonl").symlink_to(tmp_path / "outside")
    code, _, err = invoke("peer", made.folder / "M0" / PEER)
    assert code == 2
    assert "is a symbolic link" in " ".join(err.split())
    assert not list((tmp_path / "outside").iterdir())


def test_a_bench_sends_no_files_that_links_lead_to(tmp_path):
    pytest.importorskip("ray")
    from fedh2l.bench.cluster import _read

    (tmp_path / "secret").write_text("secret")
    (tmp_path / "cell").mkdir()
    (tmp_path / "cell" / "config.toml").symlink_to(tmp_path / "secret")
    with pytest.raises(RunError, match="is a symbolic link"):
        _read(tmp_path, (tmp_path / "cell").relative_to(tmp_path))


def test_the_image_cache_follows_no_links(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    outside.chmod(0o644)
    os.utime(outside, (0, 0))
    (tmp_path / "cache").mkdir()
    for name in (f"{HEX}.npy", f"{HEX[:16]}x.part"):
        (tmp_path / "cache" / name).symlink_to(outside)
    _tidy(tmp_path / "cache")
    assert outside.stat().st_mode & 0o777 == 0o644
