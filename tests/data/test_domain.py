from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedh2l
from conftest import blobs
from fedh2l.data.splits import Shares, stratified_split
from fedh2l.errors import DataError


def test_samples_from_anything_usual():
    x, y = torch.rand(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    for source in (
        (x, y),
        (x.numpy().astype(np.float64), y.numpy()),
        TensorDataset(x, y),
        list(zip(x, y, strict=True)),
    ):
        samples = fedh2l.Samples.of(source)
        torch.testing.assert_close(samples.inputs, x)
        assert torch.equal(samples.labels, y)


def test_split_is_stratified_and_complete():
    labels = [0] * 100 + [1] * 20
    parts = stratified_split(labels, Shares(), seed=0, domain="a")
    assert [len(p) for p in parts] == [65 + 13, 10 + 2, 10 + 2, 15 + 3]
    assert sorted(position for part in parts for position in part) == list(range(120))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9, 100])
def test_private_and_public_together_do_not_depend_on_alpha(size):
    few, many = (stratified_split([0] * size, Shares(public=alpha), 0, "a") for alpha in (0.001, 0.4))
    assert set(few[0] + few[1]) == set(many[0] + many[1])
    assert few[2:] == many[2:]


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (1, [1, 0, 0, 0]),
        (2, [1, 1, 0, 0]),
        (3, [2, 1, 0, 0]),
        (4, [2, 1, 0, 1]),
        (5, [2, 1, 1, 1]),
        (15, [9, 2, 2, 2]),
        (100, [65, 10, 10, 15]),
    ],
)
def test_every_class_of_two_samples_has_a_public_one(size, parts):
    labels = [*[0] * size, *[1] * 40]
    split = stratified_split(labels, Shares(), seed=3, domain="a")
    assert [sum(labels[place] == 0 for place in part) for part in split] == parts
    assert sorted(place for part in split for place in part) == list(range(size + 40))


def test_test_and_validation_data_come_first():
    """A public sample is taken from what would be private, not from test or validation data."""
    shares = Shares(public=0.1, validation=0.4, test=0.4)
    assert [len(part) for part in stratified_split([0] * 2, shares, 0, "a")] == [0, 0, 1, 1]
    assert [len(part) for part in stratified_split([0] * 3, shares, 0, "a")] == [0, 1, 1, 1]


def test_the_split_of_a_hundred_samples_is_pinned():
    split = stratified_split([0] * 100 + [1] * 100, Shares(), seed=7, domain="pinned")
    digest = hashlib.sha256(repr([list(part) for part in split]).encode()).hexdigest()
    assert digest == "335b20c81913fa9aff3d224ce98e3d7b542fa1f9024c956d4d813ebed5c325db"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"private": (torch.rand(0, 2), torch.zeros(0, dtype=torch.long))}, "no private data, so there is nothing to"),
        ({"test": (torch.rand(0, 2), torch.zeros(0, dtype=torch.long))}, r"accuracy cannot be .*raise .*data\.test"),
        ({"test": (torch.rand(3, 2), torch.tensor([0, 1, 9]))}, "labels outside"),
        ({"test": (torch.rand(3, 5), torch.tensor([0, 1, 2]))}, "shape"),
        ({"test": (torch.rand(2, 2), torch.tensor([0, 1, 2]))}, "2 inputs but 3 labels"),
        ({"test": (torch.rand(2, 2), torch.tensor([0.5, 1.5]))}, "class indices"),
        ({"test": (torch.rand(2, 2), np.array(["a", "b"]))}, "tuple"),
        ({"test": [torch.rand(4, 2), torch.zeros(4)]}, "tuple"),
        ({"private": (torch.full((3, 2), float("nan")), torch.tensor([0, 1, 2]))}, "NaN"),
    ],
)
def test_bad_data_is_refused(change, reason):
    good = blobs("a")
    parts = {"private": good.private, "public": good.public, "validation": good.validation, "test": good.test}
    with pytest.raises(DataError, match=reason):
        fedh2l.Domain("a", good.classes, **{**parts, **change})


def test_a_number_of_classes_names_them():
    domain = fedh2l.Domain.split((torch.rand(60, 2), torch.arange(60) % 3), "a", classes=3)
    assert domain.classes == ("0", "1", "2")


def test_split_notices_a_missing_label():
    with pytest.raises(DataError, match="60 inputs but 59 labels"):
        fedh2l.Domain.split((torch.rand(60, 2), torch.arange(59) % 3), "a", classes=3)
