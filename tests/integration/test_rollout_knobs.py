"""What the knobs of `rollout:` do on a real engine: the product's manager, router and buffer, and real pushes;
lengths are given, so that every knob has its tail to work on. Run with -s, it prints the figures.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from rlsys.config import Config, identity
from rlsys.core.types import AnySequence, Prompt, Sample, TrainBatch
from rlsys.core.weight_updates import Canary
from rlsys.data import Tokenizer
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.generators.generator import build_generator
from rlsys.generators.tools import Calculator, answer_template
from rlsys.generators.turns import sampling_turns
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.store import FILE_NAME
from rlsys.planning.planning import Planning
from rlsys.rollout.manager import RolloutManager
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import Interruption
from rlsys.router.router import Router
from rlsys.weights.gathered_push import GatheredPush
from rlsys.worker.resume_order import resume_key
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import direct_workers
from tests.helpers.engine_stack import (
    EOS,
    PROMPT,
    SLOW,
    Stack,
    logprobs,
    model,
    sample,
    set_model,
    stack,
    tensors,
    wait_until,
    worst_gap,
)
from tests.helpers.loaded import load_tokens

pytestmark = pytest.mark.integration

TAIL = (6, 8, 8, 10, 12, 14, 20, 120)
"""Response lengths: an eighth of the samples is six times as long as the mean of the others."""
GROUP_SIZE = 2


def length(sample_id: int) -> int:
    return TAIL[sample_id * 5 % len(TAIL)]


class TracedRouter(Router):
    """The product's router; the trace says how long each response is."""

    async def generate(self, sample: AnySequence, *, max_response_tokens: int, **how: Any) -> AnySequence:
        limit = min(length(sample.sample_id), max_response_tokens)
        return await super().generate(sample, max_response_tokens=limit, **how)


