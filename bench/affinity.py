"""Compare `hardware_affinity` with `prefix_affinity` on two real engines, one of which is slowed down.

    python bench/affinity.py --json [--pairs 5]

One engine sleeps before every forward pass (SGLang's /slow_down). It decodes slowly, but prefills a long prompt
nearly as fast as the other engine, because a prefill is a single pass. The bench sends long prompts with short
responses and short prompts with long responses at the same time, and measures the makespan: the seconds until the
last response has ended. A pair is one measurement with each strategy, in alternating order. Each measurement has a
new router, which first processes one round of such requests to measure the engines' speeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from measure import machine, running_engine, say, write_random_moe

from rlsys.config import Config
from rlsys.core.types import Sample
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.attest import Bounds
from rlsys.router.push import PROBE_SECONDS
from rlsys.router.router import Router

VOCAB, CONTEXT = 128, 2048
LONG, SHORT = (1800, 4), (16, 96)
"""(tokens of the prompt, tokens of the response) of both kinds of requests."""
REQUESTS_PER_KIND = 12
SLEEP = 0.04
"""Seconds of sleep before each pass of the slow engine."""
STRATEGIES = ("prefix_affinity", "hardware_affinity")


def make_requests(rng: random.Random) -> list[tuple[Sample, int]]:
    """Return samples of both kinds in random order, each with its number of response tokens.

    Prompts have random ids, so they share no prefix.
    """
    kinds = [LONG, SHORT] * REQUESTS_PER_KIND
    rng.shuffle(kinds)
    return [
        (Sample(i, i, 0, [rng.randrange(9, VOCAB) for _ in range(prompt)], seed=i + 1), response)
        for i, (prompt, response) in enumerate(kinds)
    ]


async def makespan(router: Router, rng: random.Random) -> tuple[float, list[tuple[Sample, int]]]:
    """Send all requests at the same time. Return the seconds until the last response has ended, and the requests."""
    requests = make_requests(rng)
    start = time.monotonic()
    await asyncio.gather(
        *(router.generate(s, max_response_tokens=tokens, temperature=1.0) for s, tokens in requests)
    )
    return time.monotonic() - start, requests


async def run_strategy(strategy: str, clients: list[EngineClient], slow: str, seed: int) -> dict[str, Any]:
    """Measure one strategy with a new router.

    Args:
        strategy: value of router.strategy.
        clients: the fast and the slow engine.
        slow: URL of the slow engine.
        seed: seed of the requests.

    Returns:
        the makespan in seconds, the share of the requests of each kind that ran on the slow engine, and the
        prefill speed of each engine that the router had measured before.
    """
    router = Router(
        clients, vocab_size=VOCAB, context_length=CONTEXT, stop_ids=(), bounds=Bounds(1.0, 1.0),
        strategy=strategy, skip_attestation=True,
    )  # fmt: skip
    for client in clients:
        await client.flush()  # the other strategy has sent the same prompts
    watch = asyncio.create_task(router.watch())
    try:
        router.resume()
        rng = random.Random(seed)
        await makespan(router, rng)
        await asyncio.sleep(2 * PROBE_SECONDS)  # a probe updates the measured speeds
        speeds = {url: figures["prefill_tokens_per_s"] for url, figures in router.engine_metrics().items()}
        seconds, samples = await makespan(router, rng)
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    shares = {
        name: statistics.fmean(s.engine == slow for s, _ in samples if len(s.prompt_ids) == kind[0])
        for name, kind in (("long", LONG), ("short", SHORT))
    }
    return {
        "seconds": seconds, "long_on_slow": shares["long"], "short_on_slow": shares["short"],
        "prefill_tokens_per_s": [speeds[c.url] for c in clients],
    }  # fmt: skip


async def bench(pairs: int) -> dict[str, Any]:
    """Start both engines, and measure `pairs` pairs. Return the result of the bench."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_random_moe(folder / "model", max_position_embeddings=CONTEXT)
        engine = {
            "max_running_requests": 2 * REQUESTS_PER_KIND, "max_total_tokens": 2 * REQUESTS_PER_KIND * CONTEXT,
            "extra_args": ["--skip-tokenizer-init", "--chunked-prefill-size", str(CONTEXT)],
        }  # fmt: skip
        config = Config.model_validate({"model": {"path": model}, "engine": engine})
        (folder / "fast").mkdir()
        (folder / "slow").mkdir()
        say("starting two engines")
        with running_engine(config, folder / "fast") as fast, running_engine(config, folder / "slow") as slow:
            async with make_session() as session:
                clients = [EngineClient(url, session) for url in (fast, slow)]
                await clients[1].slow_down(SLEEP)
                pairs_figures = [await measure_pair(clients, slow, i) for i in range(pairs)]
    falls = [1 - p["hardware_affinity"]["seconds"] / p["prefix_affinity"]["seconds"] for p in pairs_figures]
    return {
        "bench": "affinity", "machine": machine(), "slept_per_pass": SLEEP, "pairs": pairs_figures, "falls": falls,
        "pairs_with_15_percent": sum(f >= 0.15 for f in falls),
    }  # fmt: skip


async def measure_pair(clients: list[EngineClient], slow: str, number: int) -> dict[str, Any]:
    """Measure both strategies with the same requests, in an order that alternates with `number`."""
    results = {}
    for strategy in STRATEGIES[:: 1 if number % 2 == 0 else -1]:
        figures = await run_strategy(strategy, clients, slow, seed=number)
        say(
            f"pair {number + 1} {strategy}: {figures['seconds']:.2f} s; the slow engine ran "
            f"{figures['long_on_slow']:.0%} of the long and {figures['short_on_slow']:.0%} of the short prompts"
        )
        results[strategy] = figures
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--pairs", type=int, default=5, help="number of pairs (default: 5)")
    args = parser.parse_args()
    result = asyncio.run(bench(args.pairs))
    print(json.dumps(result if args.json else result["falls"], indent=2))


if __name__ == "__main__":
    main()
