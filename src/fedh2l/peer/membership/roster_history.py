"""The roster versions that a peer holds, each with its seed set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from torch import Tensor, equal

from fedh2l.data.domain import Samples
from fedh2l.data.pixels import Pixels
from fedh2l.data.seedset import SeedSet
from fedh2l.errors import ConfigError
from fedh2l.methods.base import Method
from fedh2l.peer.membership.augmentation import AS_THEY_ARE
from fedh2l.peer.membership.bundle import Bundle
from fedh2l.peer.membership.roster_comparison import check_versions
from fedh2l.peer.membership.roster_file import RosterFile
from fedh2l.protocol.messages import encoded_size
from fedh2l.protocol.roster import Roster
from fedh2l.protocol.topology import Graph


@dataclass(frozen=True, eq=False)
class RosterVersion:
    """One version of the roster, with its seed set. Objects compare by identity."""

    roster_file: RosterFile
    bundle: Bundle
    numbers: bool = False
    """Whether a seed set of bytes is converted to the numbers that a model receives."""

    def __post_init__(self) -> None:
        self.roster_file.check_bundle(self.bundle)

    @property
    def first(self) -> int:
        """First round of this version."""
        return self.roster_file.agreement.from_round

    @property
    def method(self) -> Method:
        return self.roster_file.method

    @cached_property
    def roster(self) -> Roster:
        """Members, in order."""
        return self.roster_file.roster(self.bundle.classes)

    @cached_property
    def seed_set(self) -> SeedSet:
        """Public data of all members."""
        parts = {name: self.part(name) for name in self.roster.names}
        return SeedSet(parts, self.roster.seed, self.roster_file.views.of(self.bundle), self.labelled)

    def part(self, name: str) -> Samples:
        """Return the public data of a member."""
        part = self.bundle.part(name)
        return part.as_numbers(Pixels.of(self.bundle.schema)) if self.numbers else part

    @property
    def labelled(self) -> bool:
        """Whether the public samples have labels."""
        return self.bundle.labelled

    def teachers(self, round: int) -> Graph:
        """Return the teachers of each student in a round."""
        return self.method.teachers(self.roster, round)

    def exchanges(self, round: int) -> bool:
        """Return whether messages are exchanged in a round."""
        return self.method.exchanges(round)

    @property
    def _asked(self) -> int:
        return self.method.public_batch_rows(self.roster_file.agreement.batch_size)

    def shape(self, sender: str) -> tuple[int, int]:
        """Return the shape of a sender's messages, `(samples, classes)`."""
        start, end = self.bundle.ranges[sender]
        return min(self._asked, end - start), len(self.bundle.classes)

    def size(self, sender: str) -> int:
        """Return the size of a sender's messages in bytes."""
        return encoded_size("posteriors", str(self.method.written), self.shape(sender), self.labelled)

    def labels(self, sender: str, round: int) -> Tensor | None:
        """Return the labels of the samples in a message, or None if there are no labels."""
        if not self.labelled:
            return None
        return self.seed_set.labels(sender, round, self._asked)


@dataclass(frozen=True)
class RosterHistory:
    """All roster versions that a peer holds, oldest first."""

    all: tuple[RosterVersion, ...]

    def __post_init__(self) -> None:
        check_versions([version.roster_file for version in self.all])
        first = self.all[0].bundle
        for version in self.all[1:]:
            mine, theirs = ((bundle.classes, bundle.schema, bundle.labelled) for bundle in (first, version.bundle))
            if mine != theirs:
                raise ConfigError(
                    f"version {version.roster_file.agreement.version} of the roster has a seed set of other classes or "
                    "inputs, or only one has labels"
                )
        for before, after in pairwise(self.all):
            _check_kept(before, after)

    def as_numbers(self) -> RosterHistory:
        """Return the same versions with public images as numbers, for a node whose own images are numbers."""
        for version in self.all:
            if version.roster_file.views != AS_THEY_ARE and not Pixels.of(version.bundle.schema).plain:
                raise ConfigError("[views] of the roster: this node has images as normalised numbers, not as bytes")
        return RosterHistory(tuple(replace(version, numbers=True) for version in self.all))

    def at(self, round: int) -> RosterVersion:
        """Return the version of a round, or the first version for earlier rounds."""
        return [version for version in self.all if version.first <= round or version is self.all[0]][-1]

    def since(self, name: str) -> RosterHistory:
        """Return the versions from the first one that contains a member."""
        for place, version in enumerate(self.all):
            if name in version.roster.names:
                return RosterHistory(self.all[place:])
        raise ConfigError(f"'{name}' is not a member: {', '.join(self.names)} are")

    def from_round(self, round: int) -> tuple[RosterVersion, ...]:
        """Return the version of a round, and all later ones."""
        return self.all[self.all.index(self.at(round)) :]

    @property
    def newest(self) -> RosterVersion:
        return self.all[-1]

    @property
    def rounds(self) -> int:
        """Number of rounds in the newest version."""
        return self.newest.roster_file.agreement.rounds

    def rounds_of(self, name: str) -> int:
        """Return the last round of a member: the last of its membership, or of the training."""
        for before, after in zip(self.all, self.all[1:], strict=False):
            if name in before.roster.names and name not in after.roster.names:
                return after.first - 1
        return self.rounds

    def largest(self, sender: str) -> int:
        """Return the size of the largest message that a sender may send, in bytes."""
        theirs = [version for version in self.all if sender in version.roster.names]
        return max((version.size(sender) for version in theirs), default=0)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Members of all versions."""
        return tuple(dict.fromkeys(name for version in self.all for name in version.roster.names))


def _check_kept(before: RosterVersion, after: RosterVersion) -> None:
    """Refuse other public samples of a member that stays. It knows the seed, so it could choose their order."""
    for name in (name for name in after.roster_file.names if name in before.roster_file.names):
        old, new = before.bundle.part(name), after.bundle.part(name)
        if not (equal(old.inputs, new.inputs) and equal(old.labels, new.labels)):
            raise ConfigError(
                f"version {after.roster_file.agreement.version} of the roster has a seed set with other public samples "
                f"of '{name}', a member that stays. Merge the same parts again, with those of new members"
            )


def pair_up(roster_files: Sequence[RosterFile], bundles: Sequence[Bundle]) -> RosterHistory:
    """Combine rosters with their seed sets."""
    by_digest = {bundle.digest: bundle for bundle in bundles}
    history = []
    for roster_file in sorted(roster_files, key=lambda roster_file: roster_file.agreement.version):
        bundle = by_digest.get(roster_file.agreement.seedset)
        if bundle is None and len(bundles) > 1:
            raise ConfigError(
                f"none of the seed sets is that of version {roster_file.agreement.version} of the roster, "
                f"{roster_file.agreement.seedset}"
            )
        history.append(
            RosterVersion(roster_file, bundle or bundles[0])
        )  # RosterVersion rejects a single seed set that is not the agreed one
    return RosterHistory(tuple(history))
