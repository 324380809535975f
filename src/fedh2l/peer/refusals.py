"""Reasons to refuse a peer or a message, and their texts on the wire.

A refusal must not carry text that its sender can choose. Therefore only the reasons below are sent, and for a roster
the names of the fields that differ. A receiver shows any other text as an unknown reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from fedh2l.errors import FedH2LError

FIELDS = (
    "batch_size", "classes", "ema_decay", "federation", "from_round", "members", "method", "pins", "rounds", "seed",
    "seedset", "shares", "version", "views",
)  # fmt: skip
"""Fields of a roster that members must agree on. A greeting holds their hashes in this order."""


class Refusal(StrEnum):
    """Reason to refuse a peer."""

    NOT_A_MEMBER = "not in the roster"
    NO_CERTIFICATE = "no readable certificate with one name over TLS 1.3"
    OTHER_AUTHORITY = "a certificate of another authority"
    OTHER_NAME = "the certificate of another member"
    OTHER_KEY = "another key than the roster pins"
    REVOKED = "its certificate is revoked"
    NOT_VALID_NOW = "its certificate is not valid at this time"
    OTHER_PROTOCOL = "another version of the protocol"
    OTHER_ROSTER = "another roster"
    UNSOUND_GREETING = "an unsound greeting"
    UNSOUND_HEAD = "an unsound head of its audit log"
    TOO_OFTEN = "too many greetings"
    TOO_MANY_CALLS = "too many calls"
    METADATA = "unexpected metadata"
    NO_MESSAGE = "not exactly one message"
    NOT_CANONICAL = "bytes that are not the canonical form of the message"
    OWN_FAULT = "this peer failed"
    UNKNOWN = "a reason that this version does not know"


class Reason(StrEnum):
    """Reason to refuse a message."""

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
    """A message was refused."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class PeerRefusedError(FedH2LError):
    """This peer refused another peer, or another peer refused this one."""

    def __init__(self, text: str, reason: Refusal = Refusal.UNKNOWN, fields: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.reason, self.fields = reason, tuple(fields)

    @property
    def on_the_wire(self) -> str:
        """Text that the refused peer receives."""
        return f"{self.reason}: {', '.join(self.fields)}" if self.fields else str(self.reason)


def read_refusal(text: str | None) -> str:
    """Return the refusal that another peer sent, or a fixed text if it is not a known one."""
    reason, _, named = (text or "").partition(": ")
    fields = named.split(", ") if named else []
    known = {*map(str, Refusal), *map(str, Reason)}
    if reason not in known or not set(fields) <= set(FIELDS) or len(set(fields)) < len(fields):
        return str(Refusal.UNKNOWN)
    return f"{reason}, which differs in: {named}" if named else reason
