"""`fedh2l-plus`: its settings for other sections, its averaged teacher, and its replay of lessons."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedh2l
from conftest import MLPS, TINY, blobs
from fedh2l.errors import ConfigError
from fedh2l.experiment.config import load_config
from fedh2l.experiment.toml import to_toml
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.methods.fedh2l_plus import FedH2LPlus
from fedh2l.runs.trainer import Trainer

SHORT = [*TINY, *MLPS, "run.rounds=20"]
PLUS = ["data.augment=all", "method.temperature=3.0", "method.kl_weight=3.0", "optimizer.mutual_lr_scale=3.0",
        "method.encoding=int8", "method.public_batch_size=64", "method.local_data=private+own-public"]  # fmt: skip


def test_without_an_average_it_is_fedh2l_with_other_settings():
    plus, spelled = (
        Trainer(load_config(None, [*SHORT, *changes], method=method)[0].experiment()).run().to_dict()
        for method, changes in (("fedh2l-plus", ["run.ema_decay=0.0"]), ("fedh2l", PLUS))
    )
    assert plus["matrix"] == spelled["matrix"]
    assert plus["bytes"] == spelled["bytes"]


def test_what_is_said_counts():
    config, _ = load_config(None, ["run.ema_decay=0.9", "data.augment=local", "method.temperature=1.0"], "fedh2l-plus")
    assert (config.run.ema_decay, config.data.augment, config.method.temperature) == (0.9, "local", 1.0)
    assert config.method.kl_weight == 3


def test_a_file_says_all_of_it(tmp_path):
    """A run directory reproduces its run, whatever is recommended later."""
    config, _ = load_config(None, SHORT, method="fedh2l-plus")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert "ema_decay = 0.998" in path.read_text()
    assert load_config(path)[0] == config


def test_data_that_knows_no_views_is_taken_as_it_is():
    config, _ = load_config(None, ["data.name=test_fedh2l_plus:domains"], method="fedh2l-plus")
    assert config.run.ema_decay == 0.998
    assert config.experiment().nodes[0].domain.augmentation is None


def domains():
    return [blobs("a"), blobs("b", 1.0)]


def test_rare_exchanges_are_learned_from_in_between():
    """Four lessons are kept, as they were sent, and a step is taken in every round once there is one."""
    config, _ = load_config(None, [*SHORT, "method.interval=4", "run.eval_every=1"], method="fedh2l-plus")
    trainer = Trainer(config.experiment())
    trainer.run()
    learner = trainer.engine.learners[0]
    kept = {name for name in learner.memory if name.startswith("lesson.")}
    assert {name.split(".")[1] for name in kept} == {"0", "1", "2"}  # more would never be repeated
    assert len({learner.memory[f"lesson.{place}.teacher"].square().sum().item() for place in range(3)}) == 3
    assert learner.network.optimizer_states["mutual"]["steps"] == 20 - 3
    assert "replay = 4" in to_toml(config)
    config.method.forget(learner)
    assert not any(name.startswith("lesson.") for name in learner.memory)


@pytest.mark.parametrize("interval", [2, 3, 4, 5, 8, 10])
@pytest.mark.parametrize("replay", [1, 2, 4, 8])
def test_every_lesson_that_is_kept_is_repeated_the_newest_first(interval, replay):
    method, kept = FedH2LPlus(interval=interval, replay=replay), {}
    for round in range(1, 12 * interval):
        place = method._slot(round)
        if method.exchanges(round):
            kept[place], seen = round, []
        elif kept:
            seen.append(kept[place])
        else:
            assert place is None
        if kept and round % interval == interval - 1:
            newest = sorted(kept.values(), reverse=True)
            assert seen == [newest[k % len(newest)] for k in range(interval - 1)]
            assert len(kept) == min(round // interval, replay, interval - 1)


def test_a_difference_of_gradients_cannot_be_repeated():
    FedH2LPlus(local_gradient="difference")  # every round is one with an exchange
    with pytest.raises(ConfigError, match=r"local_gradient = 'difference' .*; set replay = 0"):
        FedH2LPlus(local_gradient="difference", interval=4)


def test_without_labels():
    config, _ = load_config(None, [*SHORT, "data.public_labels=false"], method="fedh2l-plus")
    settings = (config.method.ce_weight, config.method.local_data, config.optimizer.mutual_lr_scale)
    assert settings == (0.0, "private", 1.0)
    assert Trainer(config.experiment()).run().average["ACC"] > 0
    with pytest.raises(ConfigError, match=r"needed by method\.ce_weight = 1"):
        load_config(None, [*SHORT, "data.public_labels=false", "method.ce_weight=1"], "fedh2l-plus")[0].experiment()


@pytest.mark.parametrize("labelled", [True, False])
def test_from_python(labelled, tmp_path):
    nodes = [
        fedh2l.Node(d.name, torch.nn.Linear(d.private.inputs.shape[1], 3), replace(d, public_labels=labelled))
        for d in domains()
    ]
    fedh2l.train(nodes, "fedh2l-plus", rounds=4, batch_size=8, out=tmp_path / "run")
    written = (tmp_path / "run" / "config.toml").read_text()
    assert "ema_decay = 0.998" in written
    assert f"ce_weight = {float(labelled)}" in written
    assert f"mutual_lr_scale = {3.0 if labelled else 1.0}" in written


def test_from_python_by_its_class():
    def trained(method):
        torch.manual_seed(0)
        nodes = [fedh2l.Node(d.name, torch.nn.Linear(d.private.inputs.shape[1], 3), d) for d in domains()]
        return nodes, fedh2l.train(nodes, method, rounds=20, batch_size=8).matrix

    _, matrix = trained(FedH2LPlus())
    assert matrix == trained("fedh2l-plus")[1]


def test_others_recommend_nothing():
    assert FedH2L.recommends(public_labels=True) == {}
    config, _ = load_config(None, [])
    assert (config.run.ema_decay, config.data.augment) == (0.0, "none")


def written(tmp_path, method, *changes):
    path = tmp_path / f"{method}.toml"
    path.write_text(to_toml(load_config(None, [*SHORT, *changes], method=method)[0]))
    return path


@pytest.mark.parametrize("by", ["option", "change"])
def test_over_a_file_of_another_method(tmp_path, by):
    """What the file says of the method is left out; what it says elsewhere stays, and is told."""
    path = written(tmp_path, "fedh2l")
    args = ([], "fedh2l-plus") if by == "option" else (["method.name=fedh2l-plus"], None)
    config, notices = load_config(path, *args)
    assert (config.method.temperature, config.run.ema_decay) == (3.0, 0.0)
    assert "run.ema_decay stays 0.0, as in the file; fedh2l-plus recommends 0.998" in notices
    assert "data.augment stays 'none', as in the file; fedh2l-plus recommends 'all'" in notices
    assert any("ignored these [method] keys" in text for text in notices)


def test_from_a_file_of_its_own(tmp_path):
    config, notices = load_config(written(tmp_path, "fedh2l-plus"), method="fedh2l")
    assert (config.method.temperature, config.run.ema_decay) == (1.0, 0.998)
    assert "run.ema_decay stays 0.998, as in the file; it suits fedh2l-plus" in notices
    changed = written(tmp_path, "fedh2l-plus", "run.ema_decay=0.5")  # no longer what fedh2l-plus would have
    assert not any("ema_decay" in text for text in load_config(changed, method="fedavg")[1])
    assert not load_config(written(tmp_path, "fedavg"), method="fedmd")[1][1:]


def test_a_name_that_is_none():
    with pytest.raises(ConfigError, match=r"data\.name"):
        load_config(None, ["data.name=[1]"])
