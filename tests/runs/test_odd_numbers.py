"""Numbers that do not fit, in the files of a run: an error that names the file, not a traceback."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

import fedh2l
from conftest import blobs
from fedh2l.errors import RunError
from fedh2l.runs import checkpoints
from fedh2l.runs.directory import RunDirectory

HUGE = 10**400


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    out = tmp_path_factory.mktemp("ended") / "run"
    train(out, 2)
    return out


def train(out, rounds):
    return fedh2l.train(
        [fedh2l.Node(name, "mlp", blobs(name), {"hidden": [4]}) for name in "ab"], rounds=rounds, out=out, resume=True
    )


@pytest.fixture
def run(ended, tmp_path):
    return shutil.copytree(ended, tmp_path / "run")


@pytest.mark.parametrize("rounds", ["inf", "nan", "1" + 400 * "0"])
def test_rounds_in_the_configuration(run, rounds):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("rounds = 2", f"rounds = {rounds}"))
    with pytest.raises(RunError, match=r"config.toml' cannot be read"):
        RunDirectory(run).rounds()
    with pytest.raises(RunError, match=r"config.toml' cannot be read"):
        RunDirectory.claim(run, "", overwrite=True)


def test_logits_in_the_fingerprint(run):
    found = json.loads((run / "fingerprint.json").read_text())
    found["a"]["logits"][0][1] = HUGE
    (run / "fingerprint.json").write_text(json.dumps(found))
    with pytest.raises(RunError, match="a number is too large"):
        train(run, 4)


def test_counts_in_a_checkpoint(run):
    (path,) = (run / "checkpoints").iterdir()
    body = path.read_bytes()[checkpoints._HEAD :]
    size = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + size])
    plain = json.loads(header["__metadata__"]["plain"])
    plain["best"] = {"a": [HUGE, 1], "b": [1, 1]}
    header["__metadata__"]["plain"] = json.dumps(plain)
    text = json.dumps(header).encode()
    body = len(text).to_bytes(8, "little") + text + body[8 + size :]
    path.write_bytes(checkpoints._MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    with pytest.raises(RunError):
        train(run, 4)
