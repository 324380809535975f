"""Records of several organisations: read as they are, scaled by what is public, and by nothing private of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from fedh2l.data.datasets.table import Table
from fedh2l.data.splits import Shares, stratified_split
from fedh2l.errors import ConfigError, DataError
from fedh2l.experiment.config import load_config
from records import COLUMNS, records, write

EXAMPLE = ROOT / "examples" / "hospitals"


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path / "north.csv", records(90, 0, 1))
    write(tmp_path / "south.csv", records(60, 20, 2))
    return tmp_path


def table(folder: Path, **changes) -> Table:
    return Table(
        **{
            "files": {"north": "north.csv", "south": "south.csv"}, "root": str(folder), "label": "ill",
            "classes": ["no", "yes"], "numeric": ["age", "dose"], "categorical": ["ward"], **changes,
        }
    )  # fmt: skip


def test_what_comes_of_it(folder):
    north, south = table(folder).domains(0)
    assert (north.name, south.name, north.classes) == ("north", "south", ("no", "yes"))
    assert [len(split) for split in (north.private, north.public, north.validation, north.test)] == [58, 9, 9, 14]
    assert north.private.inputs.shape[1:] == (2 + 3,)
    assert north.preprocessing == south.preprocessing
    public = torch.cat([north.public.inputs, south.public.inputs])[:, 0]
    torch.testing.assert_close((public.mean(), public.std(correction=0)), (torch.tensor(0.0), torch.tensor(1.0)))
    assert set(north.private.inputs[:, 2:].sum(1).tolist()) == {1.0}
    assert int(north.private.labels.sum()) == 19


def test_nothing_private_of_another_has_a_part_in_it(folder):
    """Other private records in the south, and the north and everything public stay as they are."""
    before = table(folder).domains(0)
    raw = records(60, 20, 2)
    labels = [row[3] == "yes" for row in raw]
    private, *_ = stratified_split(list(map(int, labels)), Shares(), 0, "south")
    for row in private:
        raw[row][0], raw[row][1], raw[row][2] = "9999", "-5", "Z"
    write(folder / "south.csv", raw)
    after = table(folder).domains(0)
    assert after[0].digest == before[0].digest
    assert torch.equal(after[1].public.inputs, before[1].public.inputs)
    assert not torch.equal(after[1].private.inputs, before[1].private.inputs)


def test_what_is_missing(folder):
    rows = [["50", "0", "A", "no"], ["60", "", "", "yes"]] * 30
    write(folder / "south.csv", rows)
    _, south = table(folder, zero_is_missing=["dose"], indicators=True, missing=["", "?"]).domains(0)
    assert south.private.inputs.shape[1] == 2 + 3 + 2
    assert set(south.private.inputs[:, 1].tolist()) == {0.0}  # of no record is the dose known: the public mean
    assert set(south.private.inputs[:, 6].tolist()) == {1.0}
    assert set(south.private.inputs[:, 2:5].sum(1).tolist()) == {0.0, 1.0}  # no ward is none of them
    rows = [["50", str(100 + 2 * row), "A", "no"] for row in range(40)] + [["60", "?", "A", "yes"]] * 20
    write(folder / "south.csv", rows)
    north, south = table(folder).domains(0)
    known = south.private.inputs[south.private.labels == 0][:, 1]
    imputed = set(south.private.inputs[south.private.labels == 1][:, 1].tolist())
    assert len(imputed) == 1
    torch.testing.assert_close(torch.tensor(imputed.pop()), known.quantile(0.5))
    assert set(south.public.inputs[south.public.labels == 1][:, 1].tolist()) == {0.0}  # of its own, by what is public
    assert torch.isfinite(north.private.inputs).all()


def test_a_column_that_one_lacks_and_numbers_written_otherwise(folder):
    rows = [[row[0], {"A": "1.0", "B": "2", "C": "03"}[row[2]], row[3]] for row in records(60, 0, 3)]
    write(folder / "south.csv", rows, ["age", "ward", "ill"])
    rows = [[row[0], row[1], {"A": "1", "B": "2.0", "C": "3"}[row[2]], row[3]] for row in records(60, 0, 4)]
    write(folder / "north.csv", rows)
    _, south = table(folder).domains(0)
    assert south.preprocessing["categorical"] == [["ward", ["1", "2", "3"]]]
    assert set(south.test.inputs[:, 1].tolist()) == {0.0}


def test_a_file_without_names_and_classes_of_several_values(folder):
    for name, seed in (("north", 1), ("south", 2)):
        rows = records(60, 0, seed)
        write(folder / f"{name}.csv", [[*row[:3], str(number % 3)] for number, row in enumerate(rows)], None)
    made = table(folder, header=COLUMNS, values={"no": ["0"], "yes": ["1", "2"]})
    assert int(made.domains(0)[0].private.labels.sum()) == 26


def test_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = records(60, 0, 1)
    columns = {
        "age": [float(row[0]) for row in rows],
        "dose": [None if row[1] == "?" else int(row[1]) for row in rows],
        "ward": [row[2] for row in rows],
        "ill": [row[3] for row in rows],
    }
    parquet.write_table(pyarrow.table(columns), folder / "north.parquet")
    write(folder / "north.csv", rows)
    both = [table(folder, files={"north": file, "south": "south.csv"}) for file in ("north.csv", "north.parquet")]
    assert both[0].domains(0)[0].digest == both[1].domains(0)[0].digest
    (folder / "north.parquet").write_text("none")
    with pytest.raises(DataError, match="cannot read"):
        both[1].domains(0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"files": {"north": "north.csv", "south": "gone.csv"}}, "cannot read '.*gone.csv'"),
        ({"label": "sick"}, "has no column 'sick', which data.label names"),
        ({"classes": ["no", "perhaps"]}, r"record \d+: label 'yes' is not one of no, perhaps"),
        ({"numeric": ["age", "does"]}, "no file has a column 'does'. Did you mean 'dose'"),
        ({"numeric": ["age", "dose", "ward"], "categorical": []}, "record 1: '[ABC]' in column 'ward' is not a number"),
        ({"missing": []}, "name it in data.missing"),
        ({"header": ["a", "b"]}, "it has 4 cells, where there are 2 columns"),
    ],
)
def test_what_is_wrong_is_named(folder, changes, why):
    with pytest.raises(DataError, match=why):
        table(folder, **changes).domains(0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"numeric": [], "categorical": []}, "name at least one column"),
        ({"numeric": ["age", "age"]}, "'age' is named twice"),
        ({"numeric": ["ill"]}, "'ill' is named twice"),
        ({"zero_is_missing": ["ward"]}, "'ward' is not in data.numeric"),
        ({"values": {"maybe": ["1"]}}, "'maybe' is not one of data.classes"),
        ({"files": {}}, "files"),
    ],
)
def test_settings_that_do_not_fit(folder, changes, why):
    with pytest.raises(ConfigError, match=why):
        table(folder, **changes)


def test_no_public_value(folder):
    rows = [["50", "", "", "no"], ["60", "", "", "yes"]] * 30
    for name in ("north", "south"):
        write(folder / f"{name}.csv", rows)
    with pytest.raises(DataError, match="no public record has a value of 'dose', so nodes cannot agree on its scale"):
        table(folder).domains(0)
    with pytest.raises(DataError, match="no public record has a value of 'ward'"):
        table(folder, numeric=["age"]).domains(0)


def hospitals(folder: Path) -> None:
    """Four files like those of the example, of made-up patients."""
    config, _ = load_config(EXAMPLE / "hospitals.toml")
    for place, file in enumerate(config.data.files.values()):
        rows = []
        for age, dose, ward, ill in records(80, 5 * place, place):
            kind, num = "ABC".find(ward), "2" if ill == "yes" else "0"
            rows.append(
                [age, "1", kind, dose, dose, "1", "0", "150", "1", "1.5", "2", "?" if place else "1", kind, num]
            )
        write(folder / file, rows, None)


def test_the_hospitals(cli, tmp_path):
    heart = tmp_path / "heart"
    heart.mkdir()
    hospitals(heart)
    ran = cli("run", EXAMPLE / "hospitals.toml", "--rounds", 20, "--set", f"data.root={heart}", "--out", "run")
    assert ran.returncode == 0, ran.stderr
    assert "switzerland" in ran.stderr
    script = [sys.executable, EXAMPLE / "compare.py", "--root", heart, "--splits", "2", "--rounds", "20"]
    told = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    measures = [line for line in told[1:] if not line.startswith(" ")]
    assert [line.split(",")[0] for line in measures] == ["own patients", "others' patients", "others' patients"]
