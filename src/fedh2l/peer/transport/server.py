"""The server of a peer: it accepts connections and calls of other members."""

from __future__ import annotations

import logging
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from fedh2l.errors import shown
from fedh2l.peer.refusals import PeerRefusedError, Reason, Refusal, Refused
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.auth import FROM, METADATA, PeerAuth
from fedh2l.peer.transport.budget import BANNED, REFUSED_CALL, STRANGER, CallBudgets
from fedh2l.peer.transport.client import EARLY, ROUND, SERVICE, canonical
from fedh2l.peer.transport.connections import EACH, Connections

log = logging.getLogger("fedh2l.peer")

SLACK = 4096
"""Bytes that are read beyond the largest message, so that a larger one can be measured and logged."""
AT_ONCE = 2
"""Maximum number of concurrent calls per member."""
ALIVE = 20.0
"""Seconds without traffic after which a keepalive ping is sent."""
HANDSHAKE = 10.0
"""Seconds within which a new connection must present a certificate."""
STREAMS, CONNECTIONS = AT_ONCE, 256
"""Maximum number of concurrent calls per connection, and of connections besides those of members."""
IDLE, OLDEST = 120.0, 3600.0
"""Seconds without a call, and seconds in total, after which a connection is closed. Peers greet more often."""
USER_AGENT = re.compile(r"grpc-python/[0-9.]{3,12} grpc-c/[0-9.]{3,12} \([a-z]{3,10}; chttp2\)")
"""Format of the user agent that gRPC adds to each call."""
ORDINARY = (Reason.PAST, Reason.FUTURE, Reason.REPLAYED, Reason.NOT_EXPECTED)
"""Reasons to refuse a message that an honest member may cause, for example when it is slower than the others."""


class Servicer(ABC):
    """Handler of the calls to a peer. The caller is always a member."""

    @abstractmethod
    def greeted(self, caller: str, hello: pb.Hello) -> pb.Hello:
        """Answer a greeting. Raise `PeerRefusedError` if it does not match."""

    @abstractmethod
    def present(self) -> int:
        """Return the current round of this peer."""

    @abstractmethod
    def taught(self, caller: str, posteriors: bytes) -> None:
        """Accept a message. Raise `Refused` if it is not used."""

    @abstractmethod
    def told(self, caller: str, head: pb.Head) -> None:
        """Accept the head of the caller's audit log."""

    @abstractmethod
    def left(self, caller: str, goodbye: pb.Goodbye) -> None:
        """Accept a goodbye."""

    @abstractmethod
    def turned_away(self, caller: str, reason: str, why: str) -> None:
        """Record a call that was refused earlier. `caller` is empty if it is not a member."""


