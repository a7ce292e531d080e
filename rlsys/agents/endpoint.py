"""The HTTP server that agents ask: for each sample an address and a key of its own, on loopback.

    http://127.0.0.1:PORT/SESSION/v1/chat/completions, /v1/responses, /v1/messages
    http://127.0.0.1:PORT/SESSION/reward                what the agent says that its response was worth
    http://127.0.0.1:PORT/SESSION/environment/open, /step, /close    the agent's episode of the run's environment

A request may have to wait for a train step, a push or a new engine. So that no client gives up meanwhile, one that
waits gets white space before its JSON, or comments in its stream (as DeepSeek's API does it). A request whose client
has gone is answered all the same: the client that asks once more gets that answer.
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
from rlsys.agents.messages import Answer, Asked, BadRequest
from rlsys.core.texts import load_json
from rlsys.core.types import is_reward
from rlsys.environments.client import KEY as ENVIRONMENT_KEY
from rlsys.environments.client import URL as ENVIRONMENT_URL
from rlsys.http_server.connections import ServerLimits
from rlsys.http_server.server import Handler, Refusal, api_key, guarded_app, read_json, same_secret, serving

HOST = "127.0.0.1"
ALIVE_SECONDS = 15.0
"""Between two signs of life to a client that waits; usual clients give up after minutes."""
LIMITS = ServerLimits(connections=4096, body_bytes=64 * 2**20)
RETRY_HEADER = "x-stainless-retry-count"
"""Of the clients of OpenAI and Anthropic: how often they have sent the request before."""


AskEnvironment = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""(open, step or close; a question) -> status and answer. Raises ConnectionError."""


@dataclass(frozen=True)
class Api:
    """One form of requests and answers."""

    read: Callable[[Mapping[str, Any]], Asked]
    whole: Callable[[Answer, Mapping[str, Any]], Mapping[str, Any]]
    events: Callable[[Answer, Mapping[str, Any]], Iterable[bytes]]


APIS: Mapping[str, Api] = {
    chat.PATH: Api(chat.read, chat.whole, chat.events),
    responses.PATH: Api(responses.read, responses.whole, responses.events),
    anthropic.PATH: Api(anthropic.read, anthropic.whole, anthropic.events),
}


@dataclass(eq=False)
class Question:
    """A request on its way to the session. `again`: its client says that it has sent it before. `gone`: whether the
    client has closed the connection."""

    asked: Asked
    again: bool
    gone: Callable[[], bool]
    answer: asyncio.Future[Answer]
    delivered: bool = False

    @property
    def lost(self) -> bool:
        """Its client went away before it had the answer."""
        return self.gone() and not self.delivered


class Session:
    """One agent's address. Whoever opened it takes the `questions` and sets each one's answer."""

    def __init__(self, url: str, ask_environment: AskEnvironment | None) -> None:
        self.url, self.key, self.ask_environment = url, secrets.token_urlsafe(24), ask_environment
        self.questions: asyncio.Queue[Question] = asyncio.Queue()
        self.waiting: set[asyncio.Future[Answer]] = set()
        """Answers that somebody waits for."""
        self.reward: float | None = None
        """What the agent has said last that its response was worth."""

    def environment(self) -> dict[str, str]:
        """With which stock clients find it."""
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
"""Of a request that shows a key: whose it is."""


class Endpoint:
    """Owns the open sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._base = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Endpoint]:
        routes = [
            *(web.post("/{session}" + path, self._answering(api)) for path, api in APIS.items()),
            web.get("/{session}/v1/models", self._models),
            web.post("/{session}/reward", self._hear),
            web.post("/{session}/environment/{call:open|step|close}", self._play),
        ]
        app = guarded_app(routes, LIMITS, refusal, admit=self._admit)
        async with serving(app, HOST) as self._base:
            yield self

    def open(self, ask_environment: AskEnvironment | None = None) -> Session:
        """An address and a key for one agent, and for what it asks of its environment."""
        name = secrets.token_urlsafe(12)
        session = self._sessions[name] = Session(f"{self._base}/{name}", ask_environment)
        return session

    def close(self, session: Session) -> None:
        """Questions that are not answered never will be."""
        self._sessions = {name: s for name, s in self._sessions.items() if s is not session}
        for answer in list(session.waiting):
            answer.cancel()

    def _admit(self, request: web.Request) -> None:
        session = self._sessions.get(request.match_info.get("session", ""))
        if session is None or not same_secret(api_key(request), session.key):
            raise Refusal(401, "not the address and key of an agent that runs")
        request[_SESSION] = session

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "rlsys"}
        return web.json_response({"object": "list", "data": [model]})

    async def _hear(self, request: web.Request) -> web.Response:
        try:
            body = load_json(await request.read())  # NaN is told as that
            reward = float(body["reward"])
        except (ValueError, KeyError, TypeError, OverflowError):
            raise Refusal(400, 'expected {"reward": NUMBER}') from None
        if not is_reward(reward):
            return refusal(400, f"reward = {reward}: expected a finite number", "reward")
        request[_SESSION].reward = reward
        return web.json_response({})

    async def _play(self, request: web.Request) -> web.Response:
        ask = request[_SESSION].ask_environment
        if ask is None:
            raise Refusal(404, "this run has no rollout.generator_params.environment")
        try:
            status, body = await ask(request.match_info["call"], await request.read())
        except ConnectionError:  # the environment has died: its client asks once more
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        return web.Response(status=status, body=body, content_type="application/json")

    def _answering(self, api: Api) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            session: Session = request[_SESSION]
            body = await read_json(request)
            if not isinstance(body, dict):
                raise Refusal(400, "the body is no JSON object")
            try:
                asked = api.read(body)
                again = request.headers.get(RETRY_HEADER, "0") not in ("", "0")
                answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
                question = Question(asked, again, lambda: request.transport is None, answer)
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
    """Until it is answered. Raises BadRequest where the session finds that it cannot be."""
    stream = question.asked.stream
    response: web.StreamResponse | None = None
    while not question.answer.done():
        await asyncio.wait({question.answer}, timeout=ALIVE_SECONDS)
        if not question.answer.done():
            response = response or await begun(request, stream)
            await response.write(sign_of_life(stream))
    if question.answer.cancelled():  # its agent is to end
        if response is not None and request.transport is not None:
            request.transport.abort()
        return response or refusal(410, "this agent's response has ended")
    if response is not None and isinstance(error := question.answer.exception(), BadRequest):
        await response.write(json.dumps(error_body(str(error), error.param)).encode())
        return response
    answer = question.answer.result()
    response = response or await begun(request, stream)
    if stream:
        for event in api.events(answer, body):
            await response.write(event)
    else:
        await response.write(json.dumps(api.whole(answer, body)).encode())
    await response.write_eof()
    question.delivered = True
    return response


async def begun(request: web.Request, stream: bool) -> web.StreamResponse:
    """Status 200 and nothing yet: signs of life may follow."""
    kind = "text/event-stream" if stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind})
    await response.prepare(request)
    return response


def sign_of_life(stream: bool) -> bytes:
    return b": waiting\n\n" if stream else b"\n"


def refusal(status: int, message: str, param: str | None = None) -> web.Response:
    """In the form that stock clients read."""
    return web.json_response(error_body(message, param), status=status)


def error_body(message: str, param: str | None) -> dict[str, Any]:
    """OpenAI's form, which Anthropic's clients read as well."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return {"type": "error", "error": error}
