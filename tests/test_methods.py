"""The methods that FedH2L is compared with: each learns, and is exactly what its sources say where that can be told."""

from __future__ import annotations

import copy

import pytest
import quadprog
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedh2l
from conftest import blobs
from fedh2l.config import load_config
from fedh2l.errors import ConfigError, DivergedError
from fedh2l.federation import Federation
from fedh2l.losses import cross_entropy
from fedh2l.messages import Features, Gradients, Logits, Parameters, Vector, decode, encode
from fedh2l.methods.agnostic import project_on_simplex
from fedh2l.methods.fedavg import FedAvg
from fedh2l.methods.registry import METHODS
from fedh2l.optimizers import OptimizerSettings
from fedh2l.settings import RunSettings
from fedh2l.trainer import Trainer

SERVED = [name for name, method in METHODS.items() if not method.decentralised]
CONVOLUTIONAL = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=lenet", "model_args={}")]
BATCH_NORM = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=test_methods:normed", "model_args={}")]


def normed(num_classes: int, input_shape: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(),
        nn.BatchNorm1d(10), nn.Linear(10, num_classes),
    )  # fmt: skip


def after(federation, rounds: int, *changes: str) -> Trainer:
    trainer = Trainer(federation("run.dtype=float64", "run.rounds=1000", *changes))
    trainer.engine.advance(1, rounds, lambda _: True)
    return trainer


def vectors(trainer: Trainer) -> list[torch.Tensor]:
    return [learner.shared() for learner in trainer.engine.learners]


def assert_same(one: list[torch.Tensor], two: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns(method):
    """Well above the 10 % of chance in 200 rounds on 40 digits a class."""
    config, _ = load_config(
        None, ["run.device=cpu", "data.per_class=40", "run.rounds=200", "run.eval_every=100"], method
    )
    result = Trainer(config.federation()).run()
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
    (validation,) = [trainer._validation]
    shown = trainer.engine.correct([validation])
    at_20 = after(federation, 20, "method.name=fedavg", "method.interval=10")
    assert shown == at_20.engine.correct([validation])
    assert not torch.equal(vectors(trainer)[0], vectors(trainer)[1])  # each is at work on its own again


# The identities of the methods with each other


def test_fedprox_without_its_term_is_fedavg(federation):
    prox = after(federation, 12, "method.name=fedprox", "method.interval=5", "method.mu=0.0")
    assert_same(vectors(prox), vectors(after(federation, 12, "method.name=fedavg", "method.interval=5")))
    pulled = after(federation, 12, "method.name=fedprox", "method.interval=5", "method.mu=1.0")
    assert not torch.equal(vectors(pulled)[0], vectors(prox)[0])


def test_fedprox_at_every_step_is_fedavg(federation):
    prox = after(federation, 8, "method.name=fedprox", "method.interval=1", "method.mu=5.0")
    assert_same(vectors(prox), vectors(after(federation, 8, "method.name=fedavg")))


def test_agnostic_with_fixed_weights_is_fedavg(federation):
    agnostic = after(federation, 8, "method.name=agnostic", "method.lambda_lr=0.0")
    assert_same(vectors(agnostic), vectors(after(federation, 8, "method.name=fedavg")))
    moving = after(federation, 8, "method.name=agnostic", "method.lambda_lr=0.5")
    assert not torch.equal(vectors(moving)[0], vectors(agnostic)[0])


def test_fml_without_distillation_is_training_alone_beside_fedavg(federation):
    fml = after(federation, 13, "method.name=fml", "method.interval=4", "method.alpha=1.0", "method.beta=1.0")
    assert_same(vectors(fml), vectors(after(federation, 13, "method.name=independent")))
    memes = [learner.networks["meme"].shared() for learner in fml.engine.learners]
    assert_same(memes, vectors(after(federation, 13, "method.name=fedavg", "method.interval=4")))


def test_fedmd_of_identical_models_has_nothing_to_digest(federation):
    changes = ["method.name=fedmd", "optimizer.weight_decay=0.0", "run.dtype=float64", "run.rounds=20"]
    trainer = Trainer(federation(*changes))
    engine = trainer.engine
    for learner in engine.learners:
        learner.load_weights(engine.learners[0].weights())
    before = vectors(trainer)
    messages = [engine.method.emit(learner, 9) for learner in engine.learners]
    answers = engine.method.aggregate(engine.server, messages, 9)
    for learner in engine.learners:
        # In float64 what is digested is the rounding of the message; make it exact to see that there is nothing else.
        exact = Logits("server", 9, learner.predict(learner.seed_set.union.inputs))
        torch.testing.assert_close(answers[learner.name].values.double(), exact.values, rtol=0, atol=1e-6)
        engine.method.receive(learner, [exact], 9)
        assert learner.records["digest"][-1][1] == 0
    assert_same(before, vectors(trainer))


def test_fedmd_without_digestion_is_training_alone(federation):
    changes = ["method.public_epochs=0", "method.private_epochs=0", "method.digest_epochs=0"]
    changes += ["method.local_data=private+own-public", "run.rounds=45"]
    fedmd = after(federation, 40, "method.name=fedmd", *changes)
    assert sum(fedmd.engine.method.exchanges(round) for round in range(1, 41)) >= 2
    assert_same(vectors(fedmd), vectors(after(federation, 40, "method.name=independent")))


def test_fedgkt_without_distillation_at_the_nodes_leaves_them_alone(federation):
    changes = ["method.name=fedgkt", "method.server_epochs=1", *CONVOLUTIONAL]
    deaf = after(federation, 12, *changes, "method.interval=5", "method.alpha=0.0")
    alone = after(federation, 12, *changes, "method.interval=100")
    taught = after(federation, 12, *changes, "method.interval=5")
    for one, two, three in zip(deaf.engine.learners, alone.engine.learners, taught.engine.learners, strict=True):
        same, other = (
            [torch.equal(a, b) for part in ("stem", "head") for a, b in
             zip(getattr(one.module, part).parameters(), getattr(x.module, part).parameters(), strict=True)]
            for x in (two, three)
        )  # fmt: skip
        assert all(same)
        assert not any(other)


# Against plain computations


def test_fedavg_at_every_step_is_one_large_batch(federation):
    """Averaged gradients and one AMSGrad: the same as torch's own on the batches of all nodes together."""
    trainer = Trainer(federation("run.dtype=float64", "run.rounds=1000", "method.name=fedavg"))
    learners = trainer.engine.learners
    plain = copy.deepcopy(learners[0].module)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3, weight_decay=1e-4, amsgrad=True)
    for round in range(1, 11):
        batches = [learner.local_batch(round, "private+own-public") for learner in learners]
        optimizer.zero_grad()
        inputs, labels = torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches])
        nn.functional.cross_entropy(plain(inputs), labels).backward()
        optimizer.step()
    trainer.engine.advance(1, 10, lambda _: True)
    expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
    for learner in learners:
        torch.testing.assert_close(learner.parameters, expected, rtol=0, atol=2e-5)  # messages are in float32


