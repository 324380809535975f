"""`roster.toml`: who the members of a real federation are, and what they have agreed on.

Every member holds the same one. What two members must agree on before they talk is the canonical form: federation,
version, method and its parameters, views, seed, rounds, classes, seed set and the members' names, in order. Addresses,
keys, deadlines and quorum are not part of it, so that a member may move or renew without a new agreement.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from fedh2l.errors import ConfigError
from fedh2l.methods.base import Method
from fedh2l.methods.registry import make_method
from fedh2l.peer.bundle import Bundle
from fedh2l.peer.views import AS_THEY_ARE, SharedViews
from fedh2l.roster import Roster, check_name
from fedh2l.section import Section
from fedh2l.toml import toml_value


class Timing(Section):
    """The `[timing]` section: how long a peer waits for others."""

    mode: Literal["synchronous", "asynchronous"] = Field(
        "synchronous",
        description="synchronous: a round hears those who answer before the deadline; asynchronous: it never waits, "
        "and hears each peer's newest signal",
    )
    deadline: float = Field(30.0, gt=0, le=86400, description="seconds that a round waits for peers")
    quorum: int = Field(1, ge=0, description="peers that must be heard for a round to count")
    below_quorum: Literal["wait", "pause"] = Field(
        "wait",
        description="with fewer: wait for them, at most `patience` seconds, and then pause; or pause at once. A paused "
        "peer is saved, still answers, and goes on when enough are back",
    )
    patience: float = Field(
        600.0, gt=0, le=2**31, description="seconds that are waited below quorum, and until one peer alone is believed"
    )
    linger: float = Field(
        600.0, ge=0, le=2**31, description="seconds that a peer which is done stays for those who are not"
    )
    staleness: int = Field(5, ge=0, description="for how many exchanges a signal is of use, when asynchronous")


class Member(Section):
    """One of the `[[members]]`."""

    name: str = Field(description="its name, as in its certificate")
    address: str = Field(description="where others reach it: host:port")
    pin: str | None = Field(None, description="of its public key, as `fedh2l pki show` prints it: sha256//…")

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        check_name(name)
        return name

    @field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        parse_address(address)
        return address

    @field_validator("pin")
    @classmethod
    def _is_pin(cls, pin: str | None) -> str | None:
        if pin is None:
            return None
        kind, _, hashed = pin.partition("//")
        try:
            size = len(base64.b64decode(hashed, validate=True))
        except (binascii.Error, ValueError):
            size = 0
        if kind != "sha256" or size != 32:
            raise ValueError("it should be sha256// and the base64 of 32 bytes, as `fedh2l pki show` prints it")
        return pin


class Agreement(Section):
    """The keys at the top of the file."""

    federation: str = Field(min_length=1, max_length=64, description="the name of the federation")
    version: int = Field(1, ge=1, description="of this roster; adding or removing a member makes a new one")
    from_round: int = Field(1, ge=1, description="the first round in which this version holds")
    seed: int = Field(0, ge=0, description="everything public that is random follows from it")
    rounds: int = Field(ge=1, description="rounds: one optimiser step on local data per node each")
    batch_size: int = Field(32, ge=1, description="samples of a batch")
    seedset: str = Field(
        pattern="^[0-9a-f]{64}$", description="the digest of the seed set, as `fedh2l seedset verify` prints it"
    )


@dataclass(frozen=True)
class Charter:
    """One version of a roster, checked."""

    agreement: Agreement
    method: Method
    timing: Timing
    members: tuple[Member, ...]
    views: SharedViews = AS_THEY_ARE

    def __post_init__(self) -> None:
        if self.method.decentralised is False or set(self.method.sends) - {"posteriors"}:
            raise ConfigError(
                f"method.name = '{self.method.title}': between organisations only posteriors on public data may cross, "
                f"and there is no server; this method sends {self.method.crossing() or 'nothing'}"
                f"{'' if self.method.decentralised else ' to a server'}"
            )
        hooks = [hook for hook in ("adapt", "fitted", "prepare") if _overrides(self.method, hook)]
        if hooks:
            raise ConfigError(
                f"method.name = '{self.method.title}': it looks at all nodes before the first round ({hooks[0]}), and "
                "a peer has only its own"
            )
        self.method.check(Roster(self.names, self.agreement.seed))
        for what, values in (("address", self.addresses), ("pin", self.pins)):
            known: dict[str, str] = {}
            for name, value in values.items():
                if value in known:
                    raise ConfigError(f"members '{known[value]}' and '{name}' have one {what}: {value}")
                known[value] = name
        if self.timing.quorum >= len(self.members):
            raise ConfigError(
                f"timing.quorum = {self.timing.quorum}: a peer has {len(self.members) - 1} others, and hears no more"
            )

    @staticmethod
    def load(path: Path) -> Charter:
        """From a file."""
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"there is no roster '{path}'; `fedh2l roster init` writes one") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the roster '{path}': {error}") from error
        try:
            return Charter.read(raw)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @staticmethod
    def read(raw: Mapping[str, Any]) -> Charter:
        """From the content of a file."""
        top = dict(raw)
        method, timing, members, views = (top.pop(key, default) for key, default in PARTS.items())
        if not isinstance(members, list) or not isinstance(method, dict):
            raise ConfigError("a roster has a table [method] and tables [[members]]")
        return Charter(
            Agreement.read(top, "roster"),
            make_method(method),
            Timing.read(timing, "timing"),
            tuple(Member.read(entry, f"members.{place}") for place, entry in enumerate(members)),
            SharedViews.read(views, "views"),
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the members, in order."""
        return tuple(member.name for member in self.members)

    @property
    def addresses(self) -> dict[str, str]:
        """By name."""
        return {member.name: member.address for member in self.members}

    @property
    def pins(self) -> dict[str, str]:
        """By name, of those that have one."""
        return {member.name: member.pin for member in self.members if member.pin is not None}

    def check_bundle(self, bundle: Bundle) -> None:
        """Refuses a seed set that is not the agreed one."""
        if bundle.digest != self.agreement.seedset:
            raise ConfigError(
                f"the seed set has the digest {bundle.digest}, but the roster agrees on {self.agreement.seedset}"
            )
        if bundle.federation != self.agreement.federation:
            raise ConfigError(
                f"the seed set is that of '{bundle.federation}', the roster that of '{self.agreement.federation}'"
            )
        missing = [name for name in self.names if name not in bundle.ranges]
        if missing:
            raise ConfigError(f"member '{missing[0]}' gave no part of the seed set")
        self.views.of(bundle)
        needed = [] if bundle.labelled else self.method.needs_labels()
        if needed:
            raise ConfigError(f"the seed set has no labels, and they are needed by {', '.join(needed)}")

    def canonical(self, classes: Sequence[str]) -> dict[str, Any]:
        """What members must agree on, as plain values."""
        return {
            **self.agreement.model_dump(mode="json"),
            "method": {"name": self.method.title, **self.method.model_dump(mode="json")},
            "views": self.views.model_dump(mode="json"),
            "classes": list(classes),
            "members": list(self.names),
        }

    def roster(self, classes: Sequence[str]) -> Roster:
        """The members and their terms, whose digest every message carries."""
        terms = self.canonical(classes)
        return Roster.agree(self.names, self.agreement.seed, terms)

    def to_toml(self) -> str:
        """A file that gives this back."""
        lines = _entries(self.agreement)
        lines += ["", "[method]", f"name = {toml_value(self.method.title)}"]
        lines += _entries(self.method, skip_defaults=True)
        if self.views != AS_THEY_ARE:
            lines += ["", "[views]", *_entries(self.views, skip_defaults=True)]
        lines += ["", "[timing]", *_entries(self.timing)]
        for member in self.members:
            lines += ["", "[[members]]", *_entries(member)]
        return "\n".join(lines) + "\n"


