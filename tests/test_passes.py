"""Passes through a model: bytes, mixed precision, a few rows at a time, batch norm in the mutual step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedh2l
from fedh2l.augmentation import Augmentation, jittered
from fedh2l.domain import Domain, Samples
from fedh2l.errors import ConfigError, DataError
from fedh2l.metrics import count_correct
from fedh2l.models.saved import probe
from fedh2l.network import Network
from fedh2l.optimizers import OptimizerSettings
from fedh2l.pixels import Pixels, ready
from fedh2l.sampling import random_words, stream_key, word_block
from fedh2l.settings import Compute

IMAGENET = {"kind": "image", "scale": 255, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def net(num_classes: int = 3, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(16, num_classes),
    )  # fmt: skip


def pictures(name: str, seed: int = 0, augmentation: Augmentation | None = None, side: int = 8) -> Domain:
    """Bright, dark and striped, as bytes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 120, (60, 3, side, side), generator=generator)
    labels = torch.arange(60) % 3
    images[labels == 1] += 120
    images[labels == 2, :, ::2] += 120
    split = Domain.split((images.to(torch.uint8), labels), name, 3, preprocessing=IMAGENET)
    return Domain(
        name, split.classes, split.private, split.public, split.validation, split.test, IMAGENET, augmentation
    )


def nodes(augmentation: Augmentation | None = None, model: object = net) -> list[fedh2l.Node]:
    return [fedh2l.Node(name, model, pictures(name, seed, augmentation)) for seed, name in enumerate("abc")]


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


def test_only_images_of_bytes_are_augmented():
    domain = pictures("a")
    with pytest.raises(DataError, match="only images of bytes"):
        replace(domain.as_numbers(), augmentation=VIEWS)


def test_other_views_or_colours_are_other_data():
    domain = pictures("a")
    others = [
        replace(domain, augmentation=VIEWS),
        replace(domain, preprocessing={"scale": 255}),
        replace(domain, augmentation=replace(VIEWS, jitter=0.1)),
    ]
    assert len({each.digest for each in (domain, *others)}) == 4


def test_fedgkt_says_what_it_cannot_do():
    with pytest.raises(ConfigError, match=r"data\.augment to 'none'"):
        fedh2l.train(nodes(VIEWS, "cnn"), "fedgkt", rounds=2)
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


@pytest.mark.parametrize("choice", ["joint", "per-domain", "frozen"])
@pytest.mark.parametrize("engine", ["local", "batched"])
def test_batch_norm_in_the_mutual_step(choice, engine):
    """How many batches the statistics of a node are of: one local, and one, two or none of its two teachers'."""
    given = nodes()
    modules = [fedh2l.Node(n.name, n.build("secret", 8), n.domain) for n in given]
    fedh2l.train(modules, fedh2l.FedH2L(batch_norm=choice), rounds=5, batch_size=8, engine=engine, selection="last")
    counted = {int(node.model[1].num_batches_tracked) for node in modules}
    assert counted == {5 * (1 + {"joint": 1, "per-domain": 2, "frozen": 0}[choice])}


def test_without_batch_norm_there_is_no_choice():
    class Plain(nn.Sequential):
        def __init__(self, num_classes: int) -> None:
            super().__init__(nn.Flatten(), nn.Linear(192, num_classes))

    results = [
        fedh2l.train(nodes(model=Plain), fedh2l.FedH2L(batch_norm=choice), rounds=5, batch_size=8).matrix
        for choice in ("joint", "per-domain", "frozen")
    ]
    assert results[0] == results[1] == results[2]


VIEWS = Augmentation(Pixels.of(IMAGENET))


