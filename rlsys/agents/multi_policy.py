"""Where several policies meet in one episode. Each is a run of its own, whose agents are this service's seats.

    run of policy A --POST /A {"task", "seed", "env"}-->  meeting  <--POST /B ...-- run of policy B
                    <---------questions, reward---------           ----------->

Samples of one row of data and one seed meet: the same row and the same place in its group, since the runs have the
same data, run.seed and group size. When a sample of each policy is there, the user's function plays one episode, in a
process of its own, and says what each response was worth. A sample whose partner does not come is told so, and its
run censors it. Nothing is kept on disk: after a death of this process all samples come again, and their runs have
what was said.
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
    ALIVE_SECONDS,
    HOST,
    LIMITS,
    RETRY_HEADER,
    error_body,
    keep_alive,
    refusal,
    start_response,
)  # fmt: skip
from rlsys.agents.host import EVALUATION_STEP, REWARD_KEY, REWARD_URL, SAMPLE
from rlsys.agents.hosting import AgentHost
from rlsys.agents.policy_endpoint import MOST_BYTES, Arrival, Gone, Said, Seat
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

Place = tuple[str, int, str]
"""A row's digest, a seed, and which evaluation it is of, if any: what samples that meet have in common."""
MOST_EPISODES = 2**14
"""That wait, are played, or have ended a while ago."""
KEPT_EVALUATIONS = 3
"""The newest ones stay: a run that goes back to a checkpoint evaluates once more, and its partners do not."""


class NoArrival(Exception):
    """A request that is not one of a run."""


@dataclass(eq=False)
class Episode:
    """Owns its seats. `rewards` or `error`: how it has ended."""

    place: Place
    row: Mapping[str, Any]
    seats: dict[str, Seat]
    name: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    playing: asyncio.Task[None] | None = None
    rewards: dict[str, float] | None = None
    error: str = ""
    ended: bool = False

    @property
    def evaluation(self) -> str:
        return self.place[2]

    @property
    def arrivals(self) -> list[Arrival]:
        """Of the samples that are here."""
        return [seat.arrival for seat in self.seats.values() if seat.arrival is not None]


