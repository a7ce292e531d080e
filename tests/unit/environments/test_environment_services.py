"""Environments in processes of their own: asked again, killed, paused, poisoned; the client hears of none of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import runpy
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsys.agents.endpoint import Endpoint, Session
from rlsys.core.errors import UserError
from rlsys.core.sockets import UnixConnection, make_folder, remove_folder
from rlsys.environments.client import DEATHS, EnvironmentFailed, RemoteEpisode
from rlsys.environments.contract import Action, RequestRefused
from rlsys.environments.leases import MAX_ABANDONED, Leases
from rlsys.generators.environment_services import Service, ServiceParams, Services
from tests.helpers.proxy import Proxy

ROOT = Path(__file__).resolve().parents[3]
OWN = ROOT / "tests/data/environments/own.py"
Sums = runpy.run_path(str(OWN))["Sums"]
TASK = {"terms": [3, 4, 5]}


@asynccontextmanager
async def running(**params: Any) -> AsyncIterator[Services]:
    service_params = {"connector": f"{OWN}:Sums", **params}
    services = Services(ServiceParams(**service_params), "rollout.generator_params")
    try:
        yield services
    finally:
        await services.close()


def processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    service_processes = []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "rlsys.environments.serve" in child.cmdline():
                service_processes.append(child)
    return service_processes


async def played(
    services: Services, task: dict[str, Any], said: tuple[str, ...] = ("3", "7", "12")
) -> list[float]:
    async with services.episode(task, 0) as episode:
        return [(await episode.step(text))["reward"] for text in said]


def leases(most: int = 8, idle: float = 60.0) -> Leases:
    return Leases(Sums(), most, idle)


def test_a_repeated_request_returns_the_same_response_without_another_step() -> None:
    lease_table = leases()
    assert lease_table.open("a", TASK, 0) == lease_table.open("a", TASK, 0)
    first = lease_table.step("a", 0, Action("3"))
    assert lease_table.step("a", 0, Action("3")) is first
    with pytest.raises(RequestRefused, match="turn 0 of lease a: expected turn 1") as refused:
        lease_table.step("a", 0, Action("4"))
    assert refused.value.status == 409
    assert lease_table.step("a", 1, Action("7")).reward == 1.0
    lease_table.close("a")
    lease_table.close("a")
    with pytest.raises(RequestRefused, match="lease a does not exist"):
        lease_table.step("a", 2, Action("12"))


def test_leases_are_bounded_and_idle_leases_are_closed() -> None:
    lease_table = leases(most=1)
    lease_table.open("a", TASK, 0)
    with pytest.raises(RequestRefused, match="all 1 leases are in use") as refused:
        lease_table.open("b", TASK, 0)
    assert refused.value.status == 503
    idle = leases(most=1, idle=0.0)
    idle.open("a", TASK, 0)
    idle.open("b", TASK, 0)
    assert len(idle) == 1


def test_an_environment_that_raises_on_open_holds_no_lease() -> None:
    lease_table = leases(most=1)
    with pytest.raises(RequestRefused, match="open raised ValueError: no such task"):
        lease_table.open("a", {"raises": True}, 0)
    assert len(lease_table) == 0


@pytest.mark.gate
async def test_service_processes_run_many_episodes_concurrently() -> None:
    async with running(processes=2, leases=4) as services:
        rewards = await asyncio.gather(*(played(services, TASK, ("3", "8", "12")) for _ in range(20)))
        assert rewards == [[1.0, 0.0, 1.0]] * 20
        assert len(processes()) == 2
    assert not processes()


@pytest.mark.gate
async def test_a_killed_service_is_restarted_and_the_episode_replayed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with running(params={"log": str(log)}) as services:
        async with services.episode({**TASK, "kill_once": str(tmp_path / "killed")}, 0) as episode:
            assert [(await episode.step(t))["reward"] for t in ("3", "7", "12")] == [1.0, 1.0, 1.0]
            assert (episode.restarts, services.restarts) == (1, 1)
        steps = [line.split() for line in log.read_text().splitlines()]
        assert [(turn, text) for _, turn, text in steps] == [
            ("0", "3"), ("1", "7"), ("0", "3"), ("1", "7"), ("2", "12"),
        ]  # fmt: skip
        (alive,) = processes()
        alive.send_signal(signal.SIGKILL)
        assert await played(services, TASK) == [1.0, 1.0, 1.0]


@pytest.mark.gate
async def test_a_link_that_resets_connections_for_a_while_is_no_death_of_the_service() -> None:
    """Before: an episode failed as one that had killed its environment, after three resets of a question."""
    connections: list[int] = []
    async with running() as services, services.service() as service:

        def target() -> Path:
            connections.append(len(connections))
            if 2 <= len(connections) <= 20:
                raise ConnectionResetError
            return Path(service.url.removeprefix("unix:"))

        folder = make_folder()
        link = Proxy(target, folder / "link")
        try:
            url = f"unix:{folder / 'link'}"
            episode = await asyncio.to_thread(RemoteEpisode, url, service.key, TASK, 0)
            steps = [await asyncio.to_thread(episode.step, text) for text in ("3", "7", "12")]
            await asyncio.to_thread(episode.close)
        finally:
            link.close()
            remove_folder(folder)
    assert [step["reward"] for step in steps] == [1.0, 1.0, 1.0]
    assert len(connections) > 20 and episode.restarts == 0


@pytest.mark.gate
async def test_an_episode_that_repeatedly_kills_the_service_does_not_affect_others() -> None:
    async with running() as services:
        poison = played(services, {**TASK, "poison": True})
        healthy_episodes = [played(services, TASK) for _ in range(4)]
        first, *rest = await asyncio.gather(poison, *healthy_episodes, return_exceptions=True)
        assert isinstance(first, EnvironmentFailed) and f"died {DEATHS} times at turn 1" in str(first)
        assert rest == [[1.0, 1.0, 1.0]] * 4


@pytest.mark.gate
async def test_an_environment_that_diverges_after_a_restart_fails(tmp_path: Path) -> None:
    async with running() as services:
        task = {**TASK, "kill_once": str(tmp_path / "killed"), "fickle": True}
        with pytest.raises(EnvironmentFailed, match="replay after a restart differs"):
            await played(services, task)


@pytest.mark.gate
async def test_a_step_that_hangs_fails_in_time_and_a_paused_service_is_waited_for() -> None:
    async with running(step_seconds=0.5) as services:
        assert await played(services, TASK) == [1.0, 1.0, 1.0]
        with pytest.raises(EnvironmentFailed, match=r"no response within 0.5 s"):
            await played(services, {**TASK, "hangs": True})
    async with running() as services, services.episode(TASK, 0) as episode:
        (process,) = processes()
        process.send_signal(signal.SIGSTOP)
        step = asyncio.ensure_future(episode.step("3"))
        assert not (await asyncio.wait([step], timeout=0.2))[0]
        process.send_signal(signal.SIGCONT)
        assert (await step)["reward"] == 1.0


@pytest.mark.gate
async def test_a_hanging_service_is_restarted_before_its_clients_time_out() -> None:
    async with running(step_seconds=6) as services, services.episode(TASK, 0) as episode:
        assert (await episode.step("3"))["reward"] == 1.0
        (process,) = processes()
        process.send_signal(signal.SIGSTOP)
        assert [(await episode.step(t))["reward"] for t in ("7", "12")] == [1.0, 1.0]
        assert (episode.restarts, services.restarts, process.is_running()) == (1, 1, False)


@pytest.mark.gate
async def test_a_cancelled_episode_releases_its_lease() -> None:
    async with running(leases=1, params={"slow": 0.3}) as services:
        for _ in range(3):
            work = asyncio.ensure_future(played(services, TASK))
            await asyncio.sleep(0)
            while not processes():
                assert not work.done(), work.exception()
                await asyncio.sleep(0.01)
            work.cancel()
            await asyncio.wait([work])
        assert await played(services, TASK) == [1.0, 1.0, 1.0]


@pytest.mark.gate
async def test_wrong_keys_are_refused_and_invalid_requests_are_reported() -> None:
    async with running() as services, services.service() as service:
        stranger = await asyncio.to_thread(
            ask, service, "/open", {"lease": "a", "task": TASK, "seed": 0}, "no"
        )
        assert stranger == (401, "wrong key")
        for path, body, expected in (
            ("/open", {}, (400, "KeyError: 'lease'")),
            (
                "/open",
                {"lease": "a", "task": {"raises": 1}, "seed": 0},
                (422, "open raised ValueError: no such task"),
            ),
            ("/else", {"lease": "a"}, (404, "/else: expected /health, /open, /step or /close")),
        ):
            assert await asyncio.to_thread(ask, service, path, body) == expected
        with pytest.raises(EnvironmentFailed, match="open raised ValueError: no such task"):
            await played(services, {"raises": True})
    with pytest.raises(
        UserError, match=r"rollout.generator_params: the environment gymnasium: ModuleNotFoundError"
    ):
        async with running(connector="gymnasium", params={"id": "FrozenLake-v1"}) as services:
            await played(services, TASK)
    with pytest.raises(UserError, match=r"python = '/no/python': expected a program"):
        async with running(python="/no/python") as services:
            await played(services, TASK)
    for params, words in (
        ({"connector": "gymnasum"}, "expected one of gymnasium"),
        ({"connector": "gymnasium", "url": "http://x"}, "expected exactly one of them"),
    ):
        with pytest.raises(ValueError, match=words):
            ServiceParams(**params)  # type: ignore[arg-type]


@pytest.mark.gate
async def test_a_body_is_read_after_the_key_and_only_if_it_is_of_a_sensible_length() -> None:
    """Else a stranger's request, of which nothing comes, holds a thread, and a long one the memory."""
    async with running() as services, services.service() as service:
        for key, length, status in (
            ("no", str(10**12), b"401"),
            (service.key, str(10**12), b"413"),
            (service.key, "-1", b"413"),
            (service.key, "many", b"400"),
        ):
            reader, writer = await asyncio.open_unix_connection(service.url.removeprefix("unix:"))
            head = f"POST /open HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
            writer.write(head.encode())  # and no body
            answer = await reader.read()  # to its end: the connection is closed
            assert answer.split()[1] == status
            assert b"Connection: close" in answer, (
                "else a client pools the connection and loses its next request"
            )
            writer.close()
            await writer.wait_closed()
        assert await played(services, TASK) == [1.0, 1.0, 1.0]


