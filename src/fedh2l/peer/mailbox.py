"""What comes in from other peers: looked at before it is used, dropped with a reason if it is not sound."""

from __future__ import annotations

import logging
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
    is bounded: one signal a sender and round, within a window of rounds around the present one.
    """

    def __init__(
        self,
        name: str,
        terms: Terms,
        staleness: int = 0,
    ) -> None:
        self.name, self.terms = name, terms
        self.refused: Counter[tuple[str, Reason]] = Counter()
        """How many signals of whom were dropped, and why."""
        self.heard: Counter[str] = Counter()
        """How many signals of whom were kept."""
        self.staleness = staleness
        """How many exchanges old a signal may be."""
        self._changed = threading.Condition()
        self._kept: dict[tuple[int, str], Posteriors] = {}
        self._seen: set[tuple[int, str]] = set()
        self._round = self._oldest = 1

    def enter(self, round: int) -> None:
        """Begins a round; what is too old by now is forgotten."""
        oldest = self._since(round)
        with self._changed:
            self._round, self._oldest = round, oldest
            self._kept = {key: signal for key, signal in self._kept.items() if key[0] >= oldest}
            self._seen = {key for key in self._seen if key[0] >= oldest}

    def _since(self, round: int) -> int:
        """The oldest round whose signals are of use in `round`: so many exchanges back, in the same term."""
        term = self.terms.at(round) or self.terms.all[0]
        left, oldest = self.staleness, round
        while left and oldest > term.first:
            oldest -= 1
            left -= term.exchanges(oldest)
        return oldest

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
            term = self.terms.at(round_of(data)) or self.terms.all[0]
            signal = decode(data, term.roster)
        except MessageError as error:
            raise Refused(Reason.MALFORMED, str(error)) from None
        if not isinstance(signal, Posteriors):
            raise Refused(Reason.NOT_POSTERIORS, f"it holds {signal.kind}, and only posteriors may cross")
        if signal.sender != sender:
            raise Refused(Reason.WRONG_NAME, f"it says it is from '{signal.sender}'")
        self._check_round(signal, term)
        agreed = term.shape(sender)
        if signal.shape != agreed or not signal.flagged:
            raise Refused(Reason.WRONG_SHAPE, f"it has shape {signal.shape}, where {agreed} and a count were agreed")
        flags = signal.faults(term.labels(sender, signal.round)).tolist()
        if any(flags):
            raise Refused(Reason.UNSOUND, f"it holds {signal.FAULTS[flags.index(True)]}")
        key = (signal.round, sender)
        with self._changed:
            self._check_round(signal, term)  # time has passed, and another thread may have been quicker
            self._seen.add(key)
            self._kept[key] = signal
            self.heard[sender] += 1
            self._changed.notify_all()
        return signal

    def _check_round(self, signal: Posteriors, term: Term) -> None:
        round, sender, present = signal.round, signal.sender, self._round
        if round < max(term.first, self._oldest):
            raise Refused(Reason.PAST, f"it is of round {round}, and this is round {present}")
        if round > present + AHEAD:
            raise Refused(Reason.FUTURE, f"it is of round {round}, and this is round {present}")
        if not term.exchanges(round) or sender not in term.teachers(round).get(self.name, ()):
            raise Refused(Reason.NOT_EXPECTED, f"'{sender}' is not heard by '{self.name}' in round {round}")
        if (round, sender) in self._seen:
            raise Refused(Reason.REPLAYED, f"a signal of round {round} was here before")

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

    def newest(self, round: int) -> list[Posteriors]:
        """The newest signal of each peer that is heard in a round, within the staleness bound, in roster order."""
        term = self.terms.at(round) or self.terms.all[0]
        teachers = term.teachers(round).get(self.name, ())
        oldest = self._since(round)
        with self._changed:
            found = []
            for name in (name for name in self._members(round) if name in teachers):
                rounds = [kept for kept, sender in self._kept if sender == name]
                fresh = [kept for kept in rounds if oldest <= kept <= round]
                if fresh:
                    found.append(self._kept[max(fresh), name])
            return found

    def _members(self, round: int) -> tuple[str, ...]:
        return (self.terms.at(round) or self.terms.all[0]).roster.names

    def furthest(self, sender: str) -> int:
        """The furthest round that a signal of `sender` is of; 0 if there is none."""
        with self._changed:
            return max((round for round, name in self._kept if name == sender), default=0)
