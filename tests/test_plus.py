"""`fedh2l-plus` is `fedh2l` with other settings, which it brings along wherever it is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import fedh2l
from conftest import MLPS, TINY, blobs
from fedh2l.config import load_config
from fedh2l.errors import ConfigError, DivergedError
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.methods.fedh2l_plus import FedH2LPlus
from fedh2l.toml import to_toml
from fedh2l.trainer import Trainer

SHORT = [*TINY, *MLPS, "run.rounds=20"]
PLUS = ["run.average=0.998", "data.augment=all", "method.teacher=average", "method.temperature=3.0",
        "method.kl_weight=3.0", "method.pace=3.0", "method.encoding=int8",
        "method.public_batch_size=64", "method.local_data=private+own-public", "method.revisit=4"]  # fmt: skip


UNLABELLED = ["data.public_labels=false", "method.ce=false", "method.local_data=private", "method.confidence=none"]


def test_it_is_fedh2l_with_other_settings():
    plus, spelled = (
        Trainer(load_config(None, [*SHORT, *changes], method=method)[0].federation()).run().to_dict()
        for method, changes in (("fedh2l-plus", []), ("fedh2l", PLUS))
    )
    assert plus["matrix"] == spelled["matrix"]
    assert plus["bytes"] == spelled["bytes"]


def test_what_is_said_counts():
    config, _ = load_config(None, ["run.average=0.9", "data.augment=local", "method.temperature=1.0"], "fedh2l-plus")
    assert (config.run.average, config.data.augment, config.method.temperature) == (0.9, "local", 1.0)
    assert config.method.kl_weight == 3


def test_a_file_says_all_of_it(tmp_path):
    """A run directory reproduces its run, whatever is recommended later."""
    config, _ = load_config(None, SHORT, method="fedh2l-plus")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert "average = 0.998" in path.read_text()
    assert load_config(path)[0] == config


def test_data_that_knows_no_views_is_taken_as_it_is():
    config, _ = load_config(None, ["data.name=test_plus:domains"], method="fedh2l-plus")
    assert config.run.average == 0.998
    assert config.federation().nodes[0].domain.augmentation is None


def domains():
    return [blobs("a"), blobs("b", 1.0)]


def test_rare_exchanges_are_learned_from_in_between():
    """Four lessons are kept, as they were sent, and a step is taken in every round once there is one."""
    config, _ = load_config(None, [*SHORT, "method.interval=4", "run.eval_every=1"], method="fedh2l-plus")
    trainer = Trainer(config.federation())
    trainer.run()
    learner = trainer.engine.learners[0]
    kept = {name for name in learner.memory if name.startswith("lesson.")}
    assert {name.split(".")[1] for name in kept} == {"0", "1", "2"}  # more would never be revisited
    assert len({learner.memory[f"lesson.{place}.teacher"].square().sum().item() for place in range(3)}) == 3
    assert learner.optimizer_states["mutual"]["steps"] == 20 - 3
    assert "revisit = 4" in to_toml(config)
    config.method.forget(learner)
    assert not any(name.startswith("lesson.") for name in learner.memory)


@pytest.mark.parametrize("interval", [2, 3, 4, 5, 8, 10])
@pytest.mark.parametrize("revisit", [1, 2, 4, 8])
def test_every_lesson_that_is_kept_is_revisited_the_newest_first(interval, revisit):
    method, kept = FedH2L(interval=interval, revisit=revisit), {}
    for round in range(1, 12 * interval):
        place = method._place(round)
        if method.exchanges(round):
            kept[place], seen = round, []
        elif kept:
            seen.append(kept[place])
        else:
            assert place is None
        if kept and round % interval == interval - 1:
            newest = sorted(kept.values(), reverse=True)
            assert seen == [newest[k % len(newest)] for k in range(interval - 1)]
            assert len(kept) == min(round // interval, revisit, interval - 1)


@pytest.mark.parametrize(
    "other",
    [{"batch_norm": "per-domain"}, {"local_gradient": "difference"}, {"project": "pcgrad", "pcgrad": "joint"}],
    ids=str,
)
def test_what_cannot_be_revisited(other):
    FedH2L(**other, interval=4)
    FedH2LPlus(**other)  # every round is one with an exchange
    with pytest.raises(ConfigError, match=f"learned again with {[*other][-1]}.*; set revisit = 0"):
        FedH2L(**other, interval=4, revisit=2)


def test_without_labels():
    config, _ = load_config(None, [*SHORT, "data.public_labels=false"], method="fedh2l-plus")
    assert (config.method.ce, config.method.local_data, config.method.pace) == (False, "private", 1)
    assert config.method.confidence == "none"
    assert Trainer(config.federation()).run().average["ACC"] > 0
    with pytest.raises(ConfigError, match=r"needed by method\.ce = true"):
        load_config(None, [*SHORT, "data.public_labels=false", "method.ce=true"], "fedh2l-plus")[0].federation()


@pytest.mark.parametrize("labelled", [True, False])
def test_from_python(labelled, tmp_path):
    nodes = [
        fedh2l.Node(d.name, torch.nn.Linear(d.private.inputs.shape[1], 3), replace(d, public_labels=labelled))
        for d in domains()
    ]
    fedh2l.train(nodes, "fedh2l-plus", rounds=4, batch_size=8, out=tmp_path / "run")
    written = (tmp_path / "run" / "config.toml").read_text()
    assert "average = 0.998" in written
    assert f"ce = {str(labelled).lower()}" in written


def test_from_python_by_its_class():
    def trained(method):
        torch.manual_seed(0)
        nodes = [fedh2l.Node(d.name, torch.nn.Linear(d.private.inputs.shape[1], 3), d) for d in domains()]
        return nodes, fedh2l.train(nodes, method, rounds=20, batch_size=8).matrix

    nodes, matrix = trained(FedH2LPlus())
    assert matrix == trained("fedh2l-plus")[1]
    with pytest.raises(ConfigError, match="no average is kept"):
        fedh2l.train(nodes, FedH2LPlus(), rounds=2, batch_size=8, average=0.0)


def test_others_recommend_nothing():
    assert FedH2L.recommends(public_labels=True) == {}
    config, _ = load_config(None, [])
    assert (config.run.average, config.data.augment) == (0.0, "none")


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
    assert (config.method.temperature, config.method.teacher, config.run.average) == (3.0, "average", 0.0)
    assert "run.average stays 0.0, as the file says; fedh2l-plus would have 0.998" in notices
    assert "data.augment stays 'none', as the file says; fedh2l-plus would have 'all'" in notices
    assert any("keys are left out" in text for text in notices)


def test_from_a_file_of_its_own(tmp_path):
    config, notices = load_config(written(tmp_path, "fedh2l-plus"), method="fedh2l")
    assert (config.method.temperature, config.run.average) == (1.0, 0.998)
    assert "run.average stays 0.998, as the file says; which is what fedh2l-plus would have" in notices
    assert load_config(written(tmp_path, "fedh2l-plus", "run.average=0.5"), method="fedavg")[1][-1].startswith("data.")
    assert not load_config(written(tmp_path, "fedavg"), method="fedmd")[1][1:]


def test_a_name_that_is_none():
    with pytest.raises(ConfigError, match=r"data\.name"):
        load_config(None, ["data.name=[1]"])


@pytest.mark.parametrize("labelled", [True, False])
def test_peers_do_it_too(cli, labelled):
    """With views that the roster agrees on, and with a seed set that has labels or has none."""
    changes = ["method.name=fedh2l-plus", f"data.public_labels={str(labelled).lower()}", *SHORT]
    options = [*(part for change in changes for part in ("--set", change)), "--rounds", 8, "--json"]
    here, there = (cli(command, *options, "--out", command, timeout=180) for command in ("run", "rehearse"))
    assert here.returncode == there.returncode == 0, here.stderr + there.stderr
    results = [json.loads(each.stdout) | {"seconds": 0} for each in (here, there)]
    assert results[0] == results[1]


@pytest.mark.parametrize("teacher", ["present", "average"])
@pytest.mark.parametrize("changes", [[], ["method.encoding=int8"], [*UNLABELLED]])
def test_a_specialist_learns_from_local_data_alone(changes, teacher):
    """It is, bit for bit, what the node's model would be if it had trained alone, and has its share in what is said."""
    common = [*SHORT, "method.local_data=private", "run.average=0.9"]
    wanted = [*common, "method.specialist=0.25", "method.own_lesson=true", f"method.teacher={teacher}", *changes]
    taught = Trainer(load_config(None, wanted)[0].federation())
    alone = Trainer(load_config(None, common, method="independent")[0].federation())
    for trainer in (taught, alone):
        trainer.engine.advance(1, 20, lambda _: True)
    method = taught.engine.method
    for learner, hermit in zip(taught.engine.learners, alone.engine.learners, strict=True):
        assert torch.equal(learner.networks["specialist"].parameters, hermit.parameters)
        assert not torch.equal(learner.parameters, hermit.parameters)
        signal, batch = method.emit(learner, 20), learner.public_batch(learner.name, 20, learner.batch_size)
        own, other = (
            torch.softmax(node.teach(batch.inputs) if teacher == "average" else node.predict(batch.inputs), -1)
            for node in (learner, hermit)
        )
        near = 0.06 if "method.encoding=int8" in changes else 1e-6
        torch.testing.assert_close(signal.values, 0.75 * own + 0.25 * other, rtol=near, atol=1e-6)
        assert not torch.allclose(signal.values, own, rtol=near, atol=1e-6)
        assert torch.equal(learner.memory["said"], signal.values)  # what others decode, not what was written
        labelled = changes != UNLABELLED
        assert ("right of it" in learner.memory) == (signal.correct is not None) == labelled
    for trainer in (taught, alone):
        trainer.engine.close()