class TracedClient(EngineClient):
    """Keeps what it was asked to generate: the ids, in the order of the requests."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[list[int]] = []

    def generate(self, ids: list[int], **how: Any) -> Any:
        self.asked.append(ids)
        return super().generate(ids, **how)


class Numbers:
    """Prompt i says i, so that none is like another."""

    def train(self, index: int) -> Prompt:
        return Prompt(index, "", [1, 10 + index // 100 % 100, 10 + index % 100, 5, 6], {})

    def heldout(self, n: int) -> list[Prompt]:
        return [self.train(-1 - i) for i in range(n)]


class Run:
    """A run without a trainer: its weights never change, but every push is a real one."""

    def __init__(self, config: Config, client: EngineClient) -> None:
        self.client = client
        self.config = config
        self.buffer = RolloutBuffer(config.run.dir / FILE_NAME, identity(config), GROUP_SIZE)
        self.router = TracedRouter(
            [client], vocab_size=128, context_length=512, stop_ids=(), bounds=Bounds.of(config)
        )
        source = Numbers()

        async def one(_prompt: Prompt, _text: str) -> float:
            return 1.0

        scorer = Scorer(lambda: nullcontext(one), lambda _ids: "", 60.0)
        planning = Planning(config, source, None)
        workers = direct_workers(config, self.router, scorer)
        self.manager = RolloutManager(config, self.buffer, workers, source, scorer, planning)
        self._sync = GatheredPush(config)
        self._step = 0

    async def push(self, seed: int = 0) -> None:
        ticket = await self.manager.begin_push()
        await asyncio.to_thread(self._sync.push, tensors(seed), ticket)
        await self.manager.end_push(ticket, [Canary(ids, logprobs(seed, ids)) for ids in ticket.canaries])

    async def steps(self, n: int, models: int = 1) -> list[TrainBatch]:
        """Take and push, so many times; with so many models in turn. With the tokens that a trainer reads."""
        out = []
        for _ in range(n):
            self._step += 1
            batch = await self.manager.take(self._step)
            assert batch is not None
            out.append(replace(batch, groups=load_tokens(self.config.run.dir, batch.groups)))
            await self.push(self._step % models)
        return out

    async def close(self) -> None:
        await self.client.slow_down(None)
        await self.manager.close()
        await asyncio.to_thread(self._sync.close)
        check_ledger(self.buffer.ledger())
        self.buffer.close()


Start = Callable[..., Any]


@pytest.fixture
def start(engine_config: Config, engine: str, tmp_path: Path) -> Iterator[Start]:
    """An asynchronous context: a run with these values of `rollout`, after its first push; its ledger is checked."""

    @asynccontextmanager
    async def begin(folder: str = "run", **rollout: Any) -> AsyncIterator[Run]:
        data = engine_config.model_dump()
        data["run"]["dir"] = tmp_path / folder
        data["run"]["dir"].mkdir()
        data["rollout"] |= {"group_size": GROUP_SIZE, "max_response_tokens": max(TAIL), **rollout}
        async with make_session() as session:
            run = Run(Config.model_validate(data), TracedClient(engine, session))
            try:
                await run.manager.restore(0)
                await run.push()
                yield run
            finally:
                await run.close()

    yield begin


def samples(taken: Iterable[TrainBatch]) -> list[Sample]:
    return [s for t in taken for g in t.groups for s in g.samples]


def average(taken: Iterable[TrainBatch], name: str) -> float:
    return mean(t.metrics[name] for t in taken)


async def test_auto_moves_towards_its_share(start: Start) -> None:
    """From N'/N = 2 on, by what each step had of tokens of older weights."""
    target_share = 0.2
    how = {"over_provision": "auto", "auto_share": target_share, "max_staleness": 8, "groups_per_step": 8}
    async with start(**how) as run:
        batches = await run.steps(6)
    factors = [t.metrics["over_provision"] for t in batches]
    shares = [t.metrics["off_policy_share"] for t in batches]
    print("auto:", [(round(f, 2), round(s, 2)) for f, s in zip(factors, shares, strict=True)])
    for factor, next_factor, share in zip(factors, factors[1:], shares, strict=False):
        assert (next_factor < factor) == (share > target_share)
    assert all(t.metrics["slots"] == round(f * 16) for t, f in zip(batches, factors, strict=True))
    most = max(t.metrics["slots"] for t in batches)
    assert all(t.metrics["in_flight"] + t.metrics["parked"] < most + GROUP_SIZE for t in batches)
    assert (factors[0], shares[0]) == (2.0, 0.0)
    assert factors[-1] < factors[1]


APRIL = {"over_provision": 2, "max_staleness": 1, "groups_per_step": 4}


async def test_drop_trains_short_responses_and_raises_the_bias_alarm(start: Start) -> None:
    async with start(**APRIL, staleness_policy="drop", length_bias_bound=0.05) as run:
        batches = await run.steps(18)
    last = batches[-1].metrics
    print("drop:", {k: v for k, v in last.items() if "bias" in k or "rank" in k or k == "expired"})
    assert last["expired"] > 0
    assert max(t.metrics["staleness_max"] for t in batches) <= 1
    assert average(batches, "generated_len_mean") > average(batches, "response_len_mean")
    assert last["length_bias"] < -0.05
    assert [t.metrics["bias_alarm"] for t in batches] == [0] * 16 + [1] * 2


async def test_wait_loses_nothing(start: Start) -> None:
    async with start(**APRIL, staleness_policy="wait") as run:
        batches = await run.steps(6)
    print("wait:", {k: average(batches, k) for k in ("staleness_max", "response_len_mean")})
    assert batches[-1].metrics["expired"] == 0
    assert max(t.metrics["staleness_max"] for t in batches) == 1
    assert max(len(s.response_ids) for s in samples(batches)) == max(TAIL)


async def test_mask_trains_all_but_the_old_tokens(start: Start) -> None:
    async with start(**APRIL, staleness_policy="mask") as run:
        batches = await run.steps(10)
        for t in batches:
            trained_steps = run.buffer.versions.trained_steps(t.weight_version)
            for s in samples([t]):
                stale_tokens = [
                    trained_steps - run.buffer.versions.trained_steps(v) > 1 for v in s.versions()
                ]
                assert s.trained() == [not o for o in stale_tokens]
    print("mask:", {k: average(batches, k) for k in ("masked_tokens", "tokens", "staleness_max")})
    assert batches[-1].metrics["expired"] == 0
    assert max(t.metrics["staleness_max"] for t in batches) > 1
    assert sum(t.metrics["masked_tokens"] for t in batches) > 0


