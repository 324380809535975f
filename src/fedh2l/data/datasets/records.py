"""Records of a table: read from CSV and Parquet files, and converted to inputs of models."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fedh2l.errors import ConfigError, DataError
from fedh2l.files import UnreadableError, check_regular

Cell = str | None
"""Content of a cell, or None if it is empty."""
MOST_CELLS, MOST_BYTES = 2**24, 2**29
"""Largest Parquet table. A small file may hold a very large one."""


@dataclass(frozen=True)
class Records:
    """Rows of a table, by column. If a column is absent, its value is missing in all rows."""

    labels: list[int]
    numbers: dict[str, list[float | None]]
    categories: dict[str, list[Cell]]
    columns: tuple[str, ...] = ()
    """All columns of the file."""

    def take(self, rows: Sequence[int]) -> Records:
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


def same_category(cell: str) -> str:
    """Return a normal form of a category: 1, 1.0 and 01 are the same, because file formats differ."""
    try:
        number = float(cell)
    except ValueError:
        return cell
    return f"{number:g}" if math.isfinite(number) else cell


def numbers_of(
    path: Path, column: str, cells: Sequence[Cell], gone: frozenset[str], no_zero: bool
) -> list[float | None]:
    """Return the numbers of a column, with None for missing ones: those in `gone`, and 0 with `no_zero`."""
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


def read_cells(path: Path, header: Sequence[str]) -> dict[str, list[Cell]]:
    """Return the cells of a file by column. `header` names the columns of a CSV file without a header line."""
    return _parquet(path) if path.suffix.lower() in (".parquet", ".pq") else _csv(path, header)


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
