"""What the supervisor asks of roles over HTTP: whether they are there, and how they are."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

from rlsys.obs.direct import opener
from rlsys.owner import KEY_HEADER

NO_ANSWER, OK, NOT_YET = 0, 200, 503
SECONDS = 1.0


def probe(url: str, key: str, data: bytes | None = None, timeout: float = SECONDS) -> tuple[int, bytes]:
    """Status and body; status 0 when there is no answer: the caller asks again. With `data`: a POST.

    `key`: of the launch, which the rollout process asks for.
    """
    try:
        request = urllib.request.Request(url, data, {KEY_HEADER: key})
        with opener.open(request, timeout=timeout) as answer:
            return int(answer.status), bytes(answer.read())
    except urllib.error.HTTPError as e:
        try:
            return e.code, e.read()
        except (OSError, http.client.HTTPException):
            return e.code, b""
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return NO_ANSWER, b""
