"""Delivery of messages to one other member, in a thread that reconnects and retries without blocking the training."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import grpc

from fedh2l.errors import shown
from fedh2l.peer.audit import AuditError, AuditLog
from fedh2l.peer.audit.log import SIGNAL
from fedh2l.peer.refusals import PeerRefusedError, Refusal, read_refusal
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.client import EARLY, REFUSED, ROUND, PeerClient
from fedh2l.peer.transport.handshake import RosterDigests

log = logging.getLogger("fedh2l.peer")

QUEUE = 8
"""Maximum number of queued messages. The oldest are dropped first, because the receiver can no longer use them."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before the next attempt to connect: the first pause and the longest. The pause doubles after each failure."""
TIMEOUT = 10.0
"""Timeout of a call in seconds."""

LONGEST = 300
"""Characters of an error that are told."""

State = Literal["down", "up", "refused"]
FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
"""Status codes after which a message is not sent again."""
NOT_YET = 0.1
"""Seconds before a message that was too early is sent again."""
IDLE = 30.0
"""Seconds without a message after which the other peer is greeted again, to update its state."""


@dataclass(frozen=True)
class Contact:
    """State of the connection to one peer."""

    state: State = "down"
    reason: str = ""
    round: int = 0
    """Round that the peer reported last."""
    finished: bool = False
    """Whether the peer had done its last round when it was greeted."""
    sent: int = 0
    """Number of delivered messages."""
    dropped: int = 0
    """Number of messages that were not delivered, because they were too old or refused."""
    met: bool = False
    """Whether there was a connection since this peer started."""
    lost_at: float | None = None
    """Time (`time.monotonic`) when the connection was lost or first failed. None while it holds."""
    past: int = 0
    """Newest round whose message the peer refused because it was already in a later round."""


