from __future__ import annotations

import pytest

from fedh2l.training.metrics import average, scores


def test_pooled_over_samples_as_the_paper_defines_them():
    # Three domains of unequal size: ACC and CDP pool samples, they do not average accuracies.
    got = scores(correct=[8, 30, 50], totals=[10, 40, 100], own=1)
    assert got["WDP"] == pytest.approx(75)
    assert got["ACC"] == pytest.approx(100 * 88 / 150)
    assert got["CDP"] == pytest.approx(100 * 58 / 110)


def test_one_model_for_all_has_one_average():
    rows = [scores([9, 7, 8], [10, 10, 10], own) for own in range(3)]
    means = average(rows)
    assert means["WDP"] == pytest.approx(means["ACC"])
    assert means["CDP"] == pytest.approx(means["ACC"])