def _overrides(method: Method, hook: str) -> bool:
    return getattr(type(method), hook) is not getattr(Method, hook)


PARTS: dict[str, Any] = {"method": {}, "timing": {}, "members": [], "views": {}}
"""The tables of a file, and what stands for those that are not there."""


def _entries(section: Section, skip_defaults: bool = False) -> list[str]:
    values = section.model_dump(mode="json", exclude_defaults=skip_defaults, exclude_none=True)
    return [f"{key} = {toml_value(value)}" for key, value in values.items()]


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The fields in which two canonical rosters differ, in words; empty if they agree."""
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


def check_versions(versions: Sequence[Charter]) -> None:
    """Refuses versions of a roster that do not follow each other; whoever joins later need not hold the first."""
    first = versions[0].agreement
    if first.version == 1 and first.from_round != 1:
        raise ConfigError(f"the first version of a roster holds from round 1, not {first.from_round}")
    for before, after in pairwise(versions):
        old, new = before.agreement, after.agreement
        for key in ("federation", "seed", "batch_size"):
            if getattr(old, key) != getattr(new, key):
                raise ConfigError(f"version {new.version} of the roster has another {key} than version {old.version}")
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


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 address stands in brackets."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*):(\d{1,5})", text)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise ValueError("it should be host:port, an IPv6 address in brackets")
    host = found[1]
    if host.startswith("["):
        ipaddress.IPv6Address(host[1:-1])
    return host.strip("[]"), int(found[2])