class Listener:
    """The server of a peer."""

    def __init__(self, auth: PeerAuth, servicer: Servicer, address: str, largest: int, members: Sequence[str]) -> None:
        options = [
            ("grpc.max_receive_message_length", largest + SLACK),
            ("grpc.max_metadata_size", METADATA),
            ("grpc.absolute_max_metadata_size", METADATA),
            ("grpc.compression_enabled_algorithms_bitset", 1),  # no compression
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", int(1000 * ALIVE)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
            ("grpc.max_concurrent_streams", STREAMS),
            ("grpc.max_connection_idle_ms", int(1000 * IDLE)),
            ("grpc.max_connection_age_ms", int(1000 * OLDEST)),
            ("grpc.max_connection_age_grace_ms", int(1000 * HANDSHAKE)),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS + EACH * len(members)),
        ]
        self._auth, self._servicer = auth, servicer
        self._connections = Connections(self._refusal, servicer.turned_away)
        self._budgets = CallBudgets()
        self._free = {name: threading.Semaphore(AT_ONCE) for name in members}
        threads = 4 + AT_ONCE * len(self._free)  # no member can occupy all of them
        pool = ThreadPoolExecutor(threads, "fedh2l-answers")
        handlers = grpc.method_handlers_generic_handler(SERVICE, self._methods())
        self._server = grpc.server(pool, [handlers], options=options)
        try:
            self.port = auth.bind(self._server, address)
        except RuntimeError as error:
            raise PeerRefusedError(f"cannot listen on {address}: {error}") from error

    def _refusal(self, certificate: bytes, name: str) -> str | None:
        problem = self._auth.refusal(certificate, name)
        return str(problem.reason) if problem else None

    def start(self) -> None:
        self._server.start()
        self._connections.start(self.port)

    def stop(self, grace: float = 1.0) -> None:
        """Refuse new calls, and wait up to `grace` seconds for running ones."""
        self._connections.stop()
        self._server.stop(grace).wait()

    def _methods(self) -> dict[str, Any]:
        servicer = self._servicer
        return {
            "Greet": self._handler(pb.Hello, servicer.greeted),
            "Teach": self._handler(pb.Signal, lambda who, signal: servicer.taught(who, signal.posteriors)),
            "Witness": self._handler(pb.Head, servicer.told),
            "Leave": self._handler(pb.Goodbye, servicer.left),
        }

    def _handler(self, kind: Any, answer: Callable[[str, Any], Any]) -> Any:
        """Return a handler that authenticates the caller before it reads the message.

        Unknown callers are refused at once, and a silent member occupies only `AT_ONCE` threads.
        """

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            if self._connections.is_closed(context.peer()) or self._is_over(context, 1.0):
                context.abort(grpc.StatusCode.UNAVAILABLE, str(Refusal.TOO_MANY_CALLS))
            try:
                caller = self._auth.caller(context)
            except PeerRefusedError as refused:
                self._connections.condemn(context.peer(), str(refused.reason))
                self._turn_away(context, grpc.StatusCode.PERMISSION_DENIED, "", refused)
            self._connections.identify(context.peer(), *caller)
            if not self._free[caller.name].acquire(blocking=False):
                text = f"{AT_ONCE} calls of '{caller.name}' are being answered"
                crowd = PeerRefusedError(text, Refusal.TOO_MANY_CALLS)
                self._turn_away(context, grpc.StatusCode.UNAVAILABLE, caller.name, crowd)
            try:
                return self._answered(caller.name, requests, context, kind, answer)
            finally:
                self._free[caller.name].release()

        return grpc.stream_unary_rpc_method_handler(handle)

    def _is_over(self, context: Any, cost: float) -> bool:
        """Count a call. If there were too many with this certificate, close the connection and return True."""
        about = context.auth_context()
        certificate = b"".join(about.get("x509_pem_cert", ()))
        if not certificate or not self._budgets.spend(certificate, cost):  # without one, this is a trial
            return False
        self._connections.close(context.peer())
        name = b"".join(about.get("x509_common_name", ())).decode(errors="replace")
        text = f"'{shown(name, 80)}' makes too many calls; its certificate is not answered for {BANNED:g} s"
        self._servicer.turned_away(name if name in self._free else "", str(Refusal.TOO_MANY_CALLS), text)
        return True

    def _turn_away(self, context: Any, code: grpc.StatusCode, caller: str, refused: PeerRefusedError) -> NoReturn:
        """Record a refused call and abort it."""
        self._servicer.turned_away(caller, str(refused.reason), str(refused))
        self._is_over(context, REFUSED_CALL if caller else STRANGER)
        context.abort(code, refused.on_the_wire)
        raise AssertionError("abort raises")

    def _answered(self, caller: str, requests: Iterator[bytes], context: Any, kind: Any, answer: Any) -> bytes:
        try:
            message = _only_message(caller, requests, context, kind)
        except PeerRefusedError as refused:
            self._turn_away(context, grpc.StatusCode.INVALID_ARGUMENT, caller, refused)
        try:
            reply = answer(caller, message)
        except PeerRefusedError as refused:
            self._turn_away(context, grpc.StatusCode.FAILED_PRECONDITION, caller, refused)
        except Refused as refused:
            context.set_trailing_metadata(((ROUND, str(self._servicer.present())),))
            self._is_over(context, 0.0 if refused.reason in ORDINARY else REFUSED_CALL)
            early = refused.reason is Reason.FUTURE  # it may be sent again
            context.abort(EARLY if early else grpc.StatusCode.INVALID_ARGUMENT, str(refused.reason))
        except Exception as error:  # gRPC would send its text, which may quote files of this machine
            text = f"a call of '{caller}' could not be answered: {type(error).__name__}: {error}"
            self._turn_away(context, grpc.StatusCode.INTERNAL, caller, PeerRefusedError(text, Refusal.OWN_FAULT))
        answered: bytes = (reply or pb.Receipt(round=self._servicer.present())).SerializeToString()
        return answered


def _only_message(caller: str, requests: Iterator[bytes], context: Any, kind: Any) -> Any:
    """Return the only message of a call. Raise `PeerRefusedError` if the call contains anything else."""
    for key, value in context.invocation_metadata():
        if key != FROM and not (key == "user-agent" and USER_AGENT.fullmatch(value)):
            text = f"'{caller}' sent metadata that does not belong to a call: {shown(key, 80)}"
            raise PeerRefusedError(text, Refusal.METADATA)
    request = next(requests, None)
    if request is None:  # the call was cancelled, or the message is too large
        raise PeerRefusedError(f"'{caller}' called without a readable message", Refusal.NO_MESSAGE)
    if next(requests, None) is not None:
        raise PeerRefusedError(f"'{caller}' sent more than one message in a call", Refusal.NO_MESSAGE)
    return canonical(kind, request, caller)
