"""Comparison of the rosters of two peers before they exchange messages."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedh2l.peer.refusals import FIELDS, PeerRefusedError, Refusal
from fedh2l.peer.transport import fedh2l_pb2 as pb

if TYPE_CHECKING:
    from fedh2l.peer.membership.roster_file import RosterFile

log = logging.getLogger("fedh2l.peer")

PROTOCOL = 2
HASH = 4
"""Bytes of the hash of a field."""
DIGEST = 16
"""Bytes of the digest of a roster."""
MOST_AGREEMENTS = 8
"""Maximum number of roster versions in a greeting: the current one and the following ones."""


@dataclass(frozen=True)
class RosterDigest:
    """Number, first round and hashes of a roster version, as a greeting contains them."""

    number: int
    from_round: int
    digest: bytes
    fields: bytes

    def to_proto(self) -> pb.Agreement:
        return pb.Agreement(digest=self.digest, version=self.number, from_round=self.from_round, fields=self.fields)

    def differs_in(self, fields: bytes) -> list[str]:
        """Return the names of the fields whose hashes differ from those of another roster."""
        places = {name: slice(HASH * place, HASH * (place + 1)) for place, name in enumerate(FIELDS)}
        return [name for name, place in places.items() if self.fields[place] != fields[place]]


@dataclass(frozen=True)
class RosterDigests:
    """All roster versions that this peer holds, oldest first."""

    versions: tuple[RosterDigest, ...]

    @staticmethod
    def of(roster_files: Sequence[RosterFile], classes: Sequence[str]) -> RosterDigests:
        """Compute the hashes of this peer's rosters."""
        return RosterDigests(tuple(_version(roster_file, classes) for roster_file in roster_files))

    def at(self, round: int) -> RosterDigest:
        """Return the version of a round, or the first version for earlier rounds."""
        return [version for version in self.versions if version.from_round <= round or version is self.versions[0]][-1]

    def hello(self, name: str, round: int, finished: bool = False) -> pb.Hello:
        """Return this peer's greeting."""
        first = self.versions.index(self.at(round))
        agreements = [version.to_proto() for version in self.versions[first : first + MOST_AGREEMENTS]]
        return pb.Hello(protocol=PROTOCOL, name=name, round=round, finished=finished, agreements=agreements)

    @property
    def size(self) -> int:
        """Approximate maximum size of a greeting in bytes."""
        return MOST_AGREEMENTS * (DIGEST + HASH * len(FIELDS) + 32) + 128

    def check(self, caller: str, hello: pb.Hello, round: int) -> None:
        """Raise `PeerRefusedError` if a caller's greeting does not match this peer's protocol and roster.

        `round` is this peer's round. The rosters are compared for the later round of the two peers.
        """
        if hello.protocol != PROTOCOL:
            raise PeerRefusedError(
                f"'{caller}' uses version {hello.protocol} of the protocol, this peer {PROTOCOL}",
                Refusal.OTHER_PROTOCOL,
            )
        if hello.name != caller:
            raise _unsound(f"'{caller}' greets under another name than that of its certificate")
        if not 1 <= len(hello.agreements) <= MOST_AGREEMENTS or not all(map(_is_sound, hello.agreements)):
            raise _unsound(f"'{caller}' greets with invalid agreements")
        mine = {version.digest: version.to_proto() for version in self.versions}
        if any(mine.get(theirs.digest, theirs) != theirs for theirs in hello.agreements):
            raise _unsound(f"'{caller}' greets with fields that do not match its digest")
        now = max(round, hello.round)
        holds = self.at(now)
        if not any(theirs.digest == holds.digest for theirs in hello.agreements):
            begun = [theirs for theirs in hello.agreements if theirs.from_round <= now] or hello.agreements[:1]
            named = holds.differs_in(begun[-1].fields)
            raise PeerRefusedError(
                f"'{caller}' holds another roster, which differs in: {', '.join(named) or 'its digest'}. Compare the "
                "two files: fedh2l roster check ONE --with OTHER",
                Refusal.OTHER_ROSTER,
                named,
            )
        newest = hello.agreements[-1]
        if newest.digest not in mine:
            log.warning(
                "'%s' holds version %d of the roster, from round %d, and this peer does not",
                caller, newest.version, newest.from_round, extra={"peer": caller},
            )  # fmt: skip


def _version(roster_file: RosterFile, classes: Sequence[str]) -> RosterDigest:
    canonical = roster_file.canonical(classes)
    assert tuple(sorted(canonical)) == FIELDS
    hashes = (
        hashlib.sha256(json.dumps(canonical[name], sort_keys=True, separators=(",", ":")).encode()).digest()[:HASH]
        for name in FIELDS
    )
    agreement = roster_file.agreement
    digest = roster_file.roster(classes).digest
    return RosterDigest(agreement.version, agreement.from_round, digest, b"".join(hashes))


def _unsound(text: str) -> PeerRefusedError:
    return PeerRefusedError(text, Refusal.UNSOUND_GREETING)


def _is_sound(agreement: pb.Agreement) -> bool:
    sizes = len(agreement.digest), len(agreement.fields)
    return sizes == (DIGEST, HASH * len(FIELDS)) and agreement.version >= 1 and agreement.from_round >= 1
