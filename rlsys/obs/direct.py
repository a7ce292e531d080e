"""HTTP straight to the address that is named: through no proxy, and to no other address.

Engines, the rollout process and the coordinator are on this machine or its network. A proxy that the environment
names would see their keys. So would the target of a redirect: urllib sends the headers of a request there too.
"""

from __future__ import annotations

import urllib.request
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect becomes an HTTPError with its status, as every other answer that is not 2xx."""

    def redirect_request(self, *_: Any) -> None:
        return None


opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
"""`opener.open(request, timeout=seconds)`. Raises what `urllib.request.urlopen` does."""
