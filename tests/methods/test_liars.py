"""The lies of `benchmarks/liars.py` are valid messages, and change what the other members learn."""

from __future__ import annotations

import liars
import pytest
import torch

from conftest import MLPS, TINY
from fedh2l.experiment.config import load_config
from fedh2l.protocol.messages import decode, encode
from fedh2l.runs.trainer import Trainer

METHODS = ["liars:LyingFedH2L", "liars:LyingFedH2LPlus"]


def after_three_rounds(method: str, lie: str) -> Trainer:
    changes = [*TINY, *MLPS, "run.engine=local", "run.rounds=10", "run.eval_every=1", f"method.lie={lie}"]
    trainer = Trainer(load_config(None, changes, method)[0].experiment())
    for _ in range(3):  # an evaluation also checks the messages before it
        trainer.advance()
    return trainer


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lie", liars.LIES[1:])
def test_a_lie_is_valid_and_changes_what_others_learn(method, lie):
    honest, lying = after_three_rounds(method, "nothing"), after_three_rounds(method, lie)
    liar, *others = lying.engine.learners
    assert liar.name == liars.LIAR
    false, roster = lying.experiment.method.emit(liar, 4), lying.experiment.roster
    labels = liar.public_batch(liar.name, 4, lying.experiment.method.public_batch_rows(liar.batch_size)).labels
    received = decode(encode(false, roster), roster)
    assert not received.faults(labels).any()
    true = type(honest.experiment.method)().emit(liar, 4)
    assert not torch.equal(received.values, true.values)
    for before, after in zip(honest.engine.learners[1:], others, strict=True):
        assert not torch.equal(before.parameters, after.parameters)


def test_only_the_named_member_lies():
    lying = after_three_rounds(METHODS[0], "everything")
    for learner in lying.engine.learners[1:]:
        honest = type(lying.experiment.method)().emit(learner, 4)
        assert torch.equal(lying.experiment.method.emit(learner, 4).values, honest.values)


@pytest.mark.parametrize(
    ("lie", "said"),
    [("certain", [0, 4, 9, 4]), ("everything", [1, 5, 0, 5]), ("pair", [0, 9, 4, 9])],
)
def test_the_classes_that_a_liar_sends(lie, said):
    assert liars.false_classes(lie, torch.tensor([0, 4, 9, 4]), 10, 1).tolist() == said


def test_noise_differs_from_round_to_round():
    one, other = (liars.false_classes("noise", torch.zeros(64, dtype=torch.long), 10, round) for round in (1, 2))
    assert not torch.equal(one, other)
    assert len(one.unique()) == 10
