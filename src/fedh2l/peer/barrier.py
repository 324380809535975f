"""Waiting for other members: for connections at the start, and for messages in each round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fedh2l.errors import FedH2LError
from fedh2l.peer.refusals import PeerRefusedError
from fedh2l.peer.transport.inbox import LatestInbox
from fedh2l.protocol.messages import Posteriors

if TYPE_CHECKING:
    from fedh2l.peer.peer import Peer

log = logging.getLogger("fedh2l.peer")

MEET = 5.0
"""Seconds that a starting peer waits for connections to the others, to learn which round they are in."""


LOOK = 0.05
"""Seconds between checks while waiting: for a stop request, for lost members, and for members that are ahead."""


class StoppedError(FedH2LError):
    """A stop request arrived during a round."""


class RoundBarrier:
    """Waits for other members, within the limits of the roster."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._near, self._inbox = peer, peer.peers, peer.inbox

    def meet(self, stop: Callable[[], bool]) -> None:
        """Wait for connections to the others, so that this peer learns which round they are in.

        In asynchronous mode this is the only wait. It lasts until the quorum is connected. A joining peer waits until
        most others have reached its first round.
        """
        peer, end, warned = self._peer, time.monotonic() + MEET, False
        while not stop() and not peer.finished:
            why = self._too_early()
            everybody = all(self._near.is_there(n) or self._near.is_lost(n, peer.begins) for n in self._others())
            if why is None and (everybody or time.monotonic() >= end):
                break
            if why is not None and time.monotonic() >= end and not warned:
                warned, peer.phase = True, "waiting"
                log.warning("waits: %s", why)
            time.sleep(0.02)

    def _others(self) -> tuple[str, ...]:
        return self._peer.roster_version.roster.others(self._peer.name)

    def _too_early(self) -> str | None:
        """Return why training cannot begin yet, or None."""
        peer, others = self._peer, self._others()
        first = peer.roster_version.first
        joins = first > 1 and peer.present() == first
        if joins and 2 * peer.progress.at_least(first, peer.roster_version) <= len(others):
            return f"this peer is a member from round {first}, which most others have not reached yet"
        there = sum(map(self._near.is_there, others))
        wanted = min(peer.timing.quorum, sum(not self._is_done(name) for name in others))
        if peer.timing.mode == "asynchronous" and there < wanted:
            return f"{there} of {len(others)} others are connected, but {wanted} are needed to begin"
        return None

    def _is_done(self, name: str) -> bool:
        """Return whether another member has done its last round.

        Its own claim counts only when this peer has reached the same round, because an earlier claim could be false. A
        removed peer treats peers that reject it as finished.
        """
        peer = self._peer
        if peer.name not in peer.history.newest.roster.names and self._near.contact(name).state == "refused":
            return True
        last = min(peer.rounds, peer.history.rounds_of(name))
        return self._near.says_done(name) and peer.present() >= last

    def hear(self, round: int, stop: Callable[[], bool]) -> list[Posteriors]:
        """Return the messages of a round. In synchronous mode, wait for them first."""
        if isinstance(self._inbox, LatestInbox):
            here: Sequence[Posteriors] = self._inbox.newest(round)
        else:
            expected = self._peer.roster_version.teachers(round).get(self._peer.name, ())
            here = self._quorate(round, self._in_time(round, stop), expected, stop)
        return [signal for signal in here if self._may_teach(signal.sender)]

    def awaited(self, round: int) -> tuple[str, ...]:
        """Return the members whose messages of a round are still awaited.

        They do not include a member that is late, done or lost, or that has skipped this round.
        """
        if isinstance(self._inbox, LatestInbox):
            return ()
        expected = self._peer.roster_version.teachers(round).get(self._peer.name, ())
        for name in expected:
            if name not in self._near.late and self._near.is_lost(name, self._peer.begins):
                about = {"peer": name, "round": round}
                log.warning("'%s' is lost in round %d; not awaited until its next message", name, round, extra=about)
                self._near.late.add(name)
        return tuple(
            name
            for name in expected
            if name not in self._near.late and not self._is_done(name) and not self._inbox.has_skipped(name, round)
        )

    def _in_time(self, round: int, stop: Callable[[], bool]) -> Sequence[Posteriors]:
        """Wait until the deadline for all members that are not late. Members that miss it become late."""
        seconds = self._peer.timing.deadline
        deadline = time.monotonic() + seconds
        while True:
            if stop():
                raise StoppedError
            waited = self.awaited(round)
            here = self._inbox.collect(round, min(deadline, time.monotonic() + LOOK), set(waited).issubset)
            heard = {signal.sender for signal in here}
            over = time.monotonic() >= deadline
            for name in waited if over else ():
                if name not in heard:
                    about = {"peer": name, "round": round}
                    log.warning("'%s' did not answer in round %d; late until it answers", name, round, extra=about)
                    self._near.missed(name, seconds)
            if over or heard.issuperset(waited) or self._peer.ahead() is not None:
                for name in heard.intersection(waited):
                    self._near.answered(name)
                return here

    def _quorate(
        self, round: int, here: Sequence[Posteriors], expected: Sequence[str], stop: Callable[[], bool]
    ) -> Sequence[Posteriors]:
        """Wait until the quorum is reached. A peer that pauses saves a checkpoint first, because the wait may be long.

        Some members cannot send a message for this round. The topology has no edge from them, or they are in a later
        round and this peer lost their message in a restart. They count towards the quorum if they are connected.
        """
        peer, began, paused = self._peer, time.monotonic(), False

        def enough(heard: set[str]) -> bool:
            others = [name for name in self._others() if not self._is_done(name)]
            silent = (name for name in others if name not in expected or self._inbox.has_skipped(name, round))
            return len(heard) + sum(map(self._near.is_there, silent)) >= min(peer.timing.quorum, len(others))

        while not enough({signal.sender for signal in here}) and peer.ahead() is None:
            if stop():
                raise StoppedError
            patient = peer.timing.below_quorum == "wait" and time.monotonic() - began < peer.timing.patience
            if patient:
                peer.phase = "waiting"
            elif not paused:
                paused, peer.phase = True, "paused"
                log.warning("paused in round %d: only %d messages arrived", round, len(here), extra={"round": round})
                peer.checkpoint()
            here = self._inbox.collect(round, time.monotonic() + LOOK, enough)
        peer.phase = "training"
        if paused:
            log.info("goes on in round %d", round, extra={"round": round})
        return here

    def linger(self, stop: Callable[[], bool]) -> None:
        """Wait up to `timing.linger` seconds for the others, so that a returning member learns that they are done.

        A former member does not wait.
        """
        peer, end, waited = self._peer, time.monotonic() + self._peer.timing.linger, False
        others = [name for name in self._others() if self._near.contact(name).state != "refused"]
        while peer.name in peer.history.newest.roster.names and time.monotonic() < end and not stop():
            behind = [name for name in others if not self._near.says_done(name)]
            if not behind:
                break
            if not waited:
                log.info("done; stays up to %g s for %s", peer.timing.linger, ", ".join(behind))
            waited = True
            time.sleep(LOOK)

    def barred(self) -> frozenset[str]:
        """Return the other members that were revoked or removed."""
        return frozenset(name for name in self._others() if self._refused(name) is not None)

    def _may_teach(self, name: str) -> bool:
        """Return whether a sender is still accepted. It may have been revoked or removed since its message arrived."""
        refused = self._refused(name)
        if refused is not None:
            log.warning("a signal is not used: %s", refused, extra={"peer": name})
        return refused is None

    def _refused(self, name: str) -> PeerRefusedError | None:
        try:
            self._peer.auth.check(name)
        except PeerRefusedError as refused:
            return refused
        return None
