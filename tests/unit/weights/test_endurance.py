"""What must not go on for ever, and what must not end a run: pushes, their folders, joins."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.core.weight_updates import EngineAddress, WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.weight_calls import Call
from rlsys.engine.wire import Limits
from rlsys.weights import disk_push, gathered_push, transports
from rlsys.weights.receivers import EngineUnreachable, Receivers
from tests.helpers.router_rig import routing
from tests.helpers.scripted_engine import Network, ScriptedEngine

# -- pushes that get nowhere (review 9) ----------------------------------------------------------------------


class SlowCanary(ScriptedEngine):
    """Its first pass after a load compiles, for longer than anybody waits."""

    seconds = 900.0

    async def answer(self, path: str, body: Any) -> Any:
        if path.startswith("/generate") and body.get("logprob_start_len") == 0:
            await asyncio.sleep(self.seconds)
        return await super().answer(path, body)


@pytest.mark.virtual_clock
async def test_a_first_pass_that_compiles_is_waited_for() -> None:
    """Before: an answer had 60 s, whatever it was to; 18 pushes in 25 minutes, and no engine ever served."""
    engine = SlowCanary("http://e0:1")
    engine.seconds = 90.0
    async with routing(engine) as stage:
        await asyncio.sleep(2)
        await stage.push()
        assert stage.router.engine_states() == {"http://e0:1": "version 1"}


@pytest.mark.virtual_clock
@pytest.mark.parametrize("work", [30.0, 400.0])
async def test_an_engines_work_has_the_time_that_its_config_gives(work: float) -> None:
    network: Any = Network(SlowCanary("http://e0:1"))
    client = EngineClient("http://e0:1", network, limits=Limits(answer=10.0, work=work))
    clock = asyncio.get_running_loop().time
    start = clock()
    with pytest.raises(TimeoutError):
        await client.token_logprobs([1, 2, 3])
    assert clock() - start == pytest.approx(work, abs=1)


def test_limits_on_answers_follow_from_size_and_config(tmp_path: Path) -> None:
    """A quarter of a GB a second for what is read; never under a minute."""
    config = Config.model_validate({"model": {"path": tmp_path}})
    assert (config.work_seconds, config.answer_seconds) == (240.0, 60.0)
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.truncate(600 * 10**9)  # has no blocks on the disk
    assert (config.work_seconds, config.answer_seconds) == (240.0 + 2400.0, 528.0)
    short = config.model_copy(update={"engine": config.engine.model_copy(update={"start_timeout": 20.0})})
    assert (short.work_seconds, short.answer_seconds) == (60.0, 60.0)
    assert gathered_push.GatheredPush(config)._seconds == config.work_seconds


@pytest.mark.virtual_clock
async def test_pushes_that_never_get_through_stop_the_run_with_a_sentence() -> None:
    """Before: for ever, with growing versions, and no engine ever served."""
    async with routing(SlowCanary("http://e0:1")) as stage:
        await asyncio.sleep(2)
        with pytest.raises(
            RunError, match=r"e0:1 quarantined: 5 pushes in a row failed, the last with: Time"
        ):
            for _ in range(100):
                await asyncio.sleep(1)
                if stage.version == 0 or stage.router.stale_engines:
                    await stage.push(only_stale=stage.version > 0)


@pytest.mark.virtual_clock
async def test_a_quarantined_engine_is_tried_again_after_its_process_restarts() -> None:
    bad, good = SlowCanary("http://e0:1"), ScriptedEngine("http://e1:1")
    async with routing(bad, good) as stage:
        await asyncio.sleep(2)
        await stage.push()
        for _ in range(500):
            await asyncio.sleep(1)
            if stage.router.stale_engines:
                await stage.push(only_stale=True)
        state = stage.router.engine_states()
        assert state["http://e0:1"].startswith("quarantined: 5 pushes in a row failed")
        assert state["http://e1:1"] == "version 1"
        bad.die()
        await asyncio.sleep(60)
        bad.restart()
        while not stage.router.stale_engines:
            await asyncio.sleep(1)


# -- a folder that is still being read (review 9) ------------------------------------------------------------------


def test_a_folder_that_an_engine_may_still_read_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose load outlasts the limit reads on. Before: the next push deleted what it was reading."""
    silent = {"http://e1:1"}

    def ask(receivers: Receivers, _calls: Sequence[Call]) -> dict[str, Future[None]]:
        late = {e.url: EngineUnreachable("timed out") if e.url in silent else None for e in receivers.present}
        return {url: answered(error) for url, error in late.items()}

    def write(folder: Path, _source: Path, _tensors: Any) -> None:
        folder.mkdir(parents=True)

    monkeypatch.setattr(Receivers, "post_all", ask)
    monkeypatch.setattr(disk_push, "write_hf", write)
    config = Config.model_validate(
        {"model": {"path": "x"}, "run": {"dir": tmp_path}, "weights": {"method": "disk"}}
    )
    folders = disk_push.DiskFolders(config)

    def push(version: int, *urls: str) -> list[str]:
        engines = [EngineAddress(url, 1, -1) for url in urls]
        with Receivers(engines, 60) as receivers:
            folders.push([], WeightUpdate(version, engines, []), receivers)
        return sorted(p.name for p in (tmp_path / "weights").iterdir())

    assert push(1, "http://e0:1", "http://e1:1") == ["version-000001"]
    assert push(2, "http://e0:1") == ["version-000001", "version-000002"], "e1 may be at it"
    silent.clear()
    assert push(3, "http://e0:1", "http://e1:1") == ["version-000003"], "e1 has loaded a later one"


# -- an engine that did not get all tensors ----------------------------------------------------------------------


