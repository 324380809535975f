"""Who takes part: the members' names in their agreed order, and the seed that all of them hold."""

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
"""The sender of what comes from a server, in methods that have one."""


def check_name(name: str) -> None:
    """Refuses what cannot be the name of a node."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"node name '{name}': use 1 to 63 letters, digits, '.', '_' and '-', a letter or digit first")
    if name == RESERVED:
        raise ConfigError(f"node name '{name}': this name is kept for the server of methods that have one")


@dataclass(frozen=True)
class Roster:
    """The members of a federation and everything they must agree on before the first round.

    `terms` holds what else they agree on (method and its parameters, rounds, classes); any difference gives another
    `digest`, which every message carries.
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
        """A roster whose digest covers `terms`, which must be plain JSON values."""
        return Roster(names, seed, json.dumps(terms, sort_keys=True, separators=(",", ":")))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ when members, seed or terms do."""
        text = json.dumps([self.names, self.seed, self.terms], separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()[:16]

    @cached_property
    def index(self) -> dict[str, int]:
        """The place of each member, which stands for its name in a message."""
        return {name: place for place, name in enumerate(self.names)}

    def others(self, name: str) -> tuple[str, ...]:
        """Everybody but `name`, in roster order."""
        return tuple(other for other in self.names if other != name)
