"""Messages from other peers. Each is validated on arrival, and dropped with a reason if it is invalid."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable

from fedh2l.errors import MessageError
from fedh2l.peer.membership.roster_history import RosterHistory, RosterVersion
from fedh2l.peer.refusals import Reason, Refused
from fedh2l.protocol.messages import Posteriors, decode, round_of

log = logging.getLogger("fedh2l.peer")

AHEAD = 64
"""Maximum number of rounds that a message may be ahead of this peer."""


class Inbox:
    """Messages that a peer has received, by sender and round. Thread-safe.

    The roster version defines the senders of a round, the shape of a message, and the correct labels. Memory is
    bounded: at most one message per sender and round is kept, from the current round to `AHEAD` rounds later.
    """

    def __init__(self, name: str, history: RosterHistory) -> None:
        self.name, self.history = name, history
        self.refused: Counter[tuple[str, Reason]] = Counter()
        """Number of dropped messages by sender and reason."""
        self.heard: Counter[str] = Counter()
        """Number of valid messages by sender."""
        self._changed = threading.Condition()
        self._kept: dict[tuple[int, str], Posteriors] = {}
        self._seen: set[tuple[int, str]] = set()
        self._round = 1

    def enter(self, round: int) -> None:
        """Start a round and drop the messages of earlier rounds."""
        with self._changed:
            self._round = round
            self._kept = {key: signal for key, signal in self._kept.items() if key[0] >= round}
            self._seen = {key for key in self._seen if key[0] >= round}

    @property
    def round(self) -> int:
        return self._round

    def accept(self, sender: str, data: bytes) -> Posteriors:
        """Validate and keep a message. Raise `Refused` and count it if it is invalid.

        `sender` is the name in the sender's certificate.
        """
        try:
            signal = self._examined(sender, data)
        except Refused as refused:
            with self._changed:
                self.refused[sender, refused.reason] += 1
            log.warning("dropped a signal of '%s': %s", sender, refused, extra={"peer": sender})
            raise
        return signal

    def _examined(self, sender: str, data: bytes) -> Posteriors:
        largest = self.history.largest(sender)
        if len(data) > largest:
            raise Refused(Reason.TOO_LARGE, f"{len(data)} bytes, but at most {largest} are accepted")
        try:
            version = self.history.at(round_of(data))
            signal = decode(data, version.roster, math.prod(version.shape(sender)))
        except MessageError as error:
            raise Refused(Reason.MALFORMED, str(error)) from None
        if not isinstance(signal, Posteriors):
            raise Refused(Reason.NOT_POSTERIORS, f"it holds {signal.kind}, but only posteriors are accepted")
        if signal.sender != sender:
            raise Refused(Reason.WRONG_NAME, f"its sender is '{signal.sender}'")
        self._check_round(signal, version)
        agreed = version.shape(sender)
        if signal.shape != agreed or signal.flagged != version.labelled:
            count = "a" if version.labelled else "no"
            raise Refused(
                Reason.WRONG_SHAPE, f"it should have shape {agreed} and {count} count, but has shape {signal.shape}"
            )
        if signal.encoding != version.method.written:
            raise Refused(
                Reason.WRONG_SHAPE, f"it has encoding {signal.encoding}, but {version.method.written} is agreed"
            )
        flags = signal.faults(version.labels(sender, signal.round)).tolist()
        if any(flags):
            raise Refused(Reason.UNSOUND, f"it holds {signal.FAULTS[flags.index(True)]}")
        with self._changed:
            self._check_round(signal, version)  # the round or the kept messages may have changed
            self._keep(signal)
            self.heard[sender] += 1
            self._changed.notify_all()
        return signal

    def _check_round(self, signal: Posteriors, version: RosterVersion) -> None:
        """Raise `Refused` for a message that is too old, too early, not expected, or a replay."""
        round, sender, present = signal.round, signal.sender, self._round
        if round < max(version.first, present):
            raise Refused(Reason.PAST, f"it is of round {round}, and this is round {present}")
        if round > present + AHEAD:
            raise Refused(Reason.FUTURE, f"it is of round {round}, and this is round {present}")
        self._check_expected(signal, version)
        if (round, sender) in self._seen:
            raise Refused(Reason.REPLAYED, f"a signal of round {round} has already arrived")

    def _check_expected(self, signal: Posteriors, version: RosterVersion) -> None:
        round, sender = signal.round, signal.sender
        if not version.exchanges(round) or sender not in version.teachers(round).get(self.name, ()):
            raise Refused(Reason.NOT_EXPECTED, f"'{sender}' is not a teacher of '{self.name}' in round {round}")

    def _keep(self, signal: Posteriors) -> None:
        key = (signal.round, signal.sender)
        self._seen.add(key)
        self._kept[key] = signal

    def collect(self, round: int, deadline: float, enough: Callable[[set[str]], bool]) -> list[Posteriors]:
        """Wait until `enough` accepts the senders of the messages of a round. Return the messages in roster order.

        At `deadline`, a time of `time.monotonic()`, return the messages that have arrived.
        """
        with self._changed:
            while True:
                here = [self._kept[round, name] for name in self._members(round) if (round, name) in self._kept]
                left = deadline - time.monotonic()
                if enough({signal.sender for signal in here}) or left <= 0:
                    return here
                self._changed.wait(left)

    def _members(self, round: int) -> tuple[str, ...]:
        return self.history.at(round).roster.names

    def has_skipped(self, sender: str, round: int) -> bool:
        """Return whether `sender` has sent no message for this round, but one for a later round. It sends in order."""
        with self._changed:
            return (round, sender) not in self._kept and any(name == sender and r > round for r, name in self._kept)

    def furthest(self, sender: str) -> int:
        """Return the latest round of the messages from `sender`, or 0 if there are none."""
        with self._changed:
            return max((round for round, name in self._kept if name == sender), default=0)


class LatestInbox(Inbox):
    """Keeps the newest message of each sender, for peers that do not wait for each other.

    Peers train at different speeds, so round numbers do not measure age. The age of a message is the number of
    exchanges of this peer since it arrived. A message is used for up to `staleness` exchanges. The rounds of a sender
    must increase.
    """

    def __init__(self, name: str, history: RosterHistory, staleness: int) -> None:
        super().__init__(name, history)
        self.staleness = staleness
        self._last: dict[str, int] = {}
        self._newest: dict[str, tuple[int, Posteriors]] = {}
        """Newest message of each sender, with the round of this peer when it arrived."""

    def enter(self, round: int) -> None:
        with self._changed:
            self._round = round

    def _check_round(self, signal: Posteriors, version: RosterVersion) -> None:
        """Raise `Refused` for a message that is of another roster version, not expected, or not newer than the last."""
        round, sender = signal.round, signal.sender
        present = self.history.at(self._round)
        if version is not present or not version.first <= round <= self.history.rounds:
            reason = Reason.PAST if round < present.first else Reason.FUTURE
            raise Refused(reason, f"it is of round {round}, and this is round {self._round}, of another time")
        self._check_expected(signal, version)
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
        """Return the newest messages of a round's teachers within the staleness bound, in roster order."""
        version = self.history.at(round)
        teachers = version.teachers(round).get(self.name, ())
        since = self._since(round, version)
        with self._changed:
            here = [self._newest[name] for name in self._members(round) if name in teachers and name in self._newest]
        return [signal for came, signal in here if came >= since]

    def _since(self, round: int, version: RosterVersion) -> int:
        """Return the round `staleness` exchanges ago, within the same version: earlier ones have another seed set."""
        left, since = self.staleness, round
        while left and since > version.first:
            since -= 1
            left -= version.exchanges(since)
        return since

    def furthest(self, sender: str) -> int:
        """Return the round of the newest message from `sender`, or 0 if there is none."""
        return self._last.get(sender, 0)
