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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedh2l.errors import ConfigError, shown
from fedh2l.experiment.toml import toml_text
from fedh2l.extras import needs
from fedh2l.files import UnreadableError, read_toml
from fedh2l.methods.base import Method
from fedh2l.methods.registry import make_method
from fedh2l.peer.membership.augmentation import AS_THEY_ARE, SharedViews
from fedh2l.peer.membership.bundle import MOST_MEMBERS, Bundle
from fedh2l.peer.membership.roster_sections import Agreement, Member, Timing
from fedh2l.peer.membership.shares import Reveal, commitment_to, seed_of
from fedh2l.protocol.roster import Roster


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
