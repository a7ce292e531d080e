"""Measure the gain of APRIL: rollouts of one recorded long-tail trace on a real SGLang engine, in several modes.

    python bench/april.py --json [--repeats 2] [--quick] [--only NAME ...] [--cost gpu-like]
    python bench/april_plot.py RESULT.json FIGURE.png

The modes take batches of the same N samples:

    synchronous    N'/N = 1, max_staleness 0: every step waits for its longest response
    synchronous-2N synchronous, with a batch twice as large: as many samples in flight as with april-2
    april-R        N'/N = R: a step takes the first N samples; the others stay in the engine, which prefills them
                   again after the push (router.interruption: retract)
    april-2-abort  N'/N = 2; the other samples return, are saved, and are sent again (abort, the default)
    april-2-kept   N'/N = 2; the other samples stay in the engine, and a push keeps their keys and values (in_place):
                   shows the cost of repeated prefills
    asynchronous   2 N samples in flight; a push interrupts them, a take does not; admission bounds the age
    saturated      always 2 N samples in flight, no steps, no pushes
    prefill        2 N interrupted prefixes are prefilled at once, without decoding

A push invalidates all keys and values, so every step prefills all samples in flight again. `bound_of` computes the
share of `saturated` that april-2 can reach, from `saturated`, `prefill` and the trace.

Every step makes the calls that a run makes between two train steps: take, interrupt, begin_push, real weights,
end_push with flush and attestation (canaries, checksums), resume with prefill. No step trains: this bench measures
rollouts, not whole runs. There are two costs of a forward pass: with `cpu` the pass of the CPU engine takes longer
the more requests it decodes; `gpu-like` adds a fixed time to every pass (SGLang's /slow_down), as for memory-bound
decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import mean
from typing import Any

from april_stage import (
    BATCH,
    CONTEXT,
    GROUP_SIZE,
    POLL_SECONDS,
    PROMPT_TOKENS,
    VOCAB,
    Clock,
    Mode,
    RandomPrompts,
    Stage,
    canary_ids,
)
from measure import machine, running_engine, say, spread, write_random_moe
from safetensors.torch import load_file

from rlsys.config import Config, identity
from rlsys.convert.config import HFConfig
from rlsys.core.types import Prompt, Sample, SampleGroup, TrainBatch
from rlsys.core.weight_updates import Canary
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.planning.planning import Planning
from rlsys.rollout.manager import RolloutManager
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.gathered_push import GatheredPush
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import direct_workers

TRACE = Path(__file__).with_name("traces") / "long_tail.json"
GPU_LIKE_SECONDS = 0.03
"""Seconds added to every forward pass: several times the CPU's own time of a pass."""
COSTS = {"gpu-like": GPU_LIKE_SECONDS, "cpu": None}
"""Seconds added to every forward pass, by cost."""
PREFILL_TOKENS = 8192
"""Largest number of tokens of a prefill pass: SGLang's default for a GPU of 80 GB, twice its default for a CPU."""
QUICK_SCALE = 16
"""Divisor of the trace's lengths with --quick."""

MODES = [
    Mode("synchronous", 1.0, 0),
    Mode("synchronous-2N", 1.0, 0, batch=2 * BATCH),
    *(Mode(f"april-{r:g}", r, 64, interruption="retract") for r in (1.25, 1.5, 2.0, 3.0)),
    Mode("april-2-abort", 2.0, 64),
    Mode("april-2-kept", 2.0, 64, interruption="in_place"),
    Mode("asynchronous", 2.0, 8, "disaggregated"),
]
MOST_SLOTS = max(m.slots for m in MODES)
SATURATED_SLOTS = 2 * BATCH
"""Samples in flight in the modes `saturated` and `prefill`."""


async def reward_one(_prompt: Prompt, _text: str) -> float:
    return 1.0


class Loop:
    """The trainer's calls of one mode.

    Attributes:
        step: number of takes so far.
        seconds: total seconds of each phase.
    """

    def __init__(self, stage: Stage, config: Config, manager: RolloutManager) -> None:
        self._manager = manager
        self._stage = stage
        self._sync = GatheredPush(config)
        self._hf = HFConfig.read(config.model.path)
        self.step = 0
        self.seconds = dict.fromkeys(("take", "begin", "send", "end"), 0.0)

    async def take(self) -> TrainBatch:
        """Take the groups of the next step."""
        self.step += 1
        with self._phase("take"):
            batch = await self._manager.take(self.step)
        assert batch is not None, "the engine lost its weights"
        return batch

    async def push(self) -> None:
        """Push the weights, as trainer and rollout process do between two steps."""
        with self._phase("begin"):
            update = await self._manager.begin_push()
        with self._phase("send"):
            checksums = EngineChecksums(self._hf, 1)
            await asyncio.to_thread(self._sync.push, checksums.watch(self._stage.tensors.items()), update)
        with self._phase("end"):
            await self._manager.end_push(update, self._stage.canaries, checksums.digests())

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - start