def test_views_follow_from_their_address():
    images = torch.randint(0, 256, (6, 3, 12, 12)).to(torch.uint8)
    first = VIEWS.views(images, torch.float32, "local-views", "secret", "a", 3)
    assert torch.equal(first, VIEWS.views(images, torch.float32, "local-views", "secret", "a", 3))
    for purpose, seed, node, round in (
        ("public-views", "secret", "a", 3), ("local-views", "other", "a", 3),
        ("local-views", "secret", "b", 3), ("local-views", "secret", "a", 4),
    ):  # fmt: skip
        assert not torch.equal(first, VIEWS.views(images, torch.float32, purpose, seed, node, round))


def test_nothing_is_changed_if_nothing_is_asked_for():
    images = torch.randint(0, 256, (6, 3, 12, 10)).to(torch.uint8)
    still = Augmentation(Pixels.of(IMAGENET), crop=1.0, flip=0.0, jitter=0.0)
    seen = still.views(images, torch.float32, "local-views", "s", "a", 0)
    torch.testing.assert_close(seen, ready(images, Pixels.of(IMAGENET), torch.float32))


def test_a_mirror_image():
    images = torch.randint(0, 256, (6, 3, 12, 10)).to(torch.uint8)
    mirror = Augmentation(Pixels(), crop=1.0, flip=1.0, jitter=0.0)
    seen = mirror.views(images, torch.float64, "local-views", "s", "a", 0)
    torch.testing.assert_close(seen, images.flip(-1).double() / 255)


def test_crops_are_within_the_image_and_of_the_size_asked_for():
    """On a ramp, the brightest and the darkest pixel of a view say which part of the image it is."""
    ramp = torch.arange(200, dtype=torch.uint8).view(1, 1, 1, 200).expand(200, 1, 200, 200)
    crops = Augmentation(Pixels(scale=1.0), crop=0.5, flip=0.0, jitter=0.0)
    across = crops.views(ramp, torch.float64, "local-views", "s", "a", 0)
    down = crops.views(ramp.transpose(2, 3), torch.float64, "local-views", "s", "a", 0)
    sides = [(seen.amax((1, 2, 3)) - seen.amin((1, 2, 3)) + 1) / 200 for seen in (across, down)]
    area = sides[0] * sides[1]
    assert 0.44 < area.min() < 0.55  # a crop as high as the image cannot be as wide as its ratio says
    assert 0.9 < area.max() <= 1.005
    ratio = sides[0] / sides[1]
    assert 0.74 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.35
    assert across.min() >= 0
    assert across.max() <= 199
    assert across.amin((1, 2, 3)).max() > 20  # some are on the right


STILL = Augmentation(Pixels(), crop=1.0, flip=0.0, jitter=0.0, border="zeros")


def test_images_are_moved_by_as_much_as_was_asked_for():
    """The middle of what is bright says where an image went, and beyond its edge there is nothing."""
    images = torch.zeros(300, 1, 40, 40)
    images[:, :, 18:22, 18:22] = 1
    seen = replace(STILL, shift=0.25).views(images, torch.float64, "public-views", 0, "a", 1)
    places = torch.arange(40, dtype=torch.float64)
    for axis in (2, 3):
        mass = seen.sum((1, 5 - axis))
        middle = (mass * places).sum(1) / mass.sum(1) - 19.5
        assert middle.abs().max() <= 10 + 1e-6
        assert middle.min() < -9
        assert middle.max() > 9
        assert middle.mean().abs() < 1
    torch.testing.assert_close(seen.sum((1, 2, 3)), torch.full((300,), 16.0, dtype=torch.float64))
    corner = torch.ones(300, 1, 40, 40)
    assert replace(STILL, shift=0.25).views(corner, torch.float64, "public-views", 0, "a", 1).mean() < 0.85


def test_sizes_change_within_bounds():
    images = torch.zeros(300, 1, 40, 40)
    images[:, :, 10:30, 10:30] = 1
    seen = replace(STILL, zoom=0.2).views(images, torch.float64, "public-views", 0, "a", 1)
    sides = seen.sum((1, 2, 3)).sqrt()
    assert 15.8 < sides.min() < 16.3
    assert 23.7 < sides.max() < 24.3


