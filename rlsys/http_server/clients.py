"""Requests to other servers, without proxies and redirects, and with responses of bounded size.

A proxy of the environment, or the target of a redirect, would get prompts and keys.
"""

from __future__ import annotations

from typing import Any

import aiohttp


class RedirectRefused(aiohttp.ClientError):
    """Raised when a server responds with a redirect."""


class TooLong(aiohttp.ClientPayloadError):
    """Raised for a response that is larger than its limit."""


def direct_session(**options: Any) -> aiohttp.ClientSession:
    """Create a session without a proxy.

    A redirect raises RedirectRefused; to a request with `allow_redirects=False` it is an ordinary response.

    Args:
        options: options of aiohttp.ClientSession.
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse)
    return aiohttp.ClientSession(trust_env=False, trace_configs=[trace], **options)


async def _refuse(_: Any, __: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    location = redirect.response.headers.get("Location", "nowhere")[:200]
    raise RedirectRefused(f"{redirect.url} redirects to {location}; use the final URL")


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
            raise TooLong(f"{answer.url}: the response has more than {max_bytes} bytes")
    return bytes(body)
