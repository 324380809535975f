"""Every file that is written as TOML reads back equal."""

from __future__ import annotations

import tomllib
from datetime import date, datetime, time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fedh2l
from conftest import MLPS, TINY, blobs, tiny_net
from fedh2l.api import _describe
from fedh2l.experiment.config import load_config
from fedh2l.experiment.experiment import Experiment
from fedh2l.experiment.settings import RunSettings
from fedh2l.experiment.toml import to_toml, toml_text, toml_value
from fedh2l.experiment.values import parse_value
from fedh2l.methods.fedh2l import FedH2L
from fedh2l.methods.registry import METHODS
from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.peer.membership.shares import Reveal, seed_of
from fedh2l.training.optimizers import OptimizerSettings

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
PLAIN = TEXT | NUMBERS | st.booleans() | st.dates() | st.times() | st.datetimes()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
TABLES = st.dictionaries(TEXT, VALUES, max_size=4)


@given(VALUES)
@example(["\x00\x7f\u2028\"'\\\n\r\t", 1e-05, 1e16, float("inf"), -0.0, {"a b": {"": [{}]}}])
@example([date(2024, 1, 2), time(3, 4), datetime(2024, 1, 2, 3, 4)])
def test_a_value_reads_back(value):
    text = toml_value(value)
    assert "\n" not in text
    assert tomllib.loads(f"value = {text}")["value"] == parse_value(text) == value


@given(st.dictionaries(TEXT, PLAIN, max_size=3), TABLES, st.lists(TABLES, min_size=1, max_size=3))
def test_a_file_reads_back(single, table, tables):
    values = {f"{place} {key}": value for place, (key, value) in enumerate(single.items())}
    values |= {"a table": table, "empty": {}, "tables": tables}
    assert tomllib.loads(toml_text(values)) == values


def test_what_has_no_value_is_left_out():
    assert toml_text({"a": None, "b": {"c": None, "d": {"e": None, "f": 1}}}) == "[b]\nd = {f = 1}\n"


def test_the_layout():
    text = toml_text({"seed": 3, "run": {"lr": 1e-05}, "empty": {}, "nodes": [{"name": "a"}, {"args": {"n": [8]}}]})
    assert text == (
        'seed = 3\n\n[run]\nlr = 1e-05\n\n[empty]\n\n[[nodes]]\nname = "a"\n\n[[nodes]]\nargs = {n = [8]}\n'
    )


@pytest.mark.parametrize("comments", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_config_reads_back(method, comments, tmp_path):
    changes = [
        "nodes.0.model_args.hidden=[12]",
        "nodes.1.resources.num_cpus=0.5",
        "optimizer.lr=1e-5",
        "run.engine=ray",
    ]
    config, _ = load_config(None, changes, method)
    text = to_toml(config, comments)
    (tmp_path / "own.toml").write_text(text)
    again, notices = load_config(tmp_path / "own.toml")
    assert again == config
    assert notices == []
    assert to_toml(again, comments) == text
    assert comments == ("#" in text)


def test_comments_fit_in_a_line():
    lines = to_toml(load_config()[0], comments=True).splitlines()
    assert max(map(len, lines)) <= 100
    assert "# weights =" in lines
    assert lines.count("[[nodes]]") == 4
    assert lines.count("# weights =") == 1  # of the first node alone


def test_a_roster_with_shares_reads_back(tmp_path):
    shares = {"a": "12" * 32, "b": "34" * 32}
    members = [{"name": name, "address": f"{name}.example:7443"} for name in shares]
    revealed = [
        Reveal(name=name, share=each, seedset="0" * 64, key="ab", signature="cd") for name, each in shares.items()
    ]
    given = [each.model_dump() for each in revealed]
    raw = {"federation": 'z "ü"\\', "rounds": 5, "seedset": "0" * 64, "members": members, "seed": seed_of(shares),
           "shares": given, "method": {"name": "fedh2l-plus"}, "views": {"flip": 0.5}}  # fmt: skip
    charter = RosterFile.read(raw)
    (tmp_path / "roster.toml").write_text(charter.to_toml(), encoding="utf-8")
    assert RosterFile.load(tmp_path / "roster.toml") == charter


def describe(**arguments: object) -> str:
    domains = [blobs("x"), blobs("y")]
    nodes = [fedh2l.Node("x", tiny_net(), domains[0]), fedh2l.Node("y", "mlp", domains[1], arguments)]
    return _describe(Experiment(nodes, FedH2L(), RunSettings(), OptimizerSettings()))


def test_the_description_of_a_python_run_reads_back():
    read = tomllib.loads(describe(hidden=[8]))
    assert RunSettings.read(read["run"], "run") == RunSettings()
    assert OptimizerSettings.read(read["optimizer"], "optimizer") == OptimizerSettings()
    assert FedH2L.read({key: value for key, value in read["method"].items() if key != "name"}, "method") == FedH2L()
    assert read["nodes"][1] == {"name": "y", "model": "mlp", "model_args": {"hidden": [8]}}


@pytest.mark.parametrize("value", [{1, 2}, [1, None]])
def test_arguments_that_no_file_can_hold_are_refused(value):
    with pytest.raises(fedh2l.FedH2LError, match="node 'y': model_args cannot be saved with the run"):
        describe(hidden=value)


def test_a_peers_file_reads_back(tmp_path):
    pytest.importorskip("cryptography")
    from fedh2l.peer.rehearsal import PEER, Rehearsal

    config, _ = load_config(None, [*TINY, *MLPS, "run.rounds=2"])
    folder: Path = tmp_path / "rehearsal"
    Rehearsal(config, config.experiment(), folder)
    read = tomllib.loads((folder / "M20" / PEER).read_text())
    sections = config.sections()
    assert read["peer"]["model_args"] == {"hidden": [12]}
    assert "weights" not in read["peer"]
    assert read["data"] == {key: value for key, value in sections["data"].items() if value is not None}
    assert read["optimizer"] == {key: value for key, value in sections["optimizer"].items() if value is not None}
    assert RosterFile.load(folder / "roster.toml").method == config.method
