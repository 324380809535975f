"""Tables: one file of records per domain, with numeric and categorical columns. Values may be missing.

All nodes must agree on the scale of a column and on its categories. Both come from public data alone. Missing values in
private records are imputed from the node's own private records, and in public records from public records. So no
statistic of one node's private data reaches another node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator

from fedh2l.data.base import Dataset, Share, WholeDomain
from fedh2l.data.datasets.records import Cell, Records, Schema, numbers_of, read_cells, same_category
from fedh2l.data.domain import SPLITS, UNKNOWN, Domain, Samples
from fedh2l.data.splits import Shares, stratified_split
from fedh2l.errors import DataError, did_you_mean


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
        return "mlp"

    def origin(self, domain: str) -> str:
        return str((Path(self.root) / self.files.get(domain, "")).resolve())

    def domain_names(self, seed: int) -> list[str]:
        return list(self.files)

    def domains(self, seed: int) -> list[Domain]:
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
        path = Path(self.root) / self.files[name]
        cells = read_cells(path, self.header)
        gone = frozenset(self.missing)
        labels = self._labels(path, cells) if labelled else [UNKNOWN] * max(map(len, cells.values()), default=0)
        if not labels:
            raise DataError(f"'{path}' has no records")
        numbers = {
            column: numbers_of(path, column, cells[column], gone, column in self.zero_is_missing)
            for column in self.numeric
            if column in cells
        }
        categories = {
            column: [None if cell is None or cell in gone else same_category(cell) for cell in cells[column]]
            for column in self.categorical
            if column in cells
        }
        return Records(labels, numbers, categories, tuple(cells))

    def _labels(self, path: Path, cells: Mapping[str, Sequence[Cell]]) -> list[int]:
        if self.label not in cells:
            raise DataError(f"'{path}' has no column '{self.label}', which data.label names")
        places = {
            same_category(raw): place
            for place, each in enumerate(self.classes)
            for raw in self.values.get(each, [each])
        }
        labels = []
        for row, raw in enumerate(cells[self.label], 1):
            if raw is None or same_category(raw) not in places:
                raise DataError(f"'{path}', record {row}: label '{raw}' is not one of {', '.join(places)}")
            labels.append(places[same_category(raw)])
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
