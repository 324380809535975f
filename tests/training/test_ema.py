"""A moving average of a node's weights, as its model and as a teacher."""

from __future__ import annotations

import pytest
import torch

from conftest import NOISY, advance
from fedh2l.errors import ConfigError
from fedh2l.runs.trainer import Trainer
from fedh2l.training.learner import EMA


def followed(federation, *changes: str, rounds: int = 12) -> tuple[Trainer, dict[str, list[torch.Tensor]]]:
    """A run round by round, with what each node shared after each of them."""
    trainer = Trainer(federation("run.ema_decay=0.8", *changes))
    seen: dict[str, list[torch.Tensor]] = {learner.name: [] for learner in trainer.engine.learners}
    for round in range(1, rounds + 1):
        trainer.engine.advance(round, round, lambda _: True)
        for learner in trainer.engine.learners:
            seen[learner.name].append(learner.network.shared())
    return trainer, seen


def averaged(weights: list[torch.Tensor], decay: float) -> torch.Tensor:
    """Written down plainly."""
    average = weights[0].double()
    for count, present in enumerate(weights[1:], 1):
        kept = min(decay, (1 + count) / (10 + count))
        average = kept * average + (1 - kept) * present.double()
    return average


@pytest.mark.parametrize(
    "changes", [[], ["method.interval=3"], ["method.name=independent"], ["method.name=fedmd"], NOISY]
)
def test_it_is_the_average_of_what_a_node_had_after_each_round(federation, changes):
    trainer, seen = followed(federation, *changes)
    for learner in trainer.engine.learners:
        found = learner.memory[EMA].double()
        torch.testing.assert_close(found, averaged(seen[learner.name], 0.8), rtol=0, atol=1e-6)


def test_of_parameter_averaging_it_is_of_the_global_models(federation):
    trainer, seen = followed(federation, "method.name=fedavg", "method.interval=4")
    for learner in trainer.engine.learners:
        models = [seen[learner.name][round - 1] for round in (4, 8, 12)]
        torch.testing.assert_close(learner.memory[EMA].double(), averaged(models, 0.8), rtol=0, atol=1e-6)
    first, *others = (learner.memory[EMA] for learner in trainer.engine.learners)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("changes", [[], ["method.name=fedavg", "method.interval=4"], NOISY])
def test_it_is_what_is_evaluated_and_kept(federation, changes):
    trainer, _ = followed(federation, "run.selection=last", "run.rounds=12", *changes)
    expected = {learner.name: learner.shown for learner in trainer.engine.learners}
    logits = {}
    images = trainer.recorder.tests[0].inputs
    for learner in trainer.engine.learners:
        before = learner.network.shared()
        logits[learner.name] = learner.teach(images)
        assert torch.equal(learner.network.shared(), before)  # training goes on from where it was
    trainer.engine.select("last")
    for learner in trainer.engine.learners:
        assert torch.equal(learner.parameters, expected[learner.name]["parameters"])
        assert torch.equal(learner.predict(images), logits[learner.name])


def test_it_changes_nothing_that_is_trained_unless_it_teaches(federation):
    def ends(*changes: str) -> tuple[dict, dict]:
        return tuple(advance(federation(*changes, f"run.ema_decay={decay}"))[1] for decay in (0.0, 0.8))

    plain, kept = ends()
    assert all(torch.equal(plain[name], kept[name]) for name in plain)
    present, teaching = ends("method.name=fedh2l-plus")
    assert not any(torch.equal(present[name], teaching[name]) for name in present)


def test_what_cannot_be_is_refused(federation):
    with pytest.raises(ConfigError, match=r"run\.ema_decay: the models of fedgkt cannot be averaged; set it to 0"):
        federation("method.name=fedgkt", "run.ema_decay=0.9")
