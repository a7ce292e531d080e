"""The engines of one push: who is asked, who has gone, and what an answer means."""

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
"""URL of an engine -> what it says."""

log = logging.getLogger("rlsys.weights")


class Gone(Exception):
    """Nobody answers at this engine's address any more."""


class Receivers:
    """Engines that take part in a push. One that goes, or refuses, is left out of the rest of it: it holds a part of
    the tensors. end_push hears why, and the next push brings it all of them; after a few such the run gives it up.
    """

    def __init__(self, engines: Sequence[EngineAddress], seconds: float) -> None:
        """`seconds`: what an answer may take; then the engine counts as gone."""
        self._seconds = seconds
        self.present = list(engines)
        self.left_out: dict[str, str] = {}
        """URL -> why."""
        self._threads = ThreadPoolExecutor(max(1, len(engines)), thread_name_prefix="push")

    def __enter__(self) -> Receivers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, calls: Sequence[Call]) -> Answers:
        """Begin one POST to each present engine, all at once. The futures raise Gone or RunError (a refusal)."""
        return {
            engine.url: self._threads.submit(post, engine, call, self._seconds)
            for engine, call in zip(self.present, calls, strict=True)
        }

    def settle(self, answers: Answers) -> None:
        """Wait for the answers; who is gone or refuses is left out."""
        for engine in list(self.present):
            try:
                answers[engine.url].result()
            except (Gone, RunError) as e:
                self.leave_out(engine, e)

    def blame(
        self,
        answers: Answers,
        first: Answers,
        otherwise: RunError,
    ) -> None:
        """Wait for all answers and leave out who is to blame, at least one: who has gone; else who of the `first`
        refused; else whoever refused; else all, for `otherwise`."""
        refused: dict[str, Exception] = {}
        before = list(self.present)
        for engine in before:
            try:
                answers[engine.url].result()
            except Gone as e:
                self.leave_out(engine, e)
            except RunError as e:
                refused[engine.url] = e
        if len(self.present) < len(before):
            return
        blamed = {url: e for url, e in refused.items() if url in first} or refused
        for engine in before:
            if engine.url in blamed or not blamed:
                self.leave_out(engine, blamed.get(engine.url, otherwise))

    def leave_out(self, engine: EngineAddress, why: Exception) -> None:
        log.warning("%s: left out of a push: %s", engine.url, why)
        self.present.remove(engine)
        self.left_out[engine.url] = str(why)


def post(engine: EngineAddress, call: Call, seconds: float) -> dict[str, Any]:
    """What it answers. Raises Gone when the engine does not answer within so many seconds; RunError when it refuses,
    or its answer is not one of SGLang."""
    headers = {"Content-Type": "application/json"}
    if engine.key:
        headers["Authorization"] = f"Bearer {engine.key}"
    if engine.epoch is not None:
        headers[HEADER] = str(engine.epoch)
    request = urllib.request.Request(
        engine.url + call.path, data=json.dumps(call.body).encode(), headers=headers
    )
    try:
        with opener.open(request, timeout=seconds) as answer:
            said = answer.read()
    except urllib.error.HTTPError as e:
        raise RunError(
            f"{engine.url}{call.path}: {e.code} {e.read().decode(errors='replace')[:300]}"
        ) from None
    except (OSError, http.client.HTTPException) as e:
        raise Gone(f"{engine.url}{call.path}: {e}") from None
    try:
        result = json.loads(said)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise RunError(f"{engine.url}{call.path}: not an answer of SGLang: {said[:100]!r}")
    if not result.get("success"):
        raise RunError(f"{engine.url}{call.path}: {result.get('message')}")
    return result
