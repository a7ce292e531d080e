"""Faults of the control plane that are no deaths: poison, strangers, nonsense, full disks, missing descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from rlsys.config import Config
from rlsys.core.descriptors import raise_descriptors
from rlsys.core.errors import RunError, UserError
from rlsys.core.types import Prompt, Sample
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import EngineError, make_session
from rlsys.evaluation.evaluation import answered_items
from rlsys.gateway.fleet import Fleet
from rlsys.generators.parser_client import ToolFailed
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.rewards import Rewards
from rlsys.router.failure_policy import PoisonRequest
from rlsys.trainer.checkpoints import manifest
from rlsys.worker.scoring import Scorer
from tests.helpers.responses import sample_of
from tests.helpers.rollout_rig import make_config, rig
from tests.helpers.router_rig import routing, sample
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.supervisor_stage import SERVE_FOREVER, Stage

ROOT = Path(__file__).resolve().parents[3]
POISON = 666


# -- poison (review 8) ---------------------------------------------------------------------------------------


class Fragile(ScriptedEngine):
    """Dies of any request with the poisonous seed."""

    killed = 0

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        if body["sampling_params"]["sampling_seed"] == POISON:
            await asyncio.sleep(0.05)
            self.killed += 1
            self.die()
            raise aiohttp.ClientPayloadError("illegal memory access")
        async for chunk in super().stream(body):
            yield chunk


@pytest.mark.virtual_clock
async def test_a_sample_that_kills_engines_is_given_up() -> None:
    """Before: 124 deaths in a quarter of an hour, and it met every restart again."""
    engines = [Fragile(f"http://e{i}:1") for i in range(4)]

    async with routing(*engines) as stage:
        await asyncio.sleep(2)
        await stage.push()
        bad, good = sample(0, seed=POISON), [sample(i, seed=i) for i in range(1, 9)]
        tasks = [stage.start(s) for s in (bad, *good)]
        for second in range(900):
            await asyncio.sleep(1)
            for engine in engines:
                if engine.dead and second % 30 == 0:
                    engine.restart()
            if stage.router.stale_engines:
                await stage.push(only_stale=True)
            if all(task.done() for task in tasks):
                break
        with pytest.raises(PoisonRequest, match="4 engines died while they processed the request"):
            tasks[0].result()
        assert sum(e.killed for e in engines) == 4
        assert all(s.status.terminal for s in good), "its neighbours went on"
        assert stage.router.stats()["poisonous"] == 1


class Choking(ScriptedEngine):
    """Answers 500 to any request with the poisonous seed."""

    choked = 0

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        if body["sampling_params"]["sampling_seed"] == POISON:
            self.choked += 1
            yield b'data: {"error": {"message": "shape mismatch in the detokenizer", "code": 500}}\n\n'
            return
        async for chunk in super().stream(body):
            yield chunk


@pytest.mark.virtual_clock
async def test_a_sample_that_gets_only_server_errors_is_given_up() -> None:
    """Before: it was sent for ever, and its engines rested after each answer."""
    engines = [Choking(f"http://e{i}:1") for i in range(2)]
    async with routing(*engines) as stage:
        await asyncio.sleep(2)
        await stage.push()
        bad, good = sample(0, seed=POISON), [sample(i, seed=i) for i in range(1, 5)]
        tasks = [stage.start(s) for s in (bad, *good)]
        await asyncio.wait(tasks)
        with pytest.raises(
            PoisonRequest,
            match=r"8 consecutive responses were server errors, the last one: .*shape mismatch in the",
        ):
            tasks[0].result()
        assert sum(e.choked for e in engines) == 8
        assert all(s.status.terminal for s in good), "its neighbours went on"
        assert stage.router.stats()["poisonous"] == 1
        assert stage.router.stats()["engine_deaths"] == 0


async def test_a_sample_given_up_before_a_restart_is_not_sent_again() -> None:
    async with routing(Choking("http://e0:1")) as stage:
        await stage.push()
        with pytest.raises(PoisonRequest, match=r"^8 consecutive responses were server errors$"):
            await stage.start(replace(sample(0, seed=POISON), faults=8))
        assert stage.engine.choked == 0  # type: ignore[attr-defined]


async def test_an_evaluation_skips_prompts_that_kill_engines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before: it ended the launch, and met the next one at the same place."""

    async def answer(of: Sample, prompt: Prompt) -> None:
        if prompt.index == 1:
            raise PoisonRequest("4 engines died while they processed the request")
        if prompt.index == 3:
            raise ToolFailed("its agent raised KeyError")

    items = [(sample(i), Prompt(i, "", [1], {})) for i in range(4)]
    assert [p.index for _, p in await answered_items(items, answer)] == [0, 2]
    assert "held-out prompt 1 is excluded: 4 engines died" in caplog.text
    assert "held-out prompt 3 is excluded: its agent raised KeyError" in caplog.text
    with pytest.raises(
        RunError, match="no prompt got a response; reason for the first prompt: 4 engines died"
    ):
        await answered_items(items[1:2], answer)


