"""Tables: one file of records per domain, with numeric and categorical columns. Values may be missing.

All nodes must agree on the scale of a column and on its categories. Both come from public data alone. Missing values in
private records are imputed from the node's own private records, and in public records from public records. So no
statistic of one node's private data reaches another node.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedh2l.data.base import Dataset, WholeDomain
from fedh2l.data.domain import SPLITS, UNKNOWN, Domain, Samples
from fedh2l.data.splits import Shares, stratified_split
from fedh2l.errors import ConfigError, DataError, did_you_mean
from fedh2l.files import UnreadableError, check_regular

Share = Annotated[float, Field(gt=0, lt=1)]
Cell = str | None
"""Content of a cell, or None if it is empty."""
PARQUET = (".parquet", ".pq")
MOST_CELLS, MOST_BYTES = 2**24, 2**29
"""Largest Parquet table. A small file may hold a very large one."""


class Table(Dataset):
    """Records of several organisations: one CSV or Parquet file per organisation, with a label column."""

    name: ClassVar[str] = "table"

    files: dict[str, str] = Field(min_length=1, description="CSV or Parquet file of each domain, by the domain's name.")
    root: str = Field(".", description="Folder of the files.")
    label: str = Field(description="Column of the label.")
    classes: list[str] = Field(min_length=2, description="Names of the classes, in order.")
    values: dict[str, list[str]] = Field(
        {}, description="Values of the label column for each class. By default the class name."
    )
    numeric: list[str] = Field([], description="Numeric columns.")
    categorical: list[str] = Field([], description="Categorical columns. Each category becomes one input.")
    header: list[str] = Field([], description="Column names, for CSV files without a header line.")
    missing: list[str] = Field(["", "?", "NA", "nan"], description="Values that mean missing.")
    zero_is_missing: list[str] = Field([], description="Numeric columns where 0 also means missing.")
    indicators: bool = Field(False, description="Add an input for each numeric column: 1 where the value is missing.")
    alpha: Share = Field(0.10, description="Share of each domain that is public (α).")
    validation: Share = Field(0.10, description="Share of each domain for validation.")
    test: Share = Field(0.15, description="Share of each domain for testing.")

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

    def suitable_model(self, seed: int) -> str:
        """Return a model for rows of numbers."""
        return "mlp"

    def origin(self, domain: str) -> str:
        """Return the path of the domain's file."""
        return str((Path(self.root) / self.files.get(domain, "")).resolve())

    def domain_names(self, seed: int) -> list[str]:
        """Return the names of the domains, in the order of `files`."""
        return list(self.files)

    def domains(self, seed: int) -> list[Domain]:
        """Return one domain per file, split by `seed`."""
        tables = {name: self.read_file(name) for name in self.files}
        self._check_columns(tables)
        shares = Shares(self.alpha, self.validation, self.test)
        split = {
            name: dict(zip(SPLITS, stratified_split(table.labels, shares, seed, name), strict=True))
            for name, table in tables.items()
        }
        schema = self.schema_of([table.take(split[name]["public"]) for name, table in tables.items()])
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

    def whole(self, seed: int, preprocessing: Mapping[str, Any]) -> list[WholeDomain]:
        """Return all records of each file, scaled as the model's training data.

        A missing number becomes the median of its column in the file.
        """
        tables = {name: self.read_file(name) for name in self.files}
        self._check_columns(tables)
        schema, result = Schema.of(preprocessing), []
        trained = [*schema.scales, *schema.categories]
        if trained != [*self.numeric, *self.categorical]:
            raise DataError(f"the model was trained on other columns: {', '.join(trained)}")
        for name, table in tables.items():
            samples = Samples(schema.inputs(table, schema.typical(table)), torch.tensor(table.labels))
            result.append(WholeDomain(name, tuple(self.classes), samples, schema.describe()))
        return result

    def read_file(self, name: str, labelled: bool = True) -> Records:
        """Return the records of a domain's file."""
        path = Path(self.root) / self.files[name]
        cells = _parquet(path) if path.suffix.lower() in PARQUET else _csv(path, self.header)
        gone = frozenset(self.missing)
        labels = self._labels(path, cells) if labelled else [UNKNOWN] * max(map(len, cells.values()), default=0)
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

    def _labels(self, path: Path, cells: Mapping[str, Sequence[Cell]]) -> list[int]:
        if self.label not in cells:
            raise DataError(f"'{path}' has no column '{self.label}', which data.label names")
        places = {_same(raw): place for place, each in enumerate(self.classes) for raw in self.values.get(each, [each])}
        labels = []
        for row, raw in enumerate(cells[self.label], 1):
            if raw is None or _same(raw) not in places:
                raise DataError(f"'{path}', record {row}: label '{raw}' is not one of {', '.join(places)}")
            labels.append(places[_same(raw)])
        return labels

    def _check_columns(self, tables: Mapping[str, Records]) -> None:
        """Raise an error for a column that all files lack. Some files may lack it."""
        known = {column for table in tables.values() for column in table.columns}
        for column in (*self.numeric, *self.categorical):
            if column not in known:
                raise DataError(f"no file has a column '{column}'.{did_you_mean(column, sorted(known))}")

    def schema_of(self, public: Sequence[Records]) -> Schema:
        """Return the scale and the categories of each column, from public records alone."""
        scales: dict[str, tuple[float, float]] = {}
        for column in self.numeric:
            seen = [n for table in public for n in table.numbers.get(column, ()) if n is not None]
            if not seen:
                raise DataError(
                    f"no public record has a value of '{column}', so nodes cannot agree on its scale; leave it out, or "
                    f"raise data.alpha ({self.alpha:g})"
                )
            scales[column] = (fmean(seen), pstdev(seen) or 1.0)  # a constant column has no deviation
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
    """Rows of a table, by column. If a column is absent, its value is missing in all rows."""

    labels: list[int]
    numbers: dict[str, list[float | None]]
    categories: dict[str, list[Cell]]
    columns: tuple[str, ...] = ()
    """All columns of the file."""

    def take(self, rows: Sequence[int]) -> Records:
        """Return some of the rows."""
        return Records(
            [self.labels[row] for row in rows],
            {column: [cells[row] for row in rows] for column, cells in self.numbers.items()},
            {column: [cells[row] for row in rows] for column, cells in self.categories.items()},
        )


