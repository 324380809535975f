"""Every way to be wrong ends with exit code 2 and one clear message, and leaves nothing behind."""

from __future__ import annotations

import sys

import pytest

from fedh2l.cli import main


def call(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """The same in this process, for the many ways to be wrong."""
    monkeypatch.setattr(sys, "argv", ["fedh2l", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    streams = capsys.readouterr()
    return int(left.value.code or 0), streams.out, streams.err


BAD = {
    "unknown key": (["--set", "method.intervall=3"], "method.intervall: unknown key. Did you mean 'interval'?"),
    "a former key": (["--set", "method.pace=3"], "method.pace: this key is now optimizer.mutual_lr_scale"),
    "a former engine": (["--set", "run.processes=2"], "run.processes: this key is now run.engine = 'processes'"),
    "unknown section": (["--set", "dta.alpha=0.1"], "unknown section [dta]. Did you mean 'data'?"),
    "wrong type": (["--set", "run.rounds=many"], "run.rounds = 'many': it should be a valid integer"),
    "a string for a number": (["--set", "run.rounds='3'"], "run.rounds = '3': it should be a valid integer"),
    "a float for an int": (["--set", "run.rounds=2.5"], "run.rounds = 2.5"),
    "alpha too large": (["--set", "data.alpha=0.75"], "data.alpha = 0.75: it should be less than 0.75"),
    "alpha zero": (["--set", "data.alpha=0"], "data.alpha = 0: it should be greater than 0"),
    "no rounds": (["--rounds", "0"], "run.rounds = 0: it should be greater than or equal to 1"),
    "one node": (["--set", "data.angles=[0]"], "data.angles = [0]"),
    "two nodes of a name": (["--set", "nodes.0.name=M20"], "two nodes are named 'M20'"),
    "no private data": (["--set", "data.alpha=0.749"], "leaves no private data"),
    "wrong outputs": (["--set", "nodes.1.model_args.num_classes=7"], "one logit for each of the 10 classes"),
    "unknown model": (["--set", "nodes.1.model=lenett"], "Did you mean 'lenet'?"),
    "model not importable": (["--set", "nodes.1.model=no.such:thing"], "cannot import 'no.such'"),
    "model not there": (["--set", "nodes.1.model=torch.nn:Nothing"], "module 'torch.nn' has no 'Nothing'"),
    "no such device": (["--device", "cuda:99"], "'cuda:99' does not exist"),
    "no device at all": (["--device", "toaster"], "'toaster' is not a device"),
    "missing config": (["nowhere.toml"], "there is no config file 'nowhere.toml'"),
    "not TOML": (["bad.toml"], "'bad.toml': it is not valid TOML"),
    "set without equals": (["--set", "method.interval"], "write --set section.key=value"),
    "set of a section": (["--set", "method=3"], "write --set section.key=value"),
    "set of no node": (["--set", "nodes.9.model=mlp"], "'9' is not a node; use a name or 0 to 3"),
    "set of no name": (["--set", "nodes.M9.model=mlp"], "'M9' is not a node; use a name or 0 to 3"),
    "a path with slashes": (["--set", "nodes.M0.model=own/nets.py:Net"], "'own.nets:Net'"),
    "a key outside": (["flat.toml"], "rounds stands in no section; write it under [run]"),
    "nodes that are no tables": (["nodes.toml"], "nodes.0 = 'a': it should be a table"),
    "resume of nothing": (["--resume", "nowhere"], "--resume nowhere: there is no such run"),
    "resume of no run": (["--resume", "."], "is not a run"),
    "resume with changes": (["--resume", "old", "--seed", "9"], "continues a run with its own settings"),
    "another run's directory": (["--out", "old"], "'old' belongs to another run"),
    "a directory with things": (["--out", "full"], "'full' is not empty"),
    "a file as directory": (["--out", "bad.toml"], "is a file"),
    "unknown method": (["--method", "fedh3l"], "unknown method 'fedh3l'. Did you mean 'fedh2l'?"),
    "unknown dataset": (["--set", "data.name=mnist"], "unknown dataset 'mnist'"),
    "unknown topology": (["--set", "method.topology=star"], "'star' is none of 'full', 'ring'"),
    "impossible topology": (["--set", "method.topology=regular-4"], "no graph of 4 nodes has 4 neighbours"),
    "edge to nobody": (["--set", 'method.topology=[["M0","M9"]]'], "'M9' is not a node"),
    "unknown domain": (["--set", "nodes.0.domain=M7"], "there is no domain 'M7'"),
    "too many digits": (["--set", "data.per_class=501"], "only 500 images of digit 0"),
    "one of a choice": (["--set", "method.project=qq"], "'qp', 'none' or 'pcgrad'"),
    "a bad option": (["--nothing"], "No such option"),
    "data not importable": (["--set", "data.name=no.such:thing"], "data.name: cannot import 'no.such'"),
    "a module that fails": (["--set", "nodes.0.model=broken:f"], "importing 'broken' failed with ZeroDivisionError"),
    "data that is no function": (["--set", "data.name=math:pi"], "'math:pi' is not a function"),
    "data that fails": (["--set", "data.name=bad_data:fails"], "failed: ValueError: no such thing"),
    "data that is no list": (["--set", "data.name=bad_data:nothing"], "must return a list of fedh2l.Domain"),
    "a key named path": (["--set", "data.name=bad_data:fails", "--set", "data.path=x"], "does not take these keys"),
    "a list as name": (["--set", "method.name=['a']"], "unknown method"),
    "a long name": (["--out", "x" * 300], "cannot write to"),
    "a superscript": (["--set", "nodes.².model=x"], "'²' is not a node"),
    "too many threads": (["--set", "run.threads=100000"], "less than or equal to 1024"),
    "an immense rate": (["--set", "optimizer.lr=1e39"], "optimizer.lr = 1e+39"),
    "an empty run": (["--resume", "old"], "config.toml is empty"),
    "data keys not taken": (["--set", "data.name=conftest:blobs"], "does not take these keys"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_bad_input(monkeypatch, capsys, tmp_path, mistake):
    arguments, message = BAD[mistake]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "bad.toml").write_text("[run\nrounds = 3")
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "bad_data.py").write_text("def fails(): raise ValueError('no such thing')\ndef nothing(): pass\n")
    sys.modules.pop("bad_data", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "flat.toml").write_text("rounds = 3")
    (tmp_path / "nodes.toml").write_text('nodes = ["a", "b"]')
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.toml").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    code, out, errors = call(monkeypatch, capsys, "run", *arguments)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors
    assert out == ""
    assert sorted(tmp_path.rglob("*")) == before  # nothing half-written


def test_a_directory_that_cannot_be_made(monkeypatch, capsys):
    code, _, errors = call(monkeypatch, capsys, "run", "--rounds", "1", "--out", "/proc/fedh2l")
    assert code == 2
    assert "cannot write to '/proc/fedh2l'" in errors


def test_debug_shows_the_traceback(monkeypatch, capsys):
    code, _, errors = call(monkeypatch, capsys, "run", "--rounds", "0", "--debug")
    assert code == 2
    assert "Traceback" in errors
