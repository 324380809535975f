"""A run that has ended is extended to more rounds, and equals one that had them from the start."""

from __future__ import annotations

import json
import os

import pytest

import fedh2l
from conftest import MLPS, TINY, blobs, left_behind, tiny_net
from fedh2l.errors import ConfigError, RunError
from fedh2l.experiment.config import load_config
from fedh2l.experiment.toml import to_toml
from fedh2l.runs import trainer as training
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.resuming import go_on, saved_result
from fedh2l.runs.trainer import Trainer


@pytest.fixture
def run(tmp_path):
    """A run of so many rounds in a folder, started or resumed there."""

    def call(name: str, rounds: int, *changes: str):
        config = load_config(None, [*TINY, *MLPS, *changes, f"run.rounds={rounds}"])[0]
        folder = tmp_path / name
        if folder.exists():
            directory = RunDirectory.open(folder)
            if (ended := saved_result(directory, config.experiment())) is not None:
                return ended
            trainer = Trainer(config.experiment(), directory)
            assert go_on(trainer, to_toml(config))
        else:
            trainer = Trainer(config.experiment(), RunDirectory.claim(folder, to_toml(config)))
        trainer.run()
        return left_behind(folder)

    return call


@pytest.mark.parametrize(
    ("early", "changes"),
    [
        (13, []),
        (20, []),
        (20, ["run.selection=last"]),
        (13, ["method.interval=4", "run.ema_decay=0.9"]),
        (13, ["method.name=fedavg", "method.interval=3"]),
        (20, ["method.name=fedgkt", "method.interval=4", "method.server_epochs=1"]),
        (13, ["method.name=fml", "method.interval=4"]),
        (13, ["run.engine=batched"]),
        (20, ["run.engine=batched", "method.name=fedavg", "method.interval=3"]),
        (13, ["run.engine=processes", "method.name=fedgkt", "method.interval=4", "method.server_epochs=1"]),
    ],
)
def test_an_extended_run_is_the_longer_run(run, tmp_path, early, changes):
    whole = run("whole", 35, *changes)
    run("parts", early, *changes)
    assert run("parts", 35, *changes) == whole
    texts = [(tmp_path / name / "config.toml").read_text() for name in ("whole", "parts")]
    assert texts[0] == texts[1]
    assert [path.name for path in RunDirectory(tmp_path / "parts").checkpoints.paths()] == ["round-000000035.ckpt"]


def test_a_run_is_extended_again_and_again(run):
    whole = run("whole", 25)
    for rounds in (3, 10, 16, 25):
        found = run("parts", rounds)
    assert found == whole


def test_stopped_at_its_end_a_run_evaluates_its_last_round(run, tmp_path, monkeypatch):
    whole = run("whole", 13)

    class CrashError(Exception):
        pass

    def crash(self):
        raise CrashError

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "finish", crash)
        with pytest.raises(CrashError):
            run("parts", 13)
    assert run("parts", 13) == whole


def test_an_interrupted_run_gets_more_rounds(run, tmp_path, monkeypatch):
    whole = run("whole", 25)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "after_round", interrupt_at(12))
        with pytest.raises(KeyboardInterrupt):
            run("parts", 20, "run.checkpoint_every=5")
    extended = run("parts", 25, "run.checkpoint_every=5")
    assert extended == whole


def interrupt_at(last: int):
    def after(self, round):
        if round == last:
            raise KeyboardInterrupt
        return True

    return after


def test_fewer_rounds_are_refused(run):
    run("run", 12)
    with pytest.raises(ConfigError, match="started with 12 rounds; give at least as many"):
        run("run", 11)


def test_a_method_with_phases_is_refused_by_name(run):
    run("run", 12, "method.name=fedmd", "method.subset=20")
    with pytest.raises(ConfigError, match="fedmd plans its phases by the number of rounds"):
        run("run", 20, "method.name=fedmd", "method.subset=20")
    assert run("run", 12, "method.name=fedmd", "method.subset=20").rounds == 12


def test_methods_say_whether_they_depend_on_the_number_of_rounds():
    from fedh2l.methods.registry import METHODS

    assert {name for name, method in METHODS.items() if method.depends_on_rounds} == {"fedmd"}


def test_large_checkpoints_are_kept_only_if_asked_for(run, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "KEPT_BYTES", 1000)
    run("small", 12)
    assert not (tmp_path / "small/checkpoints").exists()
    with pytest.raises(RunError, match=r"last checkpoint is gone.*run\.keep_checkpoint = true"):
        run("small", 20)
    assert (tmp_path / "small/result.json").exists()
    run("kept", 12, "run.keep_checkpoint=true")
    assert run("kept", 20, "run.keep_checkpoint=true") == run("whole", 20, "run.keep_checkpoint=true")


def test_a_damaged_last_checkpoint_leaves_the_result(run, tmp_path):
    run("run", 12)
    next((tmp_path / "run/checkpoints").iterdir()).write_bytes(b"nothing")
    with pytest.raises(RunError, match="last checkpoint is gone"):
        run("run", 20)
    assert json.loads((tmp_path / "run/result.json").read_text())["rounds"] == 12


def test_from_python(tmp_path):
    def script(rounds: int, out: str, **more):
        given = [fedh2l.Node(f"n{i}", tiny_net(), blobs(f"n{i}", seed=i)) for i in range(2)]
        for node in given:
            for parameter in node.model.parameters():
                parameter.data.fill_(0.1)
        result = fedh2l.train(given, rounds=rounds, eval_every=4, out=tmp_path / out, resume=True, **more)
        return {**result.to_dict(), "seconds": 0}, [node.model[0].weight.tolist() for node in given]

    script(6, "parts")
    assert script(15, "parts", keep_checkpoint=True) == script(15, "whole")
    assert script(15, "parts") == script(15, "whole")  # recalled


def test_from_the_command_line(cli, tmp_path):
    changes = [part for change in [*TINY, *MLPS] for part in ("--set", change)]
    for rounds, out in ((13, "parts"), (25, "whole")):
        assert cli("run", *changes, "--rounds", rounds, "--out", out).returncode == 0
    done = cli("run", "--resume", "parts", "--rounds", "25", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 25
    assert left_behind(tmp_path / "parts") == left_behind(tmp_path / "whole")


def test_while_it_runs_nobody_else_extends_it(run, tmp_path):
    run("run", 12)
    directory = RunDirectory.open(tmp_path / "run")
    with directory.locked(), pytest.raises(RunError, match="another process is running"):
        run("run", 20)
    assert directory.result() is not None
    assert os.listdir(tmp_path / "run/models")
