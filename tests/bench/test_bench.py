"""Benchmarks: what the tables say is what the runs gave, and what was done is not done again."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from math import pi, sqrt, tan
from pathlib import Path
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from fedh2l import extras
from fedh2l.bench.cells import Cell, Place, _fingerprint, all_cells, cells_of, run_cells, takes_part, units
from fedh2l.bench.output import Report
from fedh2l.bench.statistics import Difference, Summary, t_quantile
from fedh2l.bench.suite import Row, Suite, TableSpec, scores
from fedh2l.bench.suites import SUITES
from fedh2l.bench.tables import tables_of
from fedh2l.data.registry import DATASETS
from fedh2l.experiment.config import load_config
from fedh2l.experiment.settings import RunSettings
from fedh2l.methods.registry import METHODS
from fedh2l.runs.callbacks import Callback
from fedh2l.runs.trainer import Interrupted

pytestmark = pytest.mark.usefixtures("bench_in_process")
SMALL = ["--set", "data.per_class=20", "--set", "run.batch_size=8", "--set", "run.eval_every=3", "--device", "cpu"]
BENCH = ["bench", "comparison", "--rounds", "6", "--methods", "fedh2l,independent", *SMALL]


def test_quantiles_are_students():
    """Of one degree of freedom it is tan(0.475 π), of two √(2 · 0.95² / (1 - 0.95²)); the others are from tables."""
    known = {
        1: tan(0.475 * pi),
        2: sqrt(2 * 0.95**2 / (1 - 0.95**2)),
        4: 2.7764451052,
        9: 2.2621571628,
        30: 2.0422724563,
    }
    for freedom, quantile in known.items():
        assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-9)


def test_an_interval_by_hand():
    """Of the differences 1, 2, 3, 4, 5: their deviation is √2.5, and the quantile of four degrees 2.776."""
    difference = Difference.of([2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert difference.mean == 3
    assert difference.half_width == pytest.approx(2.7764451052 * sqrt(2.5 / 5), abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=12))
def test_intervals_are_those_of_a_paired_t_test(pairs):
    one, two = zip(*pairs, strict=True)
    if len({a - b for a, b in pairs}) < 2 or stdev(a - b for a, b in pairs) < 1e-6:
        return
    difference = Difference.of(one, two)
    interval = ttest_rel(one, two).confidence_interval(0.95)
    assert difference.mean - difference.half_width == pytest.approx(interval.low, abs=1e-6)
    assert difference.mean + difference.half_width == pytest.approx(interval.high, abs=1e-6)


def test_one_seed_has_neither_spread_nor_interval():
    assert Summary((3.0,)).deviation is None
    assert Difference.of([3.0], [1.0]) == Difference(2.0, None)


def test_a_result_by_another_rule_of_selection_is_not_taken_for_one_by_this(monkeypatch):
    cell = Cell("fedh2l", ("run.rounds=3",), 0)
    found = _fingerprint.__wrapped__(cell)  # which is remembered otherwise
    monkeypatch.setattr(RunSettings, "selection_rule", property(lambda self: "the first that comes"))
    assert _fingerprint.__wrapped__(cell) != found


@pytest.mark.parametrize("name", SUITES)
def test_every_cell_of_every_suite_can_be_configured(name, tmp_path):
    dataset = SUITES[name].images
    for folder in DATASETS[dataset].DOMAINS if dataset else ():
        (tmp_path / folder).mkdir()
    where = (f"data.root={tmp_path}",) if dataset else ()
    cells = all_cells(SUITES[name], 2, ("run.rounds=60", *where), None)
    assert len({cell.path(Path()) for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.config("cpu").run.rounds == 60
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)


def test_every_method_is_in_the_comparison():
    rows = [row.method for table in SUITES["comparison"].tables for row in table.rows]
    assert set(rows) == set(METHODS) - {"fedh2l-plus"}  # which has suites of its own


def test_on_a_gpu_seeds_and_splits_go_together():
    cells = all_cells(SUITES["rotated-mnist"], 5, ("run.rounds=60",), None)
    assert all(len(unit) == 1 for unit in units(cells, "cpu"))
    assert {len(unit) for unit in units(cells, "cuda")} == {10}


def test_averaging_methods_do_not_take_part_with_different_models():
    suite = SUITES["heterogeneous-mnist"]
    able = {row.method for row in suite.tables[0].rows if takes_part(row, suite.tables[0])}
    assert able == {name for name, method in METHODS.items() if method.heterogeneous} - {"fedh2l-plus"}
    tables = tables_of(suite, Path("nowhere"), 1, ("run.rounds=60",), None)
    text = Report.of(suite, tables, "caption").markdown()
    assert "| FedAvg | – | – | – |" in text


def test_a_bench_and_what_it_leaves(cli, process, tmp_path):
    done = process(*BENCH, "--seeds", "2", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    results = [json.loads(path.read_text()) for path in (tmp_path / "out/cells").glob("*/result.json")]
    assert len(results) == 8  # two methods, two splits, two seeds
    assert not list((tmp_path / "out/cells").glob("*/models"))
    assert not list((tmp_path / "out/cells").glob("*/checkpoints"))
    content = json.loads((tmp_path / "out/comparison.json").read_text())
    table = content["tables"][0]
    assert table["title"] == "α = 10 %, independent splits"
    rows = {row["method"]: row for row in table["rows"]}

    def by_seed(method: str, metric: str) -> list[float]:
        """Of the runs on independent splits, straight from their files."""
        values = {}
        for path in (tmp_path / "out/cells").glob(f"{method}-*"):
            result = json.loads((path / "result.json").read_text())
            if 'splits = "independent"' in (path / "config.toml").read_text():
                values[result["seed"]] = fmean(node[metric] for node in result["nodes"])
        return [values[seed] for seed in sorted(values)]

    for method in ("fedh2l", "independent"):
        for metric in ("ACC", "WDP", "CDP"):
            assert rows[method]["average"][metric] == pytest.approx(by_seed(method, metric))
    differences = [a - b for a, b in zip(by_seed("independent", "ACC"), by_seed("fedh2l", "ACC"), strict=True)]
    assert rows["independent"]["difference"]["ACC"]["mean"] == pytest.approx(fmean(differences))
    lines = list(csv.DictReader((tmp_path / "out/comparison.csv").open()))
    line = next(
        x for x in lines if (x["method"], x["node"], x["metric"], x["table"]) ==
        ("independent", "average", "ACC", table["title"])
    )  # fmt: skip
    assert float(line["mean"]) == pytest.approx(fmean(by_seed("independent", "ACC")))
    assert float(line["deviation"]) == pytest.approx(stdev(by_seed("independent", "ACC")))
    assert float(line["interval_low"]) < float(line["difference"]) < float(line["interval_high"])
    assert float(line["paper"]) == 68.45
    markdown = (tmp_path / "out/comparison.md").read_text()
    best = max(("fedh2l", "independent"), key=lambda m: fmean(by_seed(m, "ACC")))
    assert f"**{fmean(by_seed(best, 'ACC')):.2f} ± {stdev(by_seed(best, 'ACC')):.2f}**" in markdown
    assert "best model on pooled validation ACC, the latest of equals, evaluated every 3 rounds" in markdown
    assert "`fedh2l bench comparison --rounds 6" in markdown
    assert "| FedH2L | yes | yes | yes | yes | posteriors | 4.4 kB | 26.2 kB |" in markdown
    latex = (tmp_path / "out/comparison.tex").read_text()
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 5
    assert r"$\alpha$ = 10 \%" in latex
    assert "%," not in latex.replace(r"\%", "")

    again = cli(*BENCH, "--seeds", "2", "--out", "out")
    assert "8 of them done already" in again.stderr
    assert (tmp_path / "out/comparison.md").read_text() == markdown


def test_killed_half_way_it_does_only_the_rest(cli, tmp_path):
    long = [*BENCH, "--seeds", "2", "--out", "out", "--jobs", "1"]
    environment = {**os.environ, "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fedh2l", *long], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    )
    finished = lambda: list((tmp_path / "out/cells").glob("*/result.json"))  # noqa: E731
    deadline = time.monotonic() + 120
    while len(finished()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(2)  # its worker notices and goes
    kept = {path: path.stat().st_mtime_ns for path in finished()}
    assert 2 <= len(kept) < 8
    done = cli(*long)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} of them done already" in done.stderr
    assert len(finished()) == 8
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())


def test_out_of_time_it_stops_cleanly_and_goes_on(cli, tmp_path):
    first = cli(*BENCH, "--seeds", "1", "--out", "out", "--time-limit", "0")
    assert first.returncode == 75
    assert "The same command continues" in first.stderr
    assert (tmp_path / "out/comparison.md").exists()
    second = cli(*BENCH, "--seeds", "1", "--out", "out")
    assert second.returncode == 0, second.stderr


def test_a_run_that_fails_is_named_and_the_others_go_on(cli, tmp_path):
    """Of two methods of the user's own, one divides by zero and one diverges; FedAvg has its result all the same."""
    (tmp_path / "bad.py").write_text(
        "from fedh2l.methods.independent import Independent\n"
        "class Raises(Independent):\n    def local_step(self, node, round): 1 / 0\n"
        "class Diverges(Independent):\n    def local_step(self, node, round):\n"
        "        node.parameters.fill_(float('nan'))\n        super().local_step(node, round)\n"
    )
    arguments = ["bench", "comparison", "--rounds", "6", "--methods", "bad:Raises,bad:Diverges,fedavg", *SMALL]
    failed = cli(*arguments, "--seeds", "1", "--out", "out")
    assert failed.returncode == 1
    assert "bad:Diverges, seed 0" in failed.stderr
    assert "is not finite" in failed.stderr
    assert "ZeroDivisionError" in failed.stderr
    rows = {
        row["method"]: row for row in json.loads((tmp_path / "out/comparison.json").read_text())["tables"][0]["rows"]
    }
    assert rows["fedavg"]["seeds"] == [0]
    assert rows["bad:Raises"]["seeds"] == rows["bad:Diverges"]["seeds"] == []


