"""What comes in from other peers: looked at before it is used, dropped with a reason if it is not sound."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from fedh2l.errors import FedH2LError, MessageError
from fedh2l.messages import Posteriors, decode, round_of
from fedh2l.peer.terms import Term, Terms

log = logging.getLogger("fedh2l.peer")

AHEAD = 64
"""How many rounds a peer may be ahead of this one for its signals to be kept."""


class Reason(StrEnum):
    """Why a signal is refused."""

    TOO_LARGE = "too large"
    MALFORMED = "malformed"
    NOT_POSTERIORS = "not posteriors"
    WRONG_NAME = "name is not the certificate's"
    NOT_EXPECTED = "not expected"
    PAST = "round is past"
    FUTURE = "round is in the future"
    REPLAYED = "seen before"
    WRONG_SHAPE = "wrong shape"
    UNSOUND = "unsound values"


class Refused(FedH2LError):  # noqa: N818 - an outcome rather than an error
    """A signal that is not used."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Mailbox:
    """The signals that one peer was sent, by sender and round; safe to use from several threads.

    The terms say who is heard in a round, how many answers a signal holds, and which are the right ones. What is kept
    is bounded: one signal a sender and round, from the present round to some rounds ahead.
    """

    def __init__(self, name: str, terms: Terms) -> None:
        self.name, self.terms = name, terms
        self.refused: Counter[tuple[str, Reason]] = Counter()
        """How many signals of whom were dropped, and why."""
        self.heard: Counter[str] = Counter()
        """How many signals of whom were kept."""
        self._changed = threading.Condition()
        self._kept: dict[tuple[int, str], Posteriors] = {}
        self._seen: set[tuple[int, str]] = set()
        self._round = 1

    def enter(self, round: int) -> None:
        """Begins a round; what is too old by now is forgotten."""
        with self._changed:
            self._round = round
            self._kept = {key: signal for key, signal in self._kept.items() if key[0] >= round}
            self._seen = {key for key in self._seen if key[0] >= round}

    @property
    def round(self) -> int:
        """The present one."""
        return self._round

    def accept(self, sender: str, data: bytes) -> Posteriors:
        """Keeps a signal that came from `sender`, as its certificate says; raises `Refused`, and counts it, if not."""
        try:
            signal = self._examined(sender, data)
        except Refused as refused:
            with self._changed:
                self.refused[sender, refused.reason] += 1
            log.warning("dropped a signal of '%s': %s", sender, refused, extra={"peer": sender})
            raise
        return signal

    def _examined(self, sender: str, data: bytes) -> Posteriors:
        largest = self.terms.largest(sender)
        if len(data) > largest:
            raise Refused(Reason.TOO_LARGE, f"{len(data)} bytes, where at most {largest} are agreed")
        try:
            term = self.terms.at(round_of(data))
            signal = decode(data, term.roster, math.prod(term.shape(sender)))
        except MessageError as error:
            raise Refused(Reason.MALFORMED, str(error)) from None
        if not isinstance(signal, Posteriors):
            raise Refused(Reason.NOT_POSTERIORS, f"it holds {signal.kind}, and only posteriors may cross")
        if signal.sender != sender:
            raise Refused(Reason.WRONG_NAME, f"it says it is from '{signal.sender}'")
        self._check_round(signal, term)
        agreed = term.shape(sender)
        if signal.shape != agreed or signal.flagged != term.labelled:
            count = "a" if term.labelled else "no"
            raise Refused(
                Reason.WRONG_SHAPE, f"it has shape {signal.shape}, where {agreed} and {count} count were agreed"
            )
        if signal.encoding != term.method.written:
            raise Refused(
                Reason.WRONG_SHAPE, f"it is written in {signal.encoding}, where {term.method.written} was agreed"
            )
        flags = signal.faults(term.labels(sender, signal.round)).tolist()
        if any(flags):
            raise Refused(Reason.UNSOUND, f"it holds {signal.FAULTS[flags.index(True)]}")
        with self._changed:
            self._check_round(signal, term)  # time has passed, and another thread may have been quicker
            self._keep(signal)
            self.heard[sender] += 1
            self._changed.notify_all()
        return signal

    def _check_round(self, signal: Posteriors, term: Term) -> None:
        """Refuses what is not of this round or one soon, is not expected, or was here before."""
        round, sender, present = signal.round, signal.sender, self._round
        if round < max(term.first, present):
            raise Refused(Reason.PAST, f"it is of round {round}, and this is round {present}")
        if round > present + AHEAD:
            raise Refused(Reason.FUTURE, f"it is of round {round}, and this is round {present}")
        self._check_expected(signal, term)
        if (round, sender) in self._seen:
            raise Refused(Reason.REPLAYED, f"a signal of round {round} was here before")

    def _check_expected(self, signal: Posteriors, term: Term) -> None:
        round, sender = signal.round, signal.sender
        if not term.exchanges(round) or sender not in term.teachers(round).get(self.name, ()):
            raise Refused(Reason.NOT_EXPECTED, f"'{sender}' is not heard by '{self.name}' in round {round}")

    def _keep(self, signal: Posteriors) -> None:
        key = (signal.round, signal.sender)
        self._seen.add(key)
        self._kept[key] = signal

    def collect(self, round: int, deadline: float, enough: Callable[[set[str]], bool]) -> list[Posteriors]:
        """The signals of a round that are here, in roster order, once `enough` says so of those who are heard.

        At the deadline, a time of `time.monotonic()`, it is what is here.
        """
        with self._changed:
            while True:
                here = [self._kept[round, name] for name in self._members(round) if (round, name) in self._kept]
                left = deadline - time.monotonic()
                if enough({signal.sender for signal in here}) or left <= 0:
                    return here
                self._changed.wait(left)

    def _members(self, round: int) -> tuple[str, ...]:
        return self.terms.at(round).roster.names

    def furthest(self, sender: str) -> int:
        """The furthest round that a signal of `sender` is of; 0 if there is none."""
        with self._changed:
            return max((round for round, name in self._kept if name == sender), default=0)


