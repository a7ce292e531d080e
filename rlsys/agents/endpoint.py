"""Endpoint: the HTTP server for agents, on loopback. Each sample has its own address and key.

    http://127.0.0.1:PORT/SESSION/v1/chat/completions, /v1/responses, /v1/messages
    http://127.0.0.1:PORT/SESSION/reward                the reward that the agent reports
    http://127.0.0.1:PORT/SESSION/environment/open, /step, /close    the agent's episode of the run's environment

A request may have to wait for a train step, a push or a new engine. To prevent timeouts, a waiting client gets white
space before its JSON, or comments in its stream, as in DeepSeek's API. If a client disconnects, its request is still
answered; when the client repeats the request, it gets this answer.
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
"""Interval of keep-alive data to a waiting client. Most clients time out after minutes."""
LIMITS = ServerLimits(connections=4096, body_bytes=64 * 2**20)
RETRY_HEADER = "x-stainless-retry-count"
"""Header of OpenAI's and Anthropic's clients: number of earlier attempts."""


AskEnvironment = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""(open, step or close; body of the request) -> HTTP status and body. Raises ConnectionError."""


@dataclass(frozen=True)
class Api:
    """The functions of one API."""

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
    """The address of one agent. Its owner reads `questions` and sets their answers."""

    def __init__(self, url: str, ask_environment: AskEnvironment | None) -> None:
        self.url, self.key, self.ask_environment = url, secrets.token_urlsafe(24), ask_environment
        self.questions: asyncio.Queue[Question] = asyncio.Queue()
        self.waiting: set[asyncio.Future[Answer]] = set()
        """Answers of pending questions."""
        self.reward: float | None = None
        """The last reward that the agent has reported for its response."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables with the address and the key, by the names that common clients read."""
        openai = {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": self.key}
        anthropic = {"ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": self.key}
        environment = {ENVIRONMENT_URL: f"{self.url}/environment", ENVIRONMENT_KEY: self.key}
        of_run = environment if self.ask_environment is not None else {}
        return (
            openai
            | anthropic
            | of_run
            | {REWARD_URL: f"{self.url}/reward", "NO_PROXY": HOST, "no_proxy": HOST}
        )


_SESSION = web.RequestKey("session", Session)
"""Session of an authenticated request."""


class Endpoint:
    """The HTTP server for agents. Owns the open sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._base = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Endpoint]:
        routes = [
            *(web.post("/{session}" + path, self._answering(api)) for path, api in APIS.items()),
            web.get("/{session}/v1/models", self._models),
            web.post("/{session}/reward", self._set_reward),
            web.post("/{session}/environment/{call:open|step|close}", self._play),
        ]
        app = guarded_app(routes, LIMITS, refusal, admit=self._admit)
        async with serving(app, HOST) as self._base:
            yield self

    def open(self, ask_environment: AskEnvironment | None = None) -> Session:
        """Open a session for one agent. `ask_environment`: answers its requests to the environment, if it has one."""
        name = secrets.token_urlsafe(12)
        session = self._sessions[name] = Session(f"{self._base}/{name}", ask_environment)
        return session

    def close(self, session: Session) -> None:
        """Close a session. Pending questions are cancelled."""
        self._sessions = {name: s for name, s in self._sessions.items() if s is not session}
        for answer in list(session.waiting):
            answer.cancel()

    def _admit(self, request: web.Request) -> None:
        session = self._sessions.get(request.match_info.get("session", ""))
        if session is None or not same_secret(api_key(request), session.key):
            raise Refusal(401, "not the address and key of a running agent")
        request[_SESSION] = session
        request[AUTHORIZED] = True

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rlsys"}
        return web.json_response({"object": "list", "data": [model]})

    async def _set_reward(self, request: web.Request) -> web.Response:
        try:
            body = load_json(await request.read())  # NaN is reported below
            reward = float(body["reward"])
        except (ValueError, KeyError, TypeError, OverflowError):
            raise Refusal(400, 'expected {"reward": NUMBER}') from None
        if not is_reward(reward):
            return refusal(400, f"reward = {reward}: expected a finite number", "reward")
        request[_SESSION].reward = reward
        return web.json_response({})

    async def _play(self, request: web.Request) -> web.Response:
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
        async def handle(request: web.Request) -> web.StreamResponse:
            session: Session = request[_SESSION]
            body = await read_json(request)
            if not isinstance(body, dict):
                raise Refusal(400, "the body is not a JSON object")
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
    """Send the answer when it is set, and keep-alive data before.

    Raises:
        BadRequest: the session refuses the request.
    """
    stream = question.request.stream
    response: web.StreamResponse | None = None
    while not question.answer.done():
        await asyncio.wait({question.answer}, timeout=ALIVE_SECONDS)
        if not question.answer.done():
            response = response or await start_response(request, stream)
            await response.write(keep_alive(stream))
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


async def start_response(request: web.Request, stream: bool) -> web.StreamResponse:
    """Send status 200 and the headers of a response, so that keep-alive data can follow."""
    kind = "text/event-stream" if stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind})
    await response.prepare(request)
    return response


def keep_alive(stream: bool) -> bytes:
    """Return data that a client ignores: a comment in a stream, white space before JSON."""
    return b": waiting\n\n" if stream else b"\n"


def refusal(status: int, message: str, param: str | None = None) -> web.Response:
    """Create an error response in the format of OpenAI and Anthropic."""
    return web.json_response(error_body(message, param), status=status)


def error_body(message: str, param: str | None) -> dict[str, Any]:
    """Return the body of an error in OpenAI's format, which Anthropic's clients also parse."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return {"type": "error", "error": error}