class Meeting:
    """Owns the episodes: those that wait for a policy, those that are played, and for `wait` seconds those that have
    ended, because a run that died has not written down what it was told last. Evaluations stay longer."""

    def __init__(self, policies: Sequence[str], wait: float, session: aiohttp.ClientSession) -> None:
        self._policies, self._wait, self._session = tuple(policies), wait, session
        self._episodes: dict[Place, Episode] = {}
        self._seats: dict[str, Seat] = {}
        self._names: dict[str, Episode] = {}
        self._host: asyncio.Future[AgentHost] = asyncio.get_running_loop().create_future()
        self._base = ""
        self._evaluated: set[int] = set()
        self.counts = dict.fromkeys(
            ("played", "failed", "played_again", "without_partner", "came_again", "evaluated"), 0
        )

    def put_host(self, host: AgentHost) -> None:
        """The process that episodes are forked from, the first one or another after its death."""
        if self._host.done():
            self._host = asyncio.get_running_loop().create_future()
        self._host.set_result(host)

    async def hosted(self) -> None:
        """Until there is one."""
        await asyncio.shield(self._host)

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[str]:
        """Its address. Raises UserError for a port that is taken."""
        routes = [
            web.get("/", self._show),
            web.post("/{policy}", self._arrive),
            web.post("/seat/{seat}/{path:.*}", self._ask),
            web.post("/episode/{episode}/rewards", self._hear),
        ]
        app = guarded_app(routes, LIMITS, refusal, {NoArrival: 400})
        async with serving(app, HOST, port, cancel_handlers=True) as self._base:
            try:
                yield self._base
            finally:
                self.close()

    def close(self) -> None:
        """End all episodes; their runs send the samples again, to another meeting."""
        for episode in list(self._episodes.values()):
            for arrival in episode.arrivals:
                arrival.send_again()
            self._forget(episode)

    async def _show(self, request: web.Request) -> web.Response:
        live = [e for e in self._episodes.values() if not e.ended]
        waiting = [e for e in live if e.playing is None]
        missing = {p: sum(e.seats[p].arrival is None for e in waiting) for p in self._policies}
        now = {"playing": len(live) - len(waiting), "waiting_for": missing}
        return web.json_response({**now, **self.counts})

    # Samples

    async def _arrive(self, request: web.Request) -> web.StreamResponse:
        policy = request.match_info["policy"]
        if policy not in self._policies:
            raise Refusal(404, f"policy {policy}: expected one of {', '.join(self._policies)}")
        if request.content_type != "application/json":  # no page of a browser can send that here
            raise Refusal(415, "expected application/json")
        await check_same_user(request)
        if len(self._episodes) >= MOST_EPISODES:
            raise Refusal(503, f"{len(self._episodes)} episodes are here, {MOST_EPISODES} is the most")
        arrival = _read_arrival(policy, await read_json(request, strict=False))
        episode = self._episode(arrival)
        seat = episode.seats[policy]
        if (before := seat.arrival) is not None:
            before.answer(409, "its run has sent this sample once more")
        seat.replace(arrival)  # now: the episode of a seat that is empty is forgotten
        self.counts["came_again"] += seat.used
        sitting = asyncio.create_task(self._sit(episode, seat, arrival))
        try:
            outcome = await arrival.outcome
        finally:
            sitting.cancel()
            seat.leave(arrival)
            self._left(episode)
        if outcome is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        return web.Response(status=outcome[0], text=outcome[1])

    def _episode(self, arrival: Arrival) -> Episode:
        row = json.dumps(arrival.row, sort_keys=True).encode()
        place = hashlib.blake2b(row, digest_size=16).hexdigest(), arrival.seed, arrival.evaluation
        if place not in self._episodes:
            seats = {p: Seat(p, self._session, self._wait) for p in self._policies}
            made = self._episodes[place] = Episode(place, arrival.row, seats)
            self._names[made.name] = made
            self._seats |= {seat.name: seat for seat in seats.values()}
        return self._episodes[place]

    async def _sit(self, episode: Episode, seat: Seat, arrival: Arrival) -> None:
        """From a sample's arrival to the episode's beginning, or to what it has missed of it."""
        if not await seat.take(arrival):
            arrival.answer(409, f"the episode went on without it: {seat.closed}")
        elif episode.ended:
            await self._tell(episode, seat)
        elif episode.playing is None:
            if len(episode.arrivals) == len(episode.seats):
                episode.playing = asyncio.create_task(self._play(episode), name="episode")
                return
            await asyncio.sleep(self._wait)
            if episode.playing is None:
                missing = [p for p, s in episode.seats.items() if s.arrival is None]
                self.counts["without_partner"] += 1
                arrival.answer(
                    504,
                    f"no sample of {' and '.join(missing)} for this row and seed {arrival.seed} came within "
                    f"{self._wait:g} s (do the runs have the same data, run.seed and rollout.group_size?)",
                )

    def _left(self, episode: Episode) -> None:
        """A sample is not here any more."""
        if episode.arrivals:
            return
        if episode.playing is None:
            self._forget(episode)
        elif not episode.ended:
            asyncio.get_running_loop().call_later(self._wait, self._give_up, episode)

    def _give_up(self, episode: Episode) -> None:
        """Nobody has come back."""
        if not episode.arrivals:
            self._forget(episode)

    def _forget(self, episode: Episode) -> None:
        if self._episodes.get(episode.place) is episode:
            del self._episodes[episode.place]
        self._names.pop(episode.name, None)
        for seat in episode.seats.values():
            self._seats.pop(seat.name, None)
            seat.end()
        if episode.playing is not None and not episode.ended:
            episode.playing.cancel()

    # Episodes

    async def _play(self, episode: Episode) -> None:
        host = await asyncio.shield(self._host)
        policies = {
            p: {"base_url": f"{self._base}/seat/{s.name}/v1", "api_key": s.key}
            for p, s in episode.seats.items()
        }
        env = {
            REWARD_URL: f"{self._base}/episode/{episode.name}/rewards", REWARD_KEY: episode.key,
            "NO_PROXY": HOST, "no_proxy": HOST,
        }  # fmt: skip
        agent, ended = host.start({"row": episode.row, "policies": policies}, episode.place[1], env)
        try:
            end = await ended
        except asyncio.CancelledError:
            host.kill(agent)
            raise
        episode.ended = True
        if end.kill_reason:
            log.warning("an episode was killed %s, and is played again", end.kill_reason)
            self.counts["played_again"] += 1
            for arrival in episode.arrivals:
                arrival.send_again()
            self._forget(episode)
            return
        if end.error is not None:
            episode.error = f"the episode: {end.error}"
            log.warning("%s", episode.error)
        self.counts["failed" if episode.error else "evaluated" if episode.evaluation else "played"] += 1
        for seat in episode.seats.values():
            seat.end()
        await asyncio.gather(*(self._tell(episode, seat) for seat in episode.seats.values()))
        if episode.evaluation.isdecimal():
            self._forget_old(int(episode.evaluation))
        elif episode.evaluation:
            self._forget(episode)
        else:
            asyncio.get_running_loop().call_later(self._wait, self._forget, episode)

    def _forget_old(self, step: int) -> None:
        """Evaluations before the newest ones."""
        self._evaluated.add(step)
        if len(self._evaluated) > KEPT_EVALUATIONS:
            oldest = min(self._evaluated)
            self._evaluated.remove(oldest)
            for old in [e for e in self._episodes.values() if e.evaluation == str(oldest) and e.ended]:
                self._forget(old)

    async def _hear(self, request: web.Request) -> web.Response:
        episode = self._names.get(request.match_info["episode"])
        if episode is None or not same_secret(api_key(request), episode.key):
            raise Refusal(401, "not the address and key of an episode that is played")
        try:
            given = (await read_json(request, strict=False))["rewards"]
            rewards = {p: float(given[p]) for p in self._policies}
        except (ValueError, KeyError, TypeError, OverflowError, Refusal):
            rewards = {}
            given = None
        if not rewards or set(given) != set(rewards) or not all(map(is_reward, rewards.values())):
            expected = ", ".join(f'"{p}": NUMBER' for p in self._policies)
            raise Refusal(400, f"what the episode returns: expected {{{expected}}}, finite ones")
        episode.rewards = rewards
        return web.json_response({})

    async def _tell(self, episode: Episode, seat: Seat) -> None:
        """What its response was worth, if it is here."""
        arrival = seat.arrival
        if arrival is None:
            return
        if episode.error or episode.rewards is None:
            arrival.answer(500, episode.error)
            return
        headers = {"Authorization": f"Bearer {arrival.key}"}
        worth = {"reward": episode.rewards[seat.policy]}
        try:
            async with self._session.post(
                arrival.reward_url, json=worth, headers=headers, allow_redirects=False
            ) as answer:
                told = await read_bounded(answer, MOST_BYTES)
                arrival.answer(answer.status, told.decode(errors="replace"))
        except (aiohttp.ClientError, OSError):
            seat.leave(arrival)

    # Questions

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        seat = self._seats.get(request.match_info["seat"])
        if seat is None or not same_secret(api_key(request), seat.key):
            raise Refusal(401, "not the address and key of a policy in an episode")
        body = await request.read()
        headers = {
            name: request.headers[name] for name in ("Content-Type", RETRY_HEADER) if name in request.headers
        }
        path = request.match_info["path"].removeprefix("v1")
        asked = asyncio.ensure_future(seat.ask(path, body, headers))
        stream, response = _streams(body), None
        while not asked.done():
            await asyncio.wait({asked}, timeout=ALIVE_SECONDS)
            if not asked.done():
                response = response or await start_response(request, stream)
                await response.write(keep_alive(stream))
        try:
            said = asked.result()
        except Gone as e:
            said = Said(410, "application/json", json.dumps(error_body(str(e), None)).encode())
        if response is None:
            return web.Response(status=said.status, body=said.body, content_type=said.kind)
        if said.status == 200:
            await response.write(said.body)
        elif request.transport is not None:  # its client asks once more, and gets the status
            request.transport.abort()
        return response


