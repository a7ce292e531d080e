"""1,000 train steps of the real manager, router and buffer on scripted engines and a virtual clock, while everything
that can go wrong does: at the end every token is where it belongs, and every group was trained at most once.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsys.config import Config
from rlsys.core.membership import remove_member, write_member
from rlsys.core.owner import claim
from rlsys.core.types import Prompt, Sample, Status, TrainBatch
from rlsys.core.weight_updates import Canary
from rlsys.engine.client import EngineClient
from rlsys.generators.generator import single_turn
from rlsys.generators.turns import sampling_turns
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.reader import RunReader
from rlsys.ledger.store import FILE_NAME
from rlsys.planner.virtual_time import run_virtual
from rlsys.planning.exploring import Explorer
from rlsys.planning.planning import Planning
from rlsys.rollout.manager import RolloutManager
from rlsys.rollout.members import Members
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.segments.records import FOLDER, SegmentReader
from rlsys.segments.route_records import load_with_routes
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import direct_workers
from tests.helpers.loaded import load_tokens
from tests.helpers.rollout_rig import Numbers, abandon, make_config
from tests.helpers.scripted_engine import (
    EOS,
    Network,
    ScriptedEngine,
    canary_logprobs,
    checksums,
    experts,
    logprob,
    token,
)

STEPS = 1000
KILLS = 40
"""Of the rollout process; after them it is let live."""
CHECKPOINT_EVERY = 5
LONGEST_SESSION = 15
"""Train steps of one rollout process while some are killed: not only chance decides how many are."""
BUDGET = 24


class World:
    """Two engines, a saboteur, a trainer that is killed now and then, rewards that cannot be relied on."""

    def __init__(self, config: Config, seed: int, *, steps: int = STEPS, joins: bool = False) -> None:
        """`joins`: further engines come and go."""
        self.steps, self.joins, self.owner = steps, joins, claim(config.run.dir)
        self.joined: list[ScriptedEngine] = []
        self.gone: list[ScriptedEngine] = []
        peer_weights: list[int] | None = [] if joins else None
        self.peer_weights = peer_weights
        self.rng = random.Random(seed)
        self.config = config
        writes = config.run.dir / FOLDER, None  # the second one gives its routes in its answers
        self.engines = [
            ScriptedEngine(
                f"http://e{i}:1", ends_at=lambda s: 3 + s % 40, segments=writes[i], peer_weights=peer_weights
            )
            for i in range(2)
        ] + [
            ScriptedEngine(f"http://x{i}:1", ends_at=lambda s: 3 + s % 40, peer_weights=peer_weights)
            for i in range(config.engine.explorers)
        ]
        self.happened: Counter[str] = Counter()
        self.told: dict[int, list[tuple[int, list[int]]]] = {}  # step -> group ids and their tokens
        self.saved = 0  # steps of the last checkpoint
        self.buffer: RolloutBuffer | None = None
        self.manager: RolloutManager

    async def run(self) -> None:
        saboteur = asyncio.create_task(self.sabotage())
        while self.saved < self.steps:
            session = asyncio.create_task(self.session())
            patience = self.rng.expovariate(1 / 6) if self.happened["killed"] < KILLS else None
            self.long = asyncio.Event()
            long = {asyncio.create_task(self.long.wait())} if patience is not None else set()
            await asyncio.wait({session, *long}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not session.done():
                self.happened["killed"] += 1
            await self.end_everything_but(saboteur)
            if session.done() and not session.cancelled():
                session.result()
        saboteur.cancel()

    async def end_everything_but(self, saboteur: asyncio.Task[None]) -> None:
        """As kill -9 would, and what was not committed is gone."""
        other_tasks = asyncio.all_tasks() - {saboteur, asyncio.current_task()}
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)
        if self.buffer is not None:
            abandon(self.buffer)
            self.buffer = None

    async def session(self) -> None:
        """From the last checkpoint to the end, or until killed."""
        launched = [e.url for e in self.engines if e not in self.joined]
        clients = [self.client(url, 1, i) for i, url in enumerate(launched)]
        router = Router(
            clients, vocab_size=128, context_length=200, stop_ids={EOS}, bounds=Bounds(1e-6, 1e-4),
            push_timeout_s=100,
            routes=True, peers=self.joins, engine_config=self.config.engine,
        )  # fmt: skip
        scorer = Scorer(
            lambda: nullcontext(self.reward), lambda ids: "x" * len(ids), self.config.rollout.reward_timeout
        )
        planning = self.planning(router, scorer)
        self.buffer = RolloutBuffer(self.config.run.dir / FILE_NAME, "run", planning.largest)
        workers = direct_workers(self.config, router, scorer)
        self.manager = RolloutManager(self.config, self.buffer, workers, Numbers(), scorer, planning)
        self.watch = asyncio.create_task(router.watch())
        members = Members(self.config, self.owner, workers.engines, self.client, clients)
        coming = asyncio.create_task(members.watch())
        await self.manager.restore(self.saved)
        await self.push()
        first = self.saved + 1
        for step in range(first, self.steps + 1):
            if step == first + LONGEST_SESSION:
                self.long.set()
            batch = await self.take(step)
            self.check(batch)
            if self.joins:  # it trains: engines pass weights on between two pushes alone
                await asyncio.sleep(0.5)
            await self.push()
            if step % CHECKPOINT_EVERY == 0:
                await self.manager.commit(step)
                self.saved = step
        assert not coming.done()

    def planning(self, router: Router, scorer: Scorer) -> Planning:
        return Planning(self.config, Numbers(), None)

    def client(self, url: str, _tp: int, index: int | None = None) -> EngineClient:
        network: Any = Network(*self.engines, *self.gone)
        return EngineClient(url, network, index=index)

    async def take(self, step: int) -> TrainBatch:
        """Some answers get lost on their way: then the trainer asks again."""
        while True:
            if self.rng.random() < 0.05:
                lost = asyncio.create_task(self.manager.take(step))
                await asyncio.wait({lost}, timeout=self.rng.random() / 5)
                lost.cancel()
                await asyncio.gather(lost, return_exceptions=True)
                self.happened["answers lost"] += 1
            batch = await self.manager.take(step)
            if batch is not None:
                return batch
            await self.push()
            self.happened["engines brought back"] += 1

    async def push(self) -> None:
        engines_left = True
        while engines_left:
            ticket = await self.manager.begin_push()
            for address in ticket.engines:
                engine = next(e for e in [*self.engines, *self.gone] if e.url == address.url)
                if engine.update_open and not engine.dead:  # else it died since
                    engine.load(ticket.weight_version)
            canaries = [Canary(ids, canary_logprobs(ids, ticket.weight_version)) for ids in ticket.canaries]
            sums = [checksums(ticket.weight_version)] if self.joins else []
            engines_left = bool((await self.manager.end_push(ticket, canaries, sums))["push_left"])
            self.happened["rounds of a rolling push"] += engines_left

    async def sabotage(self) -> None:
        deeds: list[str] = []
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / (0.2 if self.joins else 0.35)))
            engine = self.rng.choice(self.engines)
            if engine.dead or engine.hung:
                continue
            if not deeds:  # each kind once a round, in any order
                deeds = ["die", "preempt", "abort", "hang", "restart", *["join", "send away"] * self.joins]
                self.rng.shuffle(deeds)
            deed = deeds.pop()
            self.happened[deed] += 1
            if deed == "join":
                self.join()
            elif deed == "send away":
                self.send_away()
            elif deed == "die":
                engine.die()
                await asyncio.sleep(self.rng.random() * 4)
                engine.restart()
            elif deed == "restart":  # between two probes; longer than a request takes, as each process does
                engine.die()
                await asyncio.sleep(0.1 + self.rng.random() / 5)
                engine.restart()
            elif deed == "abort":  # somebody else's
                engine._abort_request({"abort_all": True})
            elif deed == "preempt":
                engine.preempt()
            else:
                engine.hung = True
                await asyncio.sleep(self.rng.random() * 20)
                engine.wake()  # what it answers now comes late

    def join(self) -> None:
        """Up to three beside the launch's own two."""
        if len(self.joined) < 3:
            number = self.happened["join"]
            engine = ScriptedEngine(
                f"http://j{number}:1", ends_at=lambda s: 3 + s % 40, peer_weights=self.peer_weights
            )
            self.joined.append(engine)
            self.engines.append(self.joined[-1])
            write_member(self.owner, self.joined[-1].url, 1, active=True)

    def send_away(self) -> None:
        """The one that came first; one that died earlier than that has gone without a word."""
        if self.joined:
            engine = self.joined.pop(0)
            self.engines.remove(engine)
            self.gone.append(engine)
            if engine.dead:
                remove_member(self.owner, engine.url)
            else:
                write_member(self.owner, engine.url, 1, active=False)
                self.happened["left in order"] += 1

    async def reward(self, prompt: Prompt, text: str) -> float:
        fate = self.rng.random()
        await asyncio.sleep(self.rng.random() / 10)
        for name, limit in (("reward raised", 0.01), ("reward NaN", 0.02), ("reward hung", 0.03)):
            if fate < limit:
                self.happened[name] += 1
                if name == "reward raised":
                    raise OSError("judge is away")
                if name == "reward NaN":
                    return math.nan
                await asyncio.Event().wait()
        return float(len(text) % 2)

    def check(self, taken: TrainBatch) -> None:
        groups = load_tokens(self.config.run.dir, taken.groups)
        records = [(g.group_id, *(q.response_ids for s in g.samples for q in s.sequences)) for g in groups]
        assert self.told.setdefault(taken.train_step, records) == records
        assert taken.metrics["staleness_max"] <= self.config.rollout.max_staleness
        assert taken.metrics["lost"] == 0
        for sequence in (q for group in groups for s in group.samples for q in s.sequences):
            check_sample(sequence)
            self.check_routes(sequence)

    def check_routes(self, s: Sample) -> None:
        """They are the engine's at every position that has any; without them are only those that died with one."""
        with SegmentReader(self.config.run.dir) as segments:
            read = load_with_routes(segments, s)
        for route, span in zip(s.routes, read.routes, strict=True):
            self.happened["routes in hand" if route.location is None else "routes in files"] += 1
            chosen = [e for p in range(span.start, span.end) for e in experts(p)]
            assert np.frombuffer(span.experts, "<u2").tolist() == chosen
        covered = sum(span.end - span.start for span in s.routes)
        self.happened["positions"] += len(s.prompt_ids) + s.tokens - 1
        self.happened["positions with routes"] += covered


