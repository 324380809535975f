"""The client of a peer for one other member, and what both ends of a call agree on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fedh2l.peer.refusals import PeerRefusedError, Refusal, read_refusal
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.auth import PeerAuth
from fedh2l.peer.transport.handshake import RosterDigests

SERVICE = "fedh2l.v1.Peer"
UNWATCHED = 2.0
"""Seconds before an unsubscribed channel is closed. The thread of gRPC that watches it fails on a closed channel."""
REFUSED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION)
"""Status codes that refuse a peer, not a single message."""
EARLY = grpc.StatusCode.ABORTED
"""Status code for a message of a round that is still far ahead of the receiver. It may be sent again."""
ROUND = "fedh2l-round"
"""Metadata key for the round of a peer that refuses a message."""


def canonical(kind: Any, data: bytes, sender: str) -> Any:
    """Decode a message. Raise `PeerRefusedError` unless the bytes are its only valid encoding."""
    try:
        message = kind.FromString(data)
        message.DiscardUnknownFields()
        exact = message.SerializeToString(deterministic=True) == data
    except (DecodeError, RecursionError):
        exact = False
    if not exact:
        text = f"'{sender}' sent {len(data)} bytes that are not the canonical form of a {kind.__name__}"
        raise PeerRefusedError(text, Refusal.NOT_CANONICAL)
    return message


def _is_round(key: str, value: str | bytes) -> bool:
    """Return whether metadata of a refusal is the round of the peer that refuses."""
    return key == ROUND and isinstance(value, str) and value.isdecimal() and len(value) < 10


class PeerClient:
    """Client for one member."""

    def __init__(self, auth: PeerAuth, member: str, address: str) -> None:
        self._auth, self.member, self.address = auth, member, address
        self._channel: grpc.Channel | None = None
        self._follow: Callable[[grpc.ChannelConnectivity], None] = lambda state: None
        self._was_ready = False
        self.is_broken = False
        """Whether the other side has ended the connection."""

    def open(self, timeout: float, on_break: Callable[[], None] = lambda: None) -> None:
        """Connect. When the connection ends, `on_break` is called from another thread.

        Raise `PeerRefusedError` if another party answers, and `OSError` if there is no answer.
        """
        self.close()
        self._channel = channel = self._auth.dial(self.member, self.address, timeout)
        self._was_ready = self.is_broken = False

        def follow(state: grpc.ChannelConnectivity) -> None:
            if channel is not self._channel:
                return
            if state is grpc.ChannelConnectivity.READY:
                self._was_ready = True
            elif self._was_ready:
                self.is_broken = True
                on_break()

        self._follow = follow
        channel.subscribe(follow)

    def check(self) -> None:
        """Raise `PeerRefusedError` if the member is no longer accepted."""
        self._auth.check(self.member)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as known."""
        return self._channel is not None

    def call(self, method: str, message: Any, reply: Any, timeout: float) -> Any:
        """Make a call and return its answer. Errors of gRPC are raised unchanged."""
        assert self._channel is not None
        ask = self._channel.unary_unary(f"/{SERVICE}/{method}", type(message).SerializeToString)
        try:
            answer, call = ask.with_call(message, timeout=timeout, metadata=self._auth.signature)
        except grpc.RpcError as error:
            trailing = list(error.trailing_metadata() or ())
            self._check_metadata(error, trailing[len(trailing) == 1 and _is_round(*trailing[0]) :])
            raise
        self._check_metadata(call, call.trailing_metadata())
        return canonical(reply, answer, self.member)

    def _check_metadata(self, call: Any, trailing: Any) -> None:
        if call.initial_metadata() or trailing:
            raise PeerRefusedError(f"'{self.member}' answered with unexpected metadata", Refusal.METADATA)

    def greet(self, agreed: RosterDigests, hello: pb.Hello, timeout: float) -> pb.Hello:
        """Exchange greetings. Raise `PeerRefusedError` if they do not match."""
        try:
            answer: pb.Hello = self.call("Greet", hello, pb.Hello, timeout)
        except grpc.RpcError as error:
            if error.code() in REFUSED:
                raise PeerRefusedError(f"'{self.member}' refuses this peer: {read_refusal(error.details())}") from None
            raise
        agreed.check(self.member, answer, hello.round)
        return answer

    def close(self) -> None:
        """Close the connection, and its channel after `UNWATCHED` seconds."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.unsubscribe(self._follow)
            later = threading.Timer(UNWATCHED, channel.close)
            later.daemon = True
            later.start()
