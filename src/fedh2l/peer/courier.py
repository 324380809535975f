"""Carrying this peer's signals to one other: connects, tries again, and never holds up whoever sends."""

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

from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.audit import SIGNAL, AuditError, AuditLog
from fedh2l.peer.circle import PeerRefusedError
from fedh2l.peer.handshake import Agreed
from fedh2l.peer.transport import EARLY, REFUSED, ROUND, Line

log = logging.getLogger("fedh2l.peer")

QUEUE = 8
"""Signals that wait for a peer at most; the oldest make room, since it could not use them any more."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds between two attempts to reach a peer: from the first to the longest, each about twice the one before."""
TIMEOUT = 10.0
"""Seconds in which a call is answered."""

State = Literal["down", "up", "refused"]
FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
"""Answers after which the same signal is not sent again."""
NOT_YET = 0.5
"""Seconds until a signal that is early is sent again."""
IDLE = 30.0
"""Seconds without a signal after which the other is greeted again, to know how it is."""


@dataclass(frozen=True)
class Contact:
    """How it goes with one peer."""

    state: State = "down"
    reason: str = ""
    round: int = 0
    """That the peer is in, as it said last."""
    finished: bool = False
    """Whether it has done its last round, as it said when it was met."""
    sent: int = 0
    """Signals that it has taken."""
    dropped: int = 0
    """Signals that it never got: it was away for too long, or would not take them."""


class Courier:
    """A thread that takes signals to a member as long as they are of use."""

    def __init__(self, line: Line, agreed: Agreed, audit: AuditLog, hello: Callable[[], pb.Hello]) -> None:
        self.contact = Contact()
        self._line, self._agreed, self._audit, self._hello = line, agreed, audit, hello
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._changed = threading.Condition()
        self._connected = self._head_due = self._woken = False
        self._closing: pb.Goodbye | None = None
        self._until = 0.0
        self._thread = threading.Thread(target=self._work, name=f"fedh2l-to-{line.member}", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def send(self, round: int, payload: bytes) -> None:
        """Leaves a signal to be taken; returns at once."""
        with self._changed:
            self._waiting.append((round, payload))
            while len(self._waiting) > QUEUE:
                self._drop()
            self._changed.notify_all()

    def wake(self) -> None:
        """The other has just shown that it is there: no need to wait for the next attempt."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def tell_head(self) -> None:
        """Has the other told how long this peer's audit log is, when there is a connection."""
        with self._changed:
            self._head_due = True
            self._changed.notify_all()

    def close(self, goodbye: pb.Goodbye, seconds: float) -> None:
        """Takes what still waits, says goodbye, and ends; within so long. Once it has ended, this does nothing."""
        until = time.monotonic() + seconds
        self.ask_to_end(goodbye, until)
        self.join(until)

    def ask_to_end(self, goodbye: pb.Goodbye, until: float) -> None:
        """The first half of `close`, which does not wait; `until` is a time of `time.monotonic()`."""
        with self._changed:
            if self._closing is None:
                self._closing, self._until = goodbye, until
                self._changed.notify_all()

    def join(self, until: float) -> None:
        """The other half."""
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
            except Exception as error:  # this thread must live, whatever the other has said
                reason = f"{type(error).__name__}: {error}"
                if reason != self.contact.reason:
                    log.exception("taking signals to '%s' failed", self._line.member)
                self._hang_up("down", reason)
            else:
                continue
            self._rest(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, LONGEST_PAUSE)
        self._line.close()

    def _rest(self, seconds: float) -> None:
        """Until the next attempt, or until this is to end; then there is time for quicker ones."""
        with self._changed:
            ending = self._closing is not None
            self._changed.wait_for(
                lambda: self._woken or (self._closing is not None) != ending, FIRST_PAUSE if ending else seconds
            )
            self._woken = False

    def _done(self) -> bool:
        """Whether it was asked to end, and has said goodbye or found no time to."""
        with self._changed:
            return self._closing is not None and time.monotonic() > self._until

    def _connect(self) -> None:
        if self._connected:
            return
        if not self._line.is_open:
            self._line.open(TIMEOUT)
        hello = self._hello()
        self._audit.record("greeting", self._line.member, hello.round, hello.SerializeToString())
        answer = self._line.greet(self._agreed, hello, TIMEOUT)
        self._connected = True
        if self.contact.state != "up":
            log.info("'%s' is there, in round %d", self._line.member, answer.round)
        self._note(state="up", reason="", round=answer.round, finished=answer.finished)

    def _deliver(self) -> None:
        """Takes what waits, one after the other, until there is nothing and more may come."""
        while True:
            with self._changed:
                asked = self._changed.wait_for(
                    lambda: self._waiting or self._head_due or self._closing is not None, IDLE
                )
                if not asked:
                    self._connected = False
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
        """The other is told how long this peer's record of what it sent is now, so that it stays that long."""
        said = self._audit.head()
        head = pb.Head(length=said.length, hash=said.hash, signature=said.signature)
        self._say("head", self._hello().round, "Witness", head)
        self._head_due = False

    def _say(self, kind: str, round: int, method: str, message: Any, payload: bytes | None = None) -> pb.Receipt:
        """To whom may hear it, and with a line on record before it leaves."""
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
                raise PeerRefusedError(f"'{self._line.member}' refuses this peer: {error.details()}") from None
            if error.code() not in (*FINAL, EARLY):
                raise
            theirs = dict(error.trailing_metadata() or ()).get(ROUND, "")
            if theirs.isdecimal() and len(theirs) < 10:
                self._note(round=int(theirs))
            if error.code() is EARLY and self._closing is None:
                self._rest(NOT_YET)
                return
            log.warning("'%s' would not take the signal of round %d: %s", self._line.member, round, error.details())
            self._settle(round, payload, taken=False)
            return
        self._settle(round, payload, taken=True)
        self._note(round=receipt.round)

    def _settle(self, round: int, payload: bytes, taken: bool) -> None:
        """A signal is done with, one way or the other."""
        with self._changed:
            if self._waiting and self._waiting[0] == (round, payload):  # it may have made room in the meantime
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
        self._note(state=state, reason=reason)


def _said(error: BaseException) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
