"""Rounds of the other members, and whether they have continued without this peer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from fedh2l.peer.membership.roster_history import RosterHistory, RosterVersion
from fedh2l.peer.transport.inbox import Inbox
from fedh2l.peer.transport.peer_table import PeerTable

STEPS = 4
"""Assumed duration of a round in local steps, until one is measured."""


class RoundTimer:
    """Measures the training speed and the idle time of this peer."""

    def __init__(self) -> None:
        self._step = self._round = math.inf
        """Seconds of the fastest local step, and of the fastest round without its wait."""
        self._idle = time.time()
        self._began = self._waiting = time.monotonic()
        self._waited = 0.0

    def begins(self) -> None:
        """Record the start of a round."""
        self._began, self._waited = time.monotonic(), 0.0

    def waits(self) -> None:
        """Record the start of a wait."""
        self._idle, self._waiting = time.time(), time.monotonic()
        self._step = min(self._step, max(self._waiting - self._began, 1e-6))

    def goes_on(self) -> None:
        """Record the end of a wait."""
        self._waited += time.monotonic() - self._waiting

    def trained(self) -> None:
        """Record the end of a round."""
        self._round = min(self._round, max(time.monotonic() - self._began - self._waited, 1e-6))

    def possible(self) -> int:
        """Return the number of rounds that this peer could have trained in its idle time, at its best speed."""
        fastest = self._round if math.isfinite(self._round) else STEPS * self._step
        return int(max(0.0, time.time() - self._idle) / fastest)

    def state(self) -> list[float]:
        return [self._step, self._round, self._idle]

    def restore(self, state: Sequence[float]) -> None:
        self._step, self._round, self._idle = map(float, state)


class PeerProgress:
    """Compares the round of this peer, `name`, with the rounds that others report. `rounds` is its last round.

    A reported round counts if two members report it. The report of a single member counts only if there is no other
    member, or if fewer than two others were connected for `timing.patience` seconds. Even then it advances this peer by
    no more rounds than the peer could have trained in the meantime.
    """

    def __init__(self, name: str, rounds: int, history: RosterHistory, inbox: Inbox, peers: PeerTable) -> None:
        self._name, self._rounds, self._history = name, rounds, history
        self._inbox, self._peers = inbox, peers
        self._with_others = time.monotonic()
        """Last time when at least two others were connected."""
        self.timer = RoundTimer()

    def _theirs(self, version: RosterVersion, done: int) -> dict[str, int]:
        """Return the rounds of the other members, limited to those that are trusted."""
        others = version.roster.others(self._name)
        rounds = {
            name: min(self._rounds, max(self._peers.contact(name).round, self._inbox.furthest(name))) for name in others
        }
        known = sorted(rounds.values(), reverse=True)
        if sum(self._peers.is_there(name) for name in others) >= 2:
            self._with_others = time.monotonic()
        alone = len(others) < 2 or time.monotonic() - self._with_others > version.roster_file.timing.patience
        believed = min(known[0], max([*known[1:2], done + 1 + self.timer.possible()])) if alone else known[1]
        return {name: min(round, believed) for name, round in rounds.items()}

    def ahead(self, done: int, sent: int) -> int | None:
        """Return the round of the others if they have continued without this peer, else None.

        `done` is the last round that this peer has done. `sent` is the last round whose message was sent.
        """
        version = self._history.at(done + 1)
        if version.roster_file.timing.mode == "asynchronous":  # each peer has a different pace
            return None
        theirs = self._theirs(version, done)
        furthest = max(theirs.values())
        missed = any(self._never_taught(name, round, done, sent) for name, round in theirs.items())
        missed = missed or self._refused_by_enough(theirs, done)
        return furthest if missed and furthest > done + 1 else None

    def _never_taught(self, name: str, theirs: int, done: int, sent: int) -> bool:
        """Return whether a peer in round `theirs` has done a round for which this peer never sent its message."""
        return any(self._teaches(name, round) for round in range(max(done, sent) + 1, theirs))

    def _refused_by_enough(self, theirs: dict[str, int], done: int) -> bool:
        """Return whether enough peers refused a message as too old, so that they have gone on without it.

        A single peer could refuse every message, so that this peer never waits for slower ones. So two must refuse it,
        or all receivers.
        """
        past = {name: self._peers.contact(name).past for name in theirs}
        refused = [round for name, round in past.items() if done < round < theirs[name]]
        if not refused:
            return False
        students = sum(self._teaches(name, max(refused)) for name in theirs)
        return len(refused) >= min(2, students)

    def _teaches(self, student: str, round: int) -> bool:
        version = self._history.at(round)
        return (
            round >= version.first
            and version.exchanges(round)
            and self._name in version.teachers(round).get(student, ())
        )

    def at_least(self, round: int, version: RosterVersion) -> int:
        """Return how many other members report this round or a later one."""
        others = version.roster.others(self._name)
        return sum(max(self._peers.contact(n).round, self._inbox.furthest(n)) >= round for n in others)
