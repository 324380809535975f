"""Links between peers on one machine that count bytes, delay them and can be cut.

A relay is between a client and a peer. Like a network, it sees TCP streams of TLS records and can delay or drop them.
It cannot change a message without detection.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

HOST = "127.0.0.1"


class Link:
    """Connections in one direction: a client that connects to `address` reaches `target`."""

    def __init__(self, target: str) -> None:
        self.target, self.address = target, ""
        self.bytes = 0
        """Bytes in both directions."""
        self.delay = 0.0
        """Delay of every byte in seconds, in each direction."""
        self._open = asyncio.Event()

    def passes(self) -> bool:
        """Return whether the link is open."""
        return self._open.is_set()


def reroute(rehearsed, relay: Relay) -> dict[tuple[str, str], Link]:
    """Give each ordered pair of peers its own link. Return the links by client and server.

    Each peer gets a roster with its own addresses. Peers need not agree on addresses.
    """
    links = {}
    roster = (rehearsed.folder / "roster.toml").read_text()
    for name in rehearsed.names:
        own = roster
        for other, address in rehearsed.addresses.items():
            if other != name:
                links[name, other] = relay.link(address)
                own = own.replace(address, links[name, other].address)
        (rehearsed.folder / name / "roster.toml").write_text(own)
        settings = rehearsed.folder / name / "peer.toml"
        settings.write_text(settings.read_text().replace("../roster.toml", "roster.toml"))
    return links


class Relay:
    """A thread that runs links."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []

    def link(self, target: str) -> Link:
        """Return a new, open link."""
        made = Link(target)
        asyncio.run_coroutine_threadsafe(self._serve(made), self._loop).result(10)
        return made

    def cut(self, *links: Link) -> None:
        """Hold back all bytes. The connections stay open."""
        for link in links:
            self._loop.call_soon_threadsafe(link._open.clear)

    def heal(self, *links: Link) -> None:
        """Release the bytes that were held back."""
        for link in links:
            self._loop.call_soon_threadsafe(link._open.set)

    def close(self) -> None:
        """Close all links and the thread."""

        async def end() -> None:
            for server in self._servers:
                server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, link: Link) -> None:
        link._open.set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._carry(link, reader, writer)

        server = await asyncio.start_server(connected, HOST, 0)
        self._servers.append(server)
        link.address = f"{HOST}:{server.sockets[0].getsockname()[1]}"

    async def _carry(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await link._open.wait()
        host, _, port = link.target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        ways = (self._pump(link, reader, far_writer), self._pump(link, far_reader, writer))
        try:
            await asyncio.gather(*ways)
        finally:
            for end in (writer, far_writer):
                end.close()

    async def _pump(self, link: Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Forward bytes after a delay. Reading continues meanwhile, so the delay does not reduce the bandwidth."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await link._open.wait()
                if not data:
                    with contextlib.suppress(OSError):
                        sink.write_eof()
                    return
                link.bytes += len(data)
                sink.write(data)
                await sink.drain()

        async def read() -> None:
            data = b"x"
            while data:
                data = await source.read(65536)
                under_way.put_nowait((self._loop.time() + link.delay, data))

        with contextlib.suppress(OSError):
            await asyncio.gather(read(), write())
