"""Makespan of mixed requests on two real engines, one slowed down: placement by measured speed against prefixes.

    python bench/affinity.py --json [--pairs 5]

One engine sleeps before every forward pass (SGLang's /slow_down). It decodes slowly, but prefills a long prompt
nearly as fast as the other engine, because a prefill is a single pass. The work is long prompts with short responses
and short prompts with long responses, all at once. A pair is this work under prefix_affinity and under
hardware_affinity, in alternating order; each has a separate router that has processed one round of such work before.
The makespan is the time until the last response has ended, in seconds.
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
"""Tokens of a prompt, and of its response, for both kinds of requests."""
EACH = 12
SLEEP = 0.04
STRATEGIES = ("prefix_affinity", "hardware_affinity")


def work(rng: random.Random) -> list[tuple[Sample, int]]:
    """Return EACH requests of both kinds, mixed, with their longest responses; no two prompts share a prefix."""
    kinds = [LONG, SHORT] * EACH
    rng.shuffle(kinds)
    return [
        (Sample(i, i, 0, [rng.randrange(9, VOCAB) for _ in range(prompt)], seed=i + 1), response)
        for i, (prompt, response) in enumerate(kinds)
    ]


async def makespan(router: Router, rng: random.Random) -> tuple[float, list[tuple[Sample, int]]]:
    """Return the seconds until the last response has ended, and the samples."""
    requests, start = work(rng), time.monotonic()
    await asyncio.gather(
        *(router.generate(s, max_response_tokens=tokens, temperature=1.0) for s, tokens in requests)
    )
    return time.monotonic() - start, requests


async def run_strategy(strategy: str, clients: list[EngineClient], slow: str, seed: int) -> dict[str, Any]:
    router = Router(
        clients, vocab_size=VOCAB, context_length=CONTEXT, stop_ids=(), bounds=Bounds(1.0, 1.0),
        strategy=strategy, skip_attestation=True,
    )  # fmt: skip
    for client in clients:
        await client.flush()  # the other strategy has had the same prompts
    watch = asyncio.create_task(router.watch())
    try:
        router.resume()
        rng = random.Random(seed)
        await makespan(router, rng)
        await asyncio.sleep(2 * PROBE_SECONDS)  # what it has seen is settled with a probe
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_random_moe(folder / "model", max_position_embeddings=CONTEXT)
        engine = {
            "max_running_requests": 2 * EACH, "max_total_tokens": 2 * EACH * CONTEXT,
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
                pairs_figures = [await pair(clients, slow, i) for i in range(pairs)]
    falls = [1 - p["hardware_affinity"]["seconds"] / p["prefix_affinity"]["seconds"] for p in pairs_figures]
    return {
        "bench": "affinity", "machine": machine(), "slept_per_pass": SLEEP, "pairs": pairs_figures, "falls": falls,
        "pairs_with_15_percent": sum(f >= 0.15 for f in falls),
    }  # fmt: skip


async def pair(clients: list[EngineClient], slow: str, i: int) -> dict[str, Any]:
    results = {}
    for strategy in STRATEGIES[:: 1 if i % 2 == 0 else -1]:
        results[strategy] = await run_strategy(strategy, clients, slow, i)
        f = results[strategy]
        say(
            f"pair {i + 1} {strategy}: {f['seconds']:.2f} s, on the slow engine {f['long_on_slow']:.0%} of the long "
            f"prompts and {f['short_on_slow']:.0%} of the short ones"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    result = asyncio.run(bench(args.pairs))
    print(json.dumps(result if args.json else result["falls"], indent=2))


if __name__ == "__main__":
    main()
