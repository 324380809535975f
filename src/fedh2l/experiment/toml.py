"""TOML output for configs, rosters and settings of peers. `files.read_toml` reads it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tomlkit
from pydantic import BaseModel
from tomlkit.items import Array, InlineTable, Item, Table

if TYPE_CHECKING:
    from fedh2l.experiment.config import Config

Explained = Mapping[str, type[BaseModel]]
"""Per section, the class whose field descriptions explain its keys."""
SECTIONS = ("run", "data", "method", "optimizer", "ray")
COMMENT_WIDTH = 98
"""Characters per line of a comment, without `# `."""


def to_toml(config: Config, comments: bool = False) -> str:
    """Return a configuration file that loads as `config`. With `comments`, each key is explained.

    Without comments, the file includes keys whose defaults follow from other keys. A run records the values that it
    used.
    """
    if not comments:
        return toml_text(replace(config, data=config.data.resolved()).sections())
    explained: Explained = {name: type(getattr(config, name)) for name in SECTIONS}
    return toml_text(config.sections(), {**explained, "nodes": type(config.nodes[0])})


def toml_text(values: Mapping[str, Any], explained: Explained | None = None) -> str:
    """Return a TOML file with these values. A mapping becomes a table, a list of mappings becomes one table each.

    Single values must come before tables. Keys without a value (None) do not appear. With `explained`, comments
    describe the keys of each table and list those without a value. In a list of tables, only the first one has
    comments.
    """
    document = tomlkit.document()
    for name, value in values.items():
        model = explained[name] if explained and name in explained else None
        if isinstance(value, Mapping):
            _new_line(document)
            document.add(name, _table(value, model))
        elif _is_tables(value):
            _new_line(document)
            tables = tomlkit.aot()
            for place, entry in enumerate(value):
                tables.append(_table(entry, None if place else model))
            document.add(name, tables)
        elif value is not None:
            document.add(name, _item(value))
    return document.as_string()


def toml_value(value: Any) -> str:
    """Return one value in TOML notation, on one line."""
    return _item(value).as_string()


def _new_line(document: tomlkit.TOMLDocument) -> None:
    if document.body:
        document.add(tomlkit.nl())


def _is_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _table(values: Mapping[str, Any], model: type[BaseModel] | None) -> Table:
    table = tomlkit.table()
    for key, value in values.items():
        description = model.model_fields[key].description if model and key in model.model_fields else None
        for line in textwrap.wrap(description or "", COMMENT_WIDTH, subsequent_indent="  "):
            table.add(tomlkit.comment(line))
        if value is not None:
            table.add(key, _item(value))
        elif model:
            table.add(tomlkit.comment(f"{key} ="))
    return table


def _item(value: Any) -> Item:
    """Return a value on one line. Tables within it are inline."""
    if isinstance(value, Mapping):
        inline: InlineTable = tomlkit.inline_table()
        for key, each in value.items():
            if each is not None:
                inline.add(key, _item(each))
        return inline
    if isinstance(value, (list, tuple)):
        array: Array = tomlkit.array()
        for each in value:
            array.append(_item(each))
        return array
    plain: Item = tomlkit.item(value)
    return plain