@pytest.mark.parametrize("most", [None, 1])
async def test_no_sample_is_resumed_more_often_than_it_may(most: int | None, start: Start) -> None:
    async with start(over_provision=3, max_staleness=16, groups_per_step=4, max_resumes=most) as run:
        batches = await run.steps(10)
        everywhere = [*samples(batches), *(s for g in run.buffer.groups.values() for s in g.samples)]
    resumes = max(s.resumes for s in everywhere)
    print(f"max_resumes {most}: at most {resumes}, age {average(batches, 'staleness_mean'):.2f}")
    assert resumes == 1 if most == 1 else resumes > 1


@pytest.mark.parametrize("order", ["oldest", "nearest_done", "longest"])
async def test_interrupted_samples_resume_in_the_configured_order(order: str, start: Start) -> None:
    """As the engine sees it: the first requests after a push are the interrupted samples, in this order."""
    async with start(over_provision=3, max_staleness=16, groups_per_step=8, resume_order=order) as run:
        await run.steps(3)
        groups = {g.group_id: g for g in run.buffer.active()}
        parked = [s for g in groups.values() for s in g.samples if s.response_ids and not s.status.terminal]
        keys = {id(s): resume_key(order, s, groups[s.group_id]) for s in parked}  # type: ignore[arg-type]
        expected = [[*s.prompt_ids, *s.response_ids] for s in sorted(parked, key=lambda s: keys[id(s)])]
        run.client.asked.clear()
        await run.steps(1)
    assert len(expected) > 3
    assert [ids for ids in run.client.asked if len(ids) > 5][: len(expected)] == expected


async def test_a_run_is_repeated_by_its_record(start: Start, tmp_path: Path) -> None:
    """Two models take turns, so tokens tell which one sampled them; the other run's engine has another speed."""

    async def one(name: str, seconds: float, **rollout: Any) -> list[list[Sample]]:
        async with start(folder=name, **APRIL, staleness_policy="mask", **rollout) as run:
            await run.client.slow_down(seconds or None)
            batches = await run.steps(5, models=2)
        return [samples([t]) for t in batches]

    first = await one("first", 0.01)
    again = await one("again", 0.0, repeat=tmp_path / "first")
    gaps = []
    for step, repeated in zip(first, again, strict=True):
        for s, r in zip(step, repeated, strict=True):
            assert (r.sample_id, r.response_ids, r.versions()) == (
                s.sample_id,
                s.response_ids,
                s.versions(),
            )
            gaps.append(worst_gap(r.mu, s.mu))
    print(
        f"repeated: log-probs differ by up to {max(gaps):.1e}, {sum(g > 0 for g in gaps)} of {len(gaps)} samples"
    )
    assert max(gaps) <= 1e-5
    assert len({v for step in first for s in step for v in s.versions()}) > 3


NUDGED = 100
"""A model like model 0 after a train step or two: each weight moved by a thousandth of its tensor's spread."""