def test_averages_weigh_nodes_by_their_data():
    """w ← Σ n_k/n · w_k with unequal pools, and batch-norm statistics averaged like parameters."""
    sizes = {"a": 60, "b": 180}
    nodes = [fedh2l.Node(name, "test_methods:flat_normed", blobs(name, size=size)) for name, size in sizes.items()]
    settings = RunSettings(rounds=50, dtype="float64", device="cpu", batch_size=8)
    trainer = Trainer(Federation(nodes, FedAvg(interval=5), settings, OptimizerSettings()))
    engine = trainer.engine
    engine.advance(1, 4, lambda _: True)
    for learner in engine.learners:
        learner.seed_torch("torch-local", 5)
        engine.method.local_step(learner, 5)
    local = [learner.shared() for learner in engine.learners]
    pools = [len(learner.pool("private+own-public")) for learner in engine.learners]
    assert pools[0] * 2 < pools[1]
    messages = [engine.method.emit(learner, 5) for learner in engine.learners]
    answer = engine.method.aggregate(engine.server, messages, 5)["a"]
    expected = (pools[0] * local[0] + pools[1] * local[1]) / sum(pools)
    torch.testing.assert_close(answer.values.double(), expected, rtol=0, atol=1e-6)
    assert len(expected) == engine.learners[0].parameters.numel() + 2 * 6  # means and variances
    engine.method.receive(engine.learners[0], [answer], 5)
    counters = [int(b) for b in engine.learners[0].module.buffers() if not b.is_floating_point()]
    assert counters == [5]


def flat_normed(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, num_classes))


def test_agnostic_in_local_steps_multiplies_weights(federation):
    trainer = Trainer(federation("run.dtype=float64", "method.name=agnostic", "method.interval=3"))
    engine = trainer.engine
    first = [learner.local_batch(1, "private+own-public") for learner in engine.learners]
    losses = [
        float(cross_entropy(engine.learners[0].module(batch.inputs), batch.labels).detach()) for batch in first
    ]  # at the common start
    engine.advance(1, 3, lambda _: True)
    expected = torch.softmax(torch.tensor(losses, dtype=torch.float64) * 0.1, -1)
    torch.testing.assert_close(engine.server.memory["weights"], expected, rtol=0, atol=1e-7)


