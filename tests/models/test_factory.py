from __future__ import annotations

import pytest
import torch
from torch import nn

from fedh2l.errors import ModelError
from fedh2l.models.factory import Recipe, check_model
from fedh2l.models.features import features
from fedh2l.models.lenet import LeNet, LeNetWide
from fedh2l.models.registry import MODELS


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_parameter_counts():
    assert size(LeNet()) == 61_706
    assert size(LeNetWide()) == 431_080


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_fit_the_data(name):
    module = Recipe(name).build(7, (1, 28, 28))
    check_model(module, torch.rand(3, 1, 28, 28), 7, name)


def test_lenet_features_feed_its_last_layer():
    module, x = LeNet(), torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(module.output(features(module, x)), module(x))
    assert features(LeNetWide(), x).shape == (2, 500)


def test_default_features_are_the_input_of_the_last_linear():
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.rand(5, 4)
    torch.testing.assert_close(features(module, x), module[:2](x))


class WithFeaturesLayer(nn.Module):
    """As torchvision's AlexNet and VGG: `features` is a layer, not the method we mean."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 2, 3)
        self.classifier = nn.Linear(8, 3)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def test_a_layer_named_features_is_not_the_method():
    assert features(WithFeaturesLayer(), torch.rand(2, 1, 4, 4)).shape == (2, 8)


def test_no_features_is_said():
    with pytest.raises(ModelError, match="needs a method features"):
        features(nn.Sequential(nn.ReLU()), torch.rand(1, 2))


def test_factories_get_what_they_take():
    assert Recipe("torch.nn:Linear", {"in_features": 3, "out_features": 5}).build(5, (3,)).out_features == 5
    assert Recipe("mlp", {"hidden": []}).build(4, (2, 3))[1].in_features == 6


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (Recipe("lenett"), "Did you mean 'lenet'"),
        (Recipe("mlp", {"width": 3}), "could not be built"),
        (Recipe("builtins:dict"), "not an nn.Module"),
        (Recipe("math:pi"), "not a function"),
    ],
)
def test_bad_recipes_are_refused(recipe, reason):
    with pytest.raises(ModelError, match=reason):
        recipe.build(3, (2,))


class InPlace(nn.Linear):
    def forward(self, x):
        x -= x.mean()
        return super().forward(x)


class Pair(nn.Linear):
    def forward(self, x):
        return (super().forward(x), x) if self.training else super().forward(x)


def test_unfit_models_are_refused():
    with pytest.raises(ModelError, match="changes its input in place"):
        check_model(InPlace(2, 4), torch.rand(5, 2), 4, "model")
    with pytest.raises(ModelError, match="returns tuple"):
        check_model(Pair(2, 4), torch.rand(5, 2), 4, "model")
    norm = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    with pytest.raises(ModelError, match="in training mode"):
        check_model(norm, torch.rand(1, 2), 4, "model")
    check_model(norm, torch.rand(5, 2), 4, "model")
    assert not norm[1].running_mean.any()  # trying a model does not train it
    with pytest.raises(ModelError, match="no parameters to train"):
        check_model(nn.Linear(2, 4).requires_grad_(False), torch.rand(5, 2), 4, "model")
    with pytest.raises(ModelError, match="one logit for each of the 4 classes"):
        check_model(nn.Linear(2, 3), torch.rand(5, 2), 4, "model")
    with pytest.raises(ModelError, match="fails on an input"):
        check_model(nn.Linear(3, 4), torch.rand(5, 2), 4, "model")
