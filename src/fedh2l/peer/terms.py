"""The roster versions that a peer holds, each with its seed set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from fedh2l.domain import Samples
from fedh2l.errors import ConfigError
from fedh2l.messages import encoded_size
from fedh2l.methods.base import Method
from fedh2l.peer.bundle import Bundle
from fedh2l.peer.charter import Charter, check_versions
from fedh2l.peer.views import AS_THEY_ARE
from fedh2l.pixels import Pixels
from fedh2l.roster import Roster
from fedh2l.seedset import SeedSet
from fedh2l.topology import Graph


@dataclass(frozen=True, eq=False)
class Term:
    """One version of the roster, with its seed set. Objects compare by identity."""

    charter: Charter
    bundle: Bundle
    numbers: bool = False
    """Whether a seed set of bytes is converted to the numbers that a model receives."""

    def __post_init__(self) -> None:
        self.charter.check_bundle(self.bundle)

    @property
    def first(self) -> int:
        """First round of this version."""
        return self.charter.agreement.from_round

    @property
    def method(self) -> Method:
        return self.charter.method

    @cached_property
    def roster(self) -> Roster:
        """Members, in order."""
        return self.charter.roster(self.bundle.classes)

    @cached_property
    def seed_set(self) -> SeedSet:
        """Public data of all members."""
        parts = {name: self.part(name) for name in self.roster.names}
        return SeedSet(parts, self.roster.seed, self.charter.views.of(self.bundle), self.labelled)

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
        return self.method.public_batch_rows(self.charter.agreement.batch_size)

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
class Terms:
    """All roster versions that a peer holds, oldest first."""

    all: tuple[Term, ...]

    def __post_init__(self) -> None:
        check_versions([term.charter for term in self.all])
        first = self.all[0].bundle
        for term in self.all[1:]:
            mine, theirs = ((bundle.classes, bundle.schema, bundle.labelled) for bundle in (first, term.bundle))
            if mine != theirs:
                raise ConfigError(
                    f"version {term.charter.agreement.version} of the roster has a seed set of other classes or inputs"
                    ", or only one has labels"
                )

    def as_numbers(self) -> Terms:
        """Return the same versions with public images as numbers, for a node whose own images are numbers."""
        for term in self.all:
            if term.charter.views != AS_THEY_ARE and not Pixels.of(term.bundle.schema).plain:
                raise ConfigError("[views] of the roster: this node has images as normalised numbers, not as bytes")
        return Terms(tuple(replace(term, numbers=True) for term in self.all))

    def at(self, round: int) -> Term:
        """Return the version of a round, or the first version for earlier rounds."""
        return [term for term in self.all if term.first <= round or term is self.all[0]][-1]

    def since(self, name: str) -> Terms:
        """Return the versions from the first one that contains a member."""
        for place, term in enumerate(self.all):
            if name in term.roster.names:
                return Terms(self.all[place:])
        raise ConfigError(f"'{name}' is not a member: {', '.join(self.names)} are")

    def from_round(self, round: int) -> tuple[Term, ...]:
        """Return the version of a round, and all later ones."""
        return self.all[self.all.index(self.at(round)) :]

    @property
    def newest(self) -> Term:
        return self.all[-1]

    @property
    def rounds(self) -> int:
        """Number of rounds in the newest version."""
        return self.newest.charter.agreement.rounds

    def rounds_of(self, name: str) -> int:
        """Return the last round of a member: the last of its membership, or of the training."""
        for before, after in zip(self.all, self.all[1:], strict=False):
            if name in before.roster.names and name not in after.roster.names:
                return after.first - 1
        return self.rounds

    def largest(self, sender: str) -> int:
        """Return the size of the largest message that a sender may send, in bytes."""
        theirs = [term for term in self.all if sender in term.roster.names]
        return max((term.size(sender) for term in theirs), default=0)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Members of all versions."""
        return tuple(dict.fromkeys(name for term in self.all for name in term.roster.names))


def pair_up(charters: Sequence[Charter], bundles: Sequence[Bundle]) -> Terms:
    """Combine rosters with their seed sets."""
    by_digest = {bundle.digest: bundle for bundle in bundles}
    terms = []
    for charter in sorted(charters, key=lambda charter: charter.agreement.version):
        bundle = by_digest.get(charter.agreement.seedset)
        if bundle is None and len(bundles) > 1:
            raise ConfigError(
                f"none of the seed sets is that of version {charter.agreement.version} of the roster, "
                f"{charter.agreement.seedset}"
            )
        terms.append(Term(charter, bundle or bundles[0]))  # Term rejects a single seed set that is not the agreed one
    return Terms(tuple(terms))
