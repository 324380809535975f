"""The methods that FedH2L is compared with: each learns, sends what is counted, and refuses what it cannot do."""

from __future__ import annotations

import pytest
import torch
from test_identities import CONVOLUTIONAL, after, vectors
from torch import nn

import fedh2l
from conftest import blobs
from fedh2l.errors import ConfigError, DivergedError
from fedh2l.experiment.config import load_config
from fedh2l.methods.registry import METHODS
from fedh2l.protocol.messages import Features, Gradients, Logits, Parameters, Vector, decode, encode
from fedh2l.runs.trainer import Trainer

SERVED = [name for name, method in METHODS.items() if not method.decentralised]
BATCH_NORM = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=test_methods:normed", "model_args={}")]


def normed(num_classes: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(),
        nn.BatchNorm1d(10), nn.Linear(10, num_classes),
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns(method):
    """Well above the 10 % of chance in 200 rounds on 40 digits a class."""
    config, _ = load_config(
        None, ["run.device=cpu", "data.per_class=40", "run.rounds=200", "run.eval_every=100"], method
    )
    result = Trainer(config.experiment()).run()
    assert result.average["WDP"] > 65
    assert result.average["ACC"] > 45
    assert all(20 < values["WDP"] <= 100 for values in result.views.values())


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "agnostic"])
@pytest.mark.parametrize("interval", [1, 7])
def test_one_global_model_is_as_good_at_home_as_abroad(federation, method, interval):
    """On equal test sets the means of WDP, CDP and ACC over the nodes are one number, at any round."""
    fed = federation(f"method.name={method}", f"method.interval={interval}", "run.rounds=45")
    result = Trainer(fed).run()
    for scores in (result.average, result.last, *result.views.values()):
        assert scores["WDP"] == pytest.approx(scores["ACC"])
        assert scores["CDP"] == pytest.approx(scores["ACC"])
    assert len({tuple(row) for row in result.matrix}) == 1
    assert result.average["ACC"] > 15


def test_what_a_node_reports_is_the_global_model_after_the_exchange(federation):
    trainer = after(federation, 23, "method.name=fedavg", "method.interval=10")
    at_20 = after(federation, 20, "method.name=fedavg", "method.interval=10")
    assert trainer.engine.validate() == at_20.engine.validate()
    assert not torch.equal(vectors(trainer)[0], vectors(trainer)[1])  # each is at work on its own again


# What crosses


@pytest.mark.parametrize("method", SERVED)
def test_what_is_counted_is_what_would_be_sent(federation, method):
    """Both directions, per edge: the lengths of encoded messages, which decode to what was sent."""
    interval = {"fedmd": []}.get(method, ["method.interval=4"])
    fed = federation(f"method.name={method}", "run.rounds=12", *interval, *CONVOLUTIONAL, "run.eval_every=12")
    trainer = Trainer(fed)
    engine, sent = trainer.engine, {"up": 0, "down": 0, "answers": []}
    emit, aggregate = type(engine.method).emit, type(engine.method).aggregate

    class Spy(type(engine.method)):
        def emit(self, node, round):
            message = emit(self, node, round)
            data = encode(message, fed.roster)
            back = decode(data, fed.roster)
            assert (back.sender, back.round, back.kind) == (node.name, round, message.kind)
            for one, two in zip(message.tensors(), back.tensors(), strict=True):
                assert torch.equal(one.double(), two.double())
            sent["up"] += len(data)
            return message

        def aggregate(self, server, messages, round):
            answers = aggregate(self, server, messages, round)
            for answer in answers.values():
                assert decode(encode(answer, fed.roster), fed.roster).sender == "server"
                sent["down"] += len(encode(answer, fed.roster))
            sent["answers"].append(answers)
            return answers

    engine.method.__class__ = Spy
    result = trainer.run()
    closing = engine.method.closing(engine.router.server, 12)
    sent["down"] += 4 * len(encode(closing, fed.roster)) if closing else 0
    edges = result.bytes["edges"]
    assert sum(size for edge, size in edges.items() if edge.endswith("->server")) == sent["up"] > 0
    assert sum(size for edge, size in edges.items() if edge.startswith("server->")) == sent["down"] > 0
    assert len(edges) == 8
    assert result.bytes["total"] == sent["up"] + sent["down"]
    alike = all(len({id(a) for a in answers.values()}) == 1 for answers in sent["answers"])
    assert (result.bytes["multicast"] < result.bytes["total"]) is (alike or closing is not None)


