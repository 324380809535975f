"""Which value wins: the given one, then a preset, then the advice of the method, then the default."""

from __future__ import annotations

import pytest

from fedh2l.errors import ConfigError
from fedh2l.experiment.config import resolve
from fedh2l.methods.fedh2l import FedH2L


class Advised(FedH2L):
    presets = {"fast": {"optimizer.lr": 0.5}}  # noqa: RUF012 - as users write it

    @classmethod
    def recommends(cls, public_labels):
        return {"optimizer.lr": 0.1, "run.ema_decay": 0.9 if public_labels else 0.8}


@pytest.mark.parametrize(
    ("raw", "rate"),
    [({}, 0.1), ({"method": {"preset": "fast"}}, 0.5),
     ({"method": {"preset": "fast"}, "optimizer": {"lr": 0.2}}, 0.2)],
)  # fmt: skip
def test_given_values_come_before_presets_and_these_before_advice(raw, rate):
    found = resolve(raw, Advised())
    assert found.optimizer.lr == rate
    assert (found.run.ema_decay, found.run.rounds) == (0.9, 2000)


def test_advice_depends_on_labels_of_public_data():
    assert resolve({}, Advised(), labelled=False).run.ema_decay == 0.8


def test_advice_about_data_is_taken_where_the_dataset_has_the_key():
    plus = {"name": "fedh2l-plus"}
    assert resolve({"method": plus}).data == {"augment": "all"}
    assert resolve({"method": plus, "data": {"name": "table"}}).data == {"name": "table"}


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match=r"fedh2l has no preset 'slow'. Its presets: "):
        resolve({"method": {"preset": "slow"}})
