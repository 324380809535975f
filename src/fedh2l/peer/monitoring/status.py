"""Status of a peer for its operators, on ports that only programs on the same machine can reach.

`peer.status` is a gRPC port with the state, which `fedh2l status` shows, and the standard health service.
`peer.metrics` is an HTTP port for Prometheus.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedh2l.errors import RunError
from fedh2l.peer.transport import fedh2l_pb2 as pb
from fedh2l.peer.transport.auth import require_loopback
from fedh2l.peer.transport.client import SERVICE
from fedh2l.peer.transport.proxy import channel_options, parse_address

if TYPE_CHECKING:
    from fedh2l.peer.peer import Peer
    from fedh2l.peer.settings import PeerSettings

Phase = Literal["meeting", "training", "waiting", "paused", "done"]

LOCAL = "fedh2l.v1.Local"
UNKNOWN = -1.0
CONNECTIONS = 32
"""Maximum number of connections to each port. They belong to local users, and must not use up the files of a peer."""
IDLE, OLDEST = 5.0, 60.0
"""Seconds without a request, and seconds in total, after which a connection is closed."""


def state_of(peer: Peer) -> pb.State:
    """Return the current state of a peer."""
    summary = peer.recorder.summary
    return pb.State(
        node=peer.name,
        federation=peer.federation,
        version=peer.roster_version.roster_file.agreement.version,
        round=min(peer.present(), peer.rounds),
        rounds=peer.rounds,
        phase=peer.phase,
        accuracy=summary.get("validation_ACC", UNKNOWN),
        conflict_rate=summary.get("conflict_rate", UNKNOWN),
        skipped=peer.skipped,
        bytes=peer.audit.sent.total(),
        seconds=peer.recorder.clock.seconds,
        turned_away=_turned_away(peer),
        peers=[_neighbour(peer, name) for name in sorted(peer.peers.addresses)],
    )


def _turned_away(peer: Peer) -> dict[str, int]:
    refused = list(peer.servicer.refused.items())
    return {f"'{who}': {why}" if who else why: count for (who, why), count in refused}


def _neighbour(peer: Peer, name: str) -> pb.Neighbour:
    near, contact = peer.peers, peer.peers.contact(name)
    state: str = contact.state
    if near.says_done(name):
        state = "done"
    elif state == "up" and name in near.late:
        state = "late"
    refused = {str(why): count for (who, why), count in list(peer.inbox.refused.items()) if who == name}
    return pb.Neighbour(
        name=name,
        address=near.addresses.get(name, ""),
        state=state,
        reason=contact.reason,
        round=min(max(contact.round, peer.inbox.furthest(name)), 2**32 - 1),
        sent=contact.sent,
        bytes=peer.audit.sent[name],
        dropped=contact.dropped,
        heard=peer.inbox.heard[name],
        refused=refused,
    )


class MonitoringPorts(AbstractContextManager["MonitoringPorts"]):
    """The monitoring ports in a peer's settings. They are open while this is entered."""

    def __init__(self, peer: Peer, settings: PeerSettings) -> None:
        self._peer, self._settings = peer, settings
        self._stack = ExitStack()

    def __enter__(self) -> MonitoringPorts:
        with ExitStack() as stack:
            if self._settings.status is not None:
                stack.enter_context(_StatusPort(self._peer, self._settings.status))
            if self._settings.metrics is not None:
                _serve_metrics(self._peer, self._settings.metrics, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()


class _StatusPort(AbstractContextManager["_StatusPort"]):
    """gRPC port with the state and the health service."""

    def __init__(self, peer: Peer, address: str) -> None:
        self._peer = peer
        self._health = health.HealthServicer()
        self._ends = threading.Event()
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", int(1000 * IDLE)),
            ("grpc.max_connection_idle_ms", int(1000 * IDLE)),
            ("grpc.max_connection_age_ms", int(1000 * OLDEST)),
            ("grpc.max_connection_age_grace_ms", int(1000 * IDLE)),
        ]
        self._server = grpc.server(ThreadPoolExecutor(2, "fedh2l-status"), options=options)
        ask = grpc.unary_unary_rpc_method_handler(
            lambda question, context: state_of(peer),
            request_deserializer=pb.Question.FromString,
            response_serializer=pb.State.SerializeToString,
        )
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(LOCAL, {"Status": ask})])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise RunError(f"peer.status: cannot listen on {address}: {error}") from error
        self._watch = threading.Thread(target=self._follow, name="fedh2l-health", daemon=True)

    def __enter__(self) -> _StatusPort:
        self._server.start()
        self._watch.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ends.set()
        self._watch.join()
        self._health.enter_graceful_shutdown()
        self._server.stop(0.2).wait()

    def _follow(self) -> None:
        """Update the health service. The process is always alive, and the peer is serving unless it is paused."""
        serving = health_pb2.HealthCheckResponse
        self._health.set("", serving.SERVING)
        while not self._ends.is_set():
            paused = self._peer.phase == "paused"
            self._health.set(SERVICE, serving.NOT_SERVING if paused else serving.SERVING)
            self._ends.wait(0.2)


