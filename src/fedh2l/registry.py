"""Tables of built-in classes and functions by name. Entries are imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import NamedTuple, TypeVar

Thing = TypeVar("Thing")


class Builtin(NamedTuple):
    """Location of a class or function as `module:attribute`, and the first line of its docstring."""

    path: str
    summary: str


class Registry(Mapping[str, Thing]):
    """Classes or functions by name. Names and summaries are known without importing any of them."""

    def __init__(self, entries: Mapping[str, Builtin]) -> None:
        self.entries = entries

    def __getitem__(self, name: str) -> Thing:
        module, _, attribute = self.entries[name].path.partition(":")
        thing: Thing = getattr(import_module(module), attribute)
        return thing

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def summaries(self) -> dict[str, str]:
        """Return one line per name."""
        return {name: entry.summary for name, entry in self.entries.items()}