def nudged() -> Any:
    nudged_model = copy.deepcopy(model(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in nudged_model.parameters():
            p += 1e-3 * p.std() * torch.randn(p.shape, generator=generator)
    return nudged_model


async def test_keys_and_values_kept_through_a_push_cause_a_bounded_error(
    engine_config: Config, engine: str
) -> None:
    """|logp - mu| of tokens sampled after the push, `logp` by transformers under the new weights."""
    set_model(NUDGED, nudged())

    async def gaps(plain: Stack, how: Interruption) -> torch.Tensor:
        s = Stack(engine_config, plain.client, how)
        await s.push(0)
        running = [sample(i, seed=i + 1) for i in range(24)]
        await s.client.slow_down(SLOW)
        tasks = [asyncio.create_task(s.generate(r, tokens=160)) for r in running]
        everything = asyncio.gather(*tasks)
        await wait_until(lambda: sum(len(r.response_ids) >= 40 for r in running) >= 8, everything)
        version, _ = await s.push(NUDGED)
        await s.client.slow_down(None)
        await everything
        await s.router.interrupt()
        differences = []
        for r in running:
            new = [v == version for v in r.versions()]
            if new and not new[0]:  # it was in the engine when the weights changed
                logp = logprobs(NUDGED, [*r.prompt_ids, *r.response_ids])[len(r.prompt_ids) - 1 :]
                differences += [abs(a - b) for a, b, n in zip(logp, r.mu, new, strict=True) if n]
        assert len(differences) > 300
        return torch.tensor(differences)

    async with stack(engine_config, engine) as plain:
        error: dict[Interruption, torch.Tensor] = {
            how: await gaps(plain, how) for how in ("in_place", "retract")
        }
        for how, deviations in error.items():
            print(
                f"{how}: mean {deviations.mean():.1e}, 99.9th percentile {deviations.quantile(0.999):.1e}, "
                f"{len(deviations)} tokens"
            )
        assert error["retract"].max() <= 1e-4
        assert error["in_place"].mean() > 100 * error["retract"].mean()
        assert error["in_place"].mean() < 0.1


async def test_a_tool_turn_interrupted_in_its_middle_equals_the_unbroken_one(
    engine_config: Config, engine: str, tiny_moe: Path
) -> None:
    """A random model's turns end by chance, and what stands between two of its digits is the call."""
    tokenizer = Tokenizer(tiny_moe)
    params = {"opens": "1", "closes": "2", "max_turns": 3}
    budget = 300
    rollout = {"generator": "calculator", "generator_params": params, "max_response_tokens": budget}
    data = engine_config.model_dump()
    data["rollout"] |= rollout
    config = Config.model_validate(data)

    async def check_answer(s: Sample) -> None:
        """Between the turns stands what the calculator says about the call, and it is not trained."""
        span = s.observed[0]
        assert s.response_ids[span.start - 1] == EOS
        call = re.findall("1(.*?)2", tokenizer.decode(s.response_ids[: span.start]), re.DOTALL)[-1]
        prefix, suffix = answer_template(tokenizer, "user")
        answer = await Calculator()(call)
        assert tokenizer.decode(s.response_ids[span.start : span.end]) == prefix + answer + suffix
        print("tool:", repr(call), "->", answer)
        assert not any(s.trained()[span.start : span.end])
        assert list(s.mu[span.start : span.end]) == [0.0] * (span.end - span.start)

    async with stack(config, engine) as s:
        await s.push(0)
        talk = build_generator(config, tokenizer, sampling_turns(config, s.router))
        prompt = Prompt(0, "", PROMPT, {})
        unbroken = [sample(i, seed=i + 1) for i in range(32)]
        await asyncio.gather(*(talk(u, prompt) for u in unbroken))
        calling_samples = [u for u in unbroken if u.observed and u.observed[0].end + 8 < len(u.response_ids)]
        assert calling_samples, "no response has a call"
        print(f"tool: {len(calling_samples)} of {len(unbroken)} called it")
        first = calling_samples[0]
        await check_answer(first)

        await s.client.slow_down(SLOW)
        broken = sample(first.sample_id, seed=first.seed)
        task: asyncio.Future[None] = asyncio.ensure_future(talk(broken, prompt))
        middle = first.observed[0].end + 4
        await wait_until(lambda: len(broken.response_ids) >= middle, task)
        await s.router.interrupt()
        assert not broken.status.terminal
        assert first.observed[0].end < len(broken.response_ids) < len(first.response_ids)
        task.cancel()  # as a restart does: what was saved is all there is
        await asyncio.gather(task, return_exceptions=True)
        await s.client.slow_down(None)
        s.router.resume()
        await talk(broken, prompt)
        assert broken.response_ids == first.response_ids
        assert worst_gap(broken.mu, first.mu) <= 1e-5
        assert (broken.observed, broken.trained()) == (first.observed, first.trained())
        assert (broken.status, broken.resumes) == (first.status, 1)
