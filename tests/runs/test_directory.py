"""A run that failed blocks its directory until it is overwritten; nothing but a run is ever removed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fedh2l
from conftest import ROOT, blobs, tiny_net
from fedh2l.errors import ConfigError, DivergedError, RunError
from fedh2l.files import write_exclusively
from fedh2l.runs.directory import RunDirectory

DIVERGING = fedh2l.Optimizer(name="sgd", lr=1e20)


def given() -> list[fedh2l.Node]:
    return [fedh2l.Node(f"n{i}", tiny_net(), blobs(f"n{i}", seed=i)) for i in range(2)]


def test_a_failed_run_says_how_to_start_again_in_its_directory(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(DivergedError, match=r"lr may help\. '.*run' keeps this run: .*overwrite=True"):
        fedh2l.train(given(), rounds=40, optimizer=DIVERGING, out=out)
    with pytest.raises(RunError, match=r"belongs to another run, which has not ended\. .*overwrite=True"):
        fedh2l.train(given(), rounds=4, out=out)
    fedh2l.train(given(), rounds=4, out=out, overwrite=True)
    with pytest.raises(RunError, match="which has ended"):
        fedh2l.train(given(), rounds=5, out=out)
    assert fedh2l.train(given(), rounds=5, out=out, overwrite=True).rounds == 5
    assert RunDirectory.open(out).result()["rounds"] == 5
    with pytest.raises(ConfigError, match="give one of them"):
        fedh2l.train(given(), rounds=5, out=out, overwrite=True, resume=True)


def test_other_errors_say_so_too(tmp_path):
    class Failing(fedh2l.Callback):
        def on_round(self, round):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        fedh2l.train(given(), rounds=4, out=tmp_path / "run", callbacks=[Failing()])
    assert "overwrite=True" in caught.value.__notes__[0]


def test_an_empty_or_missing_directory_needs_no_permission(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        assert fedh2l.train(given(), rounds=2, out=tmp_path / name, overwrite=True).rounds == 2


@pytest.mark.parametrize(
    "put",
    [
        lambda run: (run / "notes.txt").write_text("mine"),
        lambda run: (run / "models/mine.txt").write_text("mine"),
        lambda run: (run / "more").mkdir(),
        lambda run: (run / "config.toml").unlink(),
        lambda run: (run / "config.toml").write_text("[tool]\nname = 1"),
        lambda run: (run / "checkpoints/round-1.ckpt").symlink_to(run.parent / "precious"),
        lambda run: os.replace(run / "models", run.parent / "moved") or (run / "models").symlink_to(run.parent),
    ],
)
def test_only_a_run_is_removed(tmp_path, put):
    (tmp_path / "precious").write_text("mine")
    fedh2l.train(given(), rounds=2, out=tmp_path / "run")
    put(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError):
        fedh2l.train(given(), rounds=2, out=tmp_path / "run", overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_a_link_is_not_emptied(tmp_path):
    fedh2l.train(given(), rounds=2, out=tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(RunError, match="not part of a run"):
        fedh2l.train(given(), rounds=2, out=tmp_path / "link", overwrite=True)
    assert (tmp_path / "run/result.json").exists()


def test_a_run_that_is_going_on_is_not_removed(tmp_path):
    fedh2l.train(given(), rounds=2, out=tmp_path / "run")
    with RunDirectory(tmp_path / "run").locked(), pytest.raises(RunError, match="another process is running"):
        fedh2l.train(given(), rounds=2, out=tmp_path / "run", overwrite=True)
    assert (tmp_path / "run/result.json").exists()


def test_from_the_command_line(invoke, tmp_path):
    small = ["--set", "data.per_class=20", "--device", "cpu", "--rounds", "4", "--out", tmp_path / "run"]
    code, _, errors = invoke("run", *small, "--set", "optimizer.name=sgd", "--set", "optimizer.lr=1e25")
    assert code == 1
    assert "start again there with --overwrite" in " ".join(errors.split())
    assert invoke("run", *small)[0] == 2
    assert "--overwrite" in invoke("run", "--resume", tmp_path / "run", "--overwrite")[2]


SCRIPT = """
import sys, torch, fedh2l
from torch import nn
sys.path.append({tests!r})
from conftest import blobs
class Net(nn.Module):
    def __init__(self, num_classes, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, num_classes))
    def forward(self, x):
        return self.layers(x)
nodes = [fedh2l.Node(name, Net, blobs(name), {{"width": 5}}) for name in "ab"]
fedh2l.train(nodes, rounds=4, out="run")
try:
    fedh2l.load("run", "a")
except fedh2l.errors.ModelError as error:
    print("refused:", error)
print(fedh2l.load("run", "a", allow=["__main__"])(torch.zeros(1, 2)).shape)
"""


def test_a_class_of_the_script_is_loaded_where_the_script_allows_it(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(tests=str(ROOT / "tests")))
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "node 'a': its saved model cannot be loaded by name, since its class is defined in the script" in done.stderr
    assert "refused: " in done.stdout
    assert "torch.Size([1, 3])" in done.stdout


class Net(nn.Module):
    def __init__(self, num_classes: int = 3, width: int = 8) -> None:
        super().__init__()
        self.out = nn.Linear(2, num_classes)

    def forward(self, x):
        return self.out(x)


class Needy(Net):
    def __init__(self, width: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("model", "arguments", "reason"),
    [
        (lambda num_classes: nn.Linear(2, num_classes), {}, "not built by a class or function that has a name"),
        (tiny_net(), {}, "not built by a class or function that has a name"),
        (Needy(4), {}, "arguments that it was built with are not known: width"),
        (Needy, {"width": 3}, None),
        (Net, {}, None),
        (Net(), {}, None),
        ("mlp", {}, None),
        ("test_directory:Net", {}, None),
    ],
)
def test_models_that_cannot_be_loaded_by_name_are_told_before_training(tmp_path, caplog, model, arguments, reason):
    nodes = [fedh2l.Node("a", model, blobs("a"), arguments), fedh2l.Node("b", Net, blobs("b"))]
    with caplog.at_level("WARNING", "fedh2l"):
        fedh2l.train(nodes, rounds=1, out=tmp_path / "run")
    told = [record.getMessage() for record in caplog.records if "cannot be loaded by name" in record.getMessage()]
    assert len(told) == (reason is not None)
    assert reason is None or reason in told[0]
    if reason is None:
        loaded = fedh2l.load(tmp_path / "run", "a", allow=["test_directory"])
        assert loaded(torch.zeros(1, 2)).shape == (1, 3)


def test_without_a_directory_nothing_is_told(caplog):
    fedh2l.train(given(), rounds=1)
    assert "cannot be loaded" not in caplog.text


LEFT = (".config.toml.7.partial", "..config.toml.8.partial.partial")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_start_that_was_killed_does_not_block_the_directory(tmp_path, overwrite):
    out = tmp_path / "run"
    out.mkdir()
    for name in LEFT:
        (out / name).write_text("[run]")
    RunDirectory.claim(out, "x", overwrite)
    assert RunDirectory.open(out).config_text() == "x"


@pytest.mark.parametrize("name", ["notes.txt", ".config.toml.mine.partial", "config.toml.7.partial"])
def test_other_files_do(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(RunError, match="is not empty"):
        RunDirectory.claim(tmp_path, "x")


def test_a_start_that_comes_second_leaves_nothing(tmp_path):
    write_exclusively(tmp_path / "config.toml", b"first")
    with pytest.raises(FileExistsError):
        write_exclusively(tmp_path / "config.toml", b"second")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"first"]
