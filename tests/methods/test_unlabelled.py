"""Public data that nobody has labelled: what peers say of it is all that is learned from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedh2l
from conftest import blobs
from fedh2l.data.domain import UNKNOWN, Samples
from fedh2l.errors import ConfigError, DataError
from fedh2l.experiment.config import load_config
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.methods.lesson import Lesson, mutual_losses
from fedh2l.protocol.messages import Posteriors
from fedh2l.runs.trainer import Trainer
from fedh2l.training.losses import kl_rows

ALONE = ["data.public_labels=false", "method.ce_weight=0", "method.local_data=private"]


def test_labels_are_dropped(federation):
    for node in federation(*ALONE).nodes:
        assert set(node.domain.public.labels.tolist()) == {UNKNOWN}
        assert node.domain.private.labels.min() >= 0
        assert node.domain.test.labels.min() >= 0


def test_labels_make_no_difference():
    """Whatever is given as labels of public data: nodes end with the same bits."""
    ends = []
    for labels in (0, 1, None):
        domains = [blobs("a"), blobs("b", 1.0)]
        if labels is not None:
            domains = [
                replace(d, public=Samples(d.public.inputs, torch.full_like(d.public.labels, labels))) for d in domains
            ]
        domains = [replace(domain, public_labels=False) for domain in domains]
        nets = [torch.nn.Linear(domain.private.inputs.shape[1], 3) for domain in domains]
        for net in nets:
            torch.nn.init.eye_(net.weight)
            torch.nn.init.zeros_(net.bias)
        nodes = [fedh2l.Node(domain.name, net, domain) for domain, net in zip(domains, nets, strict=True)]
        method = FedH2L(ce_weight=0.0, local_data="private")
        fedh2l.train(nodes, method, rounds=8, batch_size=8, selection="last")
        ends.append(torch.cat([net.weight.detach().clone() for net in nets]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_nothing_is_said_of_right_answers(federation):
    """A count of them would tell labels: a message is four bytes shorter."""
    labelled, unlabelled = (Trainer(federation(*c)).run().to_dict()["bytes"] for c in ([], ALONE))
    assert labelled["total"] - unlabelled["total"] == 4 * 20 * 12  # rounds, edges


def test_posteriors_are_worth_something(federation):
    """Against the same nodes alone, on other nodes' data."""
    longer = ["run.rounds=300", "data.per_class=40", "data.alpha=0.3"]
    together = Trainer(federation(*longer, *ALONE)).run().average["CDP"]
    alone = Trainer(federation(*longer, *ALONE, "method.interval=0")).run().average["CDP"]
    assert together > alone + 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([], "method.local_data = 'private+all-public', method.ce_weight = 1"),
        (["method.local_data=private"], "method.ce_weight = 1"),
        (["method.name=aggregation"], "method.local_data"),
        (["method.name=independent"], "method.local_data = 'private+own-public'"),
        (["method.name=fedavg"], "method.local_data"),
        (["method.name=fedmd"], "method.public_epochs > 0"),
        (["method.name=fml"], "method.local_data"),
        (["method.name=test_unlabelled:Own"], "method.name = 'test_unlabelled:Own'"),
    ],
)
def test_what_needs_labels_says_so(federation, changes, why):
    with pytest.raises(ConfigError) as error:
        federation("data.public_labels=false", *changes)
    assert str(error.value).startswith(
        f"public data has no labels (data.public_labels = false), and they are needed by {why}"
    )


class Own(fedh2l.Method):
    """A method of a user's own, which does not say that it can do without labels."""

    name = "own"

    def local_step(self, node, round):
        """Nothing."""


@pytest.mark.parametrize(
    "changes",
    [
        ["method.name=independent", "method.local_data=private"],
        ["method.name=fedavg", "method.local_data=private", "method.interval=4"],
        ["method.name=fedprox", "method.local_data=private", "method.interval=4"],
        ["method.name=agnostic", "method.local_data=private", "method.interval=4"],
        ["method.name=fedmd", "method.public_epochs=0"],
        ["method.name=fml", "method.local_data=private", "method.interval=4"],
    ],
)
def test_others_that_can_do_without(federation, changes):
    assert Trainer(federation("data.public_labels=false", *changes)).run().average["ACC"] > 0


def test_all_have_labels_or_nobody_has():
    domains = [blobs("a"), replace(blobs("b"), public_labels=False)]
    nodes = [fedh2l.Node(domain.name, torch.nn.Linear(domain.private.inputs.shape[1], 3), domain) for domain in domains]
    with pytest.raises(DataError, match="only one has public data with labels"):
        fedh2l.train(nodes, rounds=1)


def test_a_mutual_step_learns_something():
    with pytest.raises(ConfigError, match="ce_weight and kl_weight are both 0; set interval = 0"):
        load_config(None, ["method.ce_weight=0", "method.kl_weight=0"])


def test_labels_alone(federation):
    both, kl, ce = (
        [p.clone() for p in parameters(federation(*changes))]
        for changes in ([], ["method.ce_weight=0"], ["method.kl_weight=0"])
    )
    assert not any(torch.equal(a, b) for a, b in zip(both, kl, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(ce, kl, strict=True))


def parameters(fed):
    trainer = Trainer(fed)
    trainer.run()
    return [learner.parameters for learner in trainer.engine.learners]


def test_teachers_count_alike():
    first, second = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]), torch.full((2, 3), 1 / 3)
    batch = Samples(torch.zeros(2, 1), torch.full((2,), UNKNOWN))
    inbox = [Posteriors.of(name, 1, values, None) for name, values in (("a", first), ("b", second))]
    lesson = Lesson.join(inbox, [batch, batch], labelled=False)
    logits = torch.randn(4, 3)
    ce, kl = mutual_losses(logits, lesson)
    assert ce == 0
    rows = kl_rows(torch.cat([first, second]), torch.log_softmax(logits, -1))
    torch.testing.assert_close(kl, rows.mean())
