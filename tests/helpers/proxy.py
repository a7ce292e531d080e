"""A proxy on loopback, or between two Unix sockets, that cuts, delays and changes what passes, on demand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit


class Proxy:
    """Between clients and one server. Owns a thread; may be used from any other."""

    def __init__(self, target: int | Callable[[], int | Path], at: Path | None = None) -> None:
        """`target`: the server's port on loopback, or what gives it or the path of its Unix socket. It need not
        listen yet. `at`: the Unix socket of this proxy, which then has no port."""
        self._target = target
        self._refusing = False
        self._delay = 0.0
        self._change: Callable[[bytes], bytes] = bytes
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        if at is None:
            start = asyncio.start_server(self._relay, "127.0.0.1", 0)
        else:
            start = asyncio.start_unix_server(self._relay, at)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.port: int = 0 if at is not None else self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Break every connection, and each new one, until `mend`."""
        self._loop.call_soon_threadsafe(self._cut)

    def mend(self) -> None:
        self._refusing, self._delay, self._change = False, 0.0, bytes

    def slow(self, seconds: float) -> None:
        """What is read from now on is passed on so much later."""
        self._delay = seconds

    def change(self, change: Callable[[bytes], bytes]) -> None:
        """Pass on `change` of each block that is read from now on, towards the server."""
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
            onward_reader, onward_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        writers = {writer, onward_writer}
        self._writers |= writers
        try:
            towards = self._pass(reader, onward_writer, lambda data: self._change(data))
            await asyncio.gather(towards, self._pass(onward_reader, writer, bytes))
        finally:
            self._writers -= writers
            for w in writers:
                w.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self._target if isinstance(self._target, int) else self._target()
        if isinstance(target, int):
            return await asyncio.open_connection("127.0.0.1", target)
        return await asyncio.open_unix_connection(target)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        try:
            while data := await reader.read(2**16):
                if self._delay:
                    await asyncio.sleep(self._delay)
                writer.write(change(data))
                await writer.drain()
            writer.write_eof()
        except OSError:  # the other end is told, too
            writer.transport.abort()


def port_of(url: str) -> int:
    return int(urlsplit(url).port or 0)
