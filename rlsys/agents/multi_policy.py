"""EpisodeServer: HTTP server that plays episodes of several policies, each of which is trained by its own run.

    run of policy A --POST /A {"task", "seed", "env"}-->  server  <--POST /B ...-- run of policy B
                    <---------requests, reward---------           ----------->

To a run, the server is the service of its agents (remote.py). Samples of the same data row and seed join one episode.
As the runs have the same data, run.seed and group size, these samples have the same index in their groups. When a
sample of each policy has arrived, the user's function plays the episode in its own process, and returns the reward of
each response. If a policy's sample does not arrive, the other samples get an error, and their runs censor them.

The server stores nothing on disk. After a crash of the server, the runs send all samples again, and answer repeated
requests from their ledgers.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from rlsys.agents.endpoint import (
    HOST,
    LIMITS,
    RETRY_HEADER,
    error_body,
    keep_alive_until,
    refusal,
)
from rlsys.agents.host import EVALUATION_STEP, REWARD_KEY, REWARD_URL, SAMPLE
from rlsys.agents.hosting import AgentHost
from rlsys.agents.policy_endpoint import MAX_ANSWER_BYTES, Arrival, PolicyAnswer, PolicyEndpoint, PolicyGone
from rlsys.core.types import is_reward
from rlsys.http_server.clients import read_bounded
from rlsys.http_server.server import (
    Refusal,
    api_key,
    check_same_user,
    guarded_app,
    read_json,
    same_secret,
    serving,
)

log = logging.getLogger("rlsys.meeting")

EpisodeKey = tuple[str, int, str]
"""Digest of the row, seed, and key of the evaluation (empty in training). Samples with equal keys join an episode."""
MAX_EPISODES = 2**14
"""Largest number of waiting, running and recently ended episodes."""
KEPT_EVALUATIONS = 3
"""Number of newest evaluations whose episodes are kept. A resumed run evaluates again, but the other runs do not."""


class InvalidArrival(Exception):
    """Raised for an invalid request of a run to play a sample."""


@dataclass(eq=False)
class Episode:
    """An episode of several policies. Owns its endpoints.

    Attributes:
        row: row of the data.
        endpoints: endpoint of each policy.
        name: part of the URL to which the function reports the rewards.
        key: key for this URL.
        playing: task that plays the episode; None until all samples have arrived.
        rewards: reward of each policy's response; None until the function reports them.
        error: error of the function; empty: none.
        is_done: whether the function has ended.
    """

    identity: EpisodeKey
    row: Mapping[str, Any]
    endpoints: dict[str, PolicyEndpoint]
    name: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    playing: asyncio.Task[None] | None = None
    rewards: dict[str, float] | None = None
    error: str = ""
    is_done: bool = False

    @property
    def evaluation(self) -> str:
        """Key of the evaluation; empty in training."""
        return self.identity[2]

    @property
    def arrivals(self) -> list[Arrival]:
        """Arrivals of the present samples."""
        return [endpoint.arrival for endpoint in self.endpoints.values() if endpoint.arrival is not None]


class EpisodeServer:
    """Server of episodes.

    Owns the episodes that wait for a policy, are played, or ended at most `wait` seconds ago. Ended episodes are kept
    because a run that died may not have saved its last reward, and sends the sample again. Episodes of evaluations
    are kept longer (KEPT_EVALUATIONS).
    """

    def __init__(self, policies: Sequence[str], wait: float, session: aiohttp.ClientSession) -> None:
        self._policies, self._wait, self._session = tuple(policies), wait, session
        self._episodes: dict[EpisodeKey, Episode] = {}
        self._endpoints: dict[str, PolicyEndpoint] = {}
        self._names: dict[str, Episode] = {}
        self._host: asyncio.Future[AgentHost] = asyncio.get_running_loop().create_future()
        self._base = ""
        self._evaluated: set[int] = set()
        self.counts = dict.fromkeys(
            ("played", "failed", "played_again", "without_partner", "came_again", "evaluated"), 0
        )

    def put_host(self, host: AgentHost) -> None:
        """Set the process from which episodes are forked, or replace a process that has died."""
        if self._host.done():
            self._host = asyncio.get_running_loop().create_future()
        self._host.set_result(host)

    async def wait_for_host(self) -> None:
        """Wait until `put_host` has set a host."""
        await asyncio.shield(self._host)

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[str]:
        """Serve while the context is active, and yield the server's URL.

        Raises:
            UserError: the port is in use.
        """
        routes = [
            web.get("/", self._show),
            web.post("/{policy}", self._arrive),
            web.post("/seat/{seat}/{path:.*}", self._forward_request),
            web.post("/episode/{episode}/rewards", self._receive_rewards),
        ]
        app = guarded_app(routes, LIMITS, refusal, {InvalidArrival: 400})
        async with serving(app, HOST, port, cancel_handlers=True) as self._base:
            try:
                yield self._base
            finally:
                self.close()

    def close(self) -> None:
        """End all episodes, and close the connections of their samples, which the runs then send again."""
        for episode in list(self._episodes.values()):
            for arrival in episode.arrivals:
                arrival.send_again()
            self._forget(episode)

    async def _show(self, request: web.Request) -> web.Response:
        live = [e for e in self._episodes.values() if not e.is_done]
        waiting = [e for e in live if e.playing is None]
        missing = {p: sum(e.endpoints[p].arrival is None for e in waiting) for p in self._policies}
        state = {"playing": len(live) - len(waiting), "waiting_for": missing}
        return web.json_response({**state, **self.counts})

    # Samples

    async def _check_arrival(self, request: web.Request) -> None:
        """Check that a run of this user sends a sample, and that the server can play another episode.

        Raises:
            Refusal: the request is not allowed, or there are too many episodes.
        """
        policy = request.match_info["policy"]
        if policy not in self._policies:
            raise Refusal(404, f"policy {policy}: expected one of {', '.join(self._policies)}")
        if request.content_type != "application/json":  # a web page cannot send this type to another origin
            raise Refusal(415, f"Content-Type: {request.content_type}: expected application/json")
        await check_same_user(request)
        if len(self._episodes) >= MAX_EPISODES:
            raise Refusal(
                503, f"the server has {len(self._episodes)} episodes; expected fewer than {MAX_EPISODES}"
            )

    async def _arrive(self, request: web.Request) -> web.StreamResponse:
        """Add a sample to its episode, and respond when the sample's reward is reported, or the sample must leave."""
        await self._check_arrival(request)
        policy = request.match_info["policy"]
        arrival = _read_arrival(policy, await read_json(request, strict=False))
        episode = self._episode(arrival)
        endpoint = episode.endpoints[policy]
        if (previous := endpoint.arrival) is not None:
            previous.answer(409, "the run has sent this sample again")
        endpoint.replace(arrival)  # before any wait, because an episode without samples is removed
        self.counts["came_again"] += endpoint.has_exchanges
        join_task = asyncio.create_task(self._join(episode, endpoint, arrival))
        try:
            outcome = await arrival.outcome
        finally:
            join_task.cancel()
            endpoint.leave(arrival)
            self._on_leave(episode)
        if outcome is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        return web.Response(status=outcome[0], text=outcome[1])

    def _episode(self, arrival: Arrival) -> Episode:
        """Return the episode of a sample; create it for its first sample."""
        row = json.dumps(arrival.row, sort_keys=True).encode()
        identity = hashlib.blake2b(row, digest_size=16).hexdigest(), arrival.seed, arrival.evaluation
        if identity not in self._episodes:
            endpoints = {p: PolicyEndpoint(p, self._session, self._wait) for p in self._policies}
            episode = self._episodes[identity] = Episode(identity, arrival.row, endpoints)
            self._names[episode.name] = episode
            self._endpoints |= {endpoint.name: endpoint for endpoint in endpoints.values()}
        return self._episodes[identity]

    async def _join(self, episode: Episode, endpoint: PolicyEndpoint, arrival: Arrival) -> None:
        """Add a sample to its episode, and start the episode when all samples are present."""
        if not await endpoint.take(arrival):
            arrival.answer(409, f"the episode continued without this sample: {endpoint.closed}")
        elif episode.is_done:
            await self._report_reward(episode, endpoint)
        elif episode.playing is None:
            if len(episode.arrivals) == len(episode.endpoints):
                episode.playing = asyncio.create_task(self._play(episode), name="episode")
                return
            await asyncio.sleep(self._wait)
            if episode.playing is None:
                missing = [p for p, s in episode.endpoints.items() if s.arrival is None]
                self.counts["without_partner"] += 1
                arrival.answer(
                    504,
                    f"no sample of {' and '.join(missing)} for this row and seed {arrival.seed} arrived within "
                    f"{self._wait:g} s; expected runs with the same data, run.seed and rollout.group_size",
                )

    def _on_leave(self, episode: Episode) -> None:
        """Remove the episode if its last sample has left and none can return."""
        if episode.arrivals:
            return
        if episode.playing is None:
            self._forget(episode)
        elif not episode.is_done:
            asyncio.get_running_loop().call_later(self._wait, self._remove_abandoned, episode)

    def _remove_abandoned(self, episode: Episode) -> None:
        """Remove an episode if no sample has returned to it."""
        if not episode.arrivals:
            self._forget(episode)

    def _forget(self, episode: Episode) -> None:
        """Remove an episode and its endpoints, and stop it if it is played."""
        if self._episodes.get(episode.identity) is episode:
            del self._episodes[episode.identity]
        self._names.pop(episode.name, None)
        for endpoint in episode.endpoints.values():
            self._endpoints.pop(endpoint.name, None)
            endpoint.end()
        if episode.playing is not None and not episode.is_done:
            episode.playing.cancel()

    # Episodes

    async def _play(self, episode: Episode) -> None:
        """Run the user's function, and report its result to the samples.

        If the function is killed, the connections of the samples are closed, so that the runs send them again.
        """
        host = await asyncio.shield(self._host)
        policies = {
            p: {"base_url": f"{self._base}/seat/{s.name}/v1", "api_key": s.key}
            for p, s in episode.endpoints.items()
        }
        env = {
            REWARD_URL: f"{self._base}/episode/{episode.name}/rewards", REWARD_KEY: episode.key,
            "NO_PROXY": HOST, "no_proxy": HOST,
        }  # fmt: skip
        agent, exit_future = host.start({"row": episode.row, "policies": policies}, episode.identity[1], env)
        try:
            end = await exit_future
        except asyncio.CancelledError:
            host.kill(agent)
            raise
        episode.is_done = True
        if end.kill_reason:
            log.warning("an episode was killed %s; it is played again", end.kill_reason)
            self.counts["played_again"] += 1
            for arrival in episode.arrivals:
                arrival.send_again()
            self._forget(episode)
            return
        if end.error is not None:
            episode.error = f"the episode: {end.error}"
            log.warning("%s", episode.error)
        await self._report_result(episode)
        if episode.evaluation.isdecimal():
            self._forget_old(int(episode.evaluation))
        elif episode.evaluation:
            self._forget(episode)
        else:
            asyncio.get_running_loop().call_later(self._wait, self._forget, episode)

    async def _report_result(self, episode: Episode) -> None:
        """Count an ended episode, cancel its pending requests, and report its result to the present samples."""
        self.counts["failed" if episode.error else "evaluated" if episode.evaluation else "played"] += 1
        for endpoint in episode.endpoints.values():
            endpoint.end()
        await asyncio.gather(
            *(self._report_reward(episode, endpoint) for endpoint in episode.endpoints.values())
        )

    def _forget_old(self, step: int) -> None:
        """Add the evaluation after train step `step`, and remove all but the KEPT_EVALUATIONS newest ones."""
        self._evaluated.add(step)
        if len(self._evaluated) > KEPT_EVALUATIONS:
            oldest = min(self._evaluated)
            self._evaluated.remove(oldest)
            for episode in [e for e in self._episodes.values() if e.evaluation == str(oldest) and e.is_done]:
                self._forget(episode)

    async def _receive_rewards(self, request: web.Request) -> web.Response:
        episode = self._names.get(request.match_info["episode"])
        if episode is None or not same_secret(api_key(request), episode.key):
            raise Refusal(401, "the address or the key is wrong: expected those of a running episode")
        episode.rewards = _read_rewards(await read_json(request, strict=False), self._policies)
        return web.json_response({})

    async def _report_reward(self, episode: Episode, endpoint: PolicyEndpoint) -> None:
        """Report the reward or the error to the sample of an endpoint, if it is present."""
        arrival = endpoint.arrival
        if arrival is None:
            return
        if episode.error or episode.rewards is None:
            arrival.answer(500, episode.error)
            return
        headers = {"Authorization": f"Bearer {arrival.key}"}
        body = {"reward": episode.rewards[endpoint.policy]}
        try:
            async with self._session.post(
                arrival.reward_url, json=body, headers=headers, allow_redirects=False
            ) as answer:
                message = await read_bounded(answer, MAX_ANSWER_BYTES)
                arrival.answer(answer.status, message.decode(errors="replace"))
        except (aiohttp.ClientError, OSError):
            endpoint.leave(arrival)

    # Questions

    async def _forward_request(self, request: web.Request) -> web.StreamResponse:
        endpoint = self._endpoints.get(request.match_info["seat"])
        if endpoint is None or not same_secret(api_key(request), endpoint.key):
            raise Refusal(401, "the address or the key is wrong: expected those of a policy in an episode")
        body = await request.read()
        headers = {
            name: request.headers[name] for name in ("Content-Type", RETRY_HEADER) if name in request.headers
        }
        path = request.match_info["path"].removeprefix("v1")
        task = asyncio.ensure_future(endpoint.request(path, body, headers))
        response = await keep_alive_until(task, request, _is_stream(body))
        try:
            answer = task.result()
        except PolicyGone as e:
            answer = PolicyAnswer(410, "application/json", json.dumps(error_body(str(e), None)).encode())
        if response is None:
            return web.Response(status=answer.status, body=answer.body, content_type=answer.kind)
        if answer.status == 200:
            await response.write(answer.body)
        elif request.transport is not None:  # the client repeats the request, and then gets the status
            request.transport.abort()
        return response


