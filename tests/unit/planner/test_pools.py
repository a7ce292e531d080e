"""Pools of engines that are not alike: what the config makes of them, where they run, what they cost."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.describe import describe_arithmetic
from rlsys.config import Config, ConfigError, dump_config, load_config
from rlsys.core.errors import UserError
from rlsys.engine.launch_args import engine_command
from rlsys.planner.layout import lay_out, push_plan
from rlsys.router.push import checksums_of_size
from rlsys.weights.checksums import EngineChecksums
from tests.helpers.router_rig import A, B, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine
from tests.unit.weights.test_weights import TINY, tiny_tensors

WIDE, SMALL = {"name": "wide", "count": 1, "tp": 2, "cost": 3.0}, {"name": "small", "count": 2}


def config(*pools: dict[str, Any], **sections: dict[str, Any]) -> Config:
    engine = {"pools": list(pools), **sections.pop("engine", {})}
    return Config.model_validate({"model": {"path": "m"}, "engine": engine, **sections})


def test_count_is_the_sum_and_sizes_follow_the_pools() -> None:
    engine = config(WIDE, SMALL).engine
    assert engine.count == 3
    assert [engine.tp_of(i) for i in range(4)] == [2, 1, 1, 1], "one that joins is of engine.tp"
    assert [getattr(engine.pool_of(i), "name", None) for i in range(4)] == ["wide", "small", "small", None]
    assert engine.tps == [1, 2]


def test_without_pools_nothing_changes() -> None:
    engine = Config.model_validate({"model": {"path": "m"}, "engine": {"count": 3, "tp": 2}}).engine
    assert (engine.pools, engine.pool_of(0), engine.tps) == ([], None, [2])
    assert [engine.tp_of(i) for i in range(3)] == [2, 2, 2]


def test_the_resolved_config_can_be_loaded_again(tmp_path: Path) -> None:
    run_config = config(WIDE, SMALL)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(run_config))
    assert load_config(path).engine == run_config.engine


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (
            "{pools: [{name: a, count: 2}, {name: b, count: 1}], count: 2}",
            "count = 2, but the pools have 2 + 1 = 3",
        ),
        ("{pools: [{name: a, count: 1}, {name: a, count: 1}]}", "two have the name a"),
        ("{pools: [{name: joined, count: 1}]}", "name = joined is reserved for engines that join"),
        ("{pools: [{name: Fast, count: 1}]}", "engine.pools"),
        ("{pools: [{name: a, count: 0}]}", "engine.pools"),
        ("{pools: [{name: a}]}", "count"),
        ("{pools: [{name: a, count: 1, cots: 2}]}", "cost"),
        ("{pools: 3}", "engine.pools"),
        ("{pools: [3]}", "engine.pools"),
    ],
)
def test_an_invalid_pool_is_a_one_line_error(tmp_path: Path, engine: str, told: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {{path: {tmp_path}}}\nengine: {engine}\n")
    with pytest.raises(ConfigError) as e:
        load_config(path)
    assert told in str(e.value) and "\n" not in str(e.value)


def test_each_engine_gets_gpus_for_its_size() -> None:
    """Two trainer ranks on GPUs 0 and 1; an engine of two GPUs, then two of one."""
    run_config = config(
        WIDE, SMALL, parallel={"dp": 2}, launch={"gpus_per_node": 6, "placement": "disaggregated"},
        weights={"method": "broadcast"},
    )  # fmt: skip
    engines = [[(s.node, s.gpus) for s in shares] for shares in lay_out(run_config).engines]
    assert engines == [[(0, (2, 3))], [(0, (4,))], [(0, (5,))]]


def test_pools_that_do_not_fit_are_named_with_their_sizes() -> None:
    run_config = config(WIDE, SMALL, launch={"gpus_per_node": 3})
    with pytest.raises(UserError, match=r"wide 1 x tp 2, small 2 x tp 1.*no GPUs are free for engine 2"):
        lay_out(run_config)


def test_an_engine_is_started_with_its_size_and_the_next_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, *_: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    run_config = config(WIDE, SMALL)
    commands = [engine_command(run_config, i, 1) for i in range(3)]
    assert [argv[argv.index("--tp") + 1] for argv, _ in commands] == ["2", "1", "1"]
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in commands] == ["4,5", "6", "7"]


def test_engines_of_each_tp_size_are_compared_with_their_own_checksums() -> None:
    def digests(*tps: int) -> list[dict[str, str]]:
        checksums = EngineChecksums(TINY, *tps)
        for _ in checksums.watch(tiny_tensors().items()):
            pass
        return checksums.digests()

    both_digests = digests(1, 2)
    assert checksums_of_size(both_digests, [1, 2], 1) == digests(1)
    assert checksums_of_size(both_digests, [1, 2], 2) == digests(2)
    assert digests(1) != digests(2)
    assert checksums_of_size(digests(2), [2], 2) == digests(2)
    assert checksums_of_size(both_digests, [1, 2], 4) == [], "nobody said what it must hold"


FAR = {"name": "far", "count": 2, "relay": True}
APART = {"placement": "disaggregated"}


def test_a_pool_with_relay_is_a_chain_and_no_other_way_leads_to_it() -> None:
    farther = {"name": "farther", "count": 1, "relay": True}
    run_config = config(SMALL, FAR, farther, weights={"method": "broadcast"}, launch=APART)
    plan = push_plan(run_config, lay_out(run_config))
    assert run_config.engine.chains == plan.chains == ((2, 3), (4,))
    assert [plan.is_relayed(i) for i in (None, 0, 1, 2, 3, 4)] == [False] * 3 + [True] * 3
    joined = run_config.engine.pool_of(None, "farther")
    assert joined is not None and joined.name == "farther" and run_config.engine.chain_of("farther") == 1
    assert run_config.engine.chain_of("small") is run_config.engine.chain_of(None) is None
    by_memory = config(SMALL, FAR, launch=APART)
    near = push_plan(by_memory, lay_out(by_memory))
    assert near.memory.keys() == {0, 1} and near.senders == {0}
    assert "instead of 2 times" in dict(describe_arithmetic(run_config))["pool far"]


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"weights": {"method": "disk"}, "launch": APART},
            "weights.method = disk; expected auto or broadcast",
        ),
        ({}, "launch.placement = colocated"),
        (
            {"model": {"path": "m", "fp8": "rollout", "dtype": "bfloat16"}, "launch": APART},
            "model.fp8 = rollout",
        ),
    ],
)
def test_where_a_chain_cannot_be_is_refused(sections: dict[str, dict[str, Any]], told: str) -> None:
    with pytest.raises(ValueError, match=f"engine.pools: relay = true with {told}"):
        Config.model_validate({"model": {"path": "m"}, "engine": {"pools": [FAR]}, **sections})


def test_an_engine_of_a_chain_is_on_one_machine() -> None:
    spread = config(
        {"name": "far", "count": 1, "tp": 16, "relay": True},
        launch={**APART, "nodes": 3, "gpus_per_node": 8, "backend": "slurm"}, parallel={"dp": 8},
    )  # fmt: skip
    with pytest.raises(UserError, match="engine-0 is on 2"):
        push_plan(spread, lay_out(spread))


def test_explain_names_each_pool() -> None:
    facts = dict(describe_arithmetic(config(WIDE, SMALL)))
    assert facts["pool wide"] == "1 engine(s) of tp 2, cost 3 a rank and second"
    assert facts["pool small"] == "2 engine(s) of tp 1, cost 1 a rank and second"


@pytest.mark.virtual_clock
async def test_tokens_and_cost_of_each_pool_are_reported() -> None:
    """Also of an engine that has left."""
    kinds = config(
        {"name": "dear", "count": 1, "cost": 3.0}, {"name": "cheap", "count": 1, "cost": 0.5}
    ).engine
    async with routing(ScriptedEngine(A), ScriptedEngine(B), engine_config=kinds) as rig:
        await rig.push()
        start = rig.router.stats()
        await asyncio.gather(*(rig.start(sample(i)) for i in range(4)))
        await rig.settle()
        rig.router.resume()
        await asyncio.sleep(100)
        stats = rig.router.stats()
        assert stats["pool_dear_tokens"] + stats["pool_cheap_tokens"] == stats["engine_tokens"]
        assert stats["pool_dear_tokens"] == stats["pool_cheap_tokens"] > 0
        assert (stats["pool_dear_serving"], stats["pool_cheap_serving"]) == (1, 1)
        seconds = stats["pool_dear_rank_seconds"] - start["pool_dear_rank_seconds"]
        assert 100 < seconds < 110
        assert stats["pool_dear_cost"] == pytest.approx(3 * stats["pool_dear_rank_seconds"])
        assert stats["pool_cheap_cost"] == pytest.approx(0.5 * stats["pool_cheap_rank_seconds"])
        assert rig.router.engine_metrics()[A]["pool"] == "dear"
        rig.join(ScriptedEngine("http://c:1"))
        rig.router.remove_engine(B)
        await asyncio.sleep(10)
        later = rig.router.stats()
        assert later["pool_cheap_serving"] == 0
        assert later["pool_cheap_tokens"] == stats["pool_cheap_tokens"]
        assert later["pool_cheap_cost"] >= stats["pool_cheap_cost"]
        assert rig.router.engine_metrics()["http://c:1"]["pool"] == "joined"
        await rig.push(only_stale=True)
        assert rig.router.stats()["pool_joined_serving"] == 1