def test_the_bytes_of_the_papers_arithmetic():
    """LeNet-5 on four nodes: 2·N·P floats for FedAvg, n_k·(F + 2M) floats and labels for FedGKT, 2·N·S·M for FedMD."""
    sizes = {}
    for method, rounds in (("fedavg", 1), ("fedmd", 3), ("fedgkt", 24)):
        config, _ = load_config(None, ["run.device=cpu", f"run.rounds={rounds}", "run.eval_every=100"], method)
        trainer = Trainer(config.experiment())
        trainer.engine.advance(1, rounds, lambda _: True)
        sizes[method] = (trainer.engine.ledger.payload, trainer.engine.method)
    assert sizes["fedavg"][0] == 2 * 4 * 61_706 * 4
    assert sizes["fedmd"][0] == 3 * 2 * 4 * 400 * 10 * 4
    assert sizes["fedgkt"][0] == 4 * 750 * (1176 * 4 + 2 * 10 * 4 + 2)


def test_matched_bandwidth_sends_no_more_than_fedh2l():
    config, _ = load_config(None, ["run.device=cpu", "method.interval=matched", "run.rounds=10000"], "fedavg")
    engine = Trainer(config.experiment()).engine
    assert engine.method.interval == 129
    assert sum(engine.method.exchanges(round) for round in range(1, 10_001)) == 77
    own_public = config.experiment().method
    assert own_public.interval == "matched"


@pytest.mark.parametrize("spoiled", SERVED)
def test_a_message_that_is_not_finite_stops_the_run(federation, spoiled):
    method = METHODS[spoiled]

    class Broken(method):
        def emit(self, node, round):
            message = super().emit(node, round)
            message.tensors()[-1 if isinstance(message, Vector | Logits) else 0].fill_(float("nan"))
            return message

    fed = federation(f"method.name={spoiled}", "run.rounds=10", "run.eval_every=30", *CONVOLUTIONAL)
    broken = Broken(**{**fed.method.model_dump(), **({} if spoiled == "fedmd" else {"interval": 2})})
    object.__setattr__(fed, "method", broken)
    with pytest.raises(DivergedError, match=r"round \d+: it sent .* not finite"):
        Trainer(fed).run()


def test_labels_of_no_class_are_flagged():
    values, logits = torch.zeros(2, 3), torch.zeros(2, 4)
    assert Features.of("a", 1, values, logits, torch.tensor([0, 3])).faults().tolist() == [False, False]
    assert Features.of("a", 1, values, logits, torch.tensor([0, 4])).faults().tolist() == [False, True]


# What they refuse, and what they take


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "agnostic"])
def test_parameter_averaging_refuses_different_models_by_name(federation, method):
    with pytest.raises(ConfigError, match=r"'M0', 'M20', 'M40'; 'M60'.*fedh2l.*fedmd") as refused:
        federation(f"method.name={method}", "nodes.3.model=lenet", "nodes.3.model_args={}").learners()
    assert "fedavg," not in str(refused.value).partition("Methods for different models")[2]


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.heterogeneous])
def test_the_others_take_them(method):
    models = [f"nodes.{i}.model={model}" for i, model in enumerate(("lenet", "lenet-wide", "mlp", "cnn"))]
    changes = ["run.device=cpu", "data.per_class=20", "run.rounds=8", "run.eval_every=8", "run.batch_size=8"]
    interval = ["method.interval=4"] if method in ("fml", "fedgkt") else []
    result = Trainer(load_config(None, [*changes, *models, *interval], method)[0].experiment()).run()
    assert [node.model for node in result.nodes] == ["lenet", "lenet-wide", "mlp", "cnn"]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fml", "fedgkt", "fedmd", "agnostic"])