def _serve_metrics(peer: Peer, address: str, stack: ExitStack) -> None:
    host, port = parse_address(address)
    registry = CollectorRegistry()
    registry.register(_Metrics(peer))
    try:
        kind = _MetricsServer6 if ":" in host else _MetricsServer
        server = make_server(host, port, make_wsgi_app(registry), kind, _MetricsHandler)
    except OSError as error:
        raise RunError(f"peer.metrics: cannot listen on {address}: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, name="fedh2l-metrics", daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)


class _MetricsHandler(WSGIRequestHandler):
    timeout = IDLE

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """HTTP server with a limit on connections. Above it, the oldest is closed."""

    daemon_threads, request_queue_size = True, CONNECTIONS

    def __init__(self, *arguments: Any) -> None:
        self._open: deque[socket.socket] = deque()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        if len(self._open) > CONNECTIONS:
            with suppress(OSError):
                self._open.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a broken connection."""


class _MetricsServer6(_MetricsServer):
    address_family = socket.AF_INET6


class _Metrics(Collector):
    """State of a peer as metrics, computed for each request from Prometheus."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def collect(self) -> Iterator[Metric]:
        state = state_of(self._peer)
        for name, text, value in (
            ("round", "Current round of this peer.", state.round),
            ("rounds", "Number of rounds.", state.rounds),
            ("roster_version", "Current version of the roster.", state.version),
            ("paused", "1 if this peer is paused because too few others answer.", state.phase == "paused"),
            ("skipped_rounds", "Rounds that this peer skipped.", state.skipped),
        ):
            yield GaugeMetricFamily(f"fedh2l_{name}", text, value=float(value))
        for name, text, share in (
            ("validation_accuracy", "On this node's own validation data, from 0 to 1.", state.accuracy / 100),
            ("conflict_rate", "Share of mutual steps whose teaching conflicted, from 0 to 1.", state.conflict_rate),
        ):
            if share >= 0:
                yield GaugeMetricFamily(f"fedh2l_{name}", text, value=share)
        yield from self._of_peers(state)

    def _of_peers(self, state: pb.State) -> Iterator[Metric]:
        up = GaugeMetricFamily("fedh2l_peer_up", "1 if a peer can be reached.", labels=["peer"])
        counters: dict[str, Any] = {
            field: CounterMetricFamily(f"fedh2l_{name}", text, labels=["peer"])
            for field, name, text in (
                ("sent", "sent_signals", "Signals that a peer accepted."),
                ("bytes", "sent_bytes", "Bytes of signals that left this machine for a peer."),
                ("dropped", "undelivered_signals", "Signals that never reached a peer."),
                ("heard", "heard_signals", "Sound signals of a peer."),
            )
        }
        refused = CounterMetricFamily(
            "fedh2l_refused_signals", "Signals of a peer that were dropped here.", labels=["peer", "reason"]
        )
        for other in state.peers:
            up.add_metric([other.name], float(other.state in ("up", "late")))
            for field, family in counters.items():
                family.add_metric([other.name], getattr(other, field))
            for why, count in sorted(other.refused.items()):
                refused.add_metric([other.name, why], count)
        turned_away = CounterMetricFamily(
            "fedh2l_turned_away_calls", "Refused calls by caller and reason.", labels=["reason"]
        )
        for why, count in sorted(state.turned_away.items()):
            turned_away.add_metric([why], count)
        yield from (up, *counters.values(), refused, turned_away)


def ask(address: str, timeout: float) -> pb.State:
    """Return the state of the peer with this status address."""
    require_loopback("the status of a peer", address)
    with grpc.insecure_channel(address, options=channel_options(None)) as channel:
        call = channel.unary_unary(f"/{LOCAL}/Status", pb.Question.SerializeToString, pb.State.FromString)
        try:
            state: pb.State = call(pb.Question(), timeout=timeout)
        except grpc.RpcError as error:
            raise RunError(f"no peer answers at {address}: {error.details()}") from None
    return state
