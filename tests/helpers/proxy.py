"""Fault-injecting proxy on loopback or between two Unix sockets: it resets connections, delays and changes data."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit


class Proxy:
    """Proxy between clients and one server. It runs in its own thread; its methods are thread-safe."""

    def __init__(self, target: int | Callable[[], int | Path], unix_socket: Path | None = None) -> None:
        """Start the proxy.

        Args:
            target: Port of the server on loopback, or a function that returns it or the path of its Unix socket. The
                server may start later.
            unix_socket: Path of a Unix socket on which the proxy listens instead of a port.
        """
        self._target = target
        self._refusing = False
        self._delay = 0.0
        self._change: Callable[[bytes], bytes] = bytes
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        if unix_socket is None:
            start = asyncio.start_server(self._relay, "127.0.0.1", 0)
        else:
            start = asyncio.start_unix_server(self._relay, unix_socket)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port: int = 0 if unix_socket is not None else self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection, and each new one, until `heal`."""
        self._loop.call_soon_threadsafe(self._cut)

    def heal(self) -> None:
        """End all faults."""
        self._refusing, self._delay, self._change = False, 0.0, bytes

    def slow(self, seconds: float) -> None:
        """Delay data in both directions by this many seconds."""
        self._delay = seconds

    def change(self, change: Callable[[bytes], bytes]) -> None:
        """Apply `change` to each block of data to the server."""
        self._change = change

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        relays = asyncio.all_tasks() - {asyncio.current_task()}
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    def _cut(self) -> None:
        self._refusing = True
        for writer in self._writers:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            upstream_reader, upstream_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        writers = {writer, upstream_writer}
        self._writers |= writers
        try:
            upstream = self._forward(reader, upstream_writer, lambda data: self._change(data))
            await asyncio.gather(upstream, self._forward(upstream_reader, writer, bytes))
        finally:
            self._writers -= writers
            for w in writers:
                w.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self._target if isinstance(self._target, int) else self._target()
        if isinstance(target, int):
            return await asyncio.open_connection("127.0.0.1", target)
        return await asyncio.open_unix_connection(target)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        try:
            while data := await reader.read(2**16):
                if self._delay:
                    await asyncio.sleep(self._delay)
                writer.write(change(data))
                await writer.drain()
            writer.write_eof()
        except OSError:  # reset the other connection too
            writer.transport.abort()


def port_of(url: str) -> int:
    return int(urlsplit(url).port or 0)
