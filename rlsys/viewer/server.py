"""`rlsys dash`: read-only dashboard of runs, on loopback, protected by the token of its link.

GET /?token=T                    set a cookie, and redirect to the page
GET /static/...                  the page's modules and style sheet
GET /api/runs                    name, state, steps and metrics of each run
GET /api/curves ?names=a,b       these metrics of all runs, by step
GET /api/timeline ?run=          durations of the parts of the last steps
GET /api/status ?run=            status of the coordinator; {} for a finished run
GET /api/samples ?run=&step=&group=&order=&status=&resumed=&grep=&skip=
                                 a page of samples
GET /api/sample ?run=&sample=&from=
                                 tokens of one sample, a page from token `from` on
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.texts import shorten
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import AUTHORIZED, Refusal, guarded_app, same_secret, serving
from rlsys.ledger.samples import SampleQuery, check_query
from rlsys.obs.coordinator import CoordinatorUnreachable
from rlsys.viewer.reading import RunTexts, arrays_of
from rlsys.viewer.series import RunCurves

HOST = "127.0.0.1"
LIMITS = ServerLimits(connections=256, body_bytes=0)
STATIC = Path(__file__).parent / "static"
POINTS = 400
"""Largest number of points of a curve."""
STEPS = 60
"""Number of steps of a timeline."""
WARNINGS = 5
"""Number of the newest warnings of a run that are returned."""
SAMPLES = 24
"""Number of samples of a page."""
TOKENS = 2000
"""Number of tokens in a response to /api/sample."""
PREVIEW_CHARACTERS = 600
"""Largest number of characters of a prompt or a response in a page of samples."""
DIGITS = 18
"""Largest number of digits of a number in a query, so that it is in the range of SQLite's integers."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Dashboard:
    """Handlers of the dashboard's requests. Owns the metrics that were read."""

    def __init__(self, runs: list[Path], token: str) -> None:
        """Open the runs.

        Args:
            runs: run folders.
            token: token that clients must have.

        Raises:
            UserError: a folder is not a run folder.
        """
        self._folders = runs
        self._texts = [RunTexts(run) for run in runs]
        self._curves = [RunCurves(run) for run in runs]
        self._names = _names(runs)
        self._token = token
        self._cookie = f"rlsys-dash-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        """Name of the cookie. It depends on the token, because a browser sends cookies to all ports of a machine."""
        self._curves_lock = asyncio.Lock()
        """Held while a thread reads lines into `_curves`, and while a handler reads them."""

    def app(self) -> web.Application:
        """Create the application."""
        routes = [
            web.get("/", self._page),
            web.get("/api/runs", self._runs),
            web.get("/api/curves", self._read_curves),
            web.get("/api/timeline", self._timeline),
            web.get("/api/status", self._status),
            web.get("/api/samples", self._samples),
            web.get("/api/sample", self._sample),
            web.static("/static", STATIC),
        ]
        # 503 for RlsysError: a coordinator that does not respond now may respond later.
        app = guarded_app(routes, LIMITS, statuses={RunError: 503, RlsysError: 503}, admit=self._admit)

        async def add_headers(_: web.Request, answer: web.StreamResponse) -> None:
            answer.headers.update(HEADERS)

        app.on_response_prepare.append(add_headers)
        return app

    def _admit(self, request: web.Request) -> None:
        """Require the token, because any user of this machine can connect to a loopback port."""
        if request.path == "/" and same_secret(request.query.get("token", ""), self._token):
            page = web.HTTPFound("/")
            page.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict")
            raise page
        if not same_secret(request.cookies.get(self._cookie, ""), self._token):
            raise Refusal(403, "the token is missing or wrong: expected the link that rlsys dash printed")
        request[AUTHORIZED] = True

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _runs(self, request: web.Request) -> web.Response:
        async with self._curves_lock:
            for curves in self._curves:
                await asyncio.to_thread(curves.follow)
            rows = [
                {
                    "name": name,
                    "folder": str(folder),
                    "steps": curves.last_step,
                    "of": texts.config.trainer.steps,
                    "ended": curves.is_finished,
                    "last": curves.last_time,
                    "metrics": curves.names,
                    "warnings": curves.warnings[-WARNINGS:],
                    "model": texts.config.model.path.name,
                }
                for name, folder, curves, texts in zip(
                    self._names, self._folders, self._curves, self._texts, strict=True
                )
            ]
        return web.json_response(rows)

    async def _read_curves(self, request: web.Request) -> web.Response:
        names = [name for name in request.query.get("names", "").split(",") if name]
        async with self._curves_lock:
            return web.json_response([{n: c.curve(n, POINTS) for n in names} for c in self._curves])

    async def _timeline(self, request: web.Request) -> web.Response:
        run = self._run(request)
        async with self._curves_lock:
            return web.json_response(self._curves[run].timeline(STEPS))

    async def _status(self, request: web.Request) -> web.Response:
        reader = self._texts[self._run(request)].reader
        try:
            status = await asyncio.to_thread(reader.status)
        except CoordinatorUnreachable as e:
            status = {"silent": str(e)}
        return web.json_response(status or {})

    async def _samples(self, request: web.Request) -> web.Response:
        texts = self._texts[self._run(request)]
        query = sample_query(request.query)
        pattern = _pattern(request.query.get("grep", ""))

        def read_page() -> dict[str, Any]:
            page = texts.page(query, pattern)
            rows = []
            for view in page.samples:
                row = texts.describe(view)
                row["advantage"] = next((a for a in arrays_of(view)["advantages"] if a is not None), None)
                for name in ("prompt", "response"):
                    row[name] = _shorten_middle(row[name])
                rows.append(row)
            return {
                "samples": rows,
                "next": page.next_skip,
                "looked": page.searched,
                "last": texts.reader.last_step(),
            }

        return web.json_response(await asyncio.to_thread(read_page))

    async def _sample(self, request: web.Request) -> web.Response:
        texts = self._texts[self._run(request)]
        start = _number(request.query, "from") or 0

        def read_sample() -> dict[str, Any]:
            (view,) = texts.reader.samples(SampleQuery(sample=_number(request.query, "sample") or 0))
            pieces = texts.tokenizer.pieces(view.sample.response_ids[: start + TOKENS])
            arrays = {name: values[start : start + TOKENS] for name, values in arrays_of(view).items()}
            return {**texts.describe(view), **arrays, "from": start, "pieces": pieces[start:]}

        return web.json_response(await asyncio.to_thread(read_sample))

    def _run(self, request: web.Request) -> int:
        """Return the index of the requested run.

        Raises:
            UserError: there is no such run.
        """
        run = _number(request.query, "run") or 0
        if run >= len(self._folders):
            raise UserError(f"run = {run}: expected a number below {len(self._folders)}, the number of runs")
        return run


def sample_query(params: Any) -> SampleQuery:
    """Convert the query of a URL to a query of samples.

    Raises:
        UserError: a value is invalid.
    """
    query = SampleQuery(
        step=_number(params, "step"),
        group=_number(params, "group"),
        status=params.get("status") or None,
        resumed=params.get("resumed") == "1",
        order=params.get("order") or "newest",
        skip=_number(params, "skip") or 0,
        limit=SAMPLES,
    )
    check_query(query)
    return query


def _number(params: Any, name: str) -> int | None:
    """Return a number of a URL's query; None if it is missing.

    Raises:
        UserError: the value is not a number.
    """
    text = params.get(name, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS:
        raise UserError(f"{name} = {text[: 2 * DIGITS]}: expected a whole number of at most {DIGITS} digits")
    return int(text)


def _pattern(text: str) -> re.Pattern[str] | None:
    """Compile a regular expression; None for an empty one.

    Raises:
        UserError: the text is not a regular expression.
    """
    try:
        return re.compile(text) if text else None
    except (re.error, RecursionError, OverflowError) as e:
        raise UserError(f"grep = {shorten(text, 100)}: not a regular expression: {e}") from None


def _shorten_middle(text: str | None) -> str | None:
    """Replace the middle of a text with more than PREVIEW_CHARACTERS characters by an ellipsis."""
    if text is None or len(text) <= PREVIEW_CHARACTERS:
        return text
    return f"{text[: PREVIEW_CHARACTERS // 2]} … {text[-PREVIEW_CHARACTERS // 2 :]}"


def _names(runs: list[Path]) -> list[str]:
    """Return a unique name of each run: the name of its folder, or its path if several folders have this name."""
    folder_names = [run.resolve().name for run in runs]
    return [
        name if folder_names.count(name) == 1 else str(run)
        for name, run in zip(folder_names, runs, strict=True)
    ]


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


async def serve(runs: list[Path], port: int, report: Callable[[str], None], stop: asyncio.Event) -> None:
    """Serve the dashboard until `stop` is set.

    Args:
        runs: run folders.
        port: port on loopback; 0: a free port.
        report: called with the link to the page.
        stop: ends the server.

    Raises:
        UserError: a folder is not a run folder, or the port is in use.
    """
    token = new_token()
    async with serving(Dashboard(runs, token).app(), HOST, port, shutdown_seconds=1) as url:
        report(f"{url}/?token={token}")
        await stop.wait()