class Mute(ScriptedEngine):
    """Has no log-probs for anybody."""

    async def answer(self, path: str, body: Any) -> Any:
        if path.startswith("/generate") and body["input_ids"] == [POISON % 100] * 3:
            return 500, "out of memory"
        return await super().answer(path, body)


@pytest.mark.virtual_clock
async def test_a_prompt_whose_log_probs_always_fail_is_given_up() -> None:
    async with routing(Mute("http://e0:1")) as stage:
        await asyncio.sleep(2)
        await stage.push()
        with pytest.raises(
            PoisonRequest,
            match=r"8 consecutive responses were server errors, the last one: .*out of memory",
        ):
            await stage.router.prompt_logprobs([POISON % 100] * 3)


async def test_fault_counts_of_a_sample_survive_a_rollout_restart(tmp_path: Path) -> None:
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 8)
    group = buffer.issue(Prompt(0, "", [1], {}), [1])
    group.samples[0].deaths, group.samples[0].faults = 3, 5
    buffer.save(group.samples)
    buffer.close()
    back = RolloutBuffer(tmp_path / FILE_NAME, "run", 8)
    assert (back.groups[0].samples[0].deaths, back.groups[0].samples[0].faults) == (3, 5)
    back.close()


# -- engines that are none (15, 20) and a machine that lacks something (13) ----------------------------------


async def answers(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def raw_server(reply: bytes) -> tuple[asyncio.Server, str]:
    async def reply_to(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply_to, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 2\r\n\r\n\xff\xfe",
        b"HTTP/1.1 302 Found\r\nLocation: /model_info\r\nContent-Length: 0\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 5022\r\n\r\n{"weight_version":"' + b"9" * 5001 + b'"}',
    ],
    ids=["no HTTP", "no UTF-8", "a redirect to itself", "a version of 5,001 digits"],
)
async def test_one_nonsense_engine_is_one_bad_engine(reply: bytes) -> None:
    """Before: each of these ended the whole router."""
    server, url = await raw_server(reply)
    async with server, make_session() as session:
        fleet = Fleet([url], session, strategy="prefix_affinity", interruption="retract", queue_seconds=1)
        await fleet.pool.probe()
        await fleet.pool.probe()
        assert not fleet.pool.serving() or fleet.pool.engines[0].version <= 0


