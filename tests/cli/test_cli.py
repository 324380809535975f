"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tomllib

import pytest

from conftest import MLPS, ROOT, TINY

SMALL = [part for change in [*TINY, *MLPS] for part in ("--set", change)]


def equal(a: dict, b: dict) -> bool:
    return {**a, "seconds": 0} == {**b, "seconds": 0}


def result_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_and_what_it_leaves(cli, tmp_path):
    done = cli("run", "--rounds", 20, "--seed", 5, "--out", "one", "--json", *SMALL)
    result = result_of(done)
    assert len(done.stdout.splitlines()) == 1  # nothing but the result goes to standard output
    assert "validation ACC" in done.stderr
    rule = "best model on pooled validation ACC, the latest of equals, evaluated every 10 rounds"
    assert rule in " ".join(done.stderr.split())
    assert (result["method"], result["seed"], result["rounds"], result["selection"]) == ("fedh2l", 5, 20, "best")
    assert json.loads((tmp_path / "one/result.json").read_text()) == result
    lines = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [10, 20]
    assert lines[-1]["bytes"] == result["bytes"]["total"]
    config = tomllib.loads((tmp_path / "one/config.toml").read_text())
    assert "out" not in config["run"]
    # The resolved config is an input that gives the same run again.
    again = result_of(cli("run", "one/config.toml", "--out", "two", "--json"))
    assert equal(again, result)
    assert (tmp_path / "one/config.toml").read_text() == (tmp_path / "two/config.toml").read_text()
    for model in (tmp_path / "one/models").iterdir():
        assert model.read_bytes() == (tmp_path / "two/models" / model.name).read_bytes()
    # Testing its models again gives the matrix.
    accuracy = json.loads(cli("evaluate", "one", "--json").stdout)["accuracy"]
    assert [list(row.values()) for row in accuracy.values()] == result["matrix"]
    other = json.loads(cli("evaluate", "one", "--node", "M20", "--data", "angles=[20,200]", "--json").stdout)
    assert other["accuracy"]["M20"]["M20"] == result["nodes"][1]["WDP"]
    assert cli("evaluate", "one", "--node", "M7").returncode == 2
    other = cli("evaluate", "one", "--data", "conftest:two_domains")
    assert "domain 'x' has classes" in other.stderr
    assert other.returncode == 2
    assert "may have been trained on" in cli("evaluate", "one", "--data", "splits=aligned").stderr


def test_the_live_view(tmp_path):
    """On a terminal: round, rounds a second, time left, validation ACC of each node."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "fedh2l", "run", "--rounds", "40", *SMALL]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=theirs, stdout=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # what a pseudo-terminal raises when the other side is gone
            break
    assert process.wait() == 0
    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", shown).decode()
    assert re.search(r"round 40/40 .* rounds/s \d:\d\d:\d\d left", text)
    assert re.search(r"validation ACC  M0 \d+\.\d  M20 \d+\.\d  M40 \d+\.\d  M60 \d+\.\d", text)


def test_default_directories_are_new(cli, tmp_path):
    for _ in range(2):
        assert cli("run", "--rounds", 1, *SMALL).returncode == 0
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {f"rotated-mnist-fedh2l-s0-{n}" for n in (1, 2)}


@pytest.mark.parametrize("method", ["fedprox", "fedmd", "fedgkt"])
def test_init_explains_the_keys_of_a_method(cli, tmp_path, method):
    assert cli("init", "own.toml", "--method", method).returncode == 0
    text = (tmp_path / "own.toml").read_text()
    assert f'name = "{method}"' in text
    assert {"fedprox": "(μ)", "fedmd": "# Digest epochs", "fedgkt": "temperature of nodes and server"}[method] in text


def test_init_check_and_list(cli, tmp_path):
    assert cli("init").returncode == 0
    text = (tmp_path / "fedh2l.toml").read_text()
    assert "# Local steps per mutual step (E)" in text
    checked = cli("check", "fedh2l.toml", "--set", "nodes.1.model=mlp")
    assert checked.returncode == 0, checked.stderr
    assert "61,706" in checked.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["fedh2l.toml"]  # check writes nothing
    assert cli("init").returncode == 2  # it does not overwrite
    listed = cli("list").stdout
    assert all(name in listed for name in ("fedh2l", "rotated-mnist", "lenet-wide"))
    assert re.fullmatch(r"fedh2l \d+\.\d+\.\d+\n", cli("--version").stdout)


def test_another_method_drops_the_files_parameters(tmp_path):
    from fedh2l.experiment.values import choose_method

    raw = {"method": {"name": "fedh2l", "interval": 5, "kl_weight": 0.0}}
    assert choose_method(raw, "fedh2l", []) == []
    assert raw["method"]["interval"] == 5
    assert choose_method(raw, "fedmd", []) == [
        "--method fedmd: ignored these [method] keys of the file: interval, kl_weight"
    ]
    assert raw["method"] == {"name": "fedmd"}


def test_the_example_of_ones_own(cli):
    example = ROOT / "examples" / "own" / "federation.toml"
    result = result_of(cli("run", example, "--rounds", 200, "--out", "run", "--json"))
    assert [node["name"] for node in result["nodes"]] == ["site0", "site1", "north"]
    alone = ["--set", "method.interval=0", "--set", "method.local_data=private+own-public"]
    solo = result_of(cli("run", example, "--rounds", 200, *alone, "--out", "alone", "--json"))
    assert result["average"]["CDP"] > solo["average"]["CDP"] + 5


def test_data_and_models_of_the_users_own(cli, tmp_path):
    (tmp_path / "ours.py").write_text(
        "import torch\n"
        "from conftest import blobs\n"
        "def clouds(count, seed):\n"
        "    return [blobs(f'site{i}', shift=0.4 * i, seed=seed + i) for i in range(count)]\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self, num_classes, width=4):\n"
        "        super().__init__(torch.nn.Linear(2, width), torch.nn.Tanh(), torch.nn.Linear(width, num_classes))\n"
    )
    (tmp_path / "ours.toml").write_text(
        '[run]\nrounds = 20\neval_every = 10\n[data]\nname = "ours:clouds"\ncount = 2\n'
        '[[nodes]]\nname = "a"\ndomain = "site0"\nmodel = "ours:Net"\n'
        '[[nodes]]\nname = "b"\ndomain = "site1"\nmodel = "ours:Net"\nmodel_args = {width = 9}\n'
    )
    result = result_of(cli("run", "ours.toml", "--out", "run", "--json"))
    assert [node["name"] for node in result["nodes"]] == ["a", "b"]
    assert equal(result_of(cli("run", "run/config.toml", "--out", "again", "--json")), result)
    (tmp_path / "x.npy").write_bytes(b"")
    import numpy as np

    np.save(tmp_path / "x.npy", np.array([2.0, 0.0], dtype=np.float32))
    said = cli("predict", "run", "--node", "b", "x.npy", "--allow", "ours")
    assert re.fullmatch(r"x\.npy: c\d \(\d+\.\d %\)\n", said.stdout), said.stderr
    assert (
        json.loads(cli("predict", "run", "--node", "b", "x.npy", "--json", "--allow", "ours").stdout)[0]["input"]
        == "x.npy"
    )
    assert cli("predict", "run", "--node", "b", "gone.npy").returncode == 2