finite = st.floats(-50, 50, allow_nan=False, width=64)


@given(st.lists(finite, min_size=1, max_size=8))
def test_the_simplex_projection_is_the_solution_of_its_quadratic_program(values):
    point = torch.tensor(values, dtype=torch.float64)
    got = project_on_simplex(point)
    assert (got >= 0).all()
    assert float(got.sum()) == pytest.approx(1, abs=1e-9)
    torch.testing.assert_close(project_on_simplex(got), got, rtol=0, atol=1e-12)
    n = len(values)
    constraints = torch.cat([torch.ones(n, 1), torch.eye(n)], 1).double().numpy()
    bounds = torch.tensor([1.0] + [0.0] * n).double().numpy()
    solved = quadprog.solve_qp(torch.eye(n).double().numpy(), point.numpy(), constraints, bounds, 1)[0]
    torch.testing.assert_close(got, torch.from_numpy(solved), rtol=0, atol=1e-7)


def test_the_simplex_projection_reaches_its_border():
    assert project_on_simplex(torch.tensor([2.0, 0.9])).tolist() == [1.0, 0.0]


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
    closing = engine.method.closing(engine.server, 12)
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
        trainer = Trainer(config.federation())
        trainer.engine.advance(1, rounds, lambda _: True)
        sizes[method] = (trainer.engine.ledger.payload, trainer.engine.method)
    assert sizes["fedavg"][0] == 2 * 4 * 61_706 * 4
    assert sizes["fedmd"][0] == 3 * 2 * 4 * 400 * 10 * 4
    assert sizes["fedgkt"][0] == 4 * 750 * (1176 * 4 + 2 * 10 * 4 + 2)


def test_matched_bandwidth_sends_no_more_than_fedh2l():
    config, _ = load_config(None, ["run.device=cpu", "method.interval=matched", "run.rounds=10000"], "fedavg")
    engine = Trainer(config.federation()).engine
    assert engine.method.interval == 129
    assert sum(engine.method.exchanges(round) for round in range(1, 10_001)) == 77
    own_public = config.federation().method
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
    result = Trainer(load_config(None, [*changes, *models, *interval], method)[0].federation()).run()
    assert [node.model for node in result.nodes] == ["lenet", "lenet-wide", "mlp", "cnn"]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fml", "fedgkt", "fedmd", "agnostic"])
def test_batch_norm_survives(federation, method):
    fed = federation(f"method.name={method}", "run.rounds=12", *BATCH_NORM)
    trainer = Trainer(fed)
    started = [learner.shared() for learner in trainer.engine.learners]
    trainer.run()
    for learner, before in zip(trainer.engine.learners, started, strict=True):
        count = learner.parameters.numel()
        assert learner.shared()[count:].isfinite().all()
        assert not torch.equal(learner.shared()[count:], before[count:])  # statistics were gathered


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
    Trainer(load_config(None, small, method)[0].federation()).engine.advance(1, 20, lambda _: True)


def test_unknown_presets_are_refused():
    with pytest.raises(ConfigError, match="fedprox has no preset 'best'; it has: native"):
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
    with pytest.raises(fedh2l.FedH2LError, match=r"cannot be cut in two: give it a method split"):
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
        method = Trainer(config.federation()).engine.method
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
    scores, before = {learner.name: [] for learner in engine.learners}, {}
    for round in range(1, plan.public + 1):
        if round == plan.public:  # the last look and the choice come in one round: look before the choice
            engine.method._keep_best = lambda node, round: None
            before = {learner.name: learner.weights() for learner in engine.learners}
        engine.advance(round, round, lambda _: True)
        if round % plan.public_epoch == 0:
            for name, right in engine.validate().items():
                scores[name].append(right)
    chosen = Trainer(fed)
    chosen.engine.advance(1, plan.public, lambda _: True)
    for name, right in chosen.engine.validate().items():
        assert right == max(scores[name])
    assert any(right[-1] < max(right) for right in scores.values())  # the last was not the best of all
    assert before


def test_each_kind_of_vector_is_its_own_message():
    assert type(Gradients.of("a", 1, torch.zeros(3))) is Gradients
    assert Parameters.of("a", 1, torch.zeros(3), torch.tensor(1.0)).payload_size == 16
