"""Tables: one file of records for each domain, with numeric and categorical columns, some of them missing.

What all nodes must agree on, how a column is scaled and which categories it has, follows from public data alone. What
is missing in a node's own records is imputed from its own private ones; what is missing in public records, from public
ones. So no number of one node's private data has a part in what another node sees.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Annotated, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedh2l.data.base import Dataset
from fedh2l.data.splits import Shares, stratified_split
from fedh2l.domain import SPLITS, Domain, Samples
from fedh2l.errors import ConfigError, DataError, did_you_mean

Share = Annotated[float, Field(gt=0, lt=1)]
Cell = str | None
"""What a file says, or None if it says nothing."""
PARQUET = (".parquet", ".pq")


class Table(Dataset):
    """Records of several organisations: one CSV or Parquet file for each, a column of labels."""

    name: ClassVar[str] = "table"

    files: dict[str, str] = Field(min_length=2, description="the file of each domain, CSV or Parquet, by its name")
    root: str = Field(".", description="folder that the files are in")
    label: str = Field(description="the column of the label")
    classes: list[str] = Field(min_length=2, description="names of the classes, in order")
    values: dict[str, list[str]] = Field(
        {}, description="for each class, what stands for it in the label column; its name, if it is not here"
    )
    numeric: list[str] = Field([], description="columns of numbers")
    categorical: list[str] = Field([], description="columns of categories, each an input of its own")
    header: list[str] = Field([], description="names of the columns, for CSV files without a first line of them")
    missing: list[str] = Field(["", "?", "NA", "nan"], description="what stands for a value that is missing")
    zero_is_missing: list[str] = Field([], description="numeric columns in which 0 stands for missing too")
    indicators: bool = Field(False, description="give each numeric column a second input: 1 where it is missing")
    alpha: Share = Field(0.10, description="share of each domain that is public seed data (α)")
    validation: Share = Field(0.10, description="share of each domain that is validation data")
    test: Share = Field(0.15, description="share of each domain that is test data")

    @model_validator(mode="after")
    def _fits(self) -> Table:
        columns = [*self.numeric, *self.categorical]
        if not columns:
            raise ValueError("name at least one column, in data.numeric or data.categorical")
        twice = [column for column in (*columns, self.label) if (*columns, self.label).count(column) > 1]
        if twice:
            raise ValueError(f"column '{twice[0]}' is named twice")
        strange = [column for column in self.zero_is_missing if column not in self.numeric]
        if strange:
            raise ValueError(f"zero_is_missing: '{strange[0]}' is not in data.numeric")
        unknown = [name for name in self.values if name not in self.classes]
        if unknown:
            raise ValueError(f"values: '{unknown[0]}' is not one of data.classes")
        return self

    def domain_names(self, seed: int) -> list[str]:
        """As `files` names them."""
        return list(self.files)

    def domains(self, seed: int) -> list[Domain]:
        """One for each file, split by `seed`."""
        tables = {name: self._read(name) for name in self.files}
        self._check_columns(tables)
        shares = Shares(self.alpha, self.validation, self.test)
        split = {
            name: dict(zip(SPLITS, stratified_split(table.labels, shares, seed, name), strict=True))
            for name, table in tables.items()
        }
        schema = self._schema([table.take(split[name]["public"]) for name, table in tables.items()])
        result = []
        for name, table in tables.items():
            own = schema.typical(table.take(split[name]["private"]))
            private, public, validation, test = (
                Samples(
                    schema.inputs(table.take(split[name][part]), {} if part == "public" else own),
                    torch.tensor([table.labels[row] for row in split[name][part]]),
                )
                for part in SPLITS
            )
            about = schema.describe()
            result.append(Domain(name, tuple(self.classes), private, public, validation, test, about))
        return result

    def _read(self, name: str) -> Records:
        path = Path(self.root) / self.files[name]
        cells = _parquet(path) if path.suffix.lower() in PARQUET else _csv(path, self.header)
        if self.label not in cells:
            raise DataError(f"'{path}' has no column '{self.label}', which data.label names")
        gone = frozenset(self.missing)
        places = {_same(raw): place for place, each in enumerate(self.classes) for raw in self.values.get(each, [each])}
        labels = []
        for row, raw in enumerate(cells[self.label], 1):
            if raw is None or _same(raw) not in places:
                raise DataError(f"'{path}', record {row}: label '{raw}' is not one of {', '.join(places)}")
            labels.append(places[_same(raw)])
        if not labels:
            raise DataError(f"'{path}' has no records")
        numbers = {
            column: _numbers(path, column, cells[column], gone, column in self.zero_is_missing)
            for column in self.numeric
            if column in cells
        }
        categories = {
            column: [None if cell is None or cell in gone else _same(cell) for cell in cells[column]]
            for column in self.categorical
            if column in cells
        }
        return Records(labels, numbers, categories, tuple(cells))

    def _check_columns(self, tables: Mapping[str, Records]) -> None:
        """A column may be missing from some files, but not from all."""
        known = {column for table in tables.values() for column in table.columns}
        for column in (*self.numeric, *self.categorical):
            if column not in known:
                raise DataError(f"no file has a column '{column}'.{did_you_mean(column, sorted(known))}")

    def _schema(self, public: Sequence[Records]) -> Schema:
        scales: dict[str, tuple[float, float]] = {}
        for column in self.numeric:
            seen = [n for table in public for n in table.numbers.get(column, ()) if n is not None]
            if not seen:
                raise DataError(
                    f"no public record has a value of '{column}', so nodes cannot agree on its scale; leave it out, or "
                    f"raise data.alpha ({self.alpha:g})"
                )
            scales[column] = (fmean(seen), pstdev(seen) or 1.0)
        categories = {
            column: sorted({c for table in public for c in table.categories.get(column, ()) if c is not None})
            for column in self.categorical
        }
        empty = [column for column, found in categories.items() if not found]
        if empty:
            raise DataError(f"no public record has a value of '{empty[0]}'; leave it out, or raise data.alpha")
        return Schema(scales, categories, self.indicators)


@dataclass(frozen=True)
class Records:
    """Rows of a table, column by column; a column that is not there is missing in all of them."""

    labels: list[int]
    numbers: dict[str, list[float | None]]
    categories: dict[str, list[Cell]]
    columns: tuple[str, ...] = ()
    """All that there are in a file."""

    def take(self, rows: Sequence[int]) -> Records:
        """Some of them."""
        return Records(
            [self.labels[row] for row in rows],
            {column: [cells[row] for row in rows] for column, cells in self.numbers.items()},
            {column: [cells[row] for row in rows] for column, cells in self.categories.items()},
        )


@dataclass(frozen=True)
class Schema:
    """What a record becomes: scaled numbers, then one input for each category, then what is missing."""

    scales: dict[str, tuple[float, float]]
    """By numeric column, mean and standard deviation."""
    categories: dict[str, list[str]]
    indicators: bool

    def typical(self, records: Records) -> dict[str, float]:
        """The median of each numeric column, where there is one."""
        seen = {column: [n for n in records.numbers.get(column, ()) if n is not None] for column in self.scales}
        return {column: median(values) for column, values in seen.items() if values}

    def inputs(self, records: Records, typical: Mapping[str, float]) -> Tensor:
        """`(records, inputs)`; what is missing is `typical`, or else the public mean, and of a category none."""
        rows, columns = len(records.labels), []
        absent: list[list[float]] = []
        for column, (mean, deviation) in self.scales.items():
            cells = records.numbers.get(column, [None] * rows)
            usual = typical.get(column, mean)
            columns.append([((usual if cell is None else cell) - mean) / deviation for cell in cells])
            absent.append([float(cell is None) for cell in cells])
        for column, known in self.categories.items():
            cells_of = records.categories.get(column, [None] * rows)
            columns += [[float(cell == category) for cell in cells_of] for category in known]
        if self.indicators:
            columns += absent
        return torch.tensor(columns, dtype=torch.float32).T.contiguous()

    def describe(self) -> dict[str, object]:
        """What is saved with a model."""
        return {
            "kind": "table",
            "numeric": [[column, mean, deviation] for column, (mean, deviation) in self.scales.items()],
            "categorical": [[column, known] for column, known in self.categories.items()],
            "indicators": self.indicators,
        }


def _same(cell: str) -> str:
    """What a category is known by: 1, 1.0 and 01 are one, whatever a file makes of it."""
    try:
        number = float(cell)
    except ValueError:
        return cell
    return f"{number:g}" if math.isfinite(number) else cell


def _numbers(path: Path, column: str, cells: Sequence[Cell], gone: frozenset[str], no_zero: bool) -> list[float | None]:
    found: list[float | None] = []
    for row, cell in enumerate(cells, 1):
        if cell is None or cell in gone:
            found.append(None)
            continue
        try:
            number = float(cell)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise DataError(
                f"'{path}', record {row}: '{cell}' in column '{column}' is not a number; if it stands for a missing "
                "one, name it in data.missing"
            )
        found.append(None if no_zero and number == 0 else number)
    return found


def _csv(path: Path, header: Sequence[str]) -> dict[str, list[Cell]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    names = list(header) or (rows.pop(0) if rows else [])
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise DataError(f"'{path}', record {number}: it has {len(row)} cells, where there are {len(names)} columns")
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _parquet(path: Path) -> dict[str, list[Cell]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(f"'{path}': Parquet files need pyarrow; pip install 'fedh2l[table]'") from None
    try:
        read = parquet.read_table(path).to_pydict()
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    return {str(name): [_cell(value) for value in cells] for name, cells in read.items()}


def _cell(value: object) -> Cell:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return str(value)
