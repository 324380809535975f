"""A method of the user's own runs everywhere that ours do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedh2l
from conftest import MLPS, ROOT, TINY, blobs, tiny_net
from fedh2l.errors import ConfigError, MessageError
from fedh2l.experiment.config import load_config
from fedh2l.protocol.messages import Logits
from fedh2l.runs.trainer import Trainer
from fedh2l.training.losses import cross_entropy

EXAMPLE = ROOT / "examples" / "method"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example's module where a user would have it."""
    shutil.copy(EXAMPLE / "agreement.py", tmp_path)
    shutil.copy(EXAMPLE / "agreement.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "agreement", raising=False)
    return "agreement:Agreement"


def test_the_example_has_forty_lines():
    assert len((EXAMPLE / "agreement.py").read_text().splitlines()) <= 40


def test_it_runs_from_the_command_line_and_reproduces_itself(example, cli):
    done = cli("run", "agreement.toml", "--rounds", "40", "--out", "one", "--json", "--set", "data.per_class=20")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["method"] == example
    assert result["bytes"]["payload"] == 40 * 12 * 4 * (20 * 10 + 1)  # 20 public samples a node
    assert "of posteriors on public data crossed between the nodes" in done.stderr
    again = cli("run", "one/config.toml", "--out", "two", "--json")
    assert json.loads(again.stdout)["matrix"] == result["matrix"]


def test_it_is_right_where_its_teachers_are(example):
    """It learns much more of the others' domains than a node alone."""
    small = ["run.device=cpu", "data.per_class=60", "run.rounds=150", "run.eval_every=50"]
    own = Trainer(load_config(None, [*small, "method.interval=1"], example)[0].experiment()).run()
    alone = Trainer(load_config(None, small, "independent")[0].experiment()).run()
    assert own.average["CDP"] > alone.average["CDP"] + 8


def test_it_runs_as_one_computation(example):
    vectors = []
    for engine in ("local", "batched"):
        changes = [*TINY, *MLPS, "run.rounds=12", "run.dtype=float64", f"run.engine={engine}"]
        trainer = Trainer(load_config(None, changes, example)[0].experiment())
        trainer.run()
        vectors.append([learner.parameters for learner in trainer.engine.learners])
    for one, two in zip(*vectors, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("bench_in_process")
def test_it_is_compared_with_ours(example, cli):
    small = ["--set", "data.per_class=20", "--set", "run.batch_size=8", "--device", "cpu"]
    done = cli("bench", "comparison", "--rounds", "4", "--seeds", "1", "--methods", f"fedh2l,{example}", *small)
    assert done.returncode == 0, done.stderr
    table = json.loads(Path("bench/comparison.json").read_text())["tables"][0]
    assert [row["row"] for row in table["rows"]] == ["FedH2L", example]
    assert table["rows"][1]["average"]["ACC"]


def test_an_installed_package_names_its_method(example, cli, tmp_path):
    info = tmp_path / "site" / "demo-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedh2l.methods]\nagree = agreement:Agreement\n")
    shutil.move("agreement.py", "site")
    command = [sys.executable, "-m", "fedh2l"]
    anywhere = {"capture_output": True, "text": True, "cwd": tmp_path}
    anywhere["env"] = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    listed = subprocess.run([*command, "list"], **anywhere)
    assert "agree (agreement:Agreement)" in listed.stdout
    run = [*command, "run", "--method", "agree", "--rounds", "3", "--out", "run", "--json", "--device", "cpu"]
    done = subprocess.run([*run, "--set", "data.per_class=20"], **anywhere)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == "agree"
    assert 'name = "agree"' in (tmp_path / "run/config.toml").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Method", "method.name: cannot import 'nowhere'"),
        ("math:pi", "'math:pi' is not a subclass of fedh2l.Method"),
        ("fedavgg", "unknown method 'fedavgg'. Did you mean 'fedavg'?"),
    ],
)
def test_what_is_no_method_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, (), name)


class Silent(fedh2l.Method):
    """Says that it exchanges, and nothing else."""

    name = "silent"

    def local_step(self, node, round):
        batch = node.local_batch(round, "private")
        node.step(node.gradient(cross_entropy(node.logits(batch.inputs), batch.labels)), "local")

    def exchanges(self, round):
        return True


class Undeclared(Silent):
    def emit(self, node, round):
        return Logits.of(node.name, round, torch.zeros(2, 3))


def nodes() -> list[fedh2l.Node]:
    return [fedh2l.Node(name, tiny_net(), blobs(name)) for name in ("a", "b")]


def test_a_method_that_forgets_a_hook_is_told_which():
    with pytest.raises(NotImplementedError, match="must implement emit"):
        fedh2l.train(nodes(), Silent(), rounds=2)


def test_a_method_sends_only_what_it_declares():
    with pytest.raises(MessageError, match="silent sends logits, which it does not declare"):
        fedh2l.train(nodes(), Undeclared(), rounds=2)
