"""What the methods are to each other, exactly, and what their averages and projections are by plain computation."""

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
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RunSettings
from fedh2l.methods.agnostic import project_on_simplex
from fedh2l.methods.fedavg import FedAvg
from fedh2l.protocol.messages import Logits
from fedh2l.runs.trainer import Trainer
from fedh2l.training.losses import cross_entropy
from fedh2l.training.optimizers import OptimizerSettings

CONVOLUTIONAL = [f"nodes.{i}.{key}" for i in range(4) for key in ("model=lenet", "model_args={}")]


def after(federation, rounds: int, *changes: str) -> Trainer:
    trainer = Trainer(federation("run.dtype=float64", "run.rounds=1000", *changes))
    trainer.engine.advance(1, rounds, lambda _: True)
    return trainer


def vectors(trainer: Trainer) -> list[torch.Tensor]:
    return [learner.network.shared() for learner in trainer.engine.learners]


def assert_same(one: list[torch.Tensor], two: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


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
        learner.network.load_weights(engine.learners[0].network.weights())
    before = vectors(trainer)
    messages = [engine.method.emit(learner, 9) for learner in engine.learners]
    answers = engine.method.aggregate(engine.router.server, messages, 9)
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
    nodes = [fedh2l.Node(name, "test_identities:flat_normed", blobs(name, size=size)) for name, size in sizes.items()]
    settings = RunSettings(rounds=50, dtype="float64", device="cpu", batch_size=8)
    trainer = Trainer(Experiment(nodes, FedAvg(interval=5), settings, OptimizerSettings()))
    engine = trainer.engine
    engine.advance(1, 4, lambda _: True)
    for learner in engine.learners:
        learner.seed_torch("torch-local", 5)
        engine.method.local_step(learner, 5)
    local = [learner.network.shared() for learner in engine.learners]
    pools = [len(learner.pool("private+own-public")) for learner in engine.learners]
    assert pools[0] * 2 < pools[1]
    messages = [engine.method.emit(learner, 5) for learner in engine.learners]
    answer = engine.method.aggregate(engine.router.server, messages, 5)["a"]
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
    torch.testing.assert_close(engine.router.server.memory["weights"], expected, rtol=0, atol=1e-7)


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
