"""Fields of the config that one process could keep alone, with several rollout workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlsys.core.membership import write_member
from rlsys.core.owner import claim
from rlsys.core.types import Sample, SampleGroup, TrainBatch
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.rollout.members import Members
from tests.helpers.engine_server import check_sample
from tests.helpers.loaded import load_tokens
from tests.helpers.scripted_engine import logprob, token
from tests.helpers.several_turns import MARKS
from tests.helpers.workers_rig import Run, check_step, run

pytestmark = pytest.mark.gate  # each starts processes

DISAGGREGATED = {"launch": {"placement": "disaggregated"}}


async def trained(r: Run, steps: int) -> list[TrainBatch]:
    await r.manager.restore(0)
    await r.push()
    seen: set[int] = set()
    batches = []
    for step in range(1, steps + 1):
        batch = await r.take(step)
        check_step(r.config.run.dir, batch, seen)
        assert batch.metrics["lost"] == 0
        batches.append(batch)
        await r.push()
    return batches


@pytest.mark.parametrize("sections", [{}, DISAGGREGATED], ids=["colocated", "disaggregated"])
async def test_no_sample_is_resumed_more_often_than_max_resumes(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    async with run(tmp_path, 2, 4, sections=sections, max_resumes=1) as r:
        batches = await trained(r, 8)
    resumes = {s.resumes for t in batches for g in t.groups for s in g.samples}
    assert resumes == {0, 1}


async def test_another_number_of_workers_repeats_a_run(tmp_path: Path) -> None:
    """On engines that send their tokens in other pieces, in another order."""
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
    sections = {"model": {"path": tmp_path}}
    async with run(tmp_path / "first", 2, 4, sections=sections) as r:
        first = what(tmp_path / "first", await trained(r, 5))
        assert r.manager.status()["resumes_total"] > 0  # type: ignore[operator]
    async with run(tmp_path / "again", 3, 3, sections=sections, repeat=tmp_path / "first") as r:
        for engine in r.engines:
            engine.chunk = 3
        assert what(tmp_path / "again", await trained(r, 5)) == first


def what(folder: Path, steps: list[TrainBatch]) -> list[Any]:
    return [
        [
            (s.sample_id, list(s.response_ids), list(s.mu), s.versions(), s.status, s.reward)
            for g in load_tokens(folder, t.groups)
            for s in g.samples
        ]
        for t in steps
    ]


@pytest.mark.parametrize("more", [{}, {"max_resumes": 1}], ids=["", "max_resumes"])
async def test_a_rolling_push_visits_the_engines_of_all_workers(tmp_path: Path, more: dict[str, Any]) -> None:
    """Each engine once a version, one at a time; two at the start, when none serves, all at once."""
    sections = DISAGGREGATED | {"weights": {"rolling": 1}}
    async with run(tmp_path, 2, 4, sections=sections, **more) as r:
        await trained(r, 6)
        urls = sorted(e.url for e in r.engines)
    first, *rounds = r.rounds
    assert sorted(first) == urls
    assert [len(members) for members in rounds] == [1] * len(rounds)
    versions = [
        sorted(url for members in rounds[i : i + 4] for url in members) for i in range(0, len(rounds), 4)
    ]
    assert versions == [urls] * 6


async def test_engines_join_workers_and_leave_them(tmp_path: Path) -> None:
    async with run(tmp_path, 2, 2, joiners=2, sections=DISAGGREGATED) as r, make_session() as session:
        owner = claim(tmp_path)
        urls = [e.url for e in r.engines]

        def client(url: str, tp: int, pool: str | None = None) -> EngineClient:
            return EngineClient(url, session, tp=tp, pool=pool)

        launch_clients = [client(url, 1) for url in urls[:2]]
        members = Members(r.config, owner, r.workers.engines, client, launch_clients)
        await r.manager.restore(0)
        await r.push()
        seen: set[int] = set()

        async def until(step: int, serving: set[str]) -> int:
            """Steps are trained until these engines serve. The next step."""
            while {
                u for u, figures in r.workers.engines.engine_metrics().items() if figures["serving"]
            } != serving:
                members.update()
                check_step(tmp_path, await r.take(step), seen)
                await r.push()
                step += 1
            return step

        for url in urls[2:]:
            write_member(owner, url, 1, active=True)
        step = await until(1, set(urls))
        homes = [set(w.status.states) for w in r.processes]
        assert [len(home) for home in homes] == [2, 2], "each worker has got one"

        pids_before = r.pids()
        r.processes[1].kill()
        while pids_before == r.pids():
            await asyncio.sleep(0.01)
        step = await until(step, set(urls))
        assert homes == [set(w.status.states) for w in r.processes], "and keeps it"

        for url in (urls[0], urls[3]):
            write_member(owner, url, 1, active=False)
        step = await until(step, {urls[1], urls[2]})
        write_member(owner, urls[0], 1, active=True)
        await until(step, {urls[0], urls[1], urls[2]})
        assert urls[0] in r.processes[0].status.states, "an engine of the launch comes back where it was"


async def test_samples_of_several_sequences_outlive_a_worker(tmp_path: Path) -> None:
    """With what each turn was worth, as agents' and environments' have it."""
    name = "tests.helpers.several_turns:several"
    async with run(tmp_path, 2, 4, generator=name, flush_tokens=16) as r:
        await r.manager.restore(0)
        await r.push()
        for step in range(1, 7):
            batch = await r.take(step)
            for sample in (s for g in load_tokens(tmp_path, batch.groups) for s in g.samples):
                assert [q.parent for q in sample.sequences] == [None, 0, 1]
                assert [q.aside for q in sample.sequences] == [False, True, False]
                assert [q.last_turn for q in sample.sequences] == [1, 2, 3]
                for sequence in sample.sequences:
                    check_sample(sequence)
                assert sample.turn_rewards == MARKS
                judged = sum(q.tokens for q in sample.sequences if not q.aside)
                assert sample.reward == float(judged % 2)
            assert batch.metrics["lost"] == 0
            if step in (2, 4):
                r.processes[step % 2].kill()
            await r.push()
        assert r.manager.status()["resumes_total"] > 0  # type: ignore[operator]


@pytest.mark.parametrize("planners", [[], ["tests.helpers.tree_cases:PrefixPlanner"]], ids=["", "repairs"])
async def test_trees_and_repairs_outlive_a_worker(planners: list[str], tmp_path: Path) -> None:
    """All samples of a group are with one worker, which forks, cuts and prunes them: the ledger has what it has."""
    name, forked = "tests.helpers.tree_cases:fixed_trees", 0
    sections = {"algo": {"planners": planners}}
    async with run(tmp_path, 2, 4, sections=sections, generator=name, group_size=4, flush_tokens=16) as r:
        await r.manager.restore(0)
        await r.push()
        for step in range(1, 9):
            batch = await r.take(step)
            for group in load_tokens(tmp_path, batch.groups):
                assert len(group.samples) == (6 if planners else 4)
                for sample in group.samples:
                    check_branch(group, sample)
                    forked += sample.fork is not None
            assert batch.metrics["lost"] == 0
            if step in (3, 5):
                r.processes[step % 2].kill()
            await r.push()
        ledger = r.buffer.ledger()
        assert forked > 20 and ledger.inherited_tokens > 20 and ledger.discarded_tokens > 20


def check_branch(group: SampleGroup, sample: Sample) -> None:
    """Its own tokens are its engine's, and those before its fork are its stem's."""
    first, versions = len(sample.prompt_ids), sample.versions()
    assert len(sample.response_ids) == len(sample.mu) == sample.tokens and sample.status.terminal
    assert sample.reward == float(sample.tokens % 2)
    own_positions = [i for i, trained in enumerate(sample.trained()) if trained]
    if sample.fork is not None:
        stem, position = group.samples[sample.fork.source], sample.fork.at
        shared = min(position, 5)  # the root is cut off there, after the first forks
        assert list(sample.response_ids[:shared]) == list(stem.response_ids[:shared])
        assert (
            list(sample.mu[:shared]) == list(stem.mu[:shared])
            and versions[:shared] == stem.versions()[:shared]
        )
        assert sample.response_ids[position] in (97, 98, 99)
        own_positions = [i for i in own_positions if i > position]
    for i in own_positions:
        assert sample.response_ids[i] in (2, token(sample.seed, first + i, versions[i]))
        assert sample.mu[i] == logprob(sample.seed, first + i, versions[i])