async def run_mode(stage: Stage, mode: Mode, sample_count: int) -> dict[str, float]:
    """Run warm-up steps, then measured steps until they have taken `sample_count` samples.

    Returns:
        figures of the measured steps.
    """
    with tempfile.TemporaryDirectory(dir=stage.folder) as name:
        config = stage.for_mode(mode, Path(name))
        buffer = RolloutBuffer(config.run.dir / "rollouts.sqlite", identity(config), GROUP_SIZE)
        router, source = stage.router(mode.interruption), RandomPrompts()
        scorer = Scorer(lambda: nullcontext(reward_one), lambda _ids: "", 60.0)
        workers = direct_workers(config, router, scorer)
        manager = RolloutManager(config, buffer, workers, source, scorer, Planning(config, source, None))
        loop = Loop(stage, config, manager)
        try:
            await manager.restore(0)
            await loop.push()
            for _ in range(mode.warm_steps(stage.lengths)):
                await loop.take()
                await loop.push()
            clock, stats_before, first = Clock(router, mode.slots), router.stats(), loop.step
            read_before = await stage.tokens_read()
            loop.seconds, router.interrupt_seconds = dict.fromkeys(loop.seconds, 0.0), 0.0
            clock_task, start = asyncio.create_task(clock.run()), time.monotonic()
            batches: list[TrainBatch] = []
            while (loop.step - first) * mode.batch < sample_count:
                batches.append(await loop.take())
                await loop.push()
            seconds, stats_after = time.monotonic() - start, router.stats()
            clock_task.cancel()
            read = await stage.tokens_read() - read_before
        finally:
            await manager.close()
            buffer.close()
    assert stats_after["lost"] == stats_before["lost"], "tokens were lost"
    prefilled = stats_after["prefilled_tokens"] - stats_before["prefilled_tokens"]
    sampled = stats_after["received_tokens"] - stats_before["received_tokens"]  # may be 0 with --quick
    return {
        **trained_figures(batches, seconds, stage.true_mean),
        "sampled_tokens_per_s": sampled / seconds,
        "tokens_read_per_sampled_token": read / max(sampled, 1),
        "share_below_half_slots": clock.idle_share(),
        "cache_share": (stats_after["cached_tokens"] - stats_before["cached_tokens"]) / max(prefilled, 1),
        "seconds_per_step": seconds / len(batches),
        "interrupt_seconds_per_step": router.interrupt_seconds / len(batches),
        **{f"{phase}_seconds_per_step": total / len(batches) for phase, total in loop.seconds.items()},
        "seconds": seconds,
    }


def trained_figures(batches: list[TrainBatch], seconds: float, true_mean: float) -> dict[str, float]:
    """Return the figures of the groups that the measured steps took.

    Args:
        batches: the groups of each measured step.
        seconds: duration of the measured steps.
        true_mean: mean response length of the trace in tokens.
    """
    groups: list[SampleGroup] = [g for batch in batches for g in batch.groups]
    samples = [s for g in groups for s in g.samples]
    tokens = sum(s.tokens for s in samples)
    prefilled_again = sum(s.prefilled_tokens - s.cached_tokens - len(s.prompt_ids) for s in samples)
    off_policy_tokens = sum(b.metrics["off_policy_share"] * b.metrics["tokens"] for b in batches)
    return {
        "trained_tokens_per_s": tokens / seconds,
        "samples_per_s": len(samples) / seconds,
        "off_policy_share": off_policy_tokens / tokens,
        "mean_age": sum(b.metrics["staleness_mean"] for b in batches) / len(batches),
        "length_ratio": tokens / len(samples) / true_mean,
        "re_prefilled_tokens_per_trained_token": max(0, prefilled_again) / tokens,
    }