class LatestMailbox(Mailbox):
    """Of every sender the newest signal, whatever round it is of: for peers that do not wait for each other.

    Each goes at its own pace, so rounds say nothing of age; a signal is as old as it has been here, in exchanges of
    this peer, and is of use for `staleness` of them. A sender's rounds only go up.
    """

    def __init__(self, name: str, terms: Terms, staleness: int) -> None:
        super().__init__(name, terms)
        self.staleness = staleness
        self._last: dict[str, int] = {}
        self._newest: dict[str, tuple[int, Posteriors]] = {}
        """By sender, with the round in which it came."""

    def enter(self, round: int) -> None:
        """Begins a round."""
        with self._changed:
            self._round = round

    def _check_round(self, signal: Posteriors, term: Term) -> None:
        """Refuses what is of another roster than the present, is not expected, or is no newer than what was here."""
        round, sender = signal.round, signal.sender
        present = self.terms.at(self._round)
        if term is not present or not term.first <= round <= self.terms.rounds:
            reason = Reason.PAST if round < present.first else Reason.FUTURE
            raise Refused(reason, f"it is of round {round}, and this is round {self._round}, of another time")
        self._check_expected(signal, term)
        if round <= self._last.get(sender, 0):
            again = round == self._last[sender]
            raise Refused(
                Reason.REPLAYED if again else Reason.PAST,
                f"it is of round {round}, and one of round {self._last[sender]} was here before",
            )

    def _keep(self, signal: Posteriors) -> None:
        self._last[signal.sender] = signal.round
        self._newest[signal.sender] = (self._round, signal)

    def newest(self, round: int) -> list[Posteriors]:
        """The newest signal of each peer that is heard in a round, within the staleness bound, in roster order."""
        term = self.terms.at(round)
        teachers = term.teachers(round).get(self.name, ())
        since = self._since(round, term)
        with self._changed:
            here = [self._newest[name] for name in self._members(round) if name in teachers and name in self._newest]
        return [signal for came, signal in here if came >= since]

    def _since(self, round: int, term: Term) -> int:
        """The round that is so many exchanges back, in the same term: before, there was another seed set."""
        left, since = self.staleness, round
        while left and since > term.first:
            since -= 1
            left -= term.exchanges(since)
        return since

    def furthest(self, sender: str) -> int:
        """The round of the newest signal of `sender`; 0 if there is none."""
        return self._last.get(sender, 0)
