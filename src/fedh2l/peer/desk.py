"""What a peer answers when others call."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.circle import Circle, PeerRefusedError
from fedh2l.peer.handshake import Agreed
from fedh2l.peer.mailbox import Mailbox, Reason, Refused
from fedh2l.peer.neighbours import Neighbours
from fedh2l.peer.transport import Desk
from fedh2l.peer.witness import Witnesses

log = logging.getLogger("fedh2l.peer")

GREETINGS = (10, 10.0)
"""How many greetings of one member are answered within how many seconds."""
HEADS = (30, 3600.0)
"""How many heads of one member's audit log are kept within how many seconds."""
LONGEST = 500
"""Characters that a log line quotes of what others say."""


class FrontDesk(Desk):
    """Takes what others say to where it belongs; `hello` is how this peer greets now."""

    def __init__(
        self,
        circle: Circle,
        agreed: Agreed,
        mailbox: Mailbox,
        neighbours: Neighbours,
        audit: AuditLog,
        witnesses: Witnesses,
        hello: Callable[[], pb.Hello],
        present: Callable[[], int],
    ) -> None:
        self._circle, self._agreed, self._mailbox, self._neighbours = circle, agreed, mailbox, neighbours
        self._audit, self._witnesses, self._hello, self._present = audit, witnesses, hello, present
        self.refused: Counter[tuple[str, str]] = Counter()
        """How many calls of whom were turned away, and why; of nobody if it was no member."""

    def present(self) -> int:  # noqa: D102 - as in Desk
        return self._present()

    def greeted(self, caller: str, hello: pb.Hello) -> pb.Hello:
        """To whom has agreed on the same: the round that this peer is in."""
        many, within = GREETINGS
        if self._neighbours.too_often(caller, "Greet", many, within):
            raise PeerRefusedError(f"'{caller}' greets more than {many} times in {within:g} s")
        answer = self._hello()
        try:
            self._agreed.check(caller, hello, answer.round)
        except PeerRefusedError as refused:  # which names what this peer agreed on, and leaves this machine
            self._audit.record("refusal", caller, answer.round, str(refused).encode())
            raise
        self._neighbours.greets(caller, hello.finished)
        self._audit.record("greeting", caller, answer.round, answer.SerializeToString())
        return answer

    def taught(self, caller: str, posteriors: bytes) -> None:
        """Keeps a sound signal; also one that comes too late shows that its sender is there."""
        try:
            self._mailbox.accept(caller, posteriors)
        except Refused as refused:
            if refused.reason is Reason.PAST:
                self._heard(caller)
            raise
        self._heard(caller)

    def _heard(self, caller: str) -> None:
        if self._neighbours.heard(caller):
            about = {"peer": caller, "round": self.present()}
            log.info("'%s' is heard again, in round %d", caller, self.present(), extra=about)

    def told(self, caller: str, head: pb.Head) -> None:
        """Keeps it, as a witness."""
        if not self._neighbours.too_often(caller, "Witness", *HEADS):
            self._witnesses.take(caller, head, self._circle.key_of(caller))

    def left(self, caller: str, goodbye: pb.Goodbye) -> None:
        """Whoever leaves is not waited for."""
        done = ", done" if goodbye.finished else ""
        about = {"peer": caller, "round": goodbye.round}
        log.info("'%s' leaves after round %d%s", caller, goodbye.round, done, extra=about)
        self._neighbours.late.add(caller)
        if goodbye.finished:
            self._neighbours.finished.add(caller)

    def turned_away(self, caller: str, reason: str, why: str) -> None:
        """Counts it, and says so."""
        self.refused[caller, reason] += 1
        log.warning("turned away: %s", why[:LONGEST], extra={"peer": caller, "reason": reason})