def test_a_diverging_rate_is_said(cli, tmp_path):
    arguments = ["bench", "comparison", "--rounds", "6", "--methods", "fedavg,independent", *SMALL]
    failed = cli(
        *arguments, "--seeds", "1", "--out", "out", "--set", "optimizer.name=sgd", "--set", "optimizer.lr=1e30"
    )
    assert failed.returncode == 1
    assert "is not finite" in failed.stderr
    assert (tmp_path / "out/comparison.csv").exists()


def test_a_row_is_what_its_label_says_whatever_is_set(tmp_path):
    """What a suite varies cannot be set for all of it; what else is set, is."""
    suite = SUITES["rotated-mnist"]
    common = ("run.rounds=60", "data.alpha=0.2", "data.splits=independent", "run.batch_size=16", "run.batch_size=24")
    for table in suite.tables:
        for row in table.rows:
            (cell,) = cells_of(row, table, next(iter(row.choices)), 1, common)
            config = cell.config("cpu")
            assert f"{100 * config.data.alpha:g} %, {config.data.splits}" in table.title
            assert config.run.batch_size == 24
    intervals = {row.label.split(",")[0]: row for row in SUITES["interval"].tables[0].rows}
    for label in ("E = 5", "E = 10", "E = 50"):
        (cell,) = cells_of(intervals[label], SUITES["interval"].tables[0], "", 1, ("method.interval=3",))
        assert f"E = {cell.config('cpu').method.interval}" == label


