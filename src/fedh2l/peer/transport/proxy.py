"""Addresses of other peers, and connections to them, directly or through a configured HTTP proxy."""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import socket
from urllib.parse import unquote, urlsplit

from fedh2l.errors import ConfigError, shown

LONGEST = 8192
"""Maximum size of a proxy's answer in bytes."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`. An IPv6 address needs brackets."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*):(\d{1,5})", text)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise ValueError("it should be host:port, an IPv6 address in brackets")
    host = found[1]
    if host.startswith("["):
        ipaddress.IPv6Address(host[1:-1])
    return host.strip("[]"), int(found[2])


def channel_options(proxy: str | None) -> list[tuple[str, int | str]]:
    """Return gRPC options that set the proxy, or none.

    By default gRPC uses the proxy of the environment, which is often meant for web pages.
    """
    if proxy is None:
        return [("grpc.enable_http_proxy", 0)]
    os.environ["no_grpc_proxy"] = ""  # noqa: SIM112 - gRPC's name; gRPC would bypass the proxy for hosts in `no_proxy`
    return [("grpc.http_proxy", proxy)]


def check_proxy(proxy: str) -> None:
    """Raise `ConfigError` if the proxy is not `http://host:port`, optionally with user and password."""
    _parts(proxy)


def connect(address: str, timeout: float, proxy: str | None = None) -> socket.socket:
    """Open a TCP connection to `host:port`."""
    if proxy is None:
        return socket.create_connection(parse_address(address), timeout)
    host, port, credentials = _parts(proxy)
    made = socket.create_connection((host, port), timeout)
    try:
        made.sendall(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{credentials}\r\n".encode())
        status = _head(made).split("\r\n", 1)[0]
        if status.split(" ")[1:2] != ["200"]:
            raise OSError(f"the proxy {host}:{port} does not connect to {address}: {shown(status, 80)}")
    except BaseException:
        made.close()
        raise
    return made


def without_password(text: str) -> str:
    """A text that may be shown or copied: without the user and the password of addresses in it."""
    return re.sub(r"//[^/\"'\s]*@", "//", text)


def _parts(proxy: str) -> tuple[str, int, str]:
    """Return host, port, and the header with the credentials. The header is empty without credentials."""
    try:
        url = urlsplit(proxy)
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if host is None or port is None or url.scheme != "http" or url.path.strip("/"):
        raise ConfigError(
            f"peer.proxy = {without_password(proxy)!r}: it should be http://host:port, or http://user:password@host:port"
        )
    if url.username is None:
        return host, port, ""
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return host, port, f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"


def _head(made: socket.socket) -> str:
    """Read the head of the proxy's answer. It is read byte by byte, because all later bytes belong to TLS."""
    read = b""
    while not read.endswith(b"\r\n\r\n"):
        byte = made.recv(1)
        if not byte or len(read) >= LONGEST:
            raise OSError("the proxy sent no complete HTTP answer")
        read += byte
    return read.decode("latin-1")
