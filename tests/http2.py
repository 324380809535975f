"""Frames of HTTP/2 that gRPC would not send, for tests of what a peer makes of them."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterable
from pathlib import Path

HEADERS, RESET, SETTINGS, PING, GOAWAY = 1, 3, 4, 6, 7
END_HEADERS, END_STREAM, ACK = 4, 1, 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)


def goaway(text: bytes) -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">II", 0, 2) + text)


def call(stream: int, path: str, message: bytes, extra: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """A whole call in frames."""
    given = [
        (b":method", b"POST"), (b":scheme", b"https"), (b":path", path.encode()), (b":authority", b"x"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    ]  # fmt: skip
    headers = b"".join(b"\0" + _text(key) + _text(value) for key, value in (dict(given) | dict(extra)).items())
    data = b"\0" + struct.pack(">I", len(message)) + message
    return frame(HEADERS, END_HEADERS, stream, headers) + frame(0, END_STREAM, stream, data)


def _text(text: bytes) -> bytes:
    size, rest = bytearray([min(len(text), 127)]), len(text) - 127
    while rest >= 128:
        size.append(rest % 128 + 128)
        rest //= 128
    return bytes(size) + (bytes([rest]) if len(text) >= 127 else b"") + text


def tls(keys: Path, authority: Path, server: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(authority)
    context.load_cert_chain(keys / "node.pem", keys / "node.key")
    context.set_alpn_protocols(["h2"])
    return context


def connect(address: str, context: ssl.SSLContext | None = None) -> socket.socket:
    """A connection after the preface of HTTP/2."""
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), 5)
    made = plain if context is None else context.wrap_socket(plain)
    made.sendall(PREFACE)
    return made
