"""Slow link on loopback: its connections share a bandwidth, and it can corrupt data."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

_BLOCK = 2**14


class SlowLink:
    """Proxy in its own thread that limits the bandwidth to servers. Data from servers is not limited."""

    def __init__(self, rate: float, damage: Callable[[int], bool] = lambda _: False) -> None:
        """Start the link.

        Args:
            rate: Bytes per second.
            damage: Return whether to flip a bit of the last byte, from the number of bytes so far.
        """
        self._rate, self._damage = rate, damage
        self._free_at = 0.0
        self.passed = 0
        """Bytes sent to servers."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def through(self, url: str) -> str:
        """Return a URL that leads to the same server through this link."""
        port = urlsplit(url).port

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.transport.abort()
                return
            await asyncio.gather(self._slowly(reader, there_writer), _back(there_reader, writer))
            for w in (writer, there_writer):
                w.close()

        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(relay, "127.0.0.1", 0, limit=_BLOCK), self._loop
        ).result()
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_BLOCK):
                current_time = time.monotonic()
                self._free_at = max(current_time, self._free_at) + len(data) / self._rate
                self.passed += len(data)
                if len(data) == _BLOCK and self._damage(self.passed):  # a full block ends in a request body
                    data = data[:-1] + bytes([data[-1] ^ 1])
                await asyncio.sleep(self._free_at - current_time)
                writer.write(data)
                await writer.drain()
            writer.write_eof()


async def _back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
