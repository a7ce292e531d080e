"""Does APRIL pay? Rollouts of one recorded long-tail trace on a real SGLang engine, mode against mode in one run.

    python bench/april.py --json [--repeats 2] [--quick] [--only NAME ...]

Compared: rollout modes with the same slots (samples in flight), so that no mode gets more of the engine:

    synchronous    N'/N = 1, max_staleness 0: every step waits for its longest response
    april-R        N'/N = R: a step takes the first N, the rest is interrupted and goes on later
    asynchronous   nothing is interrupted by a take; a push interrupts, and admission bounds the age
    saturated      slots always full, no steps, no pushes: the bound

Every step is what the product does between two train steps: take, interrupt, begin_push, real weights, end_push
with flush and attestation, resume with re-prefill. Training itself takes no time here: this is a rollout bench, not
an end-to-end figure. Costs: `cpu` is the raw CPU engine, whose forward pass takes longer the more it decodes;
`gpu-like` adds a fixed time to every forward pass (SGLang's /slow_down), as a memory-bound decode has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import machine, running_engine, say, spread, write_random_moe
from safetensors.torch import load_file
from torch import Tensor

from rlsys.config import Config, identity
from rlsys.engine.client import EngineClient, make_session
from rlsys.rollout.buffer import RolloutBuffer
from rlsys.rollout.manager import RolloutManager
from rlsys.rollout.planning import Planning
from rlsys.rollout.scoring import Scorer
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.types import Canary, GroupState, Prompt, Sample, SampleGroup
from rlsys.weights.sync import WeightSync

TRACE = Path(__file__).with_name("traces") / "long_tail.json"
SLOTS, GROUP_SIZE = 120, 4
VOCAB, PROMPT_TOKENS = 128, 24
GPU_LIKE_SECONDS = 0.06
"""Added to every forward pass: several times what the CPU's own pass of a few samples takes."""
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Mode:
    name: str
    over_provision: float
    max_staleness: int
    placement: str = "colocated"

    @property
    def groups(self) -> int:
        """Of one step: N = slots / (N'/N)."""
        return round(SLOTS / GROUP_SIZE / self.over_provision)


MODES = [
    Mode("synchronous", 1.0, 0),
    *(Mode(f"april-{r:g}", r, 64) for r in (1.25, 1.5, 2.0, 3.0)),
    Mode("asynchronous", 1.0, 8, "disaggregated"),
]


class TracedRouter(Router):
    """The product's router; the trace says how long each response is."""

    lengths: Sequence[int] = ()
    interrupt_seconds = 0.0

    async def interrupt(self) -> None:
        start = time.monotonic()
        await super().interrupt()
        self.interrupt_seconds += time.monotonic() - start

    async def generate(self, sample: Sample, *, max_response_tokens: int, temperature: float) -> Sample:
        limit = self.lengths[sample.sample_id % len(self.lengths)]
        return await super().generate(sample, max_response_tokens=limit, temperature=temperature)


class RandomPrompts:
    """Prompt `i` is random ids, the same in every mode; nobody evaluates."""

    def train(self, index: int) -> Prompt:
        rng = random.Random(index)
        return Prompt(index, "", [rng.randrange(9, VOCAB) for _ in range(PROMPT_TOKENS)], {})

    def heldout(self, n: int) -> list[Prompt]:
        return [self.train(-1 - i) for i in range(n)]


async def reward_one(_prompt: Prompt, _text: str) -> float:
    return 1.0


@dataclass
class Stage:
    """What all modes share: one engine, its weights, the trace."""

    client: EngineClient
    config: Config
    tensors: dict[str, Tensor]
    canaries: list[Canary]
    lengths: list[int]
    folder: Path

    @property
    def true_mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def for_mode(self, mode: Mode, folder: Path) -> Config:
        data = self.config.model_dump()
        data["run"]["dir"] = folder
        data["rollout"] |= {
            "groups_per_step": mode.groups, "group_size": GROUP_SIZE, "over_provision": mode.over_provision,
            "max_staleness": mode.max_staleness,
        }  # fmt: skip
        data["launch"]["placement"] = mode.placement
        return Config.model_validate(data)

    def router(self) -> TracedRouter:
        router = TracedRouter(
            [self.client], vocab_size=VOCAB, context_length=1024, stop_ids=(), bounds=Bounds.of(self.config)
        )
        router.lengths = self.lengths
        return router


@dataclass
class Clock:
    """Looks at the slots while a mode runs."""

    router: Router
    looks: list[float] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            self.looks.append(self.router.stats()["in_flight"])
            await asyncio.sleep(LOOK_SECONDS)

    def idle_share(self) -> float:
        return sum(n < SLOTS / 2 for n in self.looks) / max(1, len(self.looks))


