"""Public records of a seed set: members contribute raw values, which share one scale after the merge.

A part holds raw records. When the parts are merged, the scales of the numbers and the known categories are computed
from all public records. Members put their own records on the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedh2l.data.datasets.records import Records, Schema
from fedh2l.data.datasets.table import Table
from fedh2l.data.domain import Samples
from fedh2l.errors import DataError

KIND = "records"
"""Kind of a part's schema. A merged seed set has the kind `table`."""


def raw_schema(table: Table, records: Records, units: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of the columns of a part."""
    return {
        "kind": KIND,
        "numeric": list(table.numeric),
        "categorical": {column: _known(records, column) for column in table.categorical},
        "indicators": table.indicators,
        "units": dict(units),
    }


def raw_samples(records: Records, schema: Mapping[str, Any]) -> Samples:
    """Encode records as numbers, followed by indices into the categories of the schema. Missing values are NaN."""
    columns = [_numbers(records.numbers.get(name), len(records.labels)) for name in schema["numeric"]]
    for name, known in schema["categorical"].items():
        cells = records.categories.get(name, [None] * len(records.labels))
        columns.append([math.nan if cell is None else float(known.index(cell)) for cell in cells])
    return Samples(torch.tensor(columns, dtype=torch.float64).T.contiguous(), torch.tensor(records.labels))


def records_of(samples: Samples, schema: Mapping[str, Any]) -> Records:
    """Decode the records that `raw_samples` encoded."""
    columns = list(samples.inputs.T)
    numbers = {name: _cells(column) for name, column in zip(schema["numeric"], columns, strict=False)}
    categories = {}
    rest = columns[len(numbers) :]
    for (name, known), column in zip(schema["categorical"].items(), rest, strict=True):
        categories[name] = [None if cell is None else known[int(cell)] for cell in _cells(column)]
    return Records(samples.labels.tolist(), numbers, categories)


def comparable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a schema that must be equal in all parts: all of it except the lists of categories."""
    if schema.get("kind") != KIND:
        return dict(schema)
    return {**schema, "categorical": list(schema["categorical"])}


def in_words(schema: Mapping[str, Any]) -> str:
    """Describe an input of a seed set."""
    if schema.get("kind") == "image":
        width, height = map(int, schema["size"])
        normalised = f", mean {schema['mean']}, deviation {schema['std']}" if "mean" in schema else ""
        return f"an image of mode {schema['mode']}, {width} × {height} pixels{normalised}"
    if schema.get("kind") != "table":
        return "numbers with no schema"
    units = schema.get("units", {})
    columns = [
        f"{name}{f' in {units[name]}' if name in units else ''} (mean {mean:.4g}, deviation {deviation:.4g})"
        for name, mean, deviation in schema["numeric"]
    ]
    columns += [f"{name} ({', '.join(known)})" for name, known in schema["categorical"]]
    return "; ".join(columns)


def check_raw(samples: Samples, schema: Mapping[str, Any]) -> None:
    """Raise `DataError` if a part does not match its schema."""
    numeric, categorical = list(schema["numeric"]), dict(schema["categorical"])
    named = [*numeric, *categorical, *schema["units"], *(cell for known in categorical.values() for cell in known)]
    if not all(isinstance(each, str) for each in named) or len(set(numeric) | set(categorical)) < len(numeric) + len(
        categorical
    ):
        raise DataError("its schema does not name columns and categories")
    width = len(numeric) + len(categorical)
    sizes = [len(known) for known in categorical.values()]
    inputs = samples.inputs
    if inputs.dtype != torch.float64 or inputs.dim() != 2 or inputs.shape[1] != width or bool(inputs.isinf().any()):
        raise DataError("its records are not those that its schema describes")
    for column, size in zip(inputs.T[len(numeric) :], sizes, strict=True):
        places = column[~column.isnan()]
        if bool((places.frac() != 0).any() or (places < 0).any() or (places >= size).any()):
            raise DataError("a category is not one of those that its schema names")


def on_one_scale(
    parts: Sequence[tuple[Samples, Mapping[str, Any]]], like: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[Samples]]:
    """Return the schema of all public records, and the records of each part as model inputs.

    `like` is the schema of an earlier seed set. If given, it is kept.
    """
    first = parts[0][1]
    raw = [records_of(samples, schema) for samples, schema in parts]
    table = Table(
        files={"": ""}, label="label", classes=["0", "1"], numeric=first["numeric"],
        categorical=list(first["categorical"]), indicators=first["indicators"],
    )  # fmt: skip
    schema = replace(table.schema_of(raw), units=first["units"]) if like is None else Schema.of(like)
    if [*schema.scales, *schema.categories] != [*first["numeric"], *first["categorical"]]:
        raise DataError("the earlier seed set has other columns")
    return schema.describe(), [
        Samples(schema.inputs(records, {}), samples.labels) for records, (samples, _) in zip(raw, parts, strict=True)
    ]


def _known(records: Records, column: str) -> list[str]:
    return sorted({cell for cell in records.categories.get(column, ()) if cell is not None})


def _numbers(cells: Sequence[float | None] | None, rows: int) -> list[float]:
    return [math.nan if cell is None else cell for cell in cells or [None] * rows]


def _cells(column: Tensor) -> list[float | None]:
    return [None if math.isnan(number) else number for number in column.tolist()]
