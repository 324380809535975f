"""Nodes with little data: what each method can do without, and what is refused with a remedy."""

from __future__ import annotations

import pytest
import torch

import fedh2l
from conftest import blobs
from fedh2l.errors import DataError
from fedh2l.experiment.config import load_config
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RunSettings
from fedh2l.methods.registry import METHODS, make_method

NOTHING = (torch.empty(0), torch.empty(0, dtype=torch.long))
WITHOUT = ["independent", "aggregation", "fedavg", "fedprox", "agnostic", "fml", "fedgkt"]
"""Methods that use no public data."""


def without(domain: fedh2l.Domain, *splits: str) -> fedh2l.Domain:
    parts = {name: getattr(domain, name) for name in ("private", "public", "validation", "test")}
    return fedh2l.Domain(domain.name, domain.classes, **{**parts, **dict.fromkeys(splits, NOTHING)})


def nodes(*domains: fedh2l.Domain) -> list[fedh2l.Node]:
    return [fedh2l.Node(domain.name, "mlp", domain, {"hidden": [8, 8]}) for domain in domains]


def test_every_method_has_been_decided_on():
    decided = {name: make_method({"name": name}).needs_public_data() for name in METHODS}
    assert {name for name, needed in decided.items() if needed == "none"} == set(WITHOUT)
    assert {name for name, needed in decided.items() if needed == "some"} == {"fedmd"}


@pytest.mark.parametrize("engine", ["local", "batched"])
@pytest.mark.parametrize("method", WITHOUT)
def test_methods_that_use_no_public_data_need_none(method, engine):
    often = {"interval": 2} if "interval" in METHODS[method].model_fields else {}
    chosen = make_method({"name": method, **often})
    alone = nodes(*(without(blobs(name), "public") for name in ("a", "b")))
    assert fedh2l.train(alone, chosen, rounds=4, batch_size=8, engine=engine).average["ACC"] > 0
    some = nodes(without(blobs("a"), "public"), blobs("b"))
    assert fedh2l.train(some, chosen, rounds=4, batch_size=8).average["ACC"] > 0


@pytest.mark.parametrize("method", ["fedavg", "fml", "fedgkt"])
def test_bytes_can_be_matched_to_those_of_nodes_that_have_public_data(method):
    few = make_method({"name": method, "interval": "matched"})
    fedh2l.train(nodes(*(without(blobs(name), "public") for name in ("a", "b"))), few, rounds=2, batch_size=8)


@pytest.mark.parametrize("method", ["fedh2l", "fedh2l-plus"])
def test_a_node_that_teaches_needs_public_data(method):
    with pytest.raises(DataError, match=rf"node 'b' has no public data, and {method} needs some\. .*data\.alpha"):
        fedh2l.train(nodes(blobs("a"), without(blobs("b"), "public")), method, rounds=2, batch_size=8)


def test_a_node_that_only_trains_locally_needs_none():
    silent = fedh2l.FedH2L(interval=0)
    fedh2l.train(nodes(*(without(blobs(name), "public") for name in ("a", "b"))), silent, rounds=2, batch_size=8)


def test_one_node_with_public_data_is_enough_for_fedmd():
    fedh2l.train(nodes(blobs("a"), without(blobs("b"), "public")), "fedmd", rounds=20, batch_size=8)
    with pytest.raises(DataError, match="node 'a' has no public data, and fedmd needs some"):
        fedh2l.train(nodes(*(without(blobs(name), "public") for name in ("a", "b"))), "fedmd", rounds=2)


def test_a_class_without_public_samples_matters_to_those_who_teach_it():
    one = blobs("a")
    kept = [place for place, label in enumerate(one.public.labels.tolist()) if label]
    few = [fedh2l.Domain(name, one.classes, one.private, one.public.take(kept), one.validation, one.test)
           for name in "ab"]  # fmt: skip
    fedh2l.train(nodes(*few), "fedavg", rounds=2, batch_size=8)
    with pytest.raises(DataError, match="class 'c0' is not in the public data of any node"):
        fedh2l.train(nodes(*few), "fedh2l", rounds=2, batch_size=8)


def test_validation_data_of_another_node_is_enough():
    """Models are selected on the validation data of all nodes together."""
    result = fedh2l.train(nodes(blobs("a"), without(blobs("b"), "validation")), rounds=4, batch_size=8)
    assert {node.name for node in result.nodes} == {"a", "b"}
    none = nodes(*(without(blobs(name), "validation") for name in ("a", "b")))
    with pytest.raises(DataError, match=r"no node has validation data, .*fedh2l\.Shares\(validation=…\)"):
        fedh2l.train(none, rounds=2)


@pytest.mark.parametrize("method", ["fedh2l", "fedavg"])
def test_four_samples_a_class_are_enough(method):
    """They are 2 private ones, 1 public one and 1 to test on."""
    small = blobs("small", size=12)
    assert [len(part) for part in (small.private, small.public, small.validation, small.test)] == [6, 3, 0, 3]
    fedh2l.train(nodes(blobs("large"), small), method, rounds=4, batch_size=8)


def test_digits_with_little_public_data():
    config, _ = load_config(None, ["data.alpha=0.001", "data.per_class=20", "run.device=cpu"])
    assert [len(node.domain.public) for node in config.experiment().nodes] == [10] * 4


def test_images_as_bytes_stay_bytes_without_public_data():
    images, labels = torch.randint(0, 256, (60, 1, 8, 8)).to(torch.uint8), torch.arange(60) % 3
    domain = without(fedh2l.Domain.split((images, labels), "a", 3), "public")
    assert domain.public.inputs.dtype == torch.uint8
    assert domain.public.inputs.shape == (0, 1, 8, 8)


def test_methods_of_the_users_own_are_on_the_safe_side():
    class Own(fedh2l.Method):
        name = "own"

        def local_step(self, node, round):
            pass

    with pytest.raises(DataError, match="node 'a' has no public data, and own needs some"):
        Experiment(nodes(without(blobs("a"), "public"), blobs("b")), Own(), RunSettings(), fedh2l.Optimizer())
