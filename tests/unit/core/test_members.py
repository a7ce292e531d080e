"""Engines that join a run and leave it, as its folder says."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.engine_join import check as check_joiner
from launch.engine_join import tp_size, unit_name
from rlsys.cli.main import main
from rlsys.config import Config
from rlsys.config.rollout import JOINED_POOL, EngineConfig
from rlsys.core.errors import UserError
from rlsys.core.membership import FOLDER, Member, read_members, remove_member, write_member
from rlsys.core.owner import Owner, claim
from rlsys.engine.client import EngineClient
from rlsys.rollout.members import LOST_SECONDS, Members
from rlsys.segments.route_records import RouteFile
from tests.helpers.router_rig import A, B, Rig, check, routing, sample
from tests.helpers.scripted_engine import Network, ScriptedEngine

pytestmark = pytest.mark.virtual_clock

C, D = "http://c:1", "http://d:1"
LONG = 190
"""Place of the last token of a response, which lasts for two looks."""


@asynccontextmanager
async def growing(
    folder: Path, *, own: int = 1, engine_config: EngineConfig | None = None, **launch: Any
) -> AsyncIterator[tuple[Rig, Owner]]:
    """A router with so many engines of its own, and members that look; C and D may join."""
    engines = [ScriptedEngine(url, ends_at=lambda seed: LONG) for url in (A, B, C, D)]
    network: Any = Network(*engines)
    config = Config.model_validate(
        {"model": {"path": "x"}, "run": {"dir": folder}, "launch": launch, "engine": {"count": own, "tp": 1}}
    )
    owner = claim(folder)
    async with routing(*engines[:own], engine_config=engine_config) as rig:
        rig.engines = engines
        clients = [engine.client for engine in rig.router._pool.engines]
        members = Members(
            config,
            owner,
            rig.router,
            lambda url, tp, pool: EngineClient(url, network, tp=tp, pool=pool),
            clients,
        )
        watch = asyncio.create_task(members.watch())
        await rig.push()
        yield rig, owner
        assert not watch.done()
        watch.cancel()


async def test_an_engine_joins_serves_and_drains_while_its_samples_continue(tmp_path: Path) -> None:
    async with growing(tmp_path) as (rig, owner):
        write_member(owner, C, 1, active=True)
        await asyncio.sleep(3)
        assert rig.router.stale_engines == [C]
        await rig.push(only_stale=True)
        samples = [sample(i, seed=i) for i in range(6)]
        tasks = [rig.start(s, LONG) for s in samples]
        await asyncio.sleep(0.1)
        assert {s.engine for s in samples} == {A, C}
        write_member(owner, C, 1, active=False)
        await asyncio.sleep(4)
        assert rig.router.engine_states() == {A: "version 1"} and read_members(owner) == []
        await asyncio.gather(*tasks)
        for s in samples:
            check(s, versions={1}, ends_at=LONG, budget=LONG)
        assert any(s.resumes for s in samples)
        stats = await rig.settle()
        assert (
            stats["lost"] == 0 and stats["engine_tokens"] == stats["received_tokens"] + 2
        )  # a canary for each
        assert 2 < stats["engine_rank_seconds"] - rig.router.engine_metrics()[A]["rank_seconds"] < 5  # type: ignore[operator]


async def test_an_engine_of_the_launch_leaves_and_rejoins(tmp_path: Path) -> None:
    async with growing(tmp_path, own=2) as (rig, owner):
        write_member(owner, B, 1, active=False)
        await asyncio.sleep(3)
        assert list(rig.router.engine_states()) == [A]
        assert read_members(owner) == [Member(owner.epoch, B, 1, active=False)], "also after a restart"
        write_member(owner, B, 1, active=True)
        await asyncio.sleep(3)
        assert rig.router.stale_engines == [B]
        await rig.push(only_stale=True)
        assert rig.router.engine_states() == {A: "version 1", B: "version 1"}


async def test_min_engines_and_max_engines_limit_leaving_and_joining(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with growing(tmp_path, own=2, min_engines=2, max_engines=3) as (rig, owner):
        write_member(owner, B, 1, active=False)
        write_member(owner, C, 1, active=True)
        write_member(owner, D, 1, active=True)
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(5)
        assert list(rig.router.engine_states()) == [A, B, C]
        assert [r.getMessage() for r in caplog.records] == [
            f"{B} stays: number of engines that would serve without it: 1; expected at least 2 (launch.min_engines)",
            f"{D} waits: the run has launch.max_engines = 3",
        ]
        await rig.push(only_stale=True)  # now there are three
        await asyncio.sleep(6)
        assert list(rig.router.engine_states()) == [A, C, D]


async def test_a_lost_member_is_removed_after_a_timeout(tmp_path: Path) -> None:
    async with growing(tmp_path) as (rig, owner):
        write_member(owner, C, 1, active=True)
        await asyncio.sleep(3)
        await rig.push(only_stale=True)
        tasks = [rig.start(sample(i)) for i in range(4)]
        await asyncio.sleep(0.1)
        rig.engines[2].die()
        await asyncio.gather(*tasks)
        await asyncio.sleep(LOST_SECONDS / 2)
        assert list(rig.router.engine_states()) == [A, C]
        await asyncio.sleep(LOST_SECONDS)
        assert list(rig.router.engine_states()) == [A] and read_members(owner) == []


async def test_removing_a_dead_member_admits_a_waiting_engine(tmp_path: Path) -> None:
    """What started it has seen it, and taken its name out of the run's folder."""
    async with growing(tmp_path, max_engines=2) as (rig, owner):
        write_member(owner, C, 1, active=True)
        await asyncio.sleep(3)
        await rig.push(only_stale=True)
        rig.engines[2].die()
        write_member(owner, D, 1, active=True)
        await asyncio.sleep(3)
        assert list(rig.router.engine_states()) == [A, C]
        remove_member(owner, C)
        await asyncio.sleep(5)
        assert list(rig.router.engine_states()) == [A, D]


