"""Passes through a model: bytes, mixed precision, a few rows at a time, batch norm in the mutual step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedh2l
from byte_images import IMAGENET, net, nodes
from fedh2l.data.augmentation import Augmentation
from fedh2l.data.domain import Domain, Samples
from fedh2l.data.pixels import Pixels, ready
from fedh2l.errors import ConfigError, DataError
from fedh2l.models.saved import probe
from fedh2l.training.compute import Compute
from fedh2l.training.metrics import count_correct
from fedh2l.training.network import Network
from fedh2l.training.optimizers import OptimizerSettings


def network(seed: int = 0, dropout: float = 0.0, **compute) -> Network:
    torch.manual_seed(seed)
    return Network(net(dropout=dropout), OptimizerSettings(), compute=Compute(**compute))


def test_bytes_become_what_the_preprocessing_says():
    images = torch.randint(0, 256, (4, 3, 5, 5)).to(torch.uint8)
    mean, std = (torch.tensor(IMAGENET[key], dtype=torch.float64).view(3, 1, 1) for key in ("mean", "std"))
    expected = (images.double() / 255 - mean) / std
    torch.testing.assert_close(Pixels.of(IMAGENET)(images, torch.float64), expected)
    torch.testing.assert_close(ready(images, Pixels.of(IMAGENET), torch.float32), expected.float())
    assert torch.equal(ready(torch.tensor([3]), None, torch.float32), torch.tensor([3]))
    numbers = torch.rand(2, 3, 5, 5)
    assert Pixels.of(IMAGENET)(numbers, torch.float64) is numbers


@pytest.mark.parametrize("engine", ["local", "batched"])
def test_training_on_bytes_is_training_on_their_numbers(engine):
    as_bytes = nodes()
    as_numbers = [fedh2l.Node(node.name, node.model, node.domain.as_numbers()) for node in as_bytes]
    results = [fedh2l.train(each, rounds=12, engine=engine, batch_size=8) for each in (as_bytes, as_numbers)]
    assert results[0].matrix == results[1].matrix
    assert results[0].bytes == results[1].bytes


def test_they_learn():
    result = fedh2l.train(nodes(), rounds=60, batch_size=8, optimizer=fedh2l.Optimizer(lr=0.01))
    assert result.average["ACC"] > 90


def test_images_that_nodes_see_differently_are_refused():
    other = [*nodes()[:2], fedh2l.Node("c", net, Domain.split((torch.zeros(60, 3, 8, 8, dtype=torch.uint8),
             torch.arange(60) % 3), "c", 3))]  # fmt: skip
    with pytest.raises(DataError, match="'a' and 'c' have images that are preprocessed or augmented differently"):
        fedh2l.train(other, rounds=1)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_few_rows_at_a_time_give_the_same_gradient(frozen):
    """Without batch statistics: those are of the rows that pass together."""
    whole, parts = network(), network(rows=5)
    inputs, labels = torch.rand(13, 3, 8, 8), torch.arange(13) % 3
    gradients, buffers = [], []
    for each in (whole, parts):
        if not frozen:
            each.module[1] = nn.Identity()
        loss = nn.functional.cross_entropy(each.logits(inputs, frozen=frozen), labels)
        each.predict(inputs)  # modes change between the two passes of a row
        gradients.append(torch.autograd.grad(loss, list(each.module.parameters())))
        buffers.append({name: value.clone() for name, value in each.module.named_buffers()})
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])
    torch.testing.assert_close(whole.predict(inputs), parts.predict(inputs))


def test_rows_that_pass_twice_are_counted_once():
    """Batch norm learns, and dropout draws, in the first pass alone."""
    each = network(rows=4, dropout=0.5)
    inputs = torch.rand(8, 3, 8, 8)
    torch.manual_seed(3)
    logits = each.logits(inputs)
    after_forward = {name: value.clone() for name, value in each.module.named_buffers()}
    assert int(after_forward["1.num_batches_tracked"]) == 2
    each.gradient(logits.square().sum())
    assert all(torch.equal(value, after_forward[name]) for name, value in each.module.named_buffers())
    plain = network(dropout=0.5)
    torch.manual_seed(3)
    expected = torch.cat([plain.logits(part) for part in torch.split(inputs, 4)])
    torch.testing.assert_close(logits, expected)


def test_mixed_precision_keeps_everything_else_as_it_is():
    plain, mixed = network(), network(bf16=True)
    inputs = torch.rand(16, 3, 8, 8)
    exact, rough = plain.logits(inputs), mixed.logits(inputs)
    assert rough.dtype == mixed.gradient(rough.sum()).dtype == mixed.parameters.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, atol=0.05, rtol=0.05)


def test_training_in_mixed_precision():
    settings = {"rounds": 60, "batch_size": 8, "optimizer": fedh2l.Optimizer(lr=0.01)}
    mixed = fedh2l.train(nodes(), precision="bf16", **settings)
    assert mixed.average["ACC"] > 85
    assert mixed.matrix == fedh2l.train(nodes(), precision="bf16", **settings).matrix
    small = fedh2l.train(nodes(), micro_batch=3, **settings)
    assert small.average["ACC"] > 85


def test_what_was_trained_in_mixed_precision_can_be_loaded(tmp_path):
    """A model is held to what it says in full precision; after many layers that is not what it says in mixed."""
    fedh2l.train(nodes(), rounds=4, batch_size=8, precision="bf16", out=tmp_path / "run")
    model = fedh2l.load(tmp_path / "run", "a", model=net())
    with torch.no_grad():
        again = model(probe((3, 8, 8), True, torch.float32)).flatten()
    torch.testing.assert_close(again, torch.tensor(model.about["said"]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_pieces_are_never_a_row_alone_where_there_is_batch_norm(rows):
    each = Network(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), OptimizerSettings(), compute=Compute(rows=rows))
    assert each.logits(torch.rand(4, 4)).shape == (4, 3)
    assert each.logits(torch.rand(3, 4)).shape == (3, 3)
    assert int(each.module[1].num_batches_tracked) == 3  # twice two rows, three rows


def test_large_images_are_predicted_a_few_at_a_time():
    seen = []

    class Watch(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x.mean((2, 3)))

    each = Network(Watch(3, 2), OptimizerSettings())
    each.predict(torch.zeros(100, 3, 224, 224))
    assert seen == [53, 47]
    samples = Samples(torch.zeros(100, 3, 224, 224), torch.zeros(100, dtype=torch.long))
    assert count_correct(each.predict, samples) in (0, 100)
    assert max(seen) == 53


def test_bytes_that_are_no_images_stay_what_they_are():
    """Letters of words, say, which a model looks up."""

    class Words(nn.Module):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            self.look_up = nn.EmbeddingBag(256, num_classes)

        def forward(self, letters: torch.Tensor) -> torch.Tensor:
            return self.look_up(letters.long())

    labels = torch.arange(60) % 3
    letters = (labels.unsqueeze(1) * 80 + torch.arange(4)).to(torch.uint8)
    given = [fedh2l.Node(name, Words, Domain.split((letters, labels), name, 3)) for name in "ab"]
    assert given[0].domain.pixels is None
    result = fedh2l.train(given, rounds=60, batch_size=8, optimizer=fedh2l.Optimizer(lr=0.1))
    assert result.average["ACC"] == 100


def test_fedgkt_says_what_it_cannot_do():
    with pytest.raises(ConfigError, match=r"data\.augment to 'none'"):
        fedh2l.train(nodes(Augmentation(Pixels.of(IMAGENET)), "cnn"), "fedgkt", rounds=2)
    given = [replace(node, weights="x.pth") for node in nodes(None, "cnn")]
    with pytest.raises(ConfigError, match="cannot start from weights"):
        fedh2l.train(given, "fedgkt", rounds=2)


def test_frozen_statistics_are_used_and_not_learned():
    each = network()
    each.logits(torch.rand(32, 3, 8, 8) + 2)
    learned = each.module[1].running_mean.clone()
    inputs = torch.rand(6, 3, 8, 8)
    frozen = each.logits(inputs, frozen=True)
    assert torch.equal(each.module[1].running_mean, learned)
    torch.testing.assert_close(frozen, each.predict(inputs))
    each.logits(inputs)
    assert not torch.equal(each.module[1].running_mean, learned)


@pytest.mark.parametrize("engine", ["local", "batched"])
def test_batch_norm_learns_from_local_batches_alone(engine):
    """Mutual steps use the statistics of the local steps, and leave them as they are."""
    given = nodes()
    modules = [fedh2l.Node(n.name, n.build("secret", 8), n.domain) for n in given]
    fedh2l.train(modules, fedh2l.FedH2L(), rounds=5, batch_size=8, engine=engine, selection="last")
    assert {int(node.model[1].num_batches_tracked) for node in modules} == {5}