@dataclass(frozen=True)
class Schema:
    """Conversion of a record to inputs: scaled numbers, one input per category, then indicators of missing values."""

    scales: dict[str, tuple[float, float]]
    """Mean and standard deviation by numeric column."""
    categories: dict[str, list[str]]
    indicators: bool
    units: Mapping[str, str] = field(default_factory=dict)
    """Units by column, if stated."""

    @staticmethod
    def of(preprocessing: Mapping[str, Any]) -> Schema:
        """Return the schema from a model's preprocessing, in the format of `describe`."""
        try:
            scales = {column: (mean, deviation) for column, mean, deviation in preprocessing["numeric"]}
            categories = {column: list(known) for column, known in preprocessing["categorical"]}
            units = dict(preprocessing.get("units", {}))
            return Schema(scales, categories, bool(preprocessing["indicators"]), units)
        except (KeyError, TypeError, ValueError):
            raise DataError("the model was not trained on tables") from None

    def typical(self, records: Records) -> dict[str, float]:
        """Return the median of each numeric column that has values."""
        seen = {column: [n for n in records.numbers.get(column, ()) if n is not None] for column in self.scales}
        return {column: median(values) for column, values in seen.items() if values}

    def inputs(self, records: Records, typical: Mapping[str, float]) -> Tensor:
        """Return inputs `(records, inputs)`.

        A missing number becomes its value in `typical`, else the public mean. A missing category sets no input.
        """
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
        """Return the preprocessing to save with a model."""
        return {
            "kind": "table",
            "numeric": [[column, mean, deviation] for column, (mean, deviation) in self.scales.items()],
            "categorical": [[column, known] for column, known in self.categories.items()],
            "indicators": self.indicators,
            **({"units": dict(self.units)} if self.units else {}),
        }


def _same(cell: str) -> str:
    """Return a normal form of a category: 1, 1.0 and 01 are the same, because file formats differ."""
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
        check_regular(path)
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row]
    except (OSError, UnreadableError, UnicodeDecodeError, csv.Error) as error:
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
        check_regular(path)
        with parquet.ParquetFile(path) as file:
            rows, columns = file.metadata.num_rows, file.metadata.num_columns
            if rows * columns > MOST_CELLS:
                raise DataError(f"'{path}' has {rows:,} records of {columns:,} cells; at most {MOST_CELLS:,} are read")
            read: dict[str, list[Cell]] = {name: [] for name in file.schema_arrow.names}
            size = 0
            for batch in file.iter_batches(batch_size=256):
                size += batch.nbytes
                for name, values in batch.to_pydict().items():
                    cells = [_cell(value) for value in values]
                    size += sum(len(cell) for cell in cells if cell is not None)
                    read[name] += cells
                if size > MOST_BYTES:
                    raise DataError(f"'{path}' has more than {MOST_BYTES:,} bytes when it is unpacked")
    except (OSError, UnreadableError, ArrowException) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    return read


def _cell(value: object) -> Cell:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return str(value)
