"""Endpoint: the HTTP server for agents, on loopback. Each sample has its own address and key.

    http://127.0.0.1:PORT/SESSION/v1/chat/completions, /v1/responses, /v1/messages
    http://127.0.0.1:PORT/SESSION/reward                the reward that the agent reports
    http://127.0.0.1:PORT/SESSION/environment/open, /step, /close    the agent's episode of the run's environment

A request may have to wait for a train step, a push or a new engine. Meanwhile the server sends data that clients
ignore, so that they do not time out: white space before JSON, comments in a stream (as DeepSeek's API does). If a
client disconnects, the server still completes the request, and answers a repetition of it with the stored answer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rlsys.agents import anthropic, chat, responses
from rlsys.agents.host import REWARD_URL
from rlsys.agents.messages import Answer, BadRequest, TurnRequest
from rlsys.core.texts import load_json
from rlsys.core.types import is_reward
from rlsys.environments.client import KEY as ENVIRONMENT_KEY
from rlsys.environments.client import URL as ENVIRONMENT_URL
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import (
    AUTHORIZED,
    Handler,
    Refusal,
    api_key,
    guarded_app,
    read_json,
    same_secret,
    serving,
)

HOST = "127.0.0.1"
ALIVE_SECONDS = 15.0
"""Interval in seconds of keep-alive data to a waiting client. Most clients time out after minutes."""
LIMITS = ServerLimits(connections=4096, body_bytes=64 * 2**20)
RETRY_HEADER = "x-stainless-retry-count"
"""Header of OpenAI's and Anthropic's clients: number of earlier attempts."""


AskEnvironment = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""(open, step or close; body of the request) -> HTTP status and body.

Raises ConnectionError if the environment has died and the client must repeat the request.
"""


@dataclass(frozen=True)
class Api:
    """The functions of one API: parse a request; encode an answer as one JSON object, or as a stream's events."""

    read: Callable[[Mapping[str, Any]], TurnRequest]
    to_json: Callable[[Answer, Mapping[str, Any]], Mapping[str, Any]]
    events: Callable[[Answer, Mapping[str, Any]], Iterable[bytes]]


APIS: Mapping[str, Api] = {
    chat.PATH: Api(chat.read, chat.to_json, chat.events),
    responses.PATH: Api(responses.read, responses.to_json, responses.events),
    anthropic.PATH: Api(anthropic.read, anthropic.to_json, anthropic.events),
}


@dataclass(eq=False)
class Question:
    """A request of an agent to its session.

    Attributes:
        repeated: whether the client reports that it repeats the request.
        is_disconnected: returns whether the client has closed the connection.
        answer: set by the owner of the session.
        delivered: whether the whole answer was sent.
    """

    request: TurnRequest
    repeated: bool
    is_disconnected: Callable[[], bool]
    answer: asyncio.Future[Answer]
    delivered: bool = False

    @property
    def undelivered(self) -> bool:
        """Whether the client disconnected before it received the answer."""
        return self.is_disconnected() and not self.delivered


class Session:
    """The address of one agent. The owner of the session reads `questions` and sets their answers."""

    def __init__(self, url: str, ask_environment: AskEnvironment | None) -> None:
        self.url = url
        self.key = secrets.token_urlsafe(24)
        self.ask_environment = ask_environment
        self.questions: asyncio.Queue[Question] = asyncio.Queue()
        self.waiting: set[asyncio.Future[Answer]] = set()
        """Answers of pending questions."""
        self.reward: float | None = None
        """The last reward that the agent has reported for its response; None: no report."""

    def environment(self) -> dict[str, str]:
        """Return the agent's environment variables with addresses and key, by the names that common clients read."""
        variables = {
            "OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": self.key,
        }  # fmt: skip
        if self.ask_environment is not None:
            variables |= {ENVIRONMENT_URL: f"{self.url}/environment", ENVIRONMENT_KEY: self.key}
        return variables | {REWARD_URL: f"{self.url}/reward", "NO_PROXY": HOST, "no_proxy": HOST}


_SESSION = web.RequestKey("session", Session)
"""Session of an authenticated request."""