def test_settings_of_one_method_can_be_changed(cli, tmp_path):
    arguments = ["bench", "comparison", "--rounds", "2", "--seeds", "1", "--methods", "fedprox", *SMALL]
    done = cli(*arguments, "--set", "method.mu=0.5", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert "mu = 0.5" in next((tmp_path / "out/cells").glob("*/config.toml")).read_text()


def test_runs_that_go_together_fail_alone(tmp_path):
    """Seeds that diverge do not take those beside them along."""

    def cell(seed: int, rate: str) -> Cell:
        changes = ("run.rounds=6", "data.per_class=20", "run.batch_size=8", "run.eval_every=3", "run.engine=batched",
                   "optimizer.name=sgd", f"optimizer.lr={rate}")  # fmt: skip
        return Cell("independent", changes, seed)

    fine, bad = [cell(0, "0.01"), cell(1, "0.01")], cell(2, "1e30")
    started = []
    place = Place(tmp_path, "cpu", lambda: started.append(1) or Callback(), lambda: False)
    assert run_cells(fine, place) == {}
    failed = run_cells([bad, cell(3, "1e30")], place)
    assert set(failed) == {bad, cell(3, "1e30")}
    assert all("is not finite" in reason for reason in failed.values())
    assert [c.result(tmp_path) is not None for c in (*fine, bad)] == [True, True, False]
    assert len(started) == 2 + 2 + 2  # together, then one by one


def test_a_cell_goes_on_from_its_checkpoint(tmp_path):
    """Stopped in the middle, it ends as one that was left alone, and does not begin again."""
    cell = Cell("fedavg", ("run.rounds=30", "data.per_class=20", "run.batch_size=8", "method.interval=8"), 0)
    rounds: list[int] = []

    class Watch(Callback):
        def on_round(self, round):
            rounds.append(round)

    with pytest.raises(Interrupted):
        run_cells([cell], Place(tmp_path / "a", "cpu", Watch, lambda: len(rounds) >= 13))
    assert run_cells([cell], Place(tmp_path / "a", "cpu", Watch, lambda: False)) == {}
    assert rounds == list(range(1, 31))
    run_cells([cell], Place(tmp_path / "b", "cpu", Callback, lambda: False))
    one, two = (cell.result(tmp_path / name) for name in "ab")
    assert {**one, "seconds": 0} == {**two, "seconds": 0}
    assert not list(tmp_path.rglob("*.ckpt"))  # nothing is extended


def test_runs_go_on_one_by_one_if_a_checkpoint_is_damaged(tmp_path):
    changes = ("run.rounds=20", "data.per_class=20", "run.batch_size=8", "run.eval_every=5", "run.checkpoint_every=5",
               "run.engine=batched")  # fmt: skip
    cells, rounds = [Cell("independent", changes, seed) for seed in range(2)], []

    class Watch(Callback):
        def on_round(self, round):
            rounds.append(round)

    with pytest.raises(Interrupted):
        run_cells(cells, Place(tmp_path, "cpu", Watch, lambda: len(rounds) >= 24))
    assert cells[0].reached(tmp_path) == cells[1].reached(tmp_path) > 0
    sorted(cells[0].path(tmp_path).glob("checkpoints/*"))[-1].write_bytes(b"damaged")
    assert run_cells(cells, Place(tmp_path, "cpu", Callback, lambda: False)) == {}
    assert [cell.result(tmp_path)["rounds"] for cell in cells] == [20, 20]


def test_what_a_killed_process_left_half_made_is_made_anew(tmp_path):
    cell = Cell("independent", ("run.rounds=2", "data.per_class=20", "run.batch_size=8"), 0)
    cell.path(tmp_path).mkdir(parents=True)
    assert run_cells([cell], Place(tmp_path, "cpu", Callback, lambda: False)) == {}
    assert cell.result(tmp_path) is not None


@pytest.mark.parametrize(("suite", "missing"), [("comparison", "scipy"), ("frontier", "matplotlib")])
def test_a_missing_extra_is_named_before_anything_runs(suite, missing, invoke, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module == missing else find_spec(module))
    code, _, said = invoke("bench", suite, "--rounds", 1)
    assert code == 2
    assert f"this needs {missing}; pip install 'fedh2l[bench]'" in " ".join(said.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablations"], "unknown suite 'ablations'. Did you mean 'ablation'?"),
        (["ablation", "--methods", "fedavgg"], "Did you mean 'fedavg'?"),
        (["ablation", "--set", "method.intervall=3"], "unknown key"),
    ],
)
def test_wrong_input_is_refused(cli, tmp_path, arguments, message):
    done = cli("bench", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_validation_data_chooses_between_settings(tmp_path):
    """Of several choices the line shows the one with the best validation ACC, whatever its test ACC is."""
    row = Row("FedAvg", "fedavg", {"K = 2": ("method.interval=2",), "K = 3": ("method.interval=3",)}, scores(1, 2, 3))
    suite = Suite("own", "", [TableSpec("table", [row])])
    for choice, validation, test in (("K = 2", 70.0, 90.0), ("K = 3", 80.0, 60.0)):
        for cell in cells_of(row, suite.tables[0], choice, 2, ()):
            node = {"name": "a", "model": "m", "ACC": test, "WDP": test, "CDP": test, "round": 1,
                    "validation": validation, "last": scores(1, 1, 1)}  # fmt: skip
            result = {"method": "fedavg", "rounds": 10, "selection": "best", "matrix": [[test]],
                      "seed": cell.seed, "nodes": [node], "average": scores(test, test, test), "last": scores(1, 1, 1),
                      "bytes": {"total": 10, "per_round": 1.0, "multicast": 5}, "conflict_rate": 0.0,
                      "seconds": 1.0}  # fmt: skip
            cell.path(tmp_path).mkdir(parents=True)
            (cell.path(tmp_path) / "result.json").write_text(json.dumps(result))
            if choice == "K = 2":  # before all choices are there, none is shown
                assert not tables_of(suite, tmp_path, 2, (), None)[0].lines[0].average
    (line,) = tables_of(suite, tmp_path, 2, (), None)[0].lines
    assert line.label == "FedAvg: K = 3"
    cells_of(row, suite.tables[0], "K = 3", 2, ())[1].path(tmp_path).joinpath("result.json").unlink()
    assert not tables_of(suite, tmp_path, 2, (), None)[0].lines[0].average  # on other seeds they do not compare
    assert line.average["ACC"].values == (60.0, 60.0)


def test_equal_settings_are_one_cell():
    table = TableSpec("t", [])
    written = Row.of("a", "fedprox", "method.interval=10", "method.mu=0.01")
    default = Row.of("b", "fedprox")
    one, two = (cells_of(row, table, "", 1, ())[0] for row in (written, default))
    assert one.path(Path()) == two.path(Path())
    assert load_config(None, one.changes, one.method)[0].method == load_config(None, (), two.method)[0].method