def check_sample(s: Sample) -> None:
    """It is what one unbroken response would be, with the weights that each token was made with."""
    first, versions = len(s.prompt_ids), s.versions()
    finished = 3 + s.seed % 40 < first + BUDGET
    assert len(s.response_ids) == (4 + s.seed % 40 - first if finished else BUDGET)
    assert s.status is (Status.FINISHED if finished else Status.TRUNCATED)
    expected = [token(s.seed, first + i, v) for i, v in enumerate(versions)]
    assert list(s.response_ids) == ([*expected[:-1], EOS] if finished else expected)
    assert list(s.mu) == [logprob(s.seed, first + i, v) for i, v in enumerate(versions)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: every step waits for several commits."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield path
    shutil.rmtree(path)


ROLLING = {
    "launch": {"placement": "disaggregated"}, "engine": {"count": 2, "tp": 1}, "weights": {"rolling": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "sections"),
    [
        pytest.param(0, {}, marks=pytest.mark.gate),
        pytest.param(0, ROLLING, marks=pytest.mark.gate, id="rolling"),
        *(pytest.param(n, {}, marks=pytest.mark.slow) for n in range(1, 6)),
        *(pytest.param(n, ROLLING, marks=pytest.mark.slow, id=f"rolling-{n}") for n in range(1, 6)),
    ],
)
def test_a_thousand_steps_of_chaos(folder: Path, seed: int, sections: dict[str, Any]) -> None:
    config = make_config(
        folder,
        rollout={
            "over_provision": 2, "max_staleness": 3, "max_response_tokens": BUDGET, "flush_tokens": 50,
            "stall_timeout": 600,
        },
        trainer={"checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 2},
        **sections,
    )  # fmt: skip
    world = World(config, seed)
    run_virtual(world.run())
    trained = [group[0] for groups in world.told.values() for group in groups]
    assert len(trained) == len(set(trained)) == STEPS * config.rollout.groups_per_step
    ledger = RunReader(folder).ledger()
    check_ledger(ledger)
    assert ledger.groups["trained"] == len(trained)
    assert ledger.groups["censored"] > 0
    assert ledger.lost_tokens == 0
    with sqlite3.connect(folder / FILE_NAME) as db:
        journal = {
            step: json.loads(ids) for step, ids in db.execute("SELECT train_step, group_ids FROM takes")
        }
    assert {s: sorted(ids) for s, ids in journal.items()} == {
        s: [group[0] for group in groups] for s, groups in world.told.items()
    }
    assert world.happened["killed"] >= 30
    deeds = ("die", "restart", "abort", "preempt", "hang", "answers lost")
    rewards = ("reward raised", "reward NaN", "reward hung")
    assert world.happened["engines brought back"] > 0
    assert (world.happened["rounds of a rolling push"] > 100) == bool(sections)
    assert all(world.happened[deed] >= 20 for deed in (*deeds, *rewards)), world.happened
    assert world.happened["routes in hand"] > 100 and world.happened["routes in files"] > 100
    assert world.happened["positions with routes"] > 0.8 * world.happened["positions"]
    files_on_disk = {f.relative_to(folder / FOLDER).as_posix() for f in (folder / FOLDER).glob("*/*.seg")}
    with sqlite3.connect(folder / FILE_NAME) as db:
        referenced_files = {
            row[0]
            for row in db.execute("SELECT DISTINCT name FROM route_files JOIN route_places USING (file)")
        }
    assert referenced_files <= files_on_disk and len(files_on_disk) < 40, "files go when nobody can want them"


@pytest.mark.gate
@pytest.mark.parametrize("sections", [{}, ROLLING], ids=["all at once", "rolling"])
def test_a_hundred_steps_of_samples_of_three_sequences(folder: Path, sections: dict[str, Any]) -> None:
    """Each of their tokens is what the engine would have made undisturbed, whatever was killed between them."""
    rollout = {
        "over_provision": 2, "max_staleness": 3, "max_response_tokens": BUDGET, "flush_tokens": 50,
        "stall_timeout": 600, "generator": "tests.helpers.episode_cases:concurrent_sequences",
    }  # fmt: skip
    trainer_section = {"checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 2}
    config = make_config(folder, rollout=rollout, trainer=trainer_section, **sections)
    world = World(config, 0, steps=120)
    run_virtual(world.run())
    trained = [group for groups in world.told.values() for group in groups]
    assert len({group[0] for group in trained}) == len(trained) == 120 * config.rollout.groups_per_step
    assert all(len(group) == 1 + 3 * config.rollout.group_size for group in trained)
    ledger = RunReader(folder).ledger()
    check_ledger(ledger)
    assert ledger.groups["trained"] == len(trained) and ledger.lost_tokens == 0
    assert world.happened["killed"] >= 5 and world.happened["die"] >= 2, world.happened


class Scouted(World):
    """Prompts are tried out by engines of a pool of their own."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.metrics: list[dict[str, float]] = []
        self.seeds: set[int] = set()  # of samples that were trained

    async def take(self, step: int) -> TrainBatch:
        """No engine explores in steps 20 to 29, whatever else happens."""
        if step == 20:
            self.engines[2].die()
        elif step == 30:
            self.engines[2].restart()
        return await super().take(step)

    def planning(self, router: Router, scorer: Scorer) -> Planning:
        generate = single_turn(self.config, None, sampling_turns(self.config, router, explorers=True))
        explorer = Explorer(generate, scorer, self.config.run.seed)
        return Planning(self.config, Numbers(), None, explorer=explorer)

    def check(self, taken: TrainBatch) -> None:
        super().check(taken)
        for group in taken.groups:
            self.happened[f"groups of {len(group.samples)}"] += 1
            self.seeds |= {s.seed for s in group.samples}
        self.metrics.append(taken.metrics)


class Forest(World):
    """Its samples are branches: only the roots' own tokens are what the engine would have made undisturbed."""

    def check(self, taken: TrainBatch) -> None:
        groups = load_tokens(self.config.run.dir, taken.groups)
        records = [(g.group_id, *(s.response_ids for s in g.samples)) for g in groups]
        assert self.told.setdefault(taken.train_step, records) == records
        assert taken.metrics["lost"] == 0
        for group in groups:
            for s in group.samples:
                assert len(s.response_ids) == len(s.mu) == s.tokens and s.status.terminal
                self.happened["forked"] += s.fork is not None
                if s.fork is None:
                    first, versions = len(s.prompt_ids), s.versions()
                    expected = [token(s.seed, first + i, v) for i, v in enumerate(versions)]
                    assert list(s.response_ids)[:-1] == expected[:-1]
                    continue
                stem, position = group.samples[s.fork.source], s.fork.at
                shared = min(position, 5)  # the root is cut off there, after the first forks
                assert list(s.response_ids[:shared]) == list(stem.response_ids[:shared])
                assert s.versions()[:shared] == stem.versions()[:shared] and s.response_ids[position] in (
                    97,
                    98,
                    99,
                )


@pytest.mark.gate
def test_a_hundred_steps_of_trees(folder: Path) -> None:
    """Forked, cut and pruned between kills: a token that an engine made is in the ledger, or counted as discarded."""
    rollout = {
        "over_provision": 2, "max_staleness": 3, "max_response_tokens": BUDGET, "flush_tokens": 50,
        "group_size": 4, "stall_timeout": 600, "generator": "tests.helpers.tree_cases:fixed_trees",
    }  # fmt: skip
    trainer_section = {"checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 2}
    world = Forest(make_config(folder, rollout=rollout, trainer=trainer_section), 0, steps=100)
    run_virtual(world.run())
    trained = [group[0] for groups in world.told.values() for group in groups]
    assert len(trained) == len(set(trained)) == 200
    ledger = RunReader(folder).ledger()
    check_ledger(ledger)
    assert ledger.groups["trained"] == len(trained) and ledger.lost_tokens == 0
    assert ledger.inherited_tokens > 100 and ledger.discarded_tokens > 100 and world.happened["forked"] > 100
    assert world.happened["killed"] >= 3 and world.happened["die"] >= 2, world.happened


@pytest.mark.gate
@pytest.mark.parametrize("sections", [{}, ROLLING], ids=["all at once", "rolling"])
def test_two_hundred_steps_while_engines_join_leave_and_die(folder: Path, sections: dict[str, Any]) -> None:
    config = make_config(
        folder,
        rollout={
            "over_provision": 2,
            "max_staleness": 3,
            "max_response_tokens": BUDGET,
            "stall_timeout": 600,
        },
        trainer={"checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 2},
        **sections,
    )
    world = World(config, 0, steps=200, joins=True)
    run_virtual(world.run())
    trained = [group[0] for groups in world.told.values() for group in groups]
    assert len(trained) == len(set(trained)) == 200 * config.rollout.groups_per_step
    ledger = RunReader(folder).ledger()
    check_ledger(ledger)
    assert ledger.groups["trained"] == len(trained) and ledger.lost_tokens == 0
    copied = sum(e.calls.count("update_weights_from_tensor") for e in [*world.joined, *world.gone])
    assert copied >= 3, "from one another, without the trainer"
    served = [engine for engine in [*world.joined, *world.gone] if engine.prompts]
    assert len(served) >= 4 and world.happened["left in order"] >= 3, world.happened
    assert world.happened["die"] >= 2 and world.happened["killed"] >= 3, world.happened


SCOUTS = {"pools": [{"name": "exact", "count": 2}, {"name": "scouts", "count": 1, "role": "explore"}]}


@pytest.mark.gate
def test_sixty_steps_with_engines_that_explore_and_die(folder: Path) -> None:
    """Nothing that they make is trained; without them groups have the usual size, and nobody waits."""
    rollout = {
        "over_provision": 2, "max_staleness": 3, "max_response_tokens": BUDGET, "stall_timeout": 600,
        "groups_per_step": 4, "group_size": 4,
    }  # fmt: skip
    config = make_config(
        folder,
        rollout=rollout,
        trainer={"checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 2},
        engine=SCOUTS,
        launch={"placement": "disaggregated"},
        algo={"planners": [{"name": "explore", "probes": 4, "first": 2, "largest": 6}]},
    )
    world = Scouted(config, 0, steps=60)
    run_virtual(world.run())
    trained = [group[0] for groups in world.told.values() for group in groups]
    assert len(trained) == len(set(trained)) == 60 * config.rollout.groups_per_step
    ledger = RunReader(folder).ledger()
    check_ledger(ledger)
    assert ledger.groups["trained"] == len(trained) and ledger.lost_tokens == 0
    explorer, writers = world.engines[2], world.engines[:2]
    tried = {request.seed for request in explorer.history}
    writer_seeds = {request.seed for engine in writers for request in engine.history}
    assert len(tried) > 100 and not tried & writer_seeds and world.seeds <= writer_seeds
    sizes = {int(name.split()[-1]) for name in world.happened if name.startswith("groups of")}
    assert {2, 4, 5, 6} <= sizes, "4 p (1 - p) is 0, 3/4 or 1 of four answers; 4 without any"
    assert world.happened["die"] >= 2 and world.happened["killed"] >= 3, world.happened
    assert any(m["explored_not"] for m in world.metrics) and any(m["explored"] > 9 for m in world.metrics)
    assert any(-1 <= m.get("explore_correlation", 2) <= 1 for m in world.metrics)
