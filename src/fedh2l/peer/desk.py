"""What a peer answers when others call."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.audit import AuditLog
from fedh2l.peer.circle import Circle, PeerRefusedError
from fedh2l.peer.handshake import Agreed
from fedh2l.peer.mailbox import Mailbox
from fedh2l.peer.neighbours import GREETINGS, Neighbours
from fedh2l.peer.transport import Desk
from fedh2l.peer.witness import Witnesses

log = logging.getLogger("fedh2l.peer")


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

    def present(self) -> int:  # noqa: D102 - as in Desk
        return self._present()

    def greeted(self, caller: str, hello: pb.Hello) -> pb.Hello:
        """To whom has agreed on the same: the round that this peer is in."""
        answer = self._hello()
        self._agreed.check(caller, hello, answer.round)
        if self._neighbours.too_often(caller, "Greet"):
            many, within = GREETINGS
            raise PeerRefusedError(f"'{caller}' greets more than {many} times in {within:g} s")
        self._neighbours.heard_from(caller, hello)
        self._audit.record("greeting", caller, answer.round, answer.SerializeToString())
        return answer

    def taught(self, caller: str, posteriors: bytes) -> None:
        """Keeps a sound signal."""
        signal = self._mailbox.accept(caller, posteriors)
        if caller in self._neighbours.late:
            self._neighbours.late.discard(caller)
            about = {"peer": caller, "round": signal.round}
            log.info("'%s' is heard again, in round %d", caller, signal.round, extra=about)

    def told(self, caller: str, head: pb.Head) -> None:
        """Keeps it, as a witness."""
        if not self._neighbours.too_often(caller, "Witness"):
            self._witnesses.take(caller, head, self._circle.key_of(caller))

    def left(self, caller: str, goodbye: pb.Goodbye) -> None:
        """Whoever leaves is not waited for."""
        done = ", done" if goodbye.finished else ""
        about = {"peer": caller, "round": goodbye.round}
        log.info("'%s' leaves after round %d%s", caller, goodbye.round, done, extra=about)
        self._neighbours.late.add(caller)
        if goodbye.finished:
            self._neighbours.finished.add(caller)

    def turned_away(self, why: str) -> None:
        """Says so."""
        log.warning("turned away: %s", why)
