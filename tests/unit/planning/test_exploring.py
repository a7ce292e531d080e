"""Engines that explore: how they size groups, who may ask them, and what a run refuses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlsys.algo.methods.explore import Explore, rank_correlation
from rlsys.algo.preflight import check
from rlsys.config import Config, ConfigError, load_config
from rlsys.core.errors import UserError
from rlsys.core.types import Sample, SampleGroup, Status
from rlsys.router.router import EVALUATION, NoExplorationEngine
from tests.helpers.router_rig import PROMPT, A, B, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine

POOLS = [{"name": "exact", "count": 1}, {"name": "scouts", "count": 1, "role": "explore"}]
ROOT = Path(__file__).resolve().parents[3]


def rewarded(group_id: int, *rewards: float) -> SampleGroup:
    samples = [
        Sample(i, group_id, i, [5], seed=1, reward=r, status=Status.FINISHED) for i, r in enumerate(rewards)
    ]
    return SampleGroup(group_id, group_id, samples)


def test_sizes_by_hand() -> None:
    planner = Explore(probes=4, first=2, largest=10)
    assert planner.size(6) == 2 and planner.limit(2) == 10 and planner.needs_probes(0) == 4
    assert [planner.size_for(p) for p in (0, 0.25, 0.5, 0.75, 1)] == [2, 8, 10, 8, 2]
    assert planner.receive_probes(0, [1, 0, 0, 0]) == 6, "8 in all"
    assert planner.receive_probes(1, [1, 1]) == 0
    assert planner.receive_probes(2, []) == 4, "rollout.group_size, as nobody could try it out"
    assert planner.needs_probes(0) == 0
    assert planner.counts == {"explored": 2, "explored_not": 1}


def test_a_restart_requests_probes_only_for_groups_without_them() -> None:
    planner, restarted_planner = Explore(), Explore()
    planner.receive_probes(3, [1, 0])
    restarted_planner.load_state_dict(planner.state_dict())
    assert restarted_planner.needs_probes(3) == 0 < restarted_planner.needs_probes(4)
    restarted_planner.on_decided(rewarded(3, 1, 0), accepted=True)
    planner.forget(3)
    assert planner.state_dict() == restarted_planner.state_dict() == {"means": {}}


def test_the_correlation_uses_the_ranks_of_accepted_groups() -> None:
    planner = Explore()
    probes = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    samples = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (9.0, 9.0)]
    for i, (probed, rewards) in enumerate(zip(probes, samples, strict=True)):
        planner.receive_probes(i, probed)
        planner.on_decided(rewarded(i, *rewards), accepted=i < 3)  # the last one is filtered
    assert planner.counts["explore_correlation"] == pytest.approx(1)
    assert rank_correlation([(1, 1), (2, 2)]) is None and rank_correlation([(1, 1), (1, 2), (1, 3)]) is None
    assert rank_correlation([(1, 9), (2, 5), (3, 1)]) == pytest.approx(-1)
    # Ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3: covariance 4.5, spreads 4.5 and 5.
    assert rank_correlation([(1, 1), (2, 2), (2, 3), (5, 4)]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


@pytest.mark.virtual_clock
async def test_exploring_engines_serve_only_probes_and_probes_fail_without_them() -> None:
    kinds = Config.model_validate(
        {"model": {"path": "x"}, "engine": {"pools": POOLS}, "launch": {"placement": "disaggregated"}}
    ).engine
    scout = ScriptedEngine(B)
    async with routing(ScriptedEngine(A), scout, engine_config=kinds) as rig:

        async def probe(seed: int) -> Sample:
            probe_sample = Sample(EVALUATION, EVALUATION, 0, list(PROMPT), seed=seed)
            return await rig.router.generate(
                probe_sample, max_response_tokens=30, temperature=1.0, explorers=True
            )

        await rig.push()
        samples = [sample(i, seed=i) for i in range(6)]
        tasks = [rig.start(s) for s in samples]
        probes = [asyncio.create_task(probe(100 + i)) for i in range(6)]
        await asyncio.sleep(0.1)
        await rig.push()  # they go on behind a push, as samples do
        await asyncio.gather(*tasks)
        assert {p.engine for p in await asyncio.gather(*probes)} == {B}
        assert {s.engine for s in samples} == {A}
        stats = await rig.settle()
        assert stats["engines_serving"] == stats["pool_exact_serving"] == stats["pool_scouts_serving"] == 1
        assert stats["evaluation_tokens"] == 6 * 30 and stats["lost"] == 0
        rig.router.resume()
        assert [figures["serving"] for figures in rig.router.engine_metrics().values()] == [True, False]
        waiting = asyncio.create_task(probe(7))
        await asyncio.sleep(0.1)
        scout.die()
        with pytest.raises(NoExplorationEngine):
            await waiting
        with pytest.raises(NoExplorationEngine):
            await probe(8)
        assert (await rig.start(sample(9))).engine == A


def test_the_recipe_is_served_and_its_writers_are_counted() -> None:
    config = load_config(ROOT / "configs/algorithms/explore.yaml")
    check(config)
    assert (config.engine.count, config.engine.writers, config.engine.explorers) == (2, 1, 1)
    quickstart_config = load_config(ROOT / "configs/quickstart.yaml")
    assert config.max_running_requests == quickstart_config.max_running_requests, (
        "one engine holds all samples"
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["launch.placement=colocated"], "role = explore needs launch.placement = disaggregated"),
        (["rollout.repeat=runs/old"], "role = explore with rollout.repeat"),
        (["rollout.generator=latr"], "role = explore with rollout.generator = latr"),
        (
            ["launch.min_engines=2"],
            "launch.min_engines = 2: expected at most engine.count = 2, of which 1 explore",
        ),
        (["eval.background=true"], "at least 2 engines with role = rollout"),
        (["engine.pools=[{name: a, count: 2, role: explore}]"], "role = explore in all of them"),
        (["algo.planners=[]"], "role = explore, but no planner uses such engines"),
        (["engine.pools=[{name: a, count: 2}]"], "engine.pools has no pool with role = explore"),
        (["rollout.group_size=32"], r"rollout.group_size = 32 is the size of a group without probes"),
        (["algo.planners=[explore, dars]"], "explore sets the size of groups; remove the others"),
    ],
)
def test_an_invalid_explore_config_is_a_one_line_error(overrides: list[str], told: str) -> None:
    with pytest.raises((ConfigError, UserError)) as e:
        check(load_config(ROOT / "configs/algorithms/explore.yaml", overrides))
    assert told in str(e.value) and "\n" not in str(e.value)
