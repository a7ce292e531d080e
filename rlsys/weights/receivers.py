"""The engines of one push: requests to them, and the exclusion of those that fail."""

from __future__ import annotations

import http.client
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlsys.core.errors import RunError
from rlsys.core.weight_updates import EngineAddress
from rlsys.engine.fence import HEADER
from rlsys.engine.weight_calls import Call
from rlsys.obs.direct import opener

Answers = dict[str, Future[dict[str, Any]]]
"""URL of an engine -> its response."""

log = logging.getLogger("rlsys.weights")


class EngineUnreachable(Exception):
    """The engine does not respond."""


class Receivers:
    """Engines that take part in a push, and threads that send requests to them.

    An engine that fails or refuses is excluded from the rest of the push, because it lacks some tensors. The trainer
    reports it in end_push, and the next push sends it all tensors. The run drops an engine after several failures.
    """

    def __init__(self, engines: Sequence[EngineAddress], seconds: float) -> None:
        """Start with all engines. `seconds`: response time after which an engine counts as unreachable."""
        self._seconds = seconds
        self.present = list(engines)
        """Engines that still take part."""
        self.excluded: dict[str, str] = {}
        """URL of an excluded engine -> reason."""
        self._threads = ThreadPoolExecutor(max(1, len(engines)), thread_name_prefix="push")

    def __enter__(self) -> Receivers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def post_all(self, calls: Sequence[Call]) -> Answers:
        """Start one POST to each present engine, concurrently.

        Args:
            calls: one per present engine.

        Returns:
            URL -> future, which raises EngineUnreachable, or RunError if the engine refuses.
        """
        return {
            engine.url: self._threads.submit(post, engine, call, self._seconds)
            for engine, call in zip(self.present, calls, strict=True)
        }

    def wait_all(self, answers: Answers) -> None:
        """Wait for the responses; exclude engines that are unreachable or refuse."""
        for engine in list(self.present):
            try:
                answers[engine.url].result()
            except (EngineUnreachable, RunError) as e:
                self.exclude(engine, e)

    def exclude_failed(self, answers: Answers, first: Answers, default: RunError) -> None:
        """Wait for all responses, and exclude the engines of the first of these sets that is not empty.

        1. the unreachable engines
        2. the engines of `first` that refuse
        3. all engines that refuse
        4. all engines

        Args:
            answers: responses of all present engines.
            first: the responses that had arrived when the failure was detected.
            default: reason of the exclusion in case 4.
        """
        refusals: dict[str, Exception] = {}
        engines = list(self.present)
        for engine in engines:
            try:
                answers[engine.url].result()
            except EngineUnreachable as e:
                self.exclude(engine, e)
            except RunError as e:
                refusals[engine.url] = e
        if len(self.present) < len(engines):
            return
        failed = {url: e for url, e in refusals.items() if url in first} or refusals
        for engine in engines:
            if engine.url in failed or not failed:
                self.exclude(engine, failed.get(engine.url, default))

    def exclude(self, engine: EngineAddress, reason: Exception) -> None:
        """Exclude an engine from the rest of the push."""
        log.warning("%s: excluded from a weight update: %s", engine.url, reason)
        self.present.remove(engine)
        self.excluded[engine.url] = str(reason)


def post(engine: EngineAddress, call: Call, seconds: float) -> dict[str, Any]:
    """Send a request to an engine, and return its response.

    Raises:
        EngineUnreachable: no response within `seconds`.
        RunError: the engine refuses, or its response is no JSON object.
    """
    headers = {"Content-Type": "application/json"}
    if engine.key:
        headers["Authorization"] = f"Bearer {engine.key}"
    if engine.epoch is not None:
        headers[HEADER] = str(engine.epoch)
    request = urllib.request.Request(
        engine.url + call.path, data=json.dumps(call.body).encode(), headers=headers
    )
    try:
        with opener.open(request, timeout=seconds) as response:
            body = response.read()
    except urllib.error.HTTPError as e:
        raise RunError(
            f"{engine.url}{call.path}: HTTP status {e.code}: {e.read().decode(errors='replace')[:300]}"
        ) from None
    except (OSError, http.client.HTTPException) as e:
        raise EngineUnreachable(f"{engine.url}{call.path}: {e}") from None
    try:
        result = json.loads(body)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise RunError(f"{engine.url}{call.path}: the response is {body[:100]!r}; expected a JSON object")
    if not result.get("success"):
        raise RunError(f"{engine.url}{call.path}: the engine refused: {result.get('message')}")
    return result
