"""HTTP client without proxies and redirects, for requests with keys to processes of a run.

A proxy that the environment names would receive the keys, and so would the target of a redirect, because urllib sends
the request's headers there.
"""

from __future__ import annotations

import urllib.request
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that does not follow redirects, so that urllib raises HTTPError for them."""

    def redirect_request(self, *_: Any) -> None:
        return None


opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
"""Use `opener.open(request, timeout=seconds)` in place of `urllib.request.urlopen`; it raises the same errors."""
