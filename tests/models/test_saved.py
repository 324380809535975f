"""Models that come back from a run directory are the ones that were trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedh2l
from conftest import blobs, tiny_net
from fedh2l.errors import DataError, ModelError
from test_api import nodes


def test_models_come_back(tmp_path):
    given = nodes(model_args={"width": 5})
    result = fedh2l.train(given, rounds=20, eval_every=10, out=tmp_path / "run")
    test = given[0].domain.test
    for node, row in zip(given, result.nodes, strict=True):
        loaded = fedh2l.load(tmp_path / "run", node.name, allow=["test_api"])
        assert loaded.classes == ("c0", "c1", "c2")
        right = (loaded(node.domain.test.inputs).argmax(1) == node.domain.test.labels).double().mean()
        assert 100 * right.item() == pytest.approx(row.WDP)
        assert loaded.about["round"] == row.round
        last = fedh2l.load(tmp_path / "run", node.name, which="last", allow=["test_api"])
        assert last.about["round"] == 20
    prediction = loaded.predict([test.inputs[0]])[0]
    assert prediction.label in loaded.classes
    assert 1 / 3 <= prediction.probability <= 1


def test_a_given_module_is_trained_in_place_and_selected(tmp_path):
    given = [fedh2l.Node(f"n{i}", tiny_net(), blobs(f"n{i}", seed=i)) for i in range(2)]
    before = given[0].model[0].weight.clone()
    result = fedh2l.train(given, rounds=20, eval_every=10, out=tmp_path / "run")
    assert not torch.equal(given[0].model[0].weight, before)
    test = given[0].domain.test
    right = (given[0].model(test.inputs).argmax(1) == test.labels).double().mean().item()
    assert 100 * right == pytest.approx(result.nodes[0].WDP)
    assert given[0].model[0].weight.untyped_storage().nbytes() == 2 * 8 * 4  # no longer a view of something larger
    with pytest.raises(ModelError, match="pass model="):
        fedh2l.load(tmp_path / "run", "n0")
    again = fedh2l.load(tmp_path / "run", "n0", model=tiny_net())
    torch.testing.assert_close(again(test.inputs), given[0].model(test.inputs))


def test_integer_inputs_and_float64_models_come_back(tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(20, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.embedding(x).mean(1))

    words = torch.arange(120).view(-1, 1).remainder(20).expand(-1, 5).contiguous()
    labels = words[:, 0] % 3
    given = [fedh2l.Node(f"n{i}", Words(), fedh2l.Domain.split((words, labels), f"n{i}", 3)) for i in range(2)]
    fedh2l.train(given, rounds=5, out=tmp_path / "run", dtype="float64", selection="last")
    loaded = fedh2l.load(tmp_path / "run", "n0", "last", model=Words())
    assert loaded.predict([words[0]])[0].label in ("0", "1", "2")
    assert next(loaded.parameters()).dtype is torch.float64
    torch.testing.assert_close(loaded.module.out.weight.float(), given[0].model.out.weight)


class Switch(nn.Module):
    """Its argument changes what it computes, but not the shape of its weights."""

    def __init__(self, activation: str = "relu") -> None:
        super().__init__()
        self.hidden, self.out, self.activation = nn.Linear(2, 8), nn.Linear(8, 3), getattr(torch, activation)

    def forward(self, x):
        return self.out(self.activation(self.hidden(x)))


def test_a_model_that_would_compute_something_else_is_not_loaded(tmp_path):
    given = [fedh2l.Node(f"n{i}", Switch("tanh"), blobs(f"n{i}", seed=i)) for i in range(2)]
    given.append(fedh2l.Node("n2", Switch, blobs("n2"), {"activation": "tanh"}))
    fedh2l.train(given, rounds=40, eval_every=20, out=tmp_path / "run", optimizer=fedh2l.Optimizer(lr=0.05))
    with pytest.raises(ModelError, match="gives other outputs"):
        fedh2l.load(tmp_path / "run", "n0", allow=["test_saved"])
    x = given[0].domain.test.inputs
    given_module = fedh2l.load(tmp_path / "run", "n0", model=Switch("tanh"))
    built = fedh2l.load(tmp_path / "run", "n2", allow=["test_saved"])
    for loaded in (given_module, built):
        assert loaded(x).shape == (len(x), 3)


def test_prediction_from_files(tmp_path):
    from fedh2l.data.datasets.rotated_mnist import RotatedMNIST
    from fedh2l.experiment.config import load_config

    models = [f"nodes.{i}.model=mlp" for i in range(4)]
    fed = load_config(None, models)[0].experiment()
    fedh2l.train(fed.nodes, rounds=150, out=tmp_path / "run")
    classifier = fedh2l.load(tmp_path / "run", "M0")
    test = RotatedMNIST().domains(0)[0].test
    files = []
    for i in range(0, 150, 10):
        pixels = (test.inputs[i, 0] * 255).round().byte().numpy()
        files.append(tmp_path / f"{i}.png")
        # Twice the size and in colour: preprocessing brings it back.
        Image.fromarray(pixels).convert("RGB").resize((56, 56), Image.Resampling.NEAREST).save(files[-1])
    said = [p.label for p in classifier.predict(files)]
    truth = [str(test.labels[i].item()) for i in range(0, 150, 10)]
    assert sum(a == b for a, b in zip(said, truth, strict=True)) >= 10
    np.save(tmp_path / "x.npy", test.inputs[0].numpy())
    assert classifier.predict([tmp_path / "x.npy"])[0] == classifier.predict([test.inputs[0]])[0]
    np.save(tmp_path / "bad.npy", np.zeros(3, dtype=np.float32))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    for bad, reason in (("bad.npy", "shape"), ("bad.png", "cannot be read"), ("none.png", "no file")):
        with pytest.raises(DataError, match=reason):
            classifier.predict([tmp_path / bad])