def _read_arrival(policy: str, body: Any) -> Arrival:
    """Parse the request of a run to play a sample of `policy`.

    Raises:
        InvalidArrival: the request is invalid.
    """
    invalid = InvalidArrival(
        f'body = {body!r:.160}: expected {{"task": OBJECT, "seed": INTEGER, "env": {{"OPENAI_BASE_URL": ...}}}}'
    )
    try:
        row, seed, env = body["task"], body["seed"], body["env"]
        base_url, key, reward_url = env["OPENAI_BASE_URL"], env[REWARD_KEY], env[REWARD_URL]
    except (KeyError, TypeError):
        raise invalid from None
    if not isinstance(row, dict) or type(seed) is not int or not isinstance(key, str):
        raise invalid
    for name, url in (("OPENAI_BASE_URL", base_url), (REWARD_URL, reward_url)):
        if not (isinstance(url, str) and url.startswith("http://") and _is_loopback(url)):
            raise InvalidArrival(f"env.{name} = {url!r:.160}: expected an http:// address on loopback")
    outcome: asyncio.Future[tuple[int, str] | None] = asyncio.get_running_loop().create_future()
    return Arrival(policy, row, seed, base_url, key, reward_url, _evaluation(env), outcome)


def _evaluation(env: Mapping[str, Any]) -> str:
    """Return the key of a sample's evaluation.

    Returns:
        Empty for a training sample; the number of train steps for an evaluation in a run; otherwise "alone".
    """
    return "" if SAMPLE in env else str(env.get(EVALUATION_STEP, "alone"))


def _read_rewards(body: Any, policies: Sequence[str]) -> dict[str, float]:
    """Parse the result of an episode.

    Raises:
        Refusal: the result is not one finite number for each policy.
    """
    values: Any = body.get("rewards") if isinstance(body, dict) else None
    try:
        rewards = {p: float(values[p]) for p in policies}
    except (ValueError, KeyError, TypeError, OverflowError):
        rewards = {}
    if not rewards or set(values) != set(rewards) or not all(map(is_reward, rewards.values())):
        expected = ", ".join(f'"{p}": NUMBER' for p in policies)
        raise Refusal(
            400, f"result of the episode = {values!r:.160}: expected {{{expected}}} with finite numbers"
        )
    return rewards


def _is_loopback(url: str) -> bool:
    try:
        return ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback
    except ValueError:
        return False


def _is_stream(body: bytes) -> bool:
    """Return whether a request asks for a stream."""
    try:
        return bool(json.loads(body).get("stream"))
    except (ValueError, AttributeError, RecursionError):
        return False
