"""Splits a byte stream into server-sent events, without parsing them.

Events have no size limit: the last event of a request may contain megabytes of routed experts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

END = b"\n\n"


async def events(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield each event without the empty line that ends it. Bytes after the last such line are dropped."""
    buffer = bytearray()
    async for piece in pieces:
        search_from = max(0, len(buffer) - 1)
        buffer += piece
        begin = 0
        while (end := buffer.find(END, search_from)) >= 0:
            with memoryview(buffer) as view:
                event = bytes(view[begin:end])
            yield event
            begin = search_from = end + len(END)
        del buffer[:begin]
