"""`roster.toml`: the members of a federation and the settings that they agree on.

All members hold the same file. Two peers exchange messages only if the canonical forms of their rosters agree. The
canonical form contains:

- federation, version, first round, number of rounds, batch size and EMA decay
- method with its parameters, and views
- seed with its shares, digest of the seed set, and classes
- names of the members in order, and the pins of their keys

Addresses, deadlines and quorum are not part of it, so a member can change its address without a new version. A renewed
certificate keeps its key, so it needs no new version either.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from fedh2l.errors import ConfigError, shown
from fedh2l.experiment.toml import toml_text
from fedh2l.extras import needs
from fedh2l.files import UnreadableError, read_toml
from fedh2l.methods.base import Method
from fedh2l.methods.registry import make_method
from fedh2l.peer.membership.augmentation import AS_THEY_ARE, SharedViews
from fedh2l.peer.membership.bundle import MOST_MEMBERS, Bundle
from fedh2l.peer.membership.shares import Reveal, commitment_to, seed_of
from fedh2l.peer.transport.proxy import parse_address
from fedh2l.protocol.roster import Roster, check_name
from fedh2l.section import Section

MOST = 2**31
"""Rounds and versions: messages have 32 bits for their number."""


class Timing(Section):
    """The `[timing]` section: how long a peer waits for others."""

    mode: Literal["synchronous", "asynchronous"] = Field(
        "synchronous",
        description="With synchronous, a round waits for messages until the deadline. With asynchronous, it never "
        "waits, and uses the newest message of each member.",
    )
    deadline: float = Field(30.0, gt=0, le=86400, description="Seconds that a round waits for other members.")
    quorum: int = Field(1, ge=0, description="Number of other members whose messages a round needs.")
    below_quorum: Literal["wait", "pause"] = Field(
        "wait",
        description="With wait, a peer below the quorum waits up to patience seconds and then pauses. With pause, "
        "it pauses at once. A paused peer saves its state, still answers, and continues when enough "
        "members are back.",
    )
    patience: float = Field(
        600.0,
        gt=0,
        le=2**31,
        description="Seconds to wait below the quorum. Also the time after which a peer trusts the round of a single "
        "member.",
    )
    linger: float = Field(
        600.0, ge=0, le=2**31, description="Seconds that a finished peer stays for members that are not finished."
    )
    staleness: int = Field(5, ge=0, description="Largest age of a message in exchanges, in asynchronous mode.")


class Member(Section):
    """An entry of `[[members]]`."""

    name: str = Field(description="Name of the member, as in its certificate.")
    address: str = Field(description="Address of the member, as host:port.")
    pin: str | None = Field(
        None, description="Pin of the member's public key: sha256//…, as `fedh2l pki show` prints it."
    )

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

    federation: str = Field(min_length=1, max_length=64, description="Name of the federation.")

    @field_validator("federation")
    @classmethod
    def _is_printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError("it should have printable characters only")
        return name

    version: int = Field(1, ge=1, le=MOST, description="Version of the roster. A change of members makes a new one.")
    from_round: int = Field(1, ge=1, le=MOST, description="First round of this version.")
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of everything public and random. With [[shares]], it is their hash."
    )
    rounds: int = Field(ge=1, le=MOST, description="Number of rounds. A round is one local step on every node.")
    batch_size: int = Field(32, ge=1, description="Samples per local batch.")
    ema_decay: float = Field(0.0, ge=0, lt=1, description="EMA decay of each member's weights. 0 turns it off.")
    seedset: str = Field(
        pattern="^[0-9a-f]{64}$", description="Digest of the seed set, as `fedh2l seedset verify` prints it."
    )


@dataclass(frozen=True)
class RosterFile:
    """One version of a roster, validated."""

    agreement: Agreement
    method: Method
    timing: Timing
    members: tuple[Member, ...]
    views: SharedViews = AS_THEY_ARE
    shares: Mapping[str, Reveal] = field(default_factory=dict)
    """Each member's share of the seed, by name. Empty if the founder chose the seed."""

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
        seed = seed_of({name: each.share for name, each in self.shares.items()})
        if self.shares and seed != self.agreement.seed:
            raise ConfigError("roster.seed is not the one that [[shares]] give")
        if self.shares and self.agreement.from_round == 1 and set(self.shares) != set(self.names):
            raise ConfigError("[[shares]]: there should be one share of the seed for each member")
        if self.timing.quorum >= len(self.members):
            raise ConfigError(
                f"timing.quorum = {self.timing.quorum}: a peer has {len(self.members) - 1} others, use at most that"
            )

    @staticmethod
    def load(path: Path) -> RosterFile:
        """Read a roster file."""
        try:
            raw = read_toml(path)
        except FileNotFoundError:
            raise ConfigError(f"there is no roster '{path}'; `fedh2l roster init` writes one") from None
        except UnreadableError as error:
            raise ConfigError(f"cannot read the roster '{path}': {shown(error)}") from error
        try:
            return RosterFile.read(raw)
        except ConfigError as error:
            raise ConfigError(*(f"{path}: {line}" for line in error.args)) from None

    @staticmethod
    def read(raw: Mapping[str, Any]) -> RosterFile:
        """Parse the content of a roster file."""
        top = dict(raw)
        method, timing, members, views, shares = (top.pop(key, default) for key, default in PARTS.items())
        if not isinstance(members, list) or not isinstance(method, dict) or not isinstance(shares, list):
            raise ConfigError("a roster has a table [method], and tables [[members]] and [[shares]]")
        if max(len(members), len(shares)) > MOST_MEMBERS:
            raise ConfigError(f"a roster has at most {MOST_MEMBERS:,} members, not {max(len(members), len(shares)):,}")
        revealed = [Reveal.read(entry, f"shares.{place}") for place, entry in enumerate(shares)]
        by_name = {each.name: each for each in revealed}
        if len(by_name) < len(revealed):
            raise ConfigError("[[shares]]: there are two shares of one member")
        return RosterFile(
            Agreement.read(top, "roster"),
            make_method(method),
            Timing.read(timing, "timing"),
            tuple(Member.read(entry, f"members.{place}") for place, entry in enumerate(members)),
            SharedViews.read(views, "views"),
            by_name,
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the members, in order."""
        return tuple(member.name for member in self.members)

    @property
    def addresses(self) -> dict[str, str]:
        return {member.name: member.address for member in self.members}

    @property
    def pins(self) -> dict[str, str]:
        """Pins by member, without members that have none."""
        return {member.name: member.pin for member in self.members if member.pin is not None}

    def check_bundle(self, bundle: Bundle) -> None:
        """Raise `ConfigError` if a seed set is not the agreed one."""
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
        self._check_shares(bundle)
        needed = [] if bundle.labelled else self.method.needs_labels()
        if needed:
            raise ConfigError(f"the seed set has no labels, and they are needed by {', '.join(needed)}")

    def _check_shares(self, bundle: Bundle) -> None:
        """Raise `ConfigError` if the shares of the seed do not match the members' commitments and signatures.

        Members commit before they see other shares, so that no member can choose the seed. They reveal their shares
        for the seed set of the first version. Later versions repeat these shares.
        """
        committed = {name: bundle.commitments[name] for name in self.names if name in bundle.commitments}
        if committed and not self.shares:
            raise ConfigError(
                "the members committed to shares of the seed, but this roster has no [[shares]], so its author chose "
                "the seed"
            )
        for name, revealed in self.shares.items():
            if name in self.names and committed.get(name) != commitment_to(revealed.share):
                raise ConfigError(f"[[shares]]: the share of '{name}' is not the one that it committed to")
        if self.shares and self.agreement.from_round == 1:
            self._check_signatures(bundle)

    def _check_signatures(self, bundle: Bundle) -> None:
        needs("peer", "cryptography")
        from fedh2l.peer.membership.reveals import check_reveal

        left_out = sorted(set(bundle.commitments) - set(self.shares))
        if left_out:  # its author could try which members to leave out
            raise ConfigError(f"[[shares]]: '{left_out[0]}' committed to a share, and it is not in the roster")
        for name, revealed in self.shares.items():
            check_reveal(revealed, bundle, self.pins.get(name))

    @cached_property
    def without_share(self) -> tuple[str, ...]:
        """Members whose share is not in the seed: they joined later, or the founder left them out."""
        return tuple(name for name in self.names if name not in self.shares)

    def canonical(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return the settings that members must agree on, as plain values."""
        return {
            **self.agreement.model_dump(mode="json"),
            "method": {"name": self.method.title, **self.method.model_dump(mode="json")},
            "views": self.views.model_dump(mode="json"),
            "classes": list(classes),
            "members": list(self.names),
            "pins": self.pins,
            "shares": {name: each.model_dump(exclude={"name"}) for name, each in self.shares.items()},
        }

    def roster(self, classes: Sequence[str]) -> Roster:
        """Return the members and the agreed settings. Every message carries their digest."""
        history = self.canonical(classes)
        return Roster.agree(self.names, self.agreement.seed, history)

    def to_toml(self) -> str:
        """Encode the roster as TOML."""
        tables = {
            "method": {"name": self.method.title, **self.method.model_dump(mode="json", exclude_defaults=True)},
            "views": self.views.model_dump(mode="json", exclude_defaults=True) or None,
            "timing": self.timing.model_dump(mode="json"),
            "members": [member.model_dump(mode="json") for member in self.members],
            "shares": [each.model_dump() for each in self.shares.values()] or None,
        }
        return toml_text({**self.agreement.model_dump(mode="json"), **tables})


def _overrides(method: Method, hook: str) -> bool:
    return getattr(type(method), hook) is not getattr(Method, hook)


PARTS: dict[str, Any] = {"method": {}, "timing": {}, "members": [], "views": {}, "shares": []}
"""Tables of a roster file and their defaults."""


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