def _read_arrival(policy: str, body: Any) -> Arrival:
    """Raises NoArrival."""
    expected = NoArrival('expected {"task": OBJECT, "seed": NUMBER, "env": {"OPENAI_BASE_URL": ...}}')
    try:
        row, seed, env = body["task"], body["seed"], body["env"]
        base_url, key, reward_url = env["OPENAI_BASE_URL"], env[REWARD_KEY], env[REWARD_URL]
    except (KeyError, TypeError):
        raise expected from None
    if not isinstance(row, dict) or type(seed) is not int or not isinstance(key, str):
        raise expected
    for url in (base_url, reward_url):
        if not (isinstance(url, str) and url.startswith("http://") and _is_loopback(url)):
            raise NoArrival(f"{url!r}: expected an address on loopback")
    outcome: asyncio.Future[tuple[int, str] | None] = asyncio.get_running_loop().create_future()
    return Arrival(policy, row, seed, base_url, key, reward_url, _evaluation(env), outcome)


def _evaluation(env: Mapping[str, Any]) -> str:
    """Outside of a run, those that come together are one."""
    return "" if SAMPLE in env else str(env.get(EVALUATION_STEP, "alone"))


def _is_loopback(url: str) -> bool:
    try:
        return ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback
    except ValueError:
        return False


def _streams(body: bytes) -> bool:
    try:
        return bool(json.loads(body).get("stream"))
    except (ValueError, AttributeError, RecursionError):
        return False