def test_a_piece_is_missing():
    images = torch.ones(300, 1, 40, 40)
    seen = replace(STILL, erase=0.5).views(images, torch.float32, "public-views", 0, "a", 1)
    missing = 1600 - seen.sum((1, 2, 3))
    assert set(seen.unique().tolist()) == {0.0, 1.0}
    assert missing.max() <= 21 * 21
    assert missing.max() > 18 * 18
    assert missing.min() < 20
    coloured = Augmentation(Pixels.of(IMAGENET), crop=1.0, flip=0.0, jitter=0.0, erase=0.5)
    rows = coloured.views(torch.full((50, 3, 40, 40), 200, dtype=torch.uint8), torch.float32, "local-views", 0, "a", 1)
    assert rows.unique().numel() == 4  # three colours, and what ImageNet is on average


def test_numbers_are_the_same_one_by_one_and_for_many_addresses():
    keys = [stream_key("public-views", 0, node, 3) for node in "ab"]
    together = VIEWS.numbers(word_block(keys, 7 * 5).reshape(2, 5, 7), 1.25)
    for place, node in enumerate("ab"):
        alone = VIEWS.numbers(random_words(7 * 5, "public-views", 0, node, 3).reshape(5, 7), 1.25)
        assert (together[place] == alone).all()
    images = torch.rand(2, 5, 3, 8, 10)
    stacked = VIEWS.apply(images, torch.from_numpy(together), torch.float32)
    for place in range(2):
        assert torch.equal(stacked[place], VIEWS.apply(images[place], torch.from_numpy(together[place]), torch.float32))


def test_digits_are_never_turned(federation):
    """On Rotated MNIST angles tell the domains apart: what is a line upright stays one."""
    views = federation("data.augment=all").nodes[0].domain.augmentation
    assert views.public
    upright = torch.zeros(50, 1, 28, 28)
    upright[:, :, 4:24, 13:15] = 1
    seen = replace(views, erase=0.0).views(upright, torch.float64, "public-views", 0, "M0", 1)
    rows = seen[:, 0, 10:18]  # every row of a line that is upright is the same
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows))


def test_colours_change_within_bounds():
    images = torch.rand(50, 3, 6, 6)
    same = jittered(images, torch.ones(50, 3))
    torch.testing.assert_close(same, images)
    brighter = jittered(images, torch.tensor([[1.4, 1.0, 1.0]]).expand(50, 3))
    torch.testing.assert_close(brighter, (images * 1.4).clamp(max=1))
    grey = jittered(images, torch.tensor([[1.0, 1.0, 0.0]]).expand(50, 3))
    torch.testing.assert_close(grey[:, 0], grey[:, 2])
    flat = jittered(images, torch.tensor([[1.0, 0.0, 1.0]]).expand(50, 3))
    assert flat.flatten(1).std(1).max() < 1e-5


@pytest.mark.parametrize("public", [False, True])
def test_training_on_views(public):
    views = Augmentation(Pixels.of(IMAGENET), public=public)
    plain, first, again = (
        fedh2l.train(nodes(each), rounds=20, batch_size=8, optimizer=fedh2l.Optimizer(lr=0.01))
        for each in (None, views, views)
    )
    assert first.to_dict() | {"seconds": 0} == again.to_dict() | {"seconds": 0}
    assert first.matrix != plain.matrix


def test_public_views_are_the_same_for_everybody():
    from fedh2l.seedset import SeedSet

    samples = Samples(torch.randint(0, 256, (20, 3, 8, 8)).to(torch.uint8), torch.zeros(20, dtype=torch.long))
    mine, theirs = (SeedSet({"a": samples}, 5, VIEWS) for _ in range(2))
    assert torch.equal(mine.batch("a", 3, 4).inputs, theirs.batch("a", 3, 4).inputs)
    assert not torch.equal(mine.batch("a", 3, 4).inputs, SeedSet({"a": samples}, 5).batch("a", 3, 4).inputs)