def test_batch_norm_survives(federation, method):
    fed = federation(f"method.name={method}", "run.rounds=12", *BATCH_NORM)
    trainer = Trainer(fed)
    started = [learner.network.shared() for learner in trainer.engine.learners]
    trainer.run()
    for learner, before in zip(trainer.engine.learners, started, strict=True):
        count = learner.parameters.numel()
        assert learner.network.shared()[count:].isfinite().all()
        assert not torch.equal(learner.network.shared()[count:], before[count:])  # statistics were gathered


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.presets])
def test_native_presets_are_settings_of_their_own(method):
    plain, _ = load_config(None, [], method)
    native, _ = load_config(None, ["method.preset=native"], method)
    assert native.sections() != plain.sections()
    kept, _ = load_config(None, ["method.preset=native", "run.batch_size=7"], method)
    assert kept.run.batch_size == 7  # what is said wins over what a preset stands for
    for key, value in METHODS[method].presets["native"].items():
        section, _, name = key.partition(".")
        assert native.sections()[section][name] == value
    small = ["data.per_class=20", "run.rounds=20", "run.device=cpu", "method.preset=native"]
    Trainer(load_config(None, small, method)[0].experiment()).engine.advance(1, 20, lambda _: True)


def test_unknown_presets_are_refused():
    with pytest.raises(ConfigError, match=r"fedprox has no preset 'best'\. Its presets: native"):
        load_config(None, ["method.preset=best"], "fedprox")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("method.interval=0", "at least 1"),
        ("method.interval=often", "'matched'"),
        ("method.interval=0 epochs", "'matched'"),
        ("method.mu=-1", "greater than or equal to 0"),
    ],
)
def test_wrong_parameters_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [change], "fedprox")


def test_fedgkt_says_what_it_cannot_cut():
    domain = [blobs("x"), blobs("y")]
    with pytest.raises(ConfigError, match="node 'x': fedgkt cuts models in two"):
        fedh2l.train([fedh2l.Node(d.name, nn.Linear(2, 3), d) for d in domain], "fedgkt", rounds=2)
    with pytest.raises(fedh2l.FedH2LError, match=r"cannot be cut in two\. Give it a method split"):
        fedh2l.train([fedh2l.Node(d.name, "test_methods:uncut", d) for d in domain], "fedgkt", rounds=2)


class Uncut(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, num_classes)

    def forward(self, x):
        return self.layer(x)


uncut = Uncut


def test_no_node_is_called_server(federation):
    with pytest.raises(ConfigError, match="kept for the server"):
        federation("nodes.0.name=server", "nodes.0.domain=M0")


def test_fedmd_leaves_room_for_its_phases():
    for rounds in (3, 10, 60, 500, 2000, 10_000):
        config, _ = load_config(None, ["run.device=cpu", f"run.rounds={rounds}"], "fedmd")
        method = Trainer(config.experiment()).engine.method
        exchanges = [round for round in range(1, rounds + 1) if method.exchanges(round)]
        assert len(exchanges) >= 3
        assert method._schedule.transfer <= rounds / 5


def test_fedmd_keeps_the_best_of_its_transfer_phase(federation):
    """At the end of each part the weights are those that did best on validation data, epoch by epoch."""
    parts = ["method.public_epochs=6", "method.private_epochs=1"]
    fed = federation("method.name=fedmd", "run.rounds=500", "optimizer.lr=0.05", "run.seed=2", *parts)
    trainer = Trainer(fed)
    engine = trainer.engine
    plan = engine.method._schedule
    scores = {learner.name: [] for learner in engine.learners}
    for round in range(1, plan.public + 1):
        if round == plan.public:  # the last look and the choice come in one round: look before the choice
            engine.method._keep_best = lambda node, round: None
        engine.advance(round, round, lambda _: True)
        if round % plan.public_epoch == 0:
            for name, right in engine.validate().items():
                scores[name].append(right)
    chosen = Trainer(fed)
    chosen.engine.advance(1, plan.public, lambda _: True)
    for name, right in chosen.engine.validate().items():
        assert right == max(scores[name])
    assert any(right[-1] < max(right) for right in scores.values())  # the last was not the best of all


def test_each_kind_of_vector_is_its_own_message():
    assert type(Gradients.of("a", 1, torch.zeros(3))) is Gradients
    assert Parameters.of("a", 1, torch.zeros(3), torch.tensor(1.0)).payload_size == 16