async def test_a_failed_process_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_room(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_room)
    with pytest.raises(UserError, match=r"the environment .*own.py:Sums: .*Resource temporarily unavailable"):
        async with running() as services:
            await played(services, TASK)


def ask(service: Service, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, str]:
    connection = UnixConnection(Path(service.url.removeprefix("unix:")), None)
    headers = {"Authorization": f"Bearer {key or service.key}"}
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    payload = json.loads(answer.read())
    connection.close()
    return answer.status, payload["error"]


@pytest.mark.gate
async def test_an_external_service_is_used_by_its_url_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running() as foreign_services,
        foreign_services.agent_environment() as environment,
        Endpoint().listening() as endpoint,
    ):
        session = endpoint.open(environment.request)
        url = f"{session.url}/environment"
        monkeypatch.setenv("RLSYS_ENVIRONMENT_KEY", session.key)
        async with running(connector=None, url=url) as services:
            assert await played(services, TASK) == [1.0, 1.0, 1.0]
        monkeypatch.setenv("RLSYS_ENVIRONMENT_KEY", "another")
        async with running(connector=None, url=url) as services:
            with pytest.raises(EnvironmentFailed, match="the address or the key is wrong"):
                await played(services, TASK)


@pytest.mark.gate
async def test_an_agent_finds_the_environment_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running() as services,
        services.agent_environment() as environment,
        Endpoint().listening() as endpoint,
    ):
        for name, value in endpoint.open(environment.request).environment().items():
            monkeypatch.setenv(name, value)

        def agent() -> tuple[str, float]:
            with RemoteEpisode.for_agent(TASK) as episode:
                return episode.messages[0]["content"], episode.step("3")["reward"]

        assert await asyncio.to_thread(agent) == ("3", 1.0)
    monkeypatch.delenv("RLSYS_ENVIRONMENT_URL")
    with pytest.raises(EnvironmentFailed, match="RLSYS_ENVIRONMENT_URL is not set"):
        RemoteEpisode.for_agent(TASK)