async def test_files_of_others_are_passed_over(tmp_path: Path) -> None:
    async with growing(tmp_path) as (rig, owner):
        write_member(Owner(tmp_path, owner.epoch - 1, "old"), C, 1, active=True)
        folder = tmp_path / FOLDER
        record = {"epoch": owner.epoch, "url": D, "tp": 1, "pool": None, "wanted": True}
        wrongs: list[dict[str, object]] = [
            {"url": "file:///etc"}, {"tp": 0}, {"epoch": "x"}, {"url": "http://d"},
        ]  # fmt: skip
        for i, wrong in enumerate(wrongs):
            (folder / f"{i}.json").write_text(json.dumps({**record, **wrong}))
        (folder / "half.json").write_text("{")
        await asyncio.sleep(3)
        assert list(rig.router.engine_states()) == [A] and read_members(owner) == []
        remove_member(owner, D)  # was never there


async def test_an_engine_that_joins_a_pool_has_its_cost_and_relay(tmp_path: Path) -> None:
    far = {"name": "far", "count": 1, "cost": 0.25, "relay": True}
    config = Config.model_validate(
        {"model": {"path": "x"}, "engine": {"pools": [far]}, "launch": {"placement": "disaggregated"}}
    )
    async with growing(tmp_path, engine_config=config.engine) as (rig, owner):
        write_member(owner, C, 1, "far", active=True)
        write_member(owner, D, 1, active=True)
        await asyncio.sleep(3)
        engine_pools = {e.url: (e.pool, e.cost, e.chain) for e in rig.router._pool.engines}
        assert engine_pools == {A: ("far", 0.25, None), C: ("far", 0.25, 0), D: (JOINED_POOL, 1.0, None)}
        await rig.push()
        assert rig.router.stats()["pool_far_serving"] == 2
        write_member(owner, C, 1, "far", active=False)
        await asyncio.sleep(5)
        assert list(rig.router.engine_states()) == [A, D]


def test_the_pool_determines_the_tp_size_of_a_joining_engine() -> None:
    wide = {"name": "wide", "count": 1, "tp": 4}
    config = Config.model_validate({"model": {"path": "x"}, "engine": {"pools": [wide], "tp": 2}})
    assert (tp_size(config, None), tp_size(config, "wide")) == (2, 4)
    with pytest.raises(UserError, match=r"--pool wider: expected one of wide \(engine\.pools\)"):
        tp_size(config, "wider")


def test_routes_of_an_engine_that_joined_can_be_read() -> None:
    for host in ("10.0.0.7", "node-3.cluster", "[fe80::1]"):
        file = RouteFile(3, unit_name(host, 23411), 1, 0, 2)
        assert RouteFile.of(file.name) == file


def test_the_engines_command_reports_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: str) -> str:
        assert main(["engines", *words]) == 2
        return capsys.readouterr().err

    assert "folder not found" in error("list", str(tmp_path / "none"))
    (tmp_path / "config.yaml").write_text(f"model: {{path: x}}\nrun: {{dir: {tmp_path}}}\n")
    assert "this run is not running; start it before engines join it" in error("join", str(tmp_path))
    assert f"{C}: not an engine of {tmp_path}; its engines: none" in error("drain", str(tmp_path), C)


@pytest.mark.parametrize(
    ("sections", "host", "pool", "local", "error"),
    [
        (
            {},
            "10.0.0.7",
            None,
            False,
            r"weights.method = auto: all engines of the run open memory of the run\'s machine",
        ),
        (
            {"weights": {"method": "broadcast"}},
            "127.0.0.1",
            None,
            False,
            r"--host 127.0.0.1: the run is on another machine",
        ),
        (
            {"weights": {"method": "broadcast"}},
            "10.0.0.7",
            None,
            False,
            r"--host 10.0.0.7: engine.host = 127.0.0.1, so the run's process groups listen on loopback; start the",
        ),
        ({"weights": {"method": "broadcast"}, "engine": {"host": "10.0.0.5"}}, "10.0.0.7", None, False, None),
        ({"weights": {"method": "disk"}}, "10.0.0.7", None, False, None),
        ({}, "127.0.0.1", None, True, None),
        (
            {
                "engine": {"pools": [{"name": "far", "count": 1, "relay": True}]},
                "launch": {"placement": "disaggregated"},
            },
            "10.0.0.7",
            "far",
            False,
            None,
        ),
    ],
)
def test_an_engine_that_no_weights_would_reach_does_not_join(
    sections: dict[str, Any], host: str, pool: str | None, local: bool, error: str | None
) -> None:
    config = Config.model_validate({"model": {"path": "x"}, **sections})
    if error is None:
        check_joiner(config, host, pool, local=local)
    else:
        with pytest.raises(UserError, match=error):
            check_joiner(config, host, pool, local=local)