@pytest.mark.virtual_clock
async def test_an_engine_disconnected_during_a_push_gets_all_tensors_again() -> None:
    """It lives, so nobody restarts it. Before: quarantined until somebody did, and the only one ended the launch."""
    async with routing(ScriptedEngine("http://e0:1"), ScriptedEngine("http://e1:1")) as stage:
        await asyncio.sleep(2)
        await stage.push()
        await stage.push(excluded={"http://e0:1": "http://e0:1/update_weights_from_tensor: connection reset"})
        assert stage.router.engine_states() == {"http://e0:1": "dead", "http://e1:1": "version 2"}
        while not stage.router.stale_engines:
            await asyncio.sleep(0.1)
        await stage.push(only_stale=True)
        assert stage.router.engine_states() == {"http://e0:1": "version 2", "http://e1:1": "version 2"}


@pytest.mark.virtual_clock
async def test_an_engine_that_always_refuses_tensors_is_quarantined_with_its_error() -> None:
    """Before: the first refusal ended the launch."""
    refused = {"http://e0:1": "http://e0:1/update_weights_from_tensor: 400 size mismatch"}
    async with routing(ScriptedEngine("http://e0:1")) as stage:
        await asyncio.sleep(2)
        with pytest.raises(
            RunError, match=r"e0:1 quarantined: 5 pushes in a row failed, .*400 size mismatch"
        ):
            for _ in range(100):
                await asyncio.sleep(1)
                if stage.version == 0 or stage.router.stale_engines:
                    await stage.push(only_stale=stage.version > 0, excluded=refused)
    assert stage.version == 1


class Answers(BaseHTTPRequestHandler):
    """Of an engine that has a bad moment at each second request."""

    asked = itertools.count()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        bad = next(self.asked) % 2
        body = json.dumps({"success": not bad, "message": "busy"}).encode()
        self.send_response(500 if bad else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_an_http_error_leaves_the_engine_out_of_the_push() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with Receivers([EngineAddress(url, 1, -1)], 60) as receivers:
            for present_urls in ([url], []):
                receivers.wait_all(
                    receivers.post_all([Call("/update_weights_from_tensor", {})] * len(receivers.present))
                )
                assert [e.url for e in receivers.present] == present_urls
        server.shutdown()
    assert list(receivers.excluded) == [url]
    assert receivers.excluded[url].startswith(f"{url}/update_weights_from_tensor: HTTP status 500")


# -- a join that fails (review 10) ---------------------------------------------------------------------------


class Group:
    """Stands for a process group."""


def answered(error: Exception | None) -> Future[None]:
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """World sizes of the groups that rank 0 tried to join; engine e1 is gone, and with it a join fails."""
    worlds: list[int] = []

    def join(meeting: transports.GroupRendezvous, _rank: int, _seconds: float) -> Any:
        worlds.append(meeting.world)
        if meeting.world == 3:
            raise RuntimeError("a peer is missing")
        return Group()

    def ask(receivers: Receivers, _calls: Sequence[Call]) -> dict[str, Future[None]]:
        missing = any("e1" in e.url for e in receivers.present)
        refusal = RunError("400: timed out in the join") if missing else None
        return {
            e.url: answered(EngineUnreachable("connection refused") if "e1" in e.url else refusal)
            for e in receivers.present
        }

    monkeypatch.setattr(transports.GroupRendezvous, "join", join)
    monkeypatch.setattr(transports, "local_address_for", lambda _: "127.0.0.1")
    monkeypatch.setattr(Receivers, "post_all", ask)
    return worlds


def test_an_engine_that_dies_during_the_join_is_excluded(joins: list[int]) -> None:
    """Before: a RunError of the trainer, which nobody restarts."""
    group = transports.GroupTransport(60, 60)
    with Receivers([EngineAddress(f"http://e{i}:1", 1, -1) for i in range(2)], 60) as receivers:
        group.begin(receivers)
        assert [e.url for e in receivers.present] == ["http://e0:1"]
    assert joins == [3, 2]


def test_an_engine_that_refuses_a_join_is_excluded_with_its_error(
    joins: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason, which the run tells when it gives such an engine up. Before: the end of the launch."""
    refused = {f"http://e{i}:1": answered(RunError("400: no NCCL here")) for i in range(2)}
    monkeypatch.setattr(Receivers, "post_all", lambda *_: refused)
    group = transports.GroupTransport(60, 60)
    engines = [EngineAddress(url, 1, -1) for url in refused]
    with Receivers(engines, 60) as receivers:
        group.begin(receivers)
        assert receivers.present == []
        assert receivers.excluded == dict.fromkeys(refused, "400: no NCCL here")


def test_each_trainer_process_uses_a_new_group_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each trainer counted from 0, and SGLang refused a name that the dead one had left: 400, end of run."""
    group_names: set[str] = set()

    def ask(receivers: Receivers, calls: Sequence[Call]) -> dict[str, Future[None]]:
        names = {call.body["group_name"] for call in calls}
        refusal = RunError("400: this group name has already been created") if names & group_names else None
        group_names.update(names)
        return {e.url: answered(refusal) for e in receivers.present}

    monkeypatch.setattr(transports.GroupRendezvous, "join", lambda *_: Group())
    monkeypatch.setattr(transports, "local_address_for", lambda _: "127.0.0.1")
    monkeypatch.setattr(Receivers, "post_all", ask)
    for _ in range(3):  # trainers: what a class counts begins anew with each
        monkeypatch.setattr(transports.GroupTransport, "_numbers", itertools.count(), raising=False)
        with Receivers([EngineAddress("http://e0:1", 1, -1)], 60) as receivers:
            transports.GroupTransport(60, 60).begin(receivers)
    assert len(group_names) == 3
