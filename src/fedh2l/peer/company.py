"""Waiting for others: for their company at the start, and for their signals in a round, as long as the roster says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fedh2l.errors import FedH2LError
from fedh2l.messages import Posteriors
from fedh2l.peer.circle import PeerRefusedError
from fedh2l.peer.mailbox import LatestMailbox

if TYPE_CHECKING:
    from fedh2l.peer.peer import Peer

log = logging.getLogger("fedh2l.peer")

MEET = 5.0
"""Seconds in which a peer that starts tries to meet the others, to learn which round they are in."""


LOOK = 0.5
"""Seconds after which a peer that waits looks around: whether it is to stop, or others have gone on."""


class StoppedError(FedH2LError):
    """Asked to stop in the middle of a round."""


class Company:
    """The others, as far as a peer waits for them."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._near, self._mailbox = peer, peer.neighbours, peer.mailbox

    def meet(self, stop: Callable[[], bool]) -> None:
        """Gives all others a moment to be there, so that it is known which round they are in.

        Who never waits for anybody later waits here, for as many as the roster wants to be heard; and who joins waits
        until most others have come to the round from which it is a member.
        """
        peer, end, said = self._peer, time.monotonic() + MEET, False
        while not stop() and not peer.finished:
            why = self._too_early()
            everybody = all(map(self._near.is_there, self._others()))
            if why is None and (everybody or time.monotonic() >= end):
                break
            if why is not None and time.monotonic() >= end and not said:
                said, peer.phase = True, "waiting"
                log.warning("waits: %s", why)
            time.sleep(0.02)

    def _others(self) -> tuple[str, ...]:
        return self._peer.term.roster.others(self._peer.name)

    def _too_early(self) -> str | None:
        """Why it is not yet time to begin, or None."""
        peer, others = self._peer, self._others()
        first = peer.term.first
        joins = first > 1 and peer.present() == first
        if joins and 2 * peer.pace.at_least(first, peer.term) <= len(others):
            return f"most others are not in round {first} yet, from which this peer is a member"
        there = sum(map(self._near.is_there, others))
        wanted = min(peer.timing.quorum, sum(not self._is_done(name) for name in others))
        if peer.timing.mode == "asynchronous" and there < wanted:
            return f"{there} of {len(others)} others are there, and {wanted} are wanted to begin"
        return None

    def _is_done(self, name: str) -> bool:
        """Whether another has done its last round: it says so, and this peer has come as far; before, it could lie.

        To whom is no member any longer, those who refuse it are done too.
        """
        peer = self._peer
        if peer.name not in peer.terms.newest.roster.names and self._near.contact(name).state == "refused":
            return True
        last = min(peer.rounds, peer.terms.rounds_of(name))
        return self._near.says_done(name) and peer.present() >= last

    def hear(self, round: int, stop: Callable[[], bool]) -> list[Posteriors]:
        """The signals of a round: of all that are expected, or of those that are there when it is time to go on."""
        if isinstance(self._mailbox, LatestMailbox):
            here: Sequence[Posteriors] = self._mailbox.newest(round)
        else:
            expected = self._peer.term.teachers(round).get(self._peer.name, ())
            here = self._quorate(round, self._in_time(round, stop), expected, stop)
        return [signal for signal in here if self._may_teach(signal.sender)]

    def awaited(self, round: int) -> tuple[str, ...]:
        """Whose signals of a round are waited for: of all that are expected, those who are neither late nor done."""
        if isinstance(self._mailbox, LatestMailbox):
            return ()
        expected = self._peer.term.teachers(round).get(self._peer.name, ())
        return tuple(name for name in expected if name not in self._near.late and not self._is_done(name))

    def _in_time(self, round: int, stop: Callable[[], bool]) -> Sequence[Posteriors]:
        """Waits for all who are not late, until the deadline; who misses it is late."""
        seconds = self._peer.timing.deadline
        deadline = time.monotonic() + seconds
        while True:
            if stop():
                raise StoppedError
            waited = self.awaited(round)
            here = self._mailbox.collect(round, min(deadline, time.monotonic() + LOOK), set(waited).issubset)
            heard = {signal.sender for signal in here}
            over = time.monotonic() >= deadline
            for name in waited if over else ():
                if name not in heard:
                    about = {"peer": name, "round": round}
                    log.warning("'%s' did not answer in round %d; late until it is heard", name, round, extra=about)
                    self._near.missed(name, seconds)
            if over or heard.issuperset(waited) or self._peer.ahead() is not None:
                for name in heard.intersection(waited):
                    self._near.answered(name)
                return here

    def _quorate(
        self, round: int, here: Sequence[Posteriors], expected: Sequence[str], stop: Callable[[], bool]
    ) -> Sequence[Posteriors]:
        """Waits until enough are heard; others may be away for long, so what there is is saved meanwhile.

        Those who by the topology say nothing in this round count if they are there.
        """
        peer, began, paused = self._peer, time.monotonic(), False

        def enough(heard: set[str]) -> bool:
            others = [name for name in self._others() if not self._is_done(name)]
            there = sum(self._near.is_there(name) for name in others if name not in expected)
            return len(heard) + there >= min(peer.timing.quorum, len(others))

        while not enough({signal.sender for signal in here}) and peer.ahead() is None:
            if stop():
                raise StoppedError
            patient = peer.timing.below_quorum == "wait" and time.monotonic() - began < peer.timing.patience
            if patient:
                peer.phase = "waiting"
            elif not paused:
                paused, peer.phase = True, "paused"
                log.warning("paused in round %d: only %d peers are heard", round, len(here), extra={"round": round})
                peer.checkpoint()
            here = self._mailbox.collect(round, time.monotonic() + LOOK, enough)
        peer.phase = "training"
        if paused:
            log.info("goes on in round %d", round, extra={"round": round})
        return here

    def barred(self) -> frozenset[str]:
        """Those of the others who were taken from among the members."""
        return frozenset(name for name in self._others() if self._refused(name) is not None)

    def _may_teach(self, name: str) -> bool:
        """Not if it was taken from among the members since its signal came."""
        refused = self._refused(name)
        if refused is not None:
            log.warning("a signal is not used: %s", refused, extra={"peer": name})
        return refused is None

    def _refused(self, name: str) -> PeerRefusedError | None:
        try:
            self._peer.circle.check(name)
        except PeerRefusedError as refused:
            return refused
        return None