@pytest.mark.parametrize("engine", ["local", "batched"])
def test_a_specialist_that_diverges_stops_the_run(engine):
    """At the next look, not when it is asked next: a checkpoint must not keep it."""
    changes = [*SHORT, "method.specialist=0.5", "method.interval=20", f"run.engine={engine}"]
    trainer = Trainer(load_config(None, changes)[0].federation())
    trainer.engine.advance(1, 2, lambda _: True)
    trainer.engine.verify()
    state = trainer.engine.state()
    state["M20/network-specialist.model.parameters"][3] = float("nan")
    trainer.engine.restore(state)
    trainer.engine.advance(3, 4, lambda _: True)
    with pytest.raises(DivergedError, match=r"node 'M20', round [34]: .*specialist"):
        trainer.engine.verify()
    trainer.engine.close()


def test_a_specialist_that_nobody_hears_is_refused():
    with pytest.raises(ConfigError, match="would not be heard; set specialist = 0"):
        FedH2L(interval=0, specialist=0.5)


def test_a_node_that_hears_nobody_has_no_lesson_of_its_own():
    """Its own answers are beside those of others, not instead."""
    config, _ = load_config(None, [*SHORT, "method.own_lesson=true"])
    learner, method = (made := Trainer(config.federation())).engine.learners[0], config.method
    method.local_step(learner, 1)
    method.emit(learner, 1)
    before = learner.parameters.clone()
    method.receive(learner, [], 1)
    assert torch.equal(learner.parameters, before)
    assert not {"said", "right of it"} & set(learner.memory)
    made.engine.close()
