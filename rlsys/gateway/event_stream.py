"""EventStream: a stream of server-sent events to a client."""

from __future__ import annotations

import asyncio

from aiohttp import web

from rlsys.engine.sse import END

READER_SECONDS = 60.0
"""Time after which a client that does not read is disconnected, in seconds."""


class SlowClient(Exception):
    """Raised when a client has not read its events for READER_SECONDS."""


class EventStream:
    """The stream of one request.

    Attributes:
        response: the HTTP response; None until the first event, which starts it.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._lock = asyncio.Lock()
        self.response: web.StreamResponse | None = None

    async def write(self, data: bytes) -> None:
        """Send one event with `data`.

        Raises:
            SlowClient: the client has not read for READER_SECONDS.
        """
        deadline = asyncio.timeout(READER_SECONDS)
        try:
            async with self._lock, deadline:
                if self.response is None:
                    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                    self.response = web.StreamResponse(headers=headers)
                    await self.response.prepare(self._request)
                await self.response.write(b"data: " + data + END)
        except TimeoutError:
            if deadline.expired():
                raise SlowClient from None
            raise

    async def end(self) -> web.StreamResponse:
        """End the stream and return its response. At least one event must have been sent."""
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    def drop(self) -> web.StreamResponse:
        """Close the connection at once, without waiting for the client to read, and return the response."""
        assert self.response is not None
        if self._request.transport is not None:
            self._request.transport.abort()
        return self.response
