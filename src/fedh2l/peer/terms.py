"""The versions of the roster that a peer holds, each with its seed set: who takes part in which round, and how."""

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
    """The time in which one version of the roster holds; one is another if it is another object."""

    charter: Charter
    bundle: Bundle
    numbers: bool = False
    """Whether a seed set of bytes is taken as what they are to a model."""

    def __post_init__(self) -> None:
        self.charter.check_bundle(self.bundle)

    @property
    def first(self) -> int:
        """Its first round."""
        return self.charter.agreement.from_round

    @property
    def method(self) -> Method:
        """What is done in a round."""
        return self.charter.method

    @cached_property
    def roster(self) -> Roster:
        """The members, in order."""
        return self.charter.roster(self.bundle.classes)

    @cached_property
    def seed_set(self) -> SeedSet:
        """The members' public data."""
        parts = {name: self.part(name) for name in self.roster.names}
        return SeedSet(parts, self.roster.seed, self.charter.views.of(self.bundle), self.labelled)

    def part(self, name: str) -> Samples:
        """The public data of a member."""
        part = self.bundle.part(name)
        return part.as_numbers(Pixels.of(self.bundle.schema)) if self.numbers else part

    @property
    def labelled(self) -> bool:
        """Whether anybody knows what the public samples are."""
        return self.bundle.labelled

    def teachers(self, round: int) -> Graph:
        """Who learns from whom."""
        return self.method.teachers(self.roster, round)

    def exchanges(self, round: int) -> bool:
        """Whether signals cross in a round."""
        return self.method.exchanges(round)

    @property
    def _asked(self) -> int:
        return self.method.public_batch_rows(self.charter.agreement.batch_size)

    def shape(self, sender: str) -> tuple[int, int]:
        """Of a signal of one of the members."""
        start, end = self.bundle.ranges[sender]
        return min(self._asked, end - start), len(self.bundle.classes)

    def size(self, sender: str) -> int:
        """Bytes of a signal."""
        return encoded_size("posteriors", str(self.method.written), self.shape(sender), self.labelled)

    def labels(self, sender: str, round: int) -> Tensor | None:
        """The right answers to what a signal speaks of, if anybody knows them."""
        if not self.labelled:
            return None
        return self.seed_set.labels(sender, round, self._asked)


@dataclass(frozen=True)
class Terms:
    """All that a peer holds, oldest first."""

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
        """The same with public images as numbers, for a node whose own are."""
        for term in self.all:
            if term.charter.views != AS_THEY_ARE and not Pixels.of(term.bundle.schema).plain:
                raise ConfigError("[views] of the roster: this node has images as normalised numbers, not as bytes")
        return Terms(tuple(replace(term, numbers=True) for term in self.all))

    def at(self, round: int) -> Term:
        """The one that holds in a round; before the first begins, the first."""
        return [term for term in self.all if term.first <= round or term is self.all[0]][-1]

    def since(self, name: str) -> Terms:
        """Those from the first that a member is in."""
        for place, term in enumerate(self.all):
            if name in term.roster.names:
                return Terms(self.all[place:])
        raise ConfigError(f"'{name}' is not a member: {', '.join(self.names)} are")

    def from_round(self, round: int) -> tuple[Term, ...]:
        """The one that holds in a round, and those that come after."""
        return self.all[self.all.index(self.at(round)) :]

    @property
    def newest(self) -> Term:
        """The last one."""
        return self.all[-1]

    @property
    def rounds(self) -> int:
        """How many there are in all."""
        return self.newest.charter.agreement.rounds

    def rounds_of(self, name: str) -> int:
        """The last round of a member: that before it is no longer one, or that of all."""
        for before, after in zip(self.all, self.all[1:], strict=False):
            if name in before.roster.names and name not in after.roster.names:
                return after.first - 1
        return self.rounds

    def largest(self, sender: str) -> int:
        """Bytes of the largest signal that somebody may send."""
        theirs = [term for term in self.all if sender in term.roster.names]
        return max((term.size(sender) for term in theirs), default=0)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Everybody who ever takes part."""
        return tuple(dict.fromkeys(name for term in self.all for name in term.roster.names))


def pair_up(charters: Sequence[Charter], bundles: Sequence[Bundle]) -> Terms:
    """Rosters with the seed sets that they agree on."""
    by_digest = {bundle.digest: bundle for bundle in bundles}
    terms = []
    for charter in sorted(charters, key=lambda charter: charter.agreement.version):
        bundle = by_digest.get(charter.agreement.seedset)
        if bundle is None and len(bundles) > 1:
            raise ConfigError(
                f"none of the seed sets is that of version {charter.agreement.version} of the roster, "
                f"{charter.agreement.seedset}"
            )
        terms.append(Term(charter, bundle or bundles[0]))  # a single one that is not the agreed one says so itself
    return Terms(tuple(terms))
