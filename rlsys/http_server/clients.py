"""Requests to other servers: straight to the address that is named, and answers of bounded length.

A proxy that the environment names would see prompts and keys, and so would the target of a redirect.
"""

from __future__ import annotations

from typing import Any

import aiohttp


class RedirectRefused(aiohttp.ClientError):
    """A server sends its client to another address."""


class TooLong(aiohttp.ClientPayloadError):
    """An answer with more bytes than its reader takes."""


def direct_session(**options: Any) -> aiohttp.ClientSession:
    """A session through no proxy. A redirect raises RedirectRefused, or is an answer to a request with
    `allow_redirects=False`.

    Args:
        options: of aiohttp.ClientSession.
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse)
    return aiohttp.ClientSession(trust_env=False, trace_configs=[trace], **options)


async def _refuse(_: Any, __: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    location = redirect.response.headers.get("Location", "nowhere")[:200]
    raise RedirectRefused(f"{redirect.url} redirects to {location}; name the address that answers")


async def read_bounded(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of an answer.

    Raises:
        TooLong: The body has more than `max_bytes` bytes; the connection is closed.
    """
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > max_bytes:
            answer.close()
            raise TooLong(f"{answer.url} answers with more than {max_bytes} bytes")
    return bytes(body)