class Endpoint:
    """The HTTP server for agents. Owns the open sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._base = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Endpoint]:
        """Serve on a free port while the context is active."""
        routes = [
            *(web.post("/{session}" + path, self._answering(api)) for path, api in APIS.items()),
            web.get("/{session}/v1/models", self._models),
            web.post("/{session}/reward", self._set_reward),
            web.post("/{session}/environment/{call:open|step|close}", self._forward_to_environment),
        ]
        app = guarded_app(routes, LIMITS, refusal, admit=self._admit)
        async with serving(app, HOST) as self._base:
            yield self

    def open(self, ask_environment: AskEnvironment | None = None) -> Session:
        """Open a session for one agent.

        Args:
            ask_environment: answers the agent's requests to its environment; None: the run has no environment.
        """
        name = secrets.token_urlsafe(12)
        session = self._sessions[name] = Session(f"{self._base}/{name}", ask_environment)
        return session

    def close(self, session: Session) -> None:
        """Close a session, and cancel its pending questions."""
        self._sessions = {name: s for name, s in self._sessions.items() if s is not session}
        for answer in list(session.waiting):
            answer.cancel()

    def _admit(self, request: web.Request) -> None:
        session = self._sessions.get(request.match_info.get("session", ""))
        if session is None or not same_secret(api_key(request), session.key):
            raise Refusal(401, "the address or the key is wrong: expected those of a running agent")
        request[_SESSION] = session
        request[AUTHORIZED] = True

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rlsys"}
        return web.json_response({"object": "list", "data": [model]})

    async def _set_reward(self, request: web.Request) -> web.Response:
        raw = await request.read()
        try:
            body = load_json(raw)  # NaN is reported below
            reward = float(body["reward"])
        except (ValueError, KeyError, TypeError, OverflowError):
            raise Refusal(400, f'body = {raw[:80]!r}: expected {{"reward": NUMBER}}') from None
        if not is_reward(reward):
            return refusal(400, f"reward = {reward}: expected a finite number", "reward")
        request[_SESSION].reward = reward
        return web.json_response({})

    async def _forward_to_environment(self, request: web.Request) -> web.Response:
        ask_environment = request[_SESSION].ask_environment
        if ask_environment is None:
            raise Refusal(404, "the run has no rollout.generator_params.environment")
        try:
            status, body = await ask_environment(request.match_info["call"], await request.read())
        except ConnectionError:  # the environment died; its client retries
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        return web.Response(status=status, body=body, content_type="application/json")

    def _answering(self, api: Api) -> Handler:
        """Return the handler of an API's requests."""

        async def handle(request: web.Request) -> web.StreamResponse:
            session: Session = request[_SESSION]
            body = await read_json(request)
            if not isinstance(body, dict):
                raise Refusal(400, f"the body is a {type(body).__name__}; expected a JSON object")
            try:
                turn_request = api.read(body)
                repeated = request.headers.get(RETRY_HEADER, "0") not in ("", "0")
                answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
                question = Question(turn_request, repeated, lambda: request.transport is None, answer)
                session.waiting.add(answer)
                answer.add_done_callback(session.waiting.discard)
                session.questions.put_nowait(question)
                return await _wait(request, question, api, body)
            except BadRequest as e:
                return refusal(400, str(e), e.param)

        return handle


async def _wait(
    request: web.Request, question: Question, api: Api, body: Mapping[str, Any]
) -> web.StreamResponse:
    """Send keep-alive data until the answer of `question` is set, then the answer.

    Raises:
        BadRequest: the session refuses the request.
    """
    stream = question.request.stream
    response = await keep_alive_until(question.answer, request, stream)
    if question.answer.cancelled():  # the sample has ended
        if response is not None and request.transport is not None:
            request.transport.abort()
        return response or refusal(410, "this agent's response has ended")
    if response is not None and isinstance(error := question.answer.exception(), BadRequest):
        await response.write(json.dumps(error_body(str(error), error.param)).encode())
        return response
    answer = question.answer.result()
    response = response or await start_response(request, stream)
    if stream:
        for event in api.events(answer, body):
            await response.write(event)
    else:
        await response.write(json.dumps(api.to_json(answer, body)).encode())
    await response.write_eof()
    question.delivered = True
    return response


async def keep_alive_until(
    future: asyncio.Future[Any], request: web.Request, stream: bool
) -> web.StreamResponse | None:
    """Send keep-alive data to the client of `request` until `future` is done.

    Returns:
        The response that was started for the data; None if the future was done before any were sent.
    """
    response: web.StreamResponse | None = None
    while not future.done():
        await asyncio.wait({future}, timeout=ALIVE_SECONDS)
        if not future.done():
            response = response or await start_response(request, stream)
            await response.write(
                b": waiting\n\n" if stream else b"\n"
            )  # a comment, or white space before JSON
    return response


async def start_response(request: web.Request, stream: bool) -> web.StreamResponse:
    """Start a response with status 200, as a stream of events or as JSON, and send its headers."""
    kind = "text/event-stream" if stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind})
    await response.prepare(request)
    return response


def refusal(status: int, message: str, param: str | None = None) -> web.Response:
    """Return an error response in the format of OpenAI and Anthropic. `param`: the invalid field."""
    return web.json_response(error_body(message, param), status=status)


def error_body(message: str, param: str | None) -> dict[str, Any]:
    """Return the body of an error in OpenAI's format, which Anthropic's clients also parse. `param`: the field."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return {"type": "error", "error": error}
