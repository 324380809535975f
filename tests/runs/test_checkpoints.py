from __future__ import annotations

import json
import logging
import time

import pytest
import torch

from fedh2l.errors import RunError
from fedh2l.experiment.settings import RunSettings
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.checkpoints import Checkpoint, CheckpointFolder, pack, unpack
from fedh2l.runs.clock import CHECKPOINT_SHARE
from fedh2l.runs.directory import RunDirectory
from fedh2l.runs.trainer import Interrupted, Trainer

SAMPLE = Checkpoint(5, {"a/x": torch.arange(6.0).view(2, 3), "a/n": torch.tensor(3)}, {"best": {"a": [1, 2]}})


def test_round_trip():
    back = unpack(pack(SAMPLE))
    assert back.round == 5
    assert back.plain == SAMPLE.plain
    assert all(torch.equal(back.tensors[k], v) for k, v in SAMPLE.tensors.items())


def test_any_damage_is_noticed():
    data = pack(SAMPLE)
    for position in range(0, len(data), 7):
        broken = bytearray(data)
        broken[position] ^= 1
        with pytest.raises(RunError):
            unpack(bytes(broken))
    for length in range(0, len(data), 11):
        with pytest.raises(RunError):
            unpack(data[:length])


def test_two_are_kept_and_a_damaged_one_falls_back(tmp_path, caplog):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.newest() is None
    for round in (10, 20, 30):
        path = folder.save(SAMPLE._replace(round=round))
    assert [p.name for p in folder.paths()] == ["round-000000020.ckpt", "round-000000030.ckpt"]
    assert folder.newest()[1].round == 30
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert folder.newest()[1].round == 20
    assert "round-000000030.ckpt is damaged" in caplog.text


def test_a_new_checkpoint_is_never_taken_for_an_old_one(federation, tmp_path):
    """After a resume past damaged checkpoints, what is saved next is there, and is the newest."""
    directory = RunDirectory.claim(tmp_path / "run", "x")
    Trainer(federation("run.checkpoint_every=5", "run.rounds=18"), directory).run()
    for path in directory.checkpoints.paths():
        path.write_bytes(b"damaged")
    (tmp_path / "run/result.json").unlink()
    again = Trainer(federation("run.checkpoint_every=5", "run.rounds=18"), RunDirectory.open(tmp_path / "run"))
    assert not again.resume()
    again.stop = lambda: again.round >= 5
    with pytest.raises(Interrupted) as stopped:
        again.run()
    assert stopped.value.checkpoint.exists()
    assert directory.checkpoints.newest()[1].round == stopped.value.round


def test_a_checkpoint_appears_whole(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    folder.save(SAMPLE)
    seen = []

    def failing(source, target):
        seen.append((source.read_bytes(), target.exists()))
        raise OSError("the machine stops here")

    monkeypatch.setattr("os.replace", failing)
    with pytest.raises(OSError, match="stops here"):
        folder.save(SAMPLE._replace(round=6))
    assert unpack(seen[0][0]).round == 6  # complete before it gets its name
    assert seen[0][1] is False
    assert folder.newest()[1].round == 5


def test_what_a_crash_leaves_half_written_is_no_checkpoint(tmp_path):
    folder = CheckpointFolder(tmp_path)
    (tmp_path / ".round-000000010.ckpt.partial").write_bytes(b"half")
    assert folder.newest() is None


def test_a_checkpoint_of_another_federation_is_refused(federation, tmp_path):
    directory = RunDirectory.claim(tmp_path / "run", "x")
    with pytest.raises(Interrupted):
        Trainer(federation(), directory, stop=lambda: True).run()
    for change in (
        "method.kl_weight=0.0",
        "optimizer.lr=0.5",
        "run.seed=3",
        "nodes.0.model=cnn",
        "nodes.M0.model_args={}",
    ):
        reset = ["nodes.0.model_args={}"] if "nodes" in change else []
        with pytest.raises(RunError, match="is of a run with another"):
            Trainer(federation(change, *reset), directory).resume()


def test_a_checkpoint_by_another_rule_of_selection_is_refused(federation, tmp_path, monkeypatch):
    directory = RunDirectory.claim(tmp_path / "run", "x")
    with pytest.raises(Interrupted):
        Trainer(federation(), directory, stop=lambda: True).run()
    assert Trainer(federation(), directory).resume()
    monkeypatch.setattr(RunSettings, "selection_rule", property(lambda self: "the first that comes"))
    with pytest.raises(RunError, match="another evaluation"):
        Trainer(federation(), directory).resume()


def test_they_are_as_often_as_asked_for_and_only_the_last_is_kept(federation, tmp_path):
    directory, rounds = RunDirectory.claim(tmp_path / "run", "x"), []

    class Watch(Callback):
        def on_checkpoint(self, round, path):
            rounds.append(round)
            assert path.is_file()
            assert len(directory.checkpoints.paths()) <= 2

    Trainer(federation("run.rounds=20", "run.checkpoint_every=6"), directory, [Watch()]).run()
    assert rounds == [6, 12, 18]
    assert [path.name for path in directory.checkpoints.paths()] == ["round-000000020.ckpt"]
    assert directory.result() is not None


def test_automatic_checkpoints_stay_within_their_share(federation, tmp_path):
    trainer = Trainer(federation("run.rounds=600", "run.eval_every=5"), RunDirectory.claim(tmp_path / "run", "x"))
    spent, save = [], trainer.directory.checkpoints.save

    def timed(checkpoint):
        began = time.perf_counter()
        path = save(checkpoint)
        spent.append(time.perf_counter() - began)
        return path

    class Slow(Callback):
        def on_round(self, round):
            time.sleep(0.004)  # so that the run is long enough for a checkpoint on any machine

    trainer.directory.checkpoints.save = timed
    trainer.callbacks = [Slow()]
    result = trainer.run()
    assert spent, "a run of this length affords a checkpoint"
    # The last one may have taken longer than those before it let expect.
    assert sum(spent) - max(spent) <= CHECKPOINT_SHARE * result.seconds


def test_metrics_are_cut_back(tmp_path):
    directory = RunDirectory.claim(tmp_path / "run", "x")
    for round in (10, 20, 30):
        directory.append_metrics({"round": round})
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"round": 4')  # torn by a crash
    directory.cut_metrics(20)
    assert [json.loads(line)["round"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [10, 20]
