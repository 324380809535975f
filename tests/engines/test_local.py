"""What a user may rely on when nodes run in one process."""

from __future__ import annotations

import pytest
import torch

import fedh2l
from conftest import NOISY, advance, blobs, tiny_net
from fedh2l.engines.local import LocalEngine
from fedh2l.errors import MessageError, UnsoundMessageError
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.protocol.messages import Posteriors, encode
from fedh2l.runs.trainer import Trainer


@pytest.mark.parametrize("model", [[], NOISY], ids=["mlp", "dropout"])
def test_the_order_in_which_nodes_run_changes_nothing(federation, model):
    _, forwards = advance(federation(*model))
    _, backwards = advance(federation(*model), order=[3, 1, 0, 2])
    assert list(backwards) == ["M60", "M20", "M0", "M40"]
    assert all(torch.equal(forwards[name], backwards[name]) for name in forwards)


def test_the_global_generator_is_left_alone_and_makes_no_difference(federation):
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        trainer = Trainer(federation(*NOISY))
        results.append((trainer.run().matrix, [learner.network.weights() for learner in trainer.engine.learners]))
        assert torch.equal(torch.get_rng_state(), state)
    assert results[0][0] == results[1][0]
    for one, two in zip(results[0][1], results[1][1], strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_another_seed_is_another_run(federation):
    assert not torch.equal(advance(federation())[1]["M0"], advance(federation("run.seed=1"))[1]["M0"])


def test_dropout_draws_differ_between_rounds_and_nodes(federation):
    trainer = Trainer(federation(*NOISY))
    masks = set()
    for learner in trainer.engine.learners:
        for round in (1, 2):
            learner.seed_torch("torch-local", round)
            masks.add(tuple(torch.rand(4).tolist()))
    assert len(masks) == 8


def test_teachers_predict_in_evaluation_mode(federation):
    trainer = Trainer(federation(*NOISY))
    learner = trainer.engine.learners[0]
    batch = learner.public_batch(learner.name, 1, 8)
    before = learner.network.weights()
    one, two = (trainer.experiment.method.emit(learner, 1).values for _ in range(2))
    assert torch.equal(one, two)
    torch.testing.assert_close(one, torch.softmax(learner.module.eval()(batch.inputs), -1))
    assert all(torch.equal(before[k], v) for k, v in learner.network.weights().items())


def test_what_is_counted_is_what_would_be_sent(federation):
    fed = federation("method.interval=3", "method.topology=line")
    sent = []
    trainer = Trainer(fed)
    emit = FedH2L.emit

    class Spy(FedH2L):
        def emit(self, node, round):
            message = emit(self, node, round)
            sent.append(len(encode(message, fed.roster)))
            return message

    trainer.engine.method = Spy(**fed.method.model_dump())
    trainer.engine.advance(1, 12, lambda _: True)
    assert len(sent) == 4 * 4
    assert trainer.engine.ledger.multicast == sum(sent)
    assert trainer.engine.ledger.total == sum(trainer.engine.ledger.edges.values()) == 4 * 6 * sent[0]
    assert set(trainer.engine.ledger.edges) == {
        "M0->M20", "M20->M0", "M20->M40", "M40->M20", "M40->M60", "M60->M40",
    }  # fmt: skip
    assert trainer.engine.ledger.payload == 4 * 6 * (8 * 10 + 1) * 4


def test_a_silent_node_is_not_counted(federation):
    trainer, _ = advance(federation("method.pairing=pairs", "data.angles=[0,20,40,60,80]"), rounds=6)
    assert sum(trainer.engine.ledger.edges.values()) == 6 * 4 * (40 + 4 + 8 * 10 * 4)


def mixed() -> list[fedh2l.Node]:
    return [fedh2l.Node(f"n{i}", tiny_net(), blobs(f"n{i}", shift=0.3 * i, seed=i)) for i in range(3)]


def test_a_late_message_is_read_with_the_batch_it_speaks_of(federation):
    trainer = Trainer(federation())
    node, teacher = trainer.engine.learners[:2]
    method = trainer.experiment.method
    asked = []
    node.public_batch = lambda owner, round, size: (
        asked.append((owner, round)) or teacher.public_batch(owner, round, size)
    )
    late = method.emit(teacher, 3)
    method.local_step(node, 5)
    method.receive(node, [late], 5)
    assert asked == [(teacher.name, 3)]


@pytest.mark.parametrize(("change", "reason"), [(2.0, "do not sum to 1"), (-1.0, "negative")])
def test_a_method_that_sends_no_distribution_is_stopped(change, reason):
    class Broken(FedH2L):
        def emit(self, node, round):
            message = super().emit(node, round)
            return Posteriors(message.sender, round, message.values * change, message.correct)

    with pytest.raises(UnsoundMessageError, match=reason) as caught:
        fedh2l.train(mixed(), Broken(), rounds=5)
    assert "optimizer.lr" not in str(caught.value)


@pytest.mark.parametrize("engine", ["local", "batched"])
def test_posteriors_on_another_batch_are_refused_with_both_counts(engine):
    class Elsewhere(FedH2L):
        def emit(self, node, round):
            rows = self.public_batch_rows(node.batch_size)
            expected, other = (node.public_batch(node.name, r, rows) for r in (round, round + 1))
            probabilities = torch.softmax(node.teach(other.inputs), -1)
            sent = Posteriors.of(node.name, round, probabilities, other.labels)
            given = Posteriors.of(node.name, round, probabilities, expected.labels)
            counts.append((sent.correct.tolist(), given.correct.tolist()))
            return sent

    counts = []
    with pytest.raises(UnsoundMessageError, match="on its public batch") as caught:
        fedh2l.train(mixed(), Elsewhere(), rounds=3, batch_size=8, engine=engine)
    assert "optimizer.lr" not in str(caught.value)
    if engine == "local":
        reported, given = next((reported, given) for reported, given in counts if reported != given)
        assert f"it reported {reported} correct answers, but its posteriors give {given} on its" in str(caught.value)


def test_a_method_that_sends_another_shape_is_stopped():
    class Broken(FedH2L):
        def emit(self, node, round):
            message = super().emit(node, round)
            return Posteriors(message.sender, round, message.values[:1], message.correct)

    with pytest.raises(MessageError, match="agreed"):
        fedh2l.train(mixed(), Broken(), rounds=5)


def test_frozen_parameters_stay_and_the_projection_ignores_them():
    nodes = mixed()
    frozen = nodes[0].model[0]
    frozen.requires_grad_(False)
    before = frozen.weight.clone()
    fedh2l.train(nodes, rounds=10)
    assert torch.equal(frozen.weight, before)


def test_an_engine_stops_when_asked(federation):
    trainer = Trainer(federation())
    assert isinstance(trainer.engine, LocalEngine)
    assert trainer.engine.advance(1, 20, lambda round: round < 4) == 4