async def test_no_redirect_is_followed() -> None:
    """Before: whatever stood behind a redirect was read and shown by GET /engines."""
    paths: list[str] = []

    async def secret(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(text="inner page")

    async def lead_away(_: web.Request) -> web.Response:
        raise web.HTTPFound("/secret")

    app = web.Application()
    app.add_routes([web.get("/secret", secret), web.get("/model_info", lead_away)])
    runner, url = await answers(app)
    async with make_session() as session:
        with pytest.raises(EngineError, match="302") as error:
            await EngineClient(url, session).weight_label()
    await runner.cleanup()
    assert paths == []
    assert "inner page" not in str(error.value)


async def test_a_lack_of_descriptors_is_no_death_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: 10 false deaths at a limit of 64 descriptors, every flight cut."""
    async with make_session() as session:

        def none_left(*_: Any, **__: Any) -> Any:
            key: Any = None
            raise aiohttp.ClientConnectorError(key, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

        monkeypatch.setattr(session, "request", none_left)
        with pytest.raises(RunError, match="this machine reports: Too many open files"):
            await EngineClient("http://e:1", session).weight_label()


async def test_the_descriptor_limit_is_raised_and_checked_against_the_requests() -> None:
    code = (
        "import resource; from rlsys.core.descriptors import raise_descriptors\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1000)); raise_descriptors(500, 'x')\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "raise_descriptors(2000, 'rollout.over_provision')"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.stdout.strip() == "1000"
    assert (
        "rollout.over_provision: up to 2000 requests in flight need 2256 file descriptors" in process.stderr
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        with pytest.raises(UserError, match=f"the hard limit is {hard}"):
            raise_descriptors(hard, "x")


@pytest.mark.parametrize(
    ("hard", "advice"), [(256, "raise it"), (300, "raise it, or reduce these fields to at most 44")]
)
def test_the_error_for_too_few_descriptors_advises_a_remedy(hard: int, advice: str) -> None:
    """What is reserved beside requests is not to be saved by asking for less."""
    code = (
        "import resource; from rlsys.core.descriptors import raise_descriptors\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard})); raise_descriptors(48, 'x')"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    needed = "x: up to 48 requests in flight need 304 file descriptors"
    assert process.stderr.strip().endswith(f"{needed}; the hard limit is {hard} (ulimit -Hn): {advice}")


# -- the front (14) ------------------------------------------------------------------------------------------


async def test_a_client_that_gives_up_on_an_update_does_not_shut_the_gate() -> None:
    """Before: the gate stayed shut, and every request got 503 for ever."""
    async with make_session() as session:
        fleet = Fleet([], session, strategy="prefix_affinity", interruption="retract", queue_seconds=1)
        fleet.dispatcher.resume()
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def slow(*_: Any) -> None:
            reached.set()
            await go_on.wait()

        fleet.dispatcher.pause = slow  # type: ignore[method-assign, assignment]
        handler = asyncio.create_task(fleet.update("folder", None))
        await reached.wait()
        assert not fleet.dispatcher.open
        handler.cancel()
        await asyncio.gather(handler, return_exceptions=True)
        go_on.set()
        while fleet._updating.locked():
            await asyncio.sleep(0)
        assert fleet.dispatcher.open


# -- rewards (22) --------------------------------------------------------------------------------------------

REWARD = """
import os, subprocess
def reward(config):
    def score(prompt, text):
        if text == "env": return (os.environ.get("JUDGE_TOKEN") is None) / 2 + ("ALLOWED" in os.environ) / 2
        if text == "memory": return float(len(bytearray(3 * 2**30)) > 0)
        subprocess.run(["setsid", "sleep", "4242"])
    return score
"""


def rewards_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **data: Any) -> Rewards:
    (tmp_path / "their_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    monkeypatch.setenv("ALLOWED", "1")
    data = {"reward": "their_reward:reward", "reward_env": ["ALLOWED"], **data}
    return Rewards(
        Config.model_validate({"model": {"path": tmp_path}, "run": {"dir": tmp_path}, "data": data})
    )


def sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "4242"]]


async def test_reward_code_sees_no_secrets_and_has_a_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = rewards_of(tmp_path, monkeypatch, reward_memory_gb=2)
    prompt = Prompt(0, "x", [1], {})
    for text, expected in (("env", 1.0), ("memory", None)):
        scorer = Scorer(rewards.open, lambda _, t=text: t, 60.0)  # type: ignore[misc]
        verdict = await scorer.score(prompt, sample_of([1]))
        assert verdict.reward == expected, verdict
        assert expected is not None or "MemoryError" in str(verdict.reason)
    await rewards.close()


async def test_a_cancelled_reward_leaves_no_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: what a timed-out reward function had started lived on."""
    rewards = rewards_of(tmp_path, monkeypatch)
    async with rewards.open() as reward:
        task = asyncio.ensure_future(reward(Prompt(0, "x", [1], {}), "run"))
        while not sleepers():
            await asyncio.sleep(0.02)
        task.cancel()
    while sleepers():
        await asyncio.sleep(0.02)
    await rewards.close()


# -- supervisor (11, 18), keeper (1), checkpoint (3), ledger (17), stall (12) --------------------------------


async def test_a_restart_that_fails_uses_the_budget_and_does_not_end_the_run(tmp_path: Path) -> None:
    """Before: a budget of 3, stopped after 1, because the second start died before it was ready."""
    stage = Stage(tmp_path)
    launch = stage.config.launch.model_copy(update={"max_restarts": 3})
    stage.config = stage.config.model_copy(update={"launch": launch})
    engine = """
n = count(name + ' began')
if n == 2: sys.exit(1)
serve()
if n == 1:
    wait_for(name + ' probed'); os._exit(1)
while True: signal.pause()
"""
    trainer = (
        "wait_for(*[chr(10).join(['engine-0 began'])])\nwhile count('engine-0 began') < 3: time.sleep(0.01)"
    )
    stage.run(
        stage.role("engine", engine, serves=True),
        stage.role("rollout", SERVE_FOREVER, serves=True),
        stage.role("trainer", trainer),
    )
    assert sum("engine-0 died" in phase for phase in stage.display.phases) == 2


def test_a_full_log_disk_ends_no_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path)
    plain = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if path.name == "supervisor.log" and mode == "a":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    stage.run(stage.role("trainer", "pass"))
    assert "starting trainer" in stage.display.phases


