"""The members of a federation: their names in an agreed order, and their common seed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedh2l.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


RESERVED = "server"
"""Sender of a server's messages, in methods that have a server."""


def check_name(name: str) -> None:
    """Refuse an invalid name of a node."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"node name '{name}': use 1 to 63 letters, digits, '.', '_' and '-', a letter or digit first")
    if name == RESERVED:
        raise ConfigError(f"node name '{name}': this name is kept for the server of methods that have one")


@dataclass(frozen=True)
class Roster:
    """The members of a federation and everything they must agree on before the first round.

    `terms` holds the other agreed values: method and its parameters, rounds, classes. Any difference changes `digest`,
    which every message carries.
    """

    names: tuple[str, ...]
    seed: int
    terms: str = "{}"

    def __post_init__(self) -> None:
        if len(self.names) < 2:
            raise ConfigError(f"a federation needs at least two nodes, and there is {len(self.names)}")
        for name in self.names:
            check_name(name)
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ConfigError(f"two nodes are named '{twice[0]}'; give each its own name")

    @staticmethod
    def agree(names: tuple[str, ...], seed: int, terms: Mapping[str, Any]) -> Roster:
        """Return a roster whose digest covers `terms`, which must be plain JSON values."""
        return Roster(names, seed, json.dumps(terms, sort_keys=True, separators=(",", ":")))

    @cached_property
    def digest(self) -> bytes:
        """Digest of members, seed and terms, 16 bytes."""
        text = json.dumps([self.names, self.seed, self.terms], separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()[:16]

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each member, which stands for its name in messages."""
        return {name: place for place, name in enumerate(self.names)}

    def others(self, name: str) -> tuple[str, ...]:
        """Return all members but `name`, in roster order."""
        return tuple(other for other in self.names if other != name)
