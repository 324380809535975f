"""Comparison of rosters: of two members, and of successive versions."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedh2l.errors import ConfigError
from fedh2l.peer.membership.roster_file import RosterFile


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Describe the differing fields of two canonical rosters. The list is empty if they agree."""
    return [
        f"{key}: {_said(here)} here, {_said(there)} there"
        for key, here, there in _compared(mine, theirs, "")
        if here != there
    ]


_ABSENT = object()


def _compared(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        here, there = mine.get(key, _ABSENT), theirs.get(key, _ABSENT)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += _compared(here, there, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", here, there))
    return found


def _said(value: Any) -> str:
    text = "nothing" if value is _ABSENT else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def grouped(digits: str) -> str:
    """Split hexadecimal digits into groups of four, so that people can compare them aloud."""
    return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))


def pin_digest(pin: str | None) -> str:
    """Return the first 16 bytes of a pin in hexadecimal, which is short enough to compare by telephone."""
    return base64.b64decode(pin.partition("//")[2])[:16].hex() if pin else ""


def check_start(first: RosterFile, joined: bool, remedy: str) -> None:
    """Raise `ConfigError` if a member holds no first version of the roster, and did not join later.

    The shares of the seed can be checked in the first version only.
    """
    if first.agreement.version > 1 and not joined:
        raise ConfigError(
            f"this roster starts with version {first.agreement.version} for this member, and only the first version "
            f"shows that nobody chose the seed. {remedy}"
        )


def check_versions(versions: Sequence[RosterFile]) -> None:
    """Raise `ConfigError` if versions of a roster are not consecutive or change a fixed setting.

    A member that joins later does not need the first version.
    """
    first = versions[0].agreement
    if (first.version == 1) != (first.from_round == 1):
        raise ConfigError(
            f"the first version of a roster holds from round 1, and no other does; here version {first.version} holds "
            f"from round {first.from_round}"
        )
    for before, after in pairwise(versions):
        old, new = before.agreement, after.agreement
        for key in ("federation", "seed", "batch_size", "ema_decay"):
            if getattr(old, key) != getattr(new, key):
                raise ConfigError(f"version {new.version} of the roster has another {key} than version {old.version}")
        if before.shares != after.shares:
            raise ConfigError(f"version {new.version} of the roster has other [[shares]] than version {old.version}")
        if before.timing.mode != after.timing.mode or before.timing.staleness != after.timing.staleness:
            raise ConfigError(f"version {new.version} of the roster has another timing.mode or timing.staleness")
        if (before.method.title, before.method) != (after.method.title, after.method):
            raise ConfigError(f"version {new.version} of the roster has another method than version {old.version}")
        if new.from_round > min(old.rounds, new.rounds):
            raise ConfigError(
                f"version {new.version} of the roster holds from round {new.from_round}, after the last one"
            )
        if new.version != old.version + 1 or new.from_round <= old.from_round:
            raise ConfigError(
                f"version {new.version} from round {new.from_round} does not follow version {old.version} from round "
                f"{old.from_round}"
            )