async def run_mode(stage: Stage, mode: Mode, warm: int, measured: int) -> dict[str, float]:
    """Steps until `warm` samples are trained, then steps until `measured` more are; figures of the latter."""
    with tempfile.TemporaryDirectory(dir=stage.folder) as name:
        config = stage.for_mode(mode, Path(name))
        buffer = RolloutBuffer(config.run.dir / "rollouts.sqlite", identity(config), GROUP_SIZE)
        router = stage.router()
        scorer = Scorer(lambda: nullcontext(reward_one), lambda _ids: "", 60.0)
        source = RandomPrompts()
        manager = RolloutManager(config, buffer, router, source, scorer, Planning(config, source, None))
        sync = WeightSync(config, is_main=True)

        phases = dict.fromkeys(("begin", "send", "end"), 0.0)

        async def push() -> None:
            """What the trainer and the rollout do between two steps; the seconds of each phase are added up."""
            times = [time.monotonic()]
            ticket = await manager.begin_push()
            times.append(time.monotonic())
            await asyncio.to_thread(sync.push, iter(stage.tensors.items()), ticket)
            times.append(time.monotonic())
            await manager.end_push(ticket, stage.canaries)
            times.append(time.monotonic())
            for name, a, b in zip(("begin", "send", "end"), times[:-1], times[1:], strict=True):
                phases[name] += b - a

        clock = Clock(router)
        try:
            await manager.restore(0)
            await push()
            step = trained = 0
            while mode.max_staleness and trained < warm:
                step += 1
                trained += await take(manager, step)
                await push()
            looking, before, start = asyncio.create_task(clock.run()), router.stats(), time.monotonic()
            phases.update(begin=0.0, send=0.0, end=0.0)
            router.interrupt_seconds, first = 0.0, step
            taken: list[SampleGroup] = []
            ages: list[float] = []
            off_policy = tokens = 0.0
            while len(taken) * GROUP_SIZE < measured:
                step += 1
                got = await manager.take(step)
                assert got is not None, "the engine lost its weights"
                taken += got.groups
                ages.append(got.metrics["staleness_mean"])
                tokens += got.metrics["tokens"]
                off_policy += got.metrics["off_policy_share"] * got.metrics["tokens"]
                await push()
            seconds, after = time.monotonic() - start, router.stats()
            looking.cancel()
        finally:
            await manager.close()
            buffer.close()
    prefilled = after["prefilled_tokens"] - before["prefilled_tokens"]
    cached = after["cached_tokens"] - before["cached_tokens"]
    trained_lengths = [len(s.response_ids) for g in taken for s in g.samples]
    assert all(g.state is GroupState.TRAINED for g in taken)
    assert after["lost"] == before["lost"], "tokens were lost"
    return {
        "trained_tokens_per_s": tokens / seconds,
        "samples_per_s": len(trained_lengths) / seconds,
        "share_below_half_slots": clock.idle_share(),
        "off_policy_share": off_policy / tokens,
        "mean_age": sum(ages) / len(ages),
        "length_ratio": sum(trained_lengths) / len(trained_lengths) / stage.true_mean,
        "prefilled_tokens_per_trained_token": (prefilled - cached) / tokens,
        "cache_share": cached / prefilled,
        "interrupt_seconds_per_step": router.interrupt_seconds / (step - first),
        **{f"push_{name}_seconds_per_step": total / (step - first) for name, total in phases.items()},
        "seconds_per_step": seconds / (step - first),
        "seconds": seconds,
    }


async def take(manager: RolloutManager, step: int) -> int:
    got = await manager.take(step)
    assert got is not None, "the engine lost its weights"
    return sum(len(g.samples) for g in got.groups)


