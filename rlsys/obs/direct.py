"""HTTP without proxies and redirects.

Engines, the rollout process and the coordinator are on this machine or its network. A proxy in the
environment would see their keys, and so would the target of a redirect, since urllib repeats the request's
headers there.
"""

from __future__ import annotations

import urllib.request
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that turns a redirect into an HTTPError with its status, like any other response that is not 2xx."""

    def redirect_request(self, *_: Any) -> None:
        return None


opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
"""`opener.open(request, timeout=seconds)`. Raises what `urllib.request.urlopen` does."""
