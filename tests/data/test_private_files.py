"""Files that are derived from private data: only their owner can read them, and the image cache can be cleared."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from pathlib import Path

import pytest

from conftest import train
from fedh2l.cli.console import err
from fedh2l.data import image_cache
from fedh2l.data.datasets.image_folder import ImageFolder
from pictures import folders
from town import rehearsal

FOLLOW_THE_UMASK = {"config.toml", "metrics.jsonl", "result.json", "roster.toml", "peer.toml", "seedset.safetensors",
                    "node.pem", "node.csr", "ca.pem", "revoked.pem", "issued.json"}  # fmt: skip
"""What a run or a rehearsal leaves that may be shown to others."""


@pytest.fixture(params=[0o022, 0o000], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(image_cache.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def images(tmp_path) -> ImageFolder:
    return ImageFolder(root=str(folders(tmp_path / "images", ("day", "night"), ("circle", "line"))), size=16)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def readable(folder: Path) -> set[str]:
    """Names of files in a folder that other users can read."""
    closed: set[Path] = {path for path in folder.rglob("*") if path.is_dir() and not mode(path) & 0o055}
    found = [path for path in folder.rglob("*") if path.is_file() and mode(path) & 0o044]
    return {path.name for path in found if closed.isdisjoint(path.parents)}


def test_the_image_cache(cache, images, umask):
    images.domains(0)
    assert mode(cache) == 0o700
    assert {mode(path) for path in cache.iterdir()} == {0o600}


def test_a_cache_that_was_open_is_closed(cache, images, umask):
    images.domains(0)
    cache.chmod(0o755)
    for path in cache.iterdir():
        path.chmod(0o644)
    (cache / "notes.txt").write_text("not ours")
    theirs = mode(cache / "notes.txt")
    images.domains(0)
    assert mode(cache) == 0o700
    assert {mode(path) for path in cache.iterdir() if path.name != "notes.txt"} == {0o600}
    assert mode(cache / "notes.txt") == theirs


def test_a_run(federation, tmp_path, umask):
    train(federation("run.checkpoint_every=10"), tmp_path / "run")
    assert readable(tmp_path / "run") == {"config.toml", "metrics.jsonl", "result.json"}
    assert mode(tmp_path / "run" / "models") == 0o700
    assert {mode(path) for path in (tmp_path / "run" / "models").iterdir()} == {0o600}
    assert mode(tmp_path / "run" / "result.json") == 0o666 & ~umask


@pytest.mark.parametrize("umask", [pytest.param(0o022, marks=pytest.mark.slow), 0o000], indirect=True)
def test_a_rehearsal(tmp_path, umask):
    """Keys, secrets, models, checkpoints, audit logs, witnesses and logs of real peers."""
    made = rehearsal(tmp_path / "there", "run.rounds=4", "run.eval_every=2", "run.checkpoint_every=2")
    made.run()
    own = made.folder / "M0"
    assert (own / "peer.log").stat().st_size
    assert list((own / "run" / "witness").iterdir())
    assert readable(made.folder) <= FOLLOW_THE_UMASK
    private = [own / "peer.log", own / "keys" / "secret", own / "run" / "audit.jsonl"]
    private += [*(own / "run" / "witness").iterdir(), *(own / "run" / "models").iterdir()]
    assert {mode(path) for path in private} == {0o600}
    assert {mode(own / "run" / name) for name in ("witness", "models", "checkpoints")} == {0o700}


def entries(cache: Path) -> set[str]:
    return {entry.data for entry in image_cache.entries(cache)}


def test_cached_images_are_listed_after_their_originals_are_gone(cache, images, invoke, monkeypatch):
    monkeypatch.setattr(err, "width", 250)
    images.domains(0)
    shutil.rmtree(images.root)
    day = next(entry for entry in image_cache.entries(cache) if "day" in entry.data)
    (cache / f"{day.key}.npy").write_bytes(b"damaged")
    code, _, said = invoke("cache", "list")
    assert code == 0, said
    lines = {name: next(line for line in said.splitlines() if f"'{name}'" in line) for name in ("day", "night")}
    assert "damaged" in lines["day"]
    assert "40" in lines["night"].split()
    assert f"{images.root}/night" in lines["night"]
    assert time.strftime("%Y-%m-%d") in lines["night"]
    assert str(cache) in said


def test_the_cache_is_cleared(cache, images, invoke):
    images.domains(0)
    (cache / "0123456789abcdefxyz.part").write_bytes(b"half of an image")
    (cache / "model.npy").write_bytes(b"not ours")
    code, _, said = invoke("cache", "clear")
    assert code == 0, said
    assert "Removed 2 entries" in said
    assert re.search(r"6\d\.\d kB were freed", said)
    assert [path.name for path in cache.iterdir()] == ["model.npy"]
    assert "Removed 0 entries" in invoke("cache", "clear")[2]


def test_old_entries_are_cleared(cache, images, invoke):
    images.domains(0)
    for entry in image_cache.entries(cache):
        for path in cache.glob(f"{entry.key}*"):
            os.utime(path, (time.time() - 10 * image_cache.DAY,) * 2)
    ImageFolder(root=images.root, size=16, folders=["day"]).domains(0)  # this is a use
    code, _, said = invoke("cache", "clear", "--older-than", 7)
    assert code == 0, said
    assert "Removed 1 entry" in said
    assert entries(cache) == {"image-folder 'day'"}


def test_no_cache(tmp_path, monkeypatch, invoke):
    monkeypatch.setenv(image_cache.CACHE, str(tmp_path / "nothing"))
    assert invoke("cache", "list")[0] == 0
    assert "Removed 0 entries" in invoke("cache", "clear")[2]
    assert not (tmp_path / "nothing").exists()