async def run_saturated(stage: Stage, measured: int) -> dict[str, float]:
    """Closed loop: whenever a response ends, the next begins. No steps."""
    router, source = stage.router(), RandomPrompts()
    engines = await router.begin_push(1)
    await router.end_push(1, stage.canaries)
    assert engines
    router.resume()
    numbers = iter(range(10**9))
    ended: list[tuple[float, int]] = []

    async def worker() -> None:
        while True:
            i = next(numbers)
            sample = Sample(i, i // GROUP_SIZE, i % GROUP_SIZE, source.train(i // GROUP_SIZE).ids, seed=1 + i)
            await router.generate(sample, max_response_tokens=10**6, temperature=1.0)
            ended.append((time.monotonic(), len(sample.response_ids)))

    workers = [asyncio.create_task(worker()) for _ in range(SLOTS)]
    try:
        await until(ended, 2 * SLOTS, workers)
        received, start = router.stats()["received_tokens"], time.monotonic()
        await until(ended, 2 * SLOTS + measured, workers)
        seconds = time.monotonic() - start
        rate = (router.stats()["received_tokens"] - received) / seconds
    finally:
        await router.interrupt()
        for w in workers:
            w.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return {"trained_tokens_per_s": rate, "samples_per_s": measured / seconds, "seconds": seconds}


async def until(ended: list[Any], n: int, workers: list[asyncio.Task[None]]) -> None:
    while len(ended) < n:
        for w in workers:
            if w.done():
                w.result()
        await asyncio.sleep(LOOK_SECONDS)


async def bench(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    warm, measured = (120, 120) if args.quick else (8 * SLOTS, 4 * SLOTS)
    names = ["saturated", *(m.name for m in MODES)]
    chosen = [n for n in names if not args.only or n in args.only]
    by_name = {m.name: m for m in MODES}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for repeat in range(args.repeats):
        order = chosen[repeat % len(chosen) :] + chosen[: repeat % len(chosen)]  # nobody is always first
        for cost, seconds in (("gpu-like", GPU_LIKE_SECONDS), ("cpu", None)):
            await stage.client.slow_down(seconds)
            for name in order:
                say(f"repeat {repeat + 1}/{args.repeats} {cost}: {name}")
                if name == "saturated":
                    figures = await run_saturated(stage, measured)
                else:
                    figures = await run_mode(stage, by_name[name], warm, measured)
                say(f"    {figures['trained_tokens_per_s']:.0f} trained tokens/s, {figures['seconds']:.0f} s")
                runs.setdefault(cost, {}).setdefault(name, []).append(figures)
    await stage.client.slow_down(None)
    costs = {
        cost: {
            name: {key: spread([f[key] for f in repeats]) for key in repeats[0]}
            for name, repeats in modes.items()
        }
        for cost, modes in runs.items()
    }
    return {
        "bench": "april", "slots": SLOTS, "group_size": GROUP_SIZE, "repeats": args.repeats, "quick": args.quick,
        "gpu_like_seconds_per_pass": GPU_LIKE_SECONDS, "true_mean_length": stage.true_mean,
        "longest": max(stage.lengths), "machine": machine(), "costs": costs, "summary": summary(costs),
    }  # fmt: skip


def summary(costs: dict[str, Any]) -> dict[str, float]:
    """Ratios of medians at N'/N = 2; {} when a mode was left out."""

    def rate(cost: str, mode: str) -> float:
        return float(costs[cost][mode]["trained_tokens_per_s"]["median"])

    try:
        return {
            "gain_at_2": rate("gpu-like", "april-2") / rate("gpu-like", "synchronous"),
            "gain_at_2_raw_cpu": rate("cpu", "april-2") / rate("cpu", "synchronous"),
            "share_of_saturated_at_2": rate("gpu-like", "april-2") / rate("gpu-like", "saturated"),
            "share_of_saturated_at_2_raw_cpu": rate("cpu", "april-2") / rate("cpu", "saturated"),
            "length_ratio_at_2": costs["gpu-like"]["april-2"]["length_ratio"]["median"],
        }
    except KeyError:
        return {}


async def main_async(args: argparse.Namespace) -> dict[str, Any]:
    lengths = json.loads(TRACE.read_text())["lengths"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_random_moe(folder / "model")
        config = Config.model_validate(
            {
                "model": {"path": model},
                "engine": {
                    "max_running_requests": SLOTS,
                    "max_total_tokens": SLOTS * (max(lengths) + PROMPT_TOKENS + 16),
                    "extra_args": ["--skip-tokenizer-init"],
                },
                "rollout": {"max_response_tokens": max(lengths)},
            }
        )
        say("starting the engine")
        with running_engine(config, folder) as url:
            async with make_session() as session:
                client = EngineClient(url, session)
                prompts = RandomPrompts()
                ids = [prompts.train(-100 - i).ids for i in range(8)]
                canaries = [Canary(i, await client.token_logprobs(i)) for i in ids]
                tensors = load_file(model / "model.safetensors")
                return await bench(Stage(client, config, tensors, canaries, lengths, folder), args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the whole result as JSON on stdout")
    parser.add_argument("--repeats", type=int, default=2, help="of every mode, interleaved")
    parser.add_argument("--quick", action="store_true", help="few samples: shows that it runs, not how fast")
    parser.add_argument("--only", nargs="*", help="names of modes")
    args = parser.parse_args()
    result = asyncio.run(main_async(args))
    print(json.dumps(result if args.json else result["summary"], indent=2))


if __name__ == "__main__":
    main()
