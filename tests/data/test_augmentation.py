"""Other views of images: what becomes of them, that they follow from their address, and training on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedh2l
from byte_images import IMAGENET, nodes, pictures
from fedh2l.data.augmentation import Augmentation, Mixture, PublicViews, _between, jittered
from fedh2l.data.domain import Samples
from fedh2l.data.pixels import Pixels, ready
from fedh2l.data.seedset import SeedSet
from fedh2l.errors import DataError
from fedh2l.methods.lesson import Lesson, mutual_losses
from fedh2l.protocol.messages import Posteriors
from fedh2l.protocol.sampling import random_words, stream_key, word_block

VIEWS = Augmentation(Pixels.of(IMAGENET))


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
    pixels = Pixels.of(IMAGENET)
    views = Augmentation(pixels, public=PublicViews(pixels, mix=0.5) if public else None)
    plain, first, again = (
        fedh2l.train(nodes(each), rounds=20, batch_size=8, optimizer=fedh2l.Optimizer(lr=0.01))
        for each in (None, views, views)
    )
    assert first.to_dict() | {"seconds": 0} == again.to_dict() | {"seconds": 0}
    assert first.matrix != plain.matrix


def test_views_of_public_data_alone(federation):
    """Local steps see their data as it is; what a mutual step sees is what it sees where both see views."""
    nodes = [federation(f"data.augment={steps}").nodes[0].domain for steps in ("none", "local", "public", "all")]
    plain, local, public, both = (node.augmentation for node in nodes)
    assert plain is None
    assert not local.public
    assert public.public == both.public
    digits = nodes[0].private.inputs[:8]
    assert torch.equal(public.views(digits, torch.float32, "local-views", "s", "M0", 1), digits)
    assert not torch.equal(both.views(digits, torch.float32, "local-views", "s", "M0", 1), digits)


def test_public_views_are_the_same_for_everybody():
    samples = Samples(torch.randint(0, 256, (20, 3, 8, 8)).to(torch.uint8), torch.zeros(20, dtype=torch.long))
    views = PublicViews(Pixels.of(IMAGENET), bend=0.1, mix=0.5)
    mine, theirs = (SeedSet({"a": samples}, 5, views).batch("a", 3, 4) for _ in range(2))
    assert torch.equal(mine.inputs, theirs.inputs)
    assert mine.mixture is not None
    assert all(torch.equal(*parts) for parts in zip(mine.mixture, theirs.mixture, strict=True))
    assert not torch.equal(mine.inputs, SeedSet({"a": samples}, 5).batch("a", 3, 4).inputs)


def test_bending_neither_moves_nor_turns_the_whole():
    """Where a point of an image is seen, as a function of where it was, has no common shift, stretch or turn."""
    side, rows = 48, 200
    places = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    down, across = torch.meshgrid(places, places, indexing="ij")
    images = torch.stack([across, down]).expand(rows, 2, side, side)  # each pixel says where it is
    bent = replace(STILL, bend=0.1, border="reflection").views(images, torch.float64, "public-views", 0, "a", 1)
    moves = (bent - images)[:, :, 8:-8, 8:-8]
    assert moves.abs().max() > 0.03
    assert 0.01 < moves.std() < 0.1
    words = random_words(rows * 23, "public-views", 0, "a", 1).reshape(rows, 23)
    pulls = torch.from_numpy(replace(STILL, bend=0.1).numbers(words, 1.0)[:, 10:]).view(rows, 2, 4, 4)
    line = _between(side, torch.device("cpu"), torch.float64)
    field = line @ pulls @ line.T
    for common in (torch.ones(side, side, dtype=torch.float64), across - 0.5, down - 0.5):
        assert (field * common).mean((2, 3)).abs().max() < 1e-4


def test_images_are_mixed_with_others_of_the_batch():
    images = torch.rand(60, 1, 8, 8, dtype=torch.float64)
    views = PublicViews(Pixels(), crop=1.0, flip=0.0, jitter=0.0, mix=0.4)
    numbers = views.drawn(images, "public-views", 0, "a", 1)
    own, other = views.mixture(numbers)
    assert own.min() >= 0.6
    assert own.max() <= 1
    assert own.std() > 0.05
    assert set(other.tolist()) <= set(range(60))
    assert len(set(other.tolist())) > 25
    share = own.view(-1, 1, 1, 1)
    expected = share * images + (1 - share) * images[other]
    torch.testing.assert_close(views.apply(images, numbers, torch.float64), expected)


def test_nodes_that_are_stacked_are_not_mixed():
    images, keys = torch.rand(2, 5, 1, 8, 8), [stream_key("public-views", 0, node, 3) for node in "ab"]
    views = PublicViews(Pixels(), bend=0.1, mix=0.5)
    words = word_block(keys, views.words * 5).reshape(2, 5, views.words)
    together = torch.from_numpy(views.numbers(words, 1.0))
    stacked = views.apply(images, together, torch.float32)
    for place, node in enumerate("ab"):
        alone = views.drawn(images[place], "public-views", 0, node, 3)
        assert torch.equal(alone, together[place])
        torch.testing.assert_close(views.apply(images[place], alone, torch.float32), stacked[place])


def test_a_whole_part_is_mixed_anew_in_every_round():
    """Its samples come in one order, class after class, so neighbours would always be mixed, and with their like."""
    labels = torch.arange(5).repeat_interleave(10)
    seed_set = SeedSet({"a": Samples(torch.rand(50, 1, 8, 8), labels)}, 5, PublicViews(Pixels(), mix=0.5))
    others = [seed_set.batch("a", round, 64).mixture.other for round in range(20)]
    assert len({tuple(each.tolist()) for each in others}) == 20
    assert torch.stack([labels[each] == labels for each in others]).double().mean() < 0.35


def test_labels_of_mixed_images():
    """Cross-entropy asks for both, each by its share."""
    logits, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    mixture = Mixture(torch.tensor([0.5, 0.7, 1.0, 0.9], dtype=torch.float64), torch.tensor([2, 0, 0, 1]))
    signal = Posteriors.of("a", 1, torch.softmax(logits, -1), labels)
    ce, _ = mutual_losses(logits, Lesson.join([signal], [Samples(torch.zeros(4, 1), labels, mixture)]))
    each = [
        share * cross_entropy(row, own) + (1 - share) * cross_entropy(row, other)
        for row, own, other, share in zip(logits, labels, labels[mixture.other], mixture.own, strict=True)
    ]
    torch.testing.assert_close(ce, torch.stack(each).mean())
