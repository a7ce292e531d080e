"""Rolling pushes: some engines take new weights while the others go on, and every token knows its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import pytest
import torch

from rlsys.config import Config
from rlsys.core.types import Sample, Status
from rlsys.core.weight_updates import Canary, EngineAddress, WeightUpdate
from rlsys.router.dispatch import Interruption
from rlsys.weights import disk_push
from rlsys.weights.receivers import Receivers
from tests.helpers.rollout_rig import make_config, settle
from tests.helpers.rollout_rig import rig as manager_rig
from tests.helpers.router_rig import CANARY_IDS, A, B, Rig, check, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine, canary_logprobs
from tests.helpers.scripted_router import URL

pytestmark = pytest.mark.virtual_clock


async def push_round(r: Rig, at_once: int = 1, *, first: bool, seconds: float = 0.0) -> list[str]:
    """One round, as the manager makes it; the URLs of its engines."""
    r.version += first
    members = r.router.next_members(at_once)
    addresses = await r.router.begin_push(r.version, only_stale=not first, members=members)
    await asyncio.sleep(seconds)
    for address in addresses:
        engine = next(e for e in r.engines if e.url == address.url)
        if not engine.dead:
            engine.load(r.version)
    canary = Canary(CANARY_IDS, canary_logprobs(CANARY_IDS, r.version))
    metrics = await r.router.end_push(r.version, [canary])
    r.pending_engines = int(metrics["push_left"])
    r.router.resume()
    return members


async def roll(r: Rig, at_once: int = 1, seconds: float = 0.0) -> list[list[str]]:
    """A whole push; the engines of each round."""
    rounds = [await push_round(r, at_once, first=True, seconds=seconds)]
    while r.pending_engines:
        rounds.append(await push_round(r, at_once, first=False, seconds=seconds))
    return rounds


def pool(n: int) -> list[ScriptedEngine]:
    return [ScriptedEngine(f"http://e{i}:1") for i in range(n)]


async def keep_busy(r: Rig, n: int, numbers: Iterator[int], done: list[Sample]) -> None:
    """So many samples in flight: another one starts whenever one ends."""

    async def one_after_another() -> None:
        while True:
            i = next(numbers)
            done.append(await r.router.generate(sample(i, seed=i), max_response_tokens=100, temperature=1.0))

    async with asyncio.TaskGroup() as group:
        for _ in range(n):
            group.create_task(one_after_another())


@pytest.mark.gate
@pytest.mark.parametrize(("n", "at_once"), [(2, 1), (10, 1), (20, 2)])
async def test_all_but_the_engines_of_the_round_serve_throughout(n: int, at_once: int) -> None:
    """Nine of ten; of two, one generates at every moment."""
    async with routing(*pool(n)) as r:
        await r.push()
        finished_samples: list[Sample] = []
        busy = asyncio.create_task(keep_busy(r, 4 * n, count(), finished_samples))
        await asyncio.sleep(0.5)
        serving, working = [], []

        async def look() -> None:
            while True:
                await asyncio.sleep(0.007)
                figures = [f for f in r.router.engine_metrics().values() if f["serving"]]
                serving.append(len(figures))
                working.append(sum(bool(f["requests"]) for f in figures))

        watch = asyncio.create_task(look())
        for _ in range(3):
            rounds = await roll(r, at_once, seconds=0.2)
            assert sorted(url for members in rounds for url in members) == sorted(e.url for e in r.engines)
            assert max(map(len, rounds)) == at_once
            await asyncio.sleep(0.5)
        watch.cancel()
        assert min(serving) == n - at_once
        assert min(working) >= max(1, n - 2 * at_once)  # who has just been updated waits for the next sample
        stats = await r.settle()
        busy.cancel()
        assert stats["lost"] == 0 and stats["weight_version"] == 4 and stats["engine_deaths"] == 0
        assert len(finished_samples) > 10 * n
        for sample in finished_samples:
            assert sample.versions() == sorted(sample.versions())
            check(sample, versions=set(sample.versions()))
        mixed = [sample for sample in finished_samples if len(set(sample.versions())) > 1]
        assert mixed and any(sample.resumes > 1 for sample in finished_samples)


async def test_version_aware_routing_keeps_samples_on_their_weights() -> None:
    """prefix_affinity fills the engine that has just been updated and is empty."""
    sample_versions: dict[str, list[set[int]]] = {}
    for strategy in ("prefix_affinity", "version_aware"):
        async with routing(*pool(4), strategy=strategy) as r:
            await r.push()
            samples = [sample(i, seed=i) for i in range(8)]
            tasks = [r.start(s) for s in samples]
            await asyncio.sleep(0.1)
            await push_round(r, first=True)
            await push_round(
                r, first=False
            )  # what it interrupts could go to the first or to the two old ones
            fresh = sample(20)
            tasks.append(r.start(fresh))
            await asyncio.gather(*tasks)
            assert set(fresh.versions()) == {2}
            sample_versions[strategy] = [set(s.versions()) for s in samples]
            while r.pending_engines:
                await push_round(r, first=False)
    assert {1} in sample_versions["version_aware"] and {1, 2} not in sample_versions["version_aware"]
    assert {1, 2} in sample_versions["prefix_affinity"]


@pytest.mark.parametrize("how", ["retract", "in_place"])
async def test_requests_that_an_engine_keeps_wait_for_its_own_round_only(how: Interruption) -> None:
    async with routing(*pool(2), interruption=how) as r:
        samples, tasks = await r.start_samples(2)
        first = next(s for s in samples if s.engine == r.engines[0].url)
        second = next(s for s in samples if s is not first)
        tokens_before = second.tokens
        for engine in r.engines:
            engine.calls.clear()
        await push_round(r, first=True, seconds=0.2)
        assert r.engines[0].calls.count("continue_generation") == r.engines[0].calls.count("pause_generation")
        assert "pause_generation" not in r.engines[1].calls
        assert second.tokens > tokens_before and set(second.versions()) == {1}
        await push_round(r, first=False)
        await asyncio.gather(*tasks)
        for s in samples:
            assert s.resumes == 0
            check(s, versions=set(s.versions()))


async def test_an_engine_death_in_a_round_does_not_block_the_other_engines() -> None:
    async with routing(*pool(3)) as r:
        _, tasks = await r.start_samples(6)
        members = r.router.next_members(1)
        r.version = 2
        await r.router.begin_push(2, members=members)
        r.engines[0].die()
        await r.router.end_push(2, [], excluded={members[0]: "nobody answers"})
        assert [f["serving"] for f in r.router.engine_metrics().values()] == [False, True, True]
        r.pending_engines = 2
        while r.pending_engines:
            await push_round(r, first=False)
        await asyncio.gather(*tasks)
        r.engines[0].restart()
        await asyncio.sleep(10)
        assert r.router.stale_engines == [r.engines[0].url]
        await r.push(only_stale=True)
        assert all(f["serving"] for f in r.router.engine_metrics().values())


async def test_older_weights_serve_no_longer_than_the_push_lasts() -> None:
    """One is silent while its round would come; when it answers again, the push is over."""
    async with routing(ScriptedEngine(A), ScriptedEngine(B)) as r:
        await r.push()
        await push_round(r, first=True)
        r.engines[1].die()
        await asyncio.sleep(2)
        await push_round(r, first=False)
        assert r.pending_engines == 0
        r.engines[1].dead = False  # the same process, with the weights of version 1
        await asyncio.sleep(10)
        assert r.router.stale_engines == [B]
        s = sample()
        await r.start(s)
        assert s.engine == A and set(s.versions()) == {2}


async def test_an_abandoned_push_is_followed_by_a_full_one() -> None:
    """The trainer died: another one pushes to all."""
    async with routing(*pool(3)) as r:
        await r.push()
        await push_round(r, first=True)
        await r.router.begin_push(2, only_stale=True, members=r.router.next_members(1))
        await r.router.interrupt()
        await r.push()  # to the one whose update is open still, too
        assert {f["weight_version"] for f in r.router.engine_metrics().values()} <= {3, None}
        await asyncio.sleep(10)
        while r.router.stale_engines:
            await r.push(only_stale=True)
        assert {f["weight_version"] for f in r.router.engine_metrics().values()} == {3}


ROLLING = {
    "launch": {"placement": "disaggregated"}, "engine": {"count": 3, "tp": 1}, "weights": {"rolling": 1},
}  # fmt: skip


async def test_admission_counts_with_the_oldest_weights_that_serve(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout={"over_provision": 4, "max_staleness": 1}, **ROLLING)
    async with manager_rig(config) as r:
        await r.start()
        await r.take(1)
        await settle()
        assert r.buffer.next_group_id == 4  # (1 + 0 + 1) * 2
        r.router.pending_counts = [2, 1, 0]
        for issued in (4, 4, 6):
            ticket = await r.manager.begin_push()
            assert ticket.weight_version == 2
            await settle()
            assert r.buffer.next_group_id == 4
            await r.manager.end_push(ticket, [])
            await settle()
            assert r.buffer.next_group_id == issued
        assert r.router.rounds == [[], ["e1"], ["e2"], ["e3"]]
        assert (await r.take(2)).weight_version == 2


async def test_the_first_push_after_a_restart_is_not_rolling(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout={"over_provision": 4, "max_staleness": 1}, **ROLLING)
    async with manager_rig(config) as r:
        await r.start()
        await r.take(1)
        r.router.pending_counts = [2]
        await r.manager.end_push(await r.manager.begin_push(), [])
        await r.start(0)
        assert r.router.rounds == [[], ["e1"], []]
        assert (await r.take(1)).weight_version == 1  # as before, by the journal


async def test_no_sample_is_interrupted_more_often_than_allowed(tmp_path: Path) -> None:
    rollout = {"over_provision": 4, "max_staleness": 1, "max_resumes": 0}
    config = make_config(tmp_path, rollout=rollout, **ROLLING)
    async with manager_rig(config, lambda s: 3 + s.group_id) as r:
        await r.start()
        await r.take(1)
        running = [s for g in r.buffer.active() for s in g.samples]
        assert [(s.status, s.engine) for s in running] == [(Status.IN_FLIGHT, URL)] * 4
        r.router.members, r.router.pending_counts = ["http://engine:2", URL], [1, 0]
        await r.manager.end_push(await r.manager.begin_push(), [])
        ticket = await r.until(r.manager.begin_push())
        assert [s.status for s in running] == [Status.FINISHED] * 4 and r.router.rounds[2:] == [[URL]]
        await r.manager.end_push(ticket, [])


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [("launch", "placement", "colocated"), ("engine", "count", 1), ("rollout", "max_staleness", 0)],
)
def test_rolling_is_refused_if_engines_cannot_continue_on_older_weights(
    tmp_path: Path, section: str, field: str, value: object
) -> None:
    sections = {"rollout": {"max_staleness": 1}, **{k: dict(v) for k, v in ROLLING.items()}}
    sections[section][field] = value
    with pytest.raises(ValueError, match=r"weights.rolling = 1 lets engines generate with older weights"):
        make_config(tmp_path, **sections)
    with pytest.raises(ValueError, match=r"weights.rolling = 1 with rollout.repeat"):
        make_config(tmp_path, **{**ROLLING, "rollout": {"max_staleness": 1, "repeat": str(tmp_path)}})


@pytest.mark.parametrize("method", ["disk", "disk_delta"])
def test_the_rounds_of_a_push_read_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Unless an engine needs more than the folder has: with disk_delta, one that lacks the version before."""
    writes: list[tuple[str, list[str]]] = []

    def write(folder: Path, _source: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        writes.append((folder.name, [name for name, _ in tensors]))

    monkeypatch.setattr(disk_push, "write_hf", write)
    monkeypatch.setattr(
        Receivers, "post_all", lambda receivers, _: {e.url: done() for e in receivers.present}
    )
    config = Config.model_validate(
        {"model": {"path": "x"}, "run": {"dir": tmp_path}, "weights": {"method": method}}
    )
    folders = disk_push.DiskFolders(config)

    def push(version: int, **holds: int) -> None:
        tensors = [("frozen", torch.zeros(2)), ("trained", torch.full((2,), float(version)))]
        engines = [EngineAddress(f"http://{name}:1", 1, has) for name, has in holds.items()]
        with Receivers(engines, 60) as receivers:
            folders.push(tensors, WeightUpdate(version, engines, []), receivers)
        assert receivers.excluded == {}

    push(1, a=-1, b=-1, c=-1)
    push(2, a=1)
    push(2, b=1)
    push(2, c=-1)  # it has been restarted
    tensor_names, changed = ["frozen", "trained"], ["trained"]
    first, second = (
        ("version-000001", tensor_names),
        ("version-000002", changed if method == "disk_delta" else tensor_names),
    )
    again = [("version-000002", tensor_names)] if method == "disk_delta" else []
    assert writes == [first, second, *again]


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