def test_a_rank_ends_with_the_keeper_that_is_killed(tmp_path: Path) -> None:
    """A rank in a session of its own, as torchrun starts it. Before: it lived on, under init."""
    rank = (
        "import os, pathlib, signal\nfrom rlsys.obs.role import run_role\n"
        f"def body():\n    pathlib.Path({str(tmp_path / 'rank')!r}).write_text(str(os.getpid()))\n"
        "    while True: signal.pause()\nrun_role(body)\n"
    )
    torchrun = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True).wait()\n"
    )
    argv = [sys.executable, "-m", "launch.keeper", "--", sys.executable, "-c", torchrun]
    keeper = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE)
    path = tmp_path / "rank"
    while not (path.exists() and path.read_text()):
        assert keeper.poll() is None
    process = psutil.Process(int(path.read_text()))
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()
    process.wait(30)
    assert keeper.stdin is not None
    keeper.stdin.close()


def test_a_manifest_records_the_duration_of_the_save(tmp_path: Path) -> None:
    """A session that has not saved yet knows from the one before whether a save fits; before: it never tried."""
    manifest.write(tmp_path, 3, None, {}, 12.5)
    assert manifest.seconds(tmp_path) == 12.5
    assert manifest.find_damage(tmp_path) == []


def test_a_foreign_lock_is_waited_for(tmp_path: Path) -> None:
    """Before: an outsider's lock of 5 s closed the ledger for good."""
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", 8)
    (waits,) = buffer.read(lambda db: db.execute("PRAGMA busy_timeout").fetchone())
    assert waits == 60_000
    shell = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None, check_same_thread=False)
    shell.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, lambda: shell.execute("ROLLBACK"))
    release.start()
    buffer.issue(Prompt(0, "", [1], {}), [1])
    buffer.flush()
    release.join()
    shell.close()
    buffer.close()


async def test_an_engine_that_is_away_may_take_its_start_timeout(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout={"stall_timeout": 0.05}, engine={"start_timeout": 0.2})

    async with rig(config) as r:
        await r.manager.restore(0)
        loop = asyncio.get_running_loop()
        stats = {**r.router.stats(), "engines_serving": 0}
        r.router.stats = lambda: stats  # type: ignore[method-assign]
        start = loop.time()
        with pytest.raises(RunError, match=r"stall_timeout = 0\.05 s and engine\.start_timeout = 0\.2 s"):
            await r.manager._progress_watch.watch(asyncio.Event().wait(), "an engine")
        assert loop.time() - start >= 0.25


async def test_a_failure_at_the_end_of_a_wait_is_raised(tmp_path: Path) -> None:
    async with rig(make_config(tmp_path)) as r:
        await r.manager.restore(0)

        async def fails_while_it_ends() -> str:
            r.manager._runner._fail(RunError("the disk is full"))
            return "done"

        with pytest.raises(RunError, match="the disk is full"):
            await r.manager._progress_watch.watch(fails_while_it_ends(), "nothing")
