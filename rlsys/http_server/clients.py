"""HTTP clients without proxies and redirects, for responses of bounded size.

A proxy that the environment names, or the target of a redirect, would get prompts and keys.
"""

from __future__ import annotations

from typing import Any

import aiohttp


class RedirectRefused(aiohttp.ClientError):
    """Raised for a response that is a redirect."""


class TooLong(aiohttp.ClientPayloadError):
    """Raised for a response that is larger than its limit."""


def direct_session(**options: Any) -> aiohttp.ClientSession:
    """Create a session that uses no proxy and follows no redirects.

    A redirect raises RedirectRefused. If the request has `allow_redirects=False`, the redirect is returned as the
    response.

    Args:
        options: options of aiohttp.ClientSession.
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse)
    return aiohttp.ClientSession(trust_env=False, trace_configs=[trace], **options)


async def _refuse(_: Any, __: Any, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    location = redirect.response.headers.get("Location", "no Location")[:200]
    raise RedirectRefused(f"{redirect.url} redirects to {location}; expected the final URL")


async def read_bounded(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a response.

    Raises:
        TooLong: the body has more than `max_bytes` bytes. The connection is closed.
    """
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > max_bytes:
            answer.close()
            raise TooLong(f"{answer.url}: the response has more than {max_bytes} bytes, the limit")
    return bytes(body)
