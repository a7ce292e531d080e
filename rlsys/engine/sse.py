"""Server-sent events as bytes: whole events out of whatever pieces a socket gives. No parsing, and no size limit: the
last event of a request may carry megabytes of routed experts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

END = b"\n\n"


async def events(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Each event without the empty line that ends it. What follows the last such line is dropped."""
    buffer = bytearray()
    async for piece in pieces:
        look_from = max(0, len(buffer) - 1)
        buffer += piece
        begin = 0
        while (end := buffer.find(END, look_from)) >= 0:
            with memoryview(buffer) as whole:
                event = bytes(whole[begin:end])
            yield event
            begin = look_from = end + len(END)
        del buffer[:begin]
