"""Peers ignore the proxy of the environment, and use the one that their operator names."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from fedh2l.errors import ConfigError
from fedh2l.peer.rehearsal import PEER, free_ports
from fedh2l.peer.settings import load_peer
from fedh2l.peer.transport.proxy import check_proxy, connect
from town import rehearsal

WEB = ("http_proxy", "https_proxy", "grpc_proxy", "HTTPS_PROXY", "all_proxy")


class Proxy:
    """A real HTTP proxy that knows CONNECT."""

    def __init__(self, answer: bytes = b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n") -> None:
        self.answer = answer
        self.asked: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._tunnel, args=(client,), daemon=True).start()

    def _tunnel(self, client: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(1)
        self.asked.append(head)
        host, _, port = head.split(b" ")[1].rpartition(b":")
        try:
            target = socket.create_connection((host.decode(), int(port)))
        except OSError:  # as when a peer is not there yet
            client.close()
            return
        client.sendall(self.answer)
        for source, sink in ((client, target), (target, client)):
            threading.Thread(target=_pump, args=(source, sink), daemon=True).start()

    def close(self) -> None:
        self._server.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    made.close()


def test_a_tunnel(proxy):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with connect(address, 5, proxy.url.replace("//", "//user:p%40ss@")) as made:
            there, _ = server.accept()
            there.sendall(b"hello")
            assert made.recv(5) == b"hello"
            there.close()
    assert proxy.asked[0].startswith(f"CONNECT {address} HTTP/1.1\r\n".encode())
    assert b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in proxy.asked[0]


def test_a_proxy_that_will_not(proxy):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        proxy.answer = b"HTTP/1.1 403 Forbidden\x1b[2J\r\n\r\n"
        with pytest.raises(OSError, match=r"does not connect to .*: HTTP/1.1 403 Forbidden\\x1b"):
            connect(address, 5, proxy.url)
        proxy.answer = b"HTTP/1.1 200 " + b"x" * 9000
        with pytest.raises(OSError, match="no complete HTTP answer"):
            connect(address, 5, proxy.url)


@pytest.mark.parametrize(
    "wrong", ["proxy:3128", "socks5://proxy:1080", "http://proxy", "http://p:99999999", "http://p:1/x"]
)
def test_what_is_no_proxy(wrong):
    with pytest.raises(ConfigError, match="it should be http://host:port"):
        check_proxy(wrong)


def test_its_password_is_neither_copied_nor_shown(tmp_path):
    """A run keeps a copy of its settings, which other users of the machine can read."""
    made = rehearsal(tmp_path / "there")
    path = made.folder / "M0" / PEER
    path.write_text(path.read_text().replace("[peer]", '[peer]\nproxy = "http://me:p@ss@127.0.0.1:3128"'))
    text = load_peer(path).text
    assert 'proxy = "http://127.0.0.1:3128"' in text
    assert "p@ss" not in text
    with pytest.raises(ConfigError) as wrong:
        check_proxy("ftp://me:p@ss@127.0.0.1:3128")
    assert "p@ss" not in str(wrong.value)


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True], ids=["not named", "named"])
def test_peers(town, proxy, monkeypatch, named):
    """With a web proxy in the environment that is not even there."""
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    for variable in WEB:
        monkeypatch.setenv(variable, nobody)
    monkeypatch.setenv("no_proxy", "127.0.0.1" if named else "")
    made = town("run.rounds=30", deadline=30.0)
    if named:
        for name in made.rehearsed.names:
            made.edit(name, ("[peer]", f'[peer]\nproxy = "{proxy.url}"'))
    made.start(*made.rehearsed.names)
    results = made.finish()
    assert {result["peer"]["skipped"] for result in results.values()} == {0}
    assert len(proxy.asked) >= 24 if named else proxy.asked == []  # a look at the certificate, and a connection
    from fedh2l.peer.monitoring.status import ask

    with pytest.raises(Exception, match="no peer answers"):
        ask(f"127.0.0.1:{free_ports(1)[0]}", 1)