async def run_saturated(stage: Stage, sample_count: int) -> dict[str, float]:
    """Measure SATURATED_SLOTS samples in flight without steps: whenever a response ends, the next one begins.

    The measurement begins after the time of the longest response, as in the other modes.
    """
    router, source = stage.router(), RandomPrompts()
    engines = await router.begin_push(1)
    await router.end_push(1, stage.canaries)
    assert engines
    router.resume()
    numbers = itertools.count()
    lengths: list[int] = []

    async def worker() -> None:
        while True:
            i = next(numbers)
            sample = Sample(i, i // GROUP_SIZE, i % GROUP_SIZE, source.train(i // GROUP_SIZE).ids, seed=1 + i)
            await router.generate(sample, max_response_tokens=10**6, temperature=1.0)
            lengths.append(len(sample.response_ids))

    workers = [asyncio.create_task(worker()) for _ in range(SATURATED_SLOTS)]
    try:
        warm = round(SATURATED_SLOTS * max(stage.lengths) / stage.true_mean)
        await wait_for_samples(lengths, warm, workers)
        received, start = router.stats()["received_tokens"], time.monotonic()
        await wait_for_samples(lengths, warm + sample_count, workers)
        seconds = time.monotonic() - start
        rate = (router.stats()["received_tokens"] - received) / seconds
    finally:
        await router.interrupt()
        for w in workers:
            w.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return {
        "trained_tokens_per_s": rate,
        "sampled_tokens_per_s": rate,
        "samples_per_s": sample_count / seconds,
        "seconds": seconds,
    }


async def run_prefill(stage: Stage, repeat: int) -> dict[str, float]:
    """Measure the prefill of SATURATED_SLOTS prefixes like those that a step of april-2 interrupts.

    A response is in flight with a probability proportional to its length, and is interrupted at a uniformly random
    token. Each request decodes one token after the prefix.
    """
    rng, router = random.Random(repeat), stage.router()
    engines = await router.begin_push(1)
    await router.end_push(1, stage.canaries)
    assert engines
    router.resume()
    router.lengths = [1]
    interrupted_lengths = rng.choices(stage.lengths, stage.lengths, k=SATURATED_SLOTS)
    partial_lengths = [round(rng.random() * n) for n in interrupted_lengths]
    prompts = [[rng.randrange(9, VOCAB) for _ in range(PROMPT_TOKENS + n)] for n in partial_lengths]
    samples = [Sample(i, i, 0, ids, seed=1 + i) for i, ids in enumerate(prompts)]
    start = time.monotonic()
    await asyncio.gather(*(router.generate(s, max_response_tokens=10**6, temperature=1.0) for s in samples))
    seconds = time.monotonic() - start
    await router.interrupt()
    return {"seconds": seconds, "seconds_per_token": seconds / sum(map(len, prompts))}


def bound_of(saturated: float, prefill: float, over_provision: float, lengths: Sequence[int]) -> float:
    """Return the largest possible share of a saturated engine's rate if every step prefills all samples in flight.

    A step decodes s tokens in each slot, so a response of n tokens is interrupted n / s times, on average in its
    middle. So N'/N (1 + cv^2) / 2 tokens are prefilled for each trained token, where cv is the coefficient of
    variation of the lengths.

    Args:
        saturated: seconds per token of the saturated engine.
        prefill: seconds per prefilled token.
        over_provision: N'/N.
        lengths: response lengths in tokens.
    """
    prefilled_per_trained = over_provision * mean(n * n for n in lengths) / mean(lengths) ** 2 / 2
    return saturated / (saturated + prefilled_per_trained * prefill)


async def wait_for_samples(lengths: list[int], n: int, workers: list[asyncio.Task[None]]) -> None:
    """Wait until `lengths`, to which the workers append, has n entries. Raise the error of a worker that failed."""
    while len(lengths) < n:
        for w in workers:
            if w.done():
                w.result()
        await asyncio.sleep(POLL_SECONDS)


async def measure(stage: Stage, name: str, sample_count: int, repeat: int) -> dict[str, float]:
    """Return the figures of one repeat of the mode `name`."""
    if name == "saturated":
        return await run_saturated(stage, sample_count)
    if name == "prefill":
        return await run_prefill(stage, repeat)
    return await run_mode(stage, next(mode for mode in MODES if mode.name == name), sample_count)


async def bench(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen modes at the chosen costs, interleaved. Return the result of the bench."""
    sample_count = 2 * BATCH if args.quick else 6 * BATCH
    names = ["saturated", "prefill", *(mode.name for mode in MODES)]
    chosen = [name for name in names if not args.only or name in args.only]
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for repeat in range(args.repeats):
        order = chosen[repeat % len(chosen) :] + chosen[: repeat % len(chosen)]  # no mode is always first
        for cost in args.cost:
            await stage.client.slow_down(COSTS[cost])
            for name in order:
                say(f"repeat {repeat + 1}/{args.repeats} {cost}: {name}")
                figures = await measure(stage, name, sample_count, repeat)
                say("    " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
                runs.setdefault(cost, {}).setdefault(name, []).append(figures)
    await stage.client.slow_down(None)
    costs = {
        cost: {
            name: {key: spread([f[key] for f in modes[name]]) for key in modes[name][0]} for name in chosen
        }
        for cost, modes in runs.items()
    }
    return {
        "bench": "april", "batch": BATCH, "group_size": GROUP_SIZE, "repeats": args.repeats, "quick": args.quick,
        "gpu_like_seconds_per_pass": GPU_LIKE_SECONDS, "true_mean_length": stage.true_mean,
        "longest": max(stage.lengths), "machine": machine(), "costs": costs, "summary": summary(costs, stage.lengths),
    }  # fmt: skip


def summary(costs: dict[str, Any], lengths: Sequence[int]) -> dict[str, float]:
    """Return ratios of medians at N'/N = 2; a ratio is absent if one of its modes did not run."""

    def rate(cost: str, mode: str, tokens: str = "trained") -> float:
        return float(costs[cost][mode][f"{tokens}_tokens_per_s"]["median"])

    def share(cost: str, mode: str = "april-2") -> float:
        """Return the mode's rate of sampled tokens, divided by that of an engine that is always full.

        Trained tokens depend on a few long responses, which end at random times. Over many steps both shares are
        equal.
        """
        return rate(cost, mode, "sampled") / rate(cost, "saturated", "sampled")

    def share_of_bound(cost: str) -> float:
        prefill_seconds = float(costs[cost]["prefill"]["seconds_per_token"]["median"])
        return share(cost) / bound_of(1 / rate(cost, "saturated"), prefill_seconds, 2, lengths)

    figures: dict[str, Callable[[], float]] = {
        "gain_at_2": lambda: rate("gpu-like", "april-2") / rate("gpu-like", "synchronous"),
        "gain_at_2_same_slots": lambda: rate("gpu-like", "april-2") / rate("gpu-like", "synchronous-2N"),
        "gain_at_2_raw_cpu": lambda: rate("cpu", "april-2") / rate("cpu", "synchronous"),
        "gain_at_2_raw_cpu_same_slots": lambda: rate("cpu", "april-2") / rate("cpu", "synchronous-2N"),
        "share_of_saturated_at_2": lambda: share("gpu-like"),
        "share_of_saturated_at_2_raw_cpu": lambda: share("cpu"),
        "share_of_saturated_at_2_abort": lambda: share("gpu-like", "april-2-abort"),
        "share_of_bound_at_2": lambda: share_of_bound("gpu-like"),
        "share_of_bound_at_2_raw_cpu": lambda: share_of_bound("cpu"),
        "share_of_saturated_at_2_kept": lambda: share("gpu-like", "april-2-kept"),
        "length_ratio_at_2": lambda: float(costs["gpu-like"]["april-2"]["length_ratio"]["median"]),
    }
    ratios = {}
    for name, figure in figures.items():
        with suppress(KeyError):  # a mode of the ratio did not run
            ratios[name] = figure()
    return ratios


def trace(quick: bool) -> list[int]:
    """Return the response lengths of the trace in tokens, in the order of the samples; with `quick` short ones."""
    scale = QUICK_SCALE if quick else 1
    return [math.ceil(n / scale) for n in json.loads(TRACE.read_text())["lengths"]]


@asynccontextmanager
async def set_up(lengths: list[int]) -> AsyncIterator[Stage]:
    """Start an engine with random weights, and yield its stage. End the engine after the context."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_random_moe(folder / "model", max_position_embeddings=CONTEXT)
        engine = {
            "max_running_requests": MOST_SLOTS,
            "max_total_tokens": MOST_SLOTS * (max(lengths) + PROMPT_TOKENS + 16),
            "extra_args": ["--skip-tokenizer-init", "--chunked-prefill-size", str(PREFILL_TOKENS)],
        }
        config = Config.model_validate(
            {"model": {"path": model}, "engine": engine, "rollout": {"max_response_tokens": max(lengths)}}
        )
        say("starting the engine")
        with running_engine(config, folder) as url:
            async with make_session() as session:
                client = EngineClient(url, session)
                canaries = [Canary(ids, await client.token_logprobs(ids)) for ids in canary_ids()]
                tensors = load_file(model / "model.safetensors")
                yield Stage(client, config, tensors, canaries, lengths, folder)


async def main_async(args: argparse.Namespace) -> dict[str, Any]:
    async with set_up(trace(args.quick)) as stage:
        return await bench(stage, args)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--repeats", type=int, default=2, help="interleaved repeats of every mode")
    parser.add_argument(
        "--quick", action="store_true", help="few, short samples: checks only that the bench runs"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=["saturated", "prefill", *(m.name for m in MODES)],
        help="modes to measure (default: all)",
    )
    parser.add_argument(
        "--cost", nargs="*", choices=list(COSTS), default=list(COSTS), help="costs of a pass (default: both)"
    )
    args = parser.parse_args()
    result = asyncio.run(main_async(args))
    print(json.dumps(result if args.json else result["summary"], indent=2))


if __name__ == "__main__":
    main()
