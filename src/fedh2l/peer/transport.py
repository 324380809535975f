"""How peers reach each other: what a peer answers (`Listener`), and its connection to another one (`Line`)."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fedh2l.peer import fedh2l_pb2 as pb
from fedh2l.peer.circle import Circle, PeerRefusedError
from fedh2l.peer.handshake import Agreed
from fedh2l.peer.mailbox import Reason, Refused

log = logging.getLogger("fedh2l.peer")

SERVICE = "fedh2l.v1.Peer"
SLACK = 4096
"""Bytes beyond the largest message that are still read, so that what is too large can be measured and logged."""
AT_ONCE = 2
"""Calls of one member that are answered at a time."""
ALIVE = 20.0
"""Seconds of silence after which a connection is asked whether anybody is still there."""
HANDSHAKE = 10.0
"""Seconds in which whoever connects must have shown a certificate."""
STREAMS, CONNECTIONS = 8, 64
"""Calls under way on a connection, and connections at a time beside four for each member, at most."""
REFUSED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION)
"""Answers that mean a peer, not a signal of it."""
EARLY = grpc.StatusCode.ABORTED
"""The answer to a signal of a round that is still far ahead of the receiver's, which may be sent again."""
ROUND = "fedh2l-round"
"""Under which the round of a peer stands beside its refusal of a signal."""


class Desk(ABC):
    """What a peer answers; the caller is always a member."""

    @abstractmethod
    def greeted(self, caller: str, hello: pb.Hello) -> pb.Hello:
        """To a handshake; raises `PeerRefusedError` if there can be none."""

    @abstractmethod
    def present(self) -> int:
        """The round that this peer is in."""

    @abstractmethod
    def taught(self, caller: str, posteriors: bytes) -> None:
        """Takes a signal; raises `Refused` if it is not used."""

    @abstractmethod
    def told(self, caller: str, head: pb.Head) -> None:
        """Takes the head of the caller's audit log."""

    @abstractmethod
    def left(self, caller: str, goodbye: pb.Goodbye) -> None:
        """Takes a goodbye."""

    @abstractmethod
    def turned_away(self, caller: str, reason: str, why: str) -> None:
        """A call was refused before it got this far; `caller` is empty if it is nobody who may call."""


class Listener:
    """The server of a peer."""

    def __init__(self, circle: Circle, desk: Desk, address: str, largest: int, members: Sequence[str]) -> None:
        options = [
            ("grpc.max_receive_message_length", largest + SLACK),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", int(1000 * ALIVE)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
            ("grpc.max_concurrent_streams", STREAMS),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS + 4 * len(members)),
        ]
        self._circle, self._desk = circle, desk
        self._free = {name: threading.Semaphore(AT_ONCE) for name in members}
        threads = 4 + AT_ONCE * len(self._free)  # no member can keep all of them busy
        pool = ThreadPoolExecutor(threads, "fedh2l-answers")
        handlers = grpc.method_handlers_generic_handler(SERVICE, self._methods())
        self._server = grpc.server(pool, [handlers], options=options)
        try:
            self.port = circle.bind(self._server, address)
        except RuntimeError as error:
            raise PeerRefusedError(f"cannot listen on {address}: {error}") from error

    def start(self) -> None:
        """From now on others are answered."""
        self._server.start()

    def stop(self, grace: float = 1.0) -> None:
        """No more calls; those that are being answered may end."""
        self._server.stop(grace).wait()

    def _methods(self) -> dict[str, Any]:
        desk = self._desk
        return {
            "Greet": self._handler(pb.Hello, desk.greeted),
            "Teach": self._handler(pb.Signal, lambda who, signal: desk.taught(who, signal.posteriors)),
            "Witness": self._handler(pb.Head, desk.told),
            "Leave": self._handler(pb.Goodbye, desk.left),
        }

    def _handler(self, kind: Any, answer: Callable[[str, Any], Any]) -> Any:
        """Looks at who calls before it reads what they say: who may not call, or says nothing, holds up nobody."""

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            try:
                caller = self._circle.caller(context)
            except PeerRefusedError as refused:
                self._desk.turned_away("", "not a member", str(refused))
                context.abort(grpc.StatusCode.PERMISSION_DENIED, str(refused))
            if not self._free[caller].acquire(blocking=False):
                self._desk.turned_away(caller, "too many at once", f"{AT_ONCE} calls of '{caller}' are being answered")
                context.abort(grpc.StatusCode.UNAVAILABLE, f"{AT_ONCE} calls of '{caller}' are being answered")
            try:
                return self._answered(caller, requests, context, kind, answer)
            finally:
                self._free[caller].release()

        return grpc.stream_unary_rpc_method_handler(handle)

    def _answered(self, caller: str, requests: Iterator[bytes], context: Any, kind: Any, answer: Any) -> bytes:
        request = next(requests, None)
        if request is None:  # it was cancelled, or is larger than what is read
            self._desk.turned_away(caller, "no message", f"'{caller}' called, and nothing came that is read")
            context.abort(grpc.StatusCode.CANCELLED, "nothing was read")
            raise AssertionError("abort raises")
        try:
            message = kind.FromString(request)
        except DecodeError as error:
            why = f"'{caller}' sent {len(request)} bytes that are not a {kind.__name__}: {error}"
            self._desk.turned_away(caller, "malformed", why)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {kind.__name__}")
        try:
            said = answer(caller, message)
        except PeerRefusedError as refused:
            self._desk.turned_away(caller, "refused", str(refused))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused))
        except Refused as refused:
            context.set_trailing_metadata(((ROUND, str(self._desk.present())),))
            early = refused.reason is Reason.FUTURE  # then it may be sent again
            code = EARLY if early else grpc.StatusCode.INVALID_ARGUMENT
            context.abort(code, f"{refused.reason}: {refused}")
        reply: bytes = (said or pb.Receipt(round=self._desk.present())).SerializeToString()
        return reply


class Line:
    """This peer's connection to one member."""

    def __init__(self, circle: Circle, member: str, address: str) -> None:
        self._circle, self.member, self.address = circle, member, address
        self._channel: grpc.Channel | None = None

    def open(self, timeout: float) -> None:
        """Connects; raises `PeerRefusedError` if somebody else answers, and `OSError` if nobody does."""
        self.close()
        self._channel = self._circle.dial(self.member, self.address, timeout)

    def check(self) -> None:
        """Raises `PeerRefusedError` if the other may no longer be spoken to."""
        self._circle.check(self.member)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._channel is not None

    def call(self, method: str, message: Any, reply: Any, timeout: float) -> Any:
        """Asks, and waits for the answer; `grpc.RpcError` as gRPC raises it."""
        assert self._channel is not None
        ask = self._channel.unary_unary(f"/{SERVICE}/{method}", type(message).SerializeToString, reply.FromString)
        return ask(message, timeout=timeout, metadata=self._circle.signature)

    def greet(self, agreed: Agreed, hello: pb.Hello, timeout: float) -> pb.Hello:
        """Shakes hands; raises `PeerRefusedError` if the two have not agreed on the same."""
        try:
            answer: pb.Hello = self.call("Greet", hello, pb.Hello, timeout)
        except grpc.RpcError as error:
            if error.code() in REFUSED:
                raise PeerRefusedError(f"'{self.member}' refuses this peer: {error.details()}") from None
            raise
        agreed.check(self.member, answer, hello.round)
        return answer

    def close(self) -> None:
        """Hangs up."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