class Sender:
    """A thread that sends messages to one member."""

    def __init__(self, line: PeerClient, agreed: RosterDigests, audit: AuditLog, hello: Callable[[], pb.Hello]) -> None:
        self.contact = Contact()
        self._line, self._agreed, self._audit, self._hello = line, agreed, audit, hello
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._changed = threading.Condition()
        self._connected = self._head_due = self._woken = False
        self._closing: pb.Goodbye | None = None
        self._until = 0.0
        self._thread = threading.Thread(target=self._work, name=f"fedh2l-to-{line.member}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, round: int, payload: bytes) -> None:
        """Queue a message and return at once."""
        with self._changed:
            self._waiting.append((round, payload))
            while len(self._waiting) > QUEUE:
                self._drop()
            self._changed.notify_all()

    def wake(self) -> None:
        """Try to connect now, because the other peer has shown that it is reachable."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def tell_head(self) -> None:
        """Send the head of the audit log as soon as there is a connection."""
        with self._changed:
            self._head_due = True
            self._changed.notify_all()

    def close(self, goodbye: pb.Goodbye, seconds: float) -> None:
        """Send the queued messages and a goodbye, then end within `seconds`. A second call does nothing."""
        until = time.monotonic() + seconds
        self.ask_to_end(goodbye, until)
        self.join(until)

    def ask_to_end(self, goodbye: pb.Goodbye, until: float) -> None:
        """Start `close` without waiting. `until` is a time of `time.monotonic()`."""
        with self._changed:
            if self._closing is None:
                self._closing, self._until = goodbye, until
                self._changed.notify_all()

    def join(self, until: float) -> None:
        """Wait for the thread to end, at most until one second after `until`."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, until - time.monotonic()) + 1)

    def _note(self, **changes: Any) -> None:
        with self._changed:
            self.contact = replace(self.contact, **changes)

    def _drop(self) -> None:
        self._waiting.popleft()
        self.contact = replace(self.contact, dropped=self.contact.dropped + 1)

    def _work(self) -> None:
        pause = FIRST_PAUSE
        while not self._done():
            try:
                self._connect()
                self._deliver()
                pause = FIRST_PAUSE
            except PeerRefusedError as error:
                self._hang_up("refused", str(error))
                pause = LONGEST_PAUSE
                if self._closing is not None:
                    break
            except (OSError, grpc.RpcError, AuditError) as error:
                self._hang_up("down", _said(error))
            except Exception as error:  # keep the thread alive, whatever the peer answered
                reason = shown(f"{type(error).__name__}: {error}", LONGEST)
                if reason != self.contact.reason:
                    log.exception("taking signals to '%s' failed", self._line.member)
                self._hang_up("down", reason)
            else:
                continue
            self._rest(pause * random.uniform(0.5, 1.5))  # noqa: S311 - spreads retries, guards nothing
            pause = min(2 * pause, LONGEST_PAUSE)
        self._line.close()

    def _rest(self, seconds: float) -> None:
        """Wait for the next attempt. During `close` the waits are short, so that there is time for several attempts."""
        with self._changed:
            ending = self._closing is not None
            self._changed.wait_for(
                lambda: self._woken or (self._closing is not None) != ending, FIRST_PAUSE if ending else seconds
            )
            self._woken = False

    def _done(self) -> bool:
        """Return whether the thread should end: after `close`, when the goodbye was sent or the time is over."""
        with self._changed:
            return self._closing is not None and time.monotonic() > self._until

    def _notice(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _connect(self) -> None:
        if self._connected:
            return
        if not self._line.is_open:
            self._line.open(TIMEOUT, self._notice)
        hello = self._hello()
        self._audit.record("greeting", self._line.member, hello.round, hello.SerializeToString())
        answer = self._line.greet(self._agreed, hello, TIMEOUT)
        self._connected = True
        if self.contact.state != "up":
            log.info("'%s' is there, in round %d", self._line.member, answer.round)
        self._note(state="up", reason="", round=answer.round, finished=answer.finished, met=True, lost_at=None)

    def _deliver(self) -> None:
        """Send the queued messages in order until the connection breaks, is idle, or is closed with a goodbye."""
        while True:
            with self._changed:
                asked = self._changed.wait_for(
                    lambda: self._waiting or self._head_due or self._closing is not None or self._line.is_broken, IDLE
                )
                broken = self._line.is_broken and not self._waiting and self._closing is None
                if broken or not asked:
                    self._connected = False
                    if broken:
                        self._line.close()
                    return
                if not self._waiting and not self._head_due:
                    break
                if self._closing is not None and time.monotonic() > self._until:
                    return
                signal = self._waiting[0] if self._waiting else None
            if signal is not None:
                self._take(*signal)
            else:
                self._bear_witness()
        assert self._closing is not None
        self._bear_witness()
        self._say("goodbye", self._closing.round, "Leave", self._closing)
        self._until = 0.0

    def _bear_witness(self) -> None:
        """Send the head of the audit log, so that this peer cannot shorten its log unnoticed."""
        own = self._audit.head()
        head = pb.Head(length=own.length, hash=own.hash, signature=own.signature)
        self._say("head", self._hello().round, "Witness", head)
        self._head_due = False

    def _say(self, kind: str, round: int, method: str, message: Any, payload: bytes | None = None) -> pb.Receipt:
        """Check the receiver, log the message, and send it."""
        self._line.check()
        self._audit.record(kind, self._line.member, round, payload or message.SerializeToString())
        left = TIMEOUT if self._closing is None else min(TIMEOUT, max(0.1, self._until - time.monotonic()))
        receipt: pb.Receipt = self._line.call(method, message, pb.Receipt, left)
        return receipt

    def _take(self, round: int, payload: bytes) -> None:
        try:
            receipt = self._say(SIGNAL, round, "Teach", pb.Signal(posteriors=payload), payload)
        except grpc.RpcError as error:
            if error.code() in REFUSED:
                why = read_refusal(error.details())
                raise PeerRefusedError(f"'{self._line.member}' refuses this peer: {why}") from None
            if error.code() not in (*FINAL, EARLY):
                raise
            theirs = str(dict(error.trailing_metadata() or ()).get(ROUND, ""))
            if theirs.isdecimal() and len(theirs) < 10:
                self._note(round=int(theirs), **({"past": round} if int(theirs) > round else {}))
            if error.code() is EARLY and self._closing is None:
                self._rest(NOT_YET)
                return
            why = read_refusal(error.details())
            log.warning("'%s' refused the signal of round %d: %s", self._line.member, round, why)
            self._settle(round, payload, taken=False)
            return
        self._settle(round, payload, taken=True)
        self._note(round=receipt.round)

    def _settle(self, round: int, payload: bytes, taken: bool) -> None:
        """Remove a message from the queue and count it as sent or dropped."""
        with self._changed:
            if self._waiting and self._waiting[0] == (round, payload):  # it may have been dropped meanwhile
                self._waiting.popleft()
                if not taken:
                    self.contact = replace(self.contact, dropped=self.contact.dropped + 1)
            if taken:
                self.contact = replace(self.contact, sent=self.contact.sent + 1)

    def _hang_up(self, state: State, reason: str) -> None:
        if (self.contact.state, self.contact.reason) != (state, reason):
            log.warning("'%s' cannot be reached: %s", self._line.member, reason)
        self._connected = False
        self._line.close()
        self._note(state=state, reason=reason, lost_at=self.contact.lost_at or time.monotonic())


def _said(error: BaseException) -> str:
    """Return a short text for the log. The other peer writes the details of an error, so only known ones count."""
    if not isinstance(error, grpc.RpcError):
        return shown(error, LONGEST)
    why = read_refusal(error.details())
    return error.code().name if why == Refusal.UNKNOWN else f"{error.code().name}: {why}"
