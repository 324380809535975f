"""What two peers compare before they talk: the roster that holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.charter import Charter, differences
from fedh2l.peer.circle import PeerRefusedError

log = logging.getLogger("fedh2l.peer")

PROTOCOL = 1


@dataclass(frozen=True)
class Version:
    """One version of what was agreed on."""

    from_round: int
    digest: bytes
    canonical: str


@dataclass(frozen=True)
class Agreed:
    """All that this peer has agreed on, oldest first."""

    versions: tuple[Version, ...]

    @staticmethod
    def of(charters: Sequence[Charter], classes: Sequence[str]) -> Agreed:
        """Of this peer's rosters."""
        return Agreed(
            tuple(
                Version(
                    charter.agreement.from_round,
                    charter.roster(classes).digest,
                    json.dumps(charter.canonical(classes), sort_keys=True, separators=(",", ":")),
                )
                for charter in charters
            )
        )

    def at(self, round: int) -> Version:
        """What holds in a round; the first, before it begins."""
        return [version for version in self.versions if version.from_round <= round or version is self.versions[0]][-1]

    def hello(self, name: str, round: int, finished: bool = False) -> pb.Hello:
        """The greeting of this peer."""
        held = self.versions[self.versions.index(self.at(round)) :]
        agreements = [pb.Agreement(digest=version.digest, canonical=version.canonical) for version in held]
        return pb.Hello(protocol=PROTOCOL, name=name, round=round, finished=finished, agreements=agreements)

    @property
    def size(self) -> int:
        """Bytes of a greeting at most, about."""
        return sum(len(version.canonical.encode()) + 64 for version in self.versions) + 256

    def check(self, caller: str, hello: pb.Hello, round: int) -> None:
        """Raises `PeerRefusedError`, and says why, if this peer, in `round`, and another have not agreed on the same.

        What must be the same is the version that holds for whoever of the two is further.
        """
        if hello.protocol != PROTOCOL:
            raise PeerRefusedError(f"'{caller}' speaks version {hello.protocol} of the protocol, this peer {PROTOCOL}")
        if hello.name != caller:
            raise PeerRefusedError(f"'{caller}' says that it is '{hello.name[:80]}'")
        now = max(round, hello.round)
        mine = self.at(now)
        if any(theirs.digest == mine.digest for theirs in hello.agreements):
            self._say_what_is_new(caller, hello)
            return
        theirs = _at(hello, now)
        try:
            found = differences(json.loads(mine.canonical), theirs) if theirs is not None else [_UNREADABLE]
        except RecursionError:
            found = [_UNREADABLE]
        why = "; ".join(found[:20]) or "its digest is not that of what it says it agreed on"
        raise PeerRefusedError(f"'{caller}' has agreed on something else: {why}")

    def _say_what_is_new(self, caller: str, hello: pb.Hello) -> None:
        """A version that is to come, and that this peer must be given before it does."""
        known = {version.digest for version in self.versions}
        if hello.agreements and hello.agreements[-1].digest not in known:
            newest = _read(hello.agreements[-1]) or {}
            log.warning(
                "'%s' holds version %s of the roster, from round %s, and this peer does not",
                caller, str(newest.get("version"))[:20], str(newest.get("from_round"))[:20], extra={"peer": caller},
            )  # fmt: skip


_UNREADABLE = "what it agreed on cannot be read"


def _read(agreement: pb.Agreement) -> dict[str, Any] | None:
    try:
        found = json.loads(agreement.canonical)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else {}


def _at(hello: pb.Hello, round: int) -> dict[str, Any] | None:
    """The version that holds in a round for whoever greets, as far as it can be read."""
    read = [found for found in map(_read, hello.agreements[:8]) if found is not None]
    begun = [found for found in read if not isinstance(found.get("from_round"), int) or found["from_round"] <= round]
    return next(reversed(begun or read), None)
