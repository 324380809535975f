"""Only the same run is resumed: a saved model says which classes it has, and how its inputs were made."""

from __future__ import annotations

import pytest
import torch

import fedh2l
from fedh2l.errors import ConfigError

NUMBERS = {"kind": "numbers", "mean": [0.0], "std": [1.0]}


def train(out, classes=("benign", "malignant"), preprocessing=NUMBERS, rounds=2):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 4, generator=generator)
    data = (inputs, (inputs[:, 0] > 0).long())
    nodes = [
        fedh2l.Node(name, "mlp", fedh2l.Domain.split(data, name, classes, preprocessing=preprocessing), {"hidden": [4]})
        for name in "ab"
    ]
    return fedh2l.train(nodes, rounds=rounds, out=out, resume=True)


@pytest.mark.parametrize("rounds", [2, 4], ids=["ended", "extended"])
@pytest.mark.parametrize(
    "other",
    [
        {"classes": ("malignant", "benign")},
        {"classes": ("benign", "other")},
        {"preprocessing": NUMBERS | {"mean": [5.0]}},
        {"preprocessing": {}},
    ],
    ids=["order of classes", "names of classes", "preprocessing", "no preprocessing"],
)
def test_other_classes_or_preprocessing_are_refused(tmp_path, other, rounds):
    first = train(tmp_path / "run")
    assert train(tmp_path / "run") == first
    with pytest.raises(ConfigError, match="node 'a' has other data"):
        train(tmp_path / "run", **other, rounds=rounds)
    assert fedh2l.load(tmp_path / "run", "a").classes == ("benign", "malignant")
