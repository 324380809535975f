"""Handler of the calls that other peers make."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from fedh2l.peer.audit import AuditLog
from fedh2l.peer.audit.witness import Witnesses
from fedh2l.peer.refusals import PeerRefusedError, Reason, Refusal, Refused
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.auth import PeerAuth
from fedh2l.peer.transport.handshake import RosterDigests
from fedh2l.peer.transport.inbox import Inbox
from fedh2l.peer.transport.peer_table import PeerTable
from fedh2l.peer.transport.server import Servicer

log = logging.getLogger("fedh2l.peer")

GREETINGS = (10, 10.0)
"""Maximum number of greetings per member, and the window in seconds."""
HEADS = (30, 3600.0)
"""Maximum number of audit log heads per member, and the window in seconds."""
LONGEST = 500
"""Maximum number of characters that a log line quotes from another peer."""


class PeerServicer(Servicer):
    """Passes each call to the part of this peer that handles it. `hello` returns its current greeting."""

    def __init__(
        self,
        auth: PeerAuth,
        agreed: RosterDigests,
        inbox: Inbox,
        peers: PeerTable,
        audit: AuditLog,
        witnesses: Witnesses,
        hello: Callable[[], pb.Hello],
        present: Callable[[], int],
    ) -> None:
        self._auth, self._agreed, self._inbox, self._peers = auth, agreed, inbox, peers
        self._audit, self._witnesses, self._hello, self._present = audit, witnesses, hello, present
        self.refused: Counter[tuple[str, str]] = Counter()
        """Number of refused calls by caller and reason. The caller is empty if it is not a member."""

    def present(self) -> int:
        return self._present()

    def greeted(self, caller: str, hello: pb.Hello) -> pb.Hello:
        """Return this peer's greeting, with its round, to a caller with the same roster."""
        many, within = GREETINGS
        if self._peers.too_often(caller, "Greet", many, within):
            text = f"'{caller}' greets more than {many} times in {within:g} s"
            raise PeerRefusedError(text, Refusal.TOO_OFTEN)
        answer = self._hello()
        try:
            self._agreed.check(caller, hello, answer.round)
        except PeerRefusedError as refused:  # it names fields of this peer's roster, so it is logged
            self._audit.record("refusal", caller, answer.round, refused.on_the_wire.encode())
            raise
        self._peers.greets(caller, hello.finished)
        self._audit.record("greeting", caller, answer.round, answer.SerializeToString())
        return answer

    def taught(self, caller: str, posteriors: bytes) -> None:
        """Keep a valid message. A late one still shows that its sender is reachable."""
        try:
            self._inbox.accept(caller, posteriors)
        except Refused as refused:
            if refused.reason is Reason.PAST:
                self._heard(caller)
            raise
        self._heard(caller)

    def _heard(self, caller: str) -> None:
        if self._peers.heard(caller):
            about = {"peer": caller, "round": self.present()}
            log.info("'%s' is back in round %d", caller, self.present(), extra=about)

    def told(self, caller: str, head: pb.Head) -> None:
        """Keep the head as a witness."""
        if not self._peers.too_often(caller, "Witness", *HEADS):
            self._witnesses.take(caller, head, self._auth.key_of(caller))

    def left(self, caller: str, goodbye: pb.Goodbye) -> None:
        """Stop waiting for a peer that leaves."""
        done = ", done" if goodbye.finished else ""
        about = {"peer": caller, "round": goodbye.round}
        log.info("'%s' leaves after round %d%s", caller, goodbye.round, done, extra=about)
        self._peers.late.add(caller)
        if goodbye.finished:
            self._peers.finished.add(caller)

    def turned_away(self, caller: str, reason: str, why: str) -> None:
        """Count and log a refused call."""
        self.refused[caller, reason] += 1
        log.warning("turned away: %s", why[:LONGEST], extra={"peer": caller, "reason": reason})