# -- what one agent can do to the others (A12) -----------------------------------------------------------------


@asynccontextmanager
async def agents(services: Services, number: int) -> AsyncIterator[list[Session]]:
    """The addresses of so many agents of one run."""
    async with contextlib.AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(Endpoint().listening())
        environments = [await stack.enter_async_context(services.agent_environment()) for _ in range(number)]
        yield [endpoint.open(each.request) for each in environments]


def episode_of(session: Session, task: dict[str, Any] = TASK, seconds: float = 60.0) -> RemoteEpisode:
    return RemoteEpisode(f"{session.url}/environment", session.key, task, 0, seconds)


def steps_of(session: Session) -> list[float]:
    with episode_of(session) as episode:
        return [episode.step(text)["reward"] for text in ("3", "7", "12")]


@pytest.mark.gate
async def test_security_a12_an_agent_that_opens_many_episodes_takes_no_lease_of_others() -> None:
    async with running(leases=2) as services, agents(services, 2) as (greedy, honest):
        episodes = [await asyncio.to_thread(episode_of, greedy) for _ in range(5)]
        assert await asyncio.to_thread(steps_of, honest) == [1.0, 1.0, 1.0]
        episodes[-1]._history.clear()
        assert (await asyncio.to_thread(episodes[-1].step, "3"))["reward"] == 1.0, "the newest one is open"


@pytest.mark.gate
async def test_security_a12_hanging_agent_steps_do_not_end_the_service() -> None:
    """Before: nine steps that hang, each closed, and the process ended itself."""
    async with running() as services, agents(services, 2) as (bad, honest):
        refused = 0
        for _ in range(MAX_ABANDONED + 1):
            try:
                episode = await asyncio.to_thread(episode_of, bad, {**TASK, "hangs": True}, 0.3)
                for text in ("3", "7", "12"):
                    await asyncio.to_thread(episode.step, text)
            except EnvironmentFailed as e:
                refused += "the agent cannot open an episode" in str(e)
            else:
                raise AssertionError("its step does not hang")
            await asyncio.to_thread(episode.close)
        assert refused == MAX_ABANDONED
        assert await asyncio.to_thread(steps_of, honest) == [1.0, 1.0, 1.0]
        assert services.restarts == 0


@pytest.mark.gate
async def test_security_a12_an_agent_cannot_step_the_episode_of_another_one() -> None:
    async with running() as services, agents(services, 2) as (owner_session, other_session):
        episode = await asyncio.to_thread(episode_of, owner_session)
        stranger = await asyncio.to_thread(episode_of, other_session)
        stranger._lease = episode._lease
        status, payload = await asyncio.to_thread(
            stranger._send, "/step", {"lease": episode._lease, "number": 0, "action": {"text": "3"}}, 1e9
        )
        assert (status, payload["error"]) == (404, f"lease {episode._lease} does not exist")
