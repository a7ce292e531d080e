"""Parts of the drill that start an engine or a whole run (gpu.py).

They measure weight updates, decoding, the log-probs of trainer and engine, sleep and wake, the quickstart and APRIL.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from gpu_figures import Figures
from gpu_node import CUDA, gap, layer_config, need_cuda
from measure import ROOT, running_engine

from rlsys.config import Config
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.trainer.pack import TrainSample
from rlsys.trainer.trainer import Trainer
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.gathered_push import GatheredPush
from tests.helpers.engine_process import engine_arguments

LAYERS = 4 if CUDA else 2
UPDATES = 4
"""Number of updates; the first one includes imports and compilation."""
START_SECONDS = 200.0
"""Time limit of an engine's start."""
CANARIES = [[9 + (7 * i * j) % 100 for j in range(40)] for i in range(1, 5)]
RESPONSES = 16 if CUDA else 4
RESPONSE_TOKENS = 256 if CUDA else 16
CONCURRENCY = (1, 64, 256) if CUDA else (1, 4)
"""Numbers of concurrent requests at which decoding is measured."""
DECODE_PROMPT_TOKENS = 64


def engine(figures: Figures) -> None:
    """Measure one engine: start, attested weight updates by handle, decoding, log-probs, sleep and wake."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = layer_config(
            folder / "run", LAYERS,
            engine={"return_routes": True, "extra_args": ["--skip-tokenizer-init"]},
            trainer={"replay": "engine"}, launch={"release_memory": True},
        )  # fmt: skip
        start = time.monotonic()
        with running_engine(config, folder, START_SECONDS) as url:
            figures(engine_start_s=time.monotonic() - start)
            start = time.monotonic()
            trainer = Trainer(config)
            figures(trainer_built_s=time.monotonic() - start)
            asyncio.run(_use(config, trainer, url, figures))


async def _use(config: Config, trainer: Trainer, url: str, figures: Figures) -> None:
    """Measure UPDATES weight updates, then the other figures of `engine`, on a running engine."""
    async with make_session() as session:
        client = EngineClient(url, session)
        router = Router(
            [client],
            vocab_size=trainer.hf.vocab_size,
            context_length=4096,
            stop_ids=(),
            bounds=Bounds.of(config),
        )
        sync = GatheredPush(config)
        for version in range(1, UPDATES + 1):
            figures(**{f"update_{version}": await _update(version, trainer, router, sync)})
        router.resume()
        figures(log_probs=await _log_probs(trainer, client))
        await _decode(client, figures)
        if CUDA:
            figures(sleep=await _sleep_and_wake(client))


async def _update(version: int, trainer: Trainer, router: Router, sync: GatheredPush) -> dict[str, Any]:
    """Push the trainer's weights as `version`, and attest the engine.

    Returns:
        sent bytes, seconds of each phase, and the router's metrics of the push.
    """
    times = [time.monotonic()]
    update = WeightUpdate(version, await router.begin_push(version), CANARIES)
    times.append(time.monotonic())
    checksums = EngineChecksums(trainer.hf, 1)
    sent_bytes = sync.push(checksums.watch(trainer.served_tensors()), update)
    times.append(time.monotonic())
    canaries, digests = trainer.canaries(CANARIES), checksums.digests()
    times.append(time.monotonic())
    metrics = await router.end_push(version, canaries, digests)
    times.append(time.monotonic())
    names = ("begin_s", "send_s", "canaries_s", "end_s")
    phases = {name: end - begin for name, begin, end in zip(names, times, times[1:], strict=False)}
    return {
        "bytes": sent_bytes, **phases, "hashing_s": checksums.seconds, "total_s": times[-1] - times[0],
        "gb_per_s": sent_bytes / 1e9 / phases["send_s"], "metrics": {k: v for k, v in metrics.items() if "push" in k},
    }  # fmt: skip


async def _log_probs(trainer: Trainer, client: EngineClient) -> dict[str, Any]:
    """Compare the engine's log-probs of its responses with the trainer's.

    Returns:
        number of tokens, and the differences with the engine's experts (`replayed`) and with the trainer's own.
    """

    async def response(i: int) -> Sample:
        sample = Sample(i, i, 0, [1, 4, 20 + i, 40, 21, 30 + i, 5, 6], seed=i)
        stream = client.generate(
            sample.prompt_ids, rid=f"drill-{i}-", max_new_tokens=RESPONSE_TOKENS, temperature=1.0, seed=i,
            stop_ids=[], routes_from=0,
        )  # fmt: skip
        async for segment in stream:
            segment.spans = [VersionSpan(UPDATES, 0, len(segment.ids))]
            sample.append(segment)
        return sample

    samples = await asyncio.gather(*(response(i) for i in range(RESPONSES)))
    batch = trainer.passes.pack([TrainSample.of(sample, sample.sample_id) for sample in samples])
    result: dict[str, Any] = {"tokens": sum(sample.tokens for sample in samples)}
    for name, routing in (("replayed", nullcontext()), ("own_experts", trainer.without_replay())):
        with routing:
            pairs = list(zip(trainer.passes.logprobs(batch), batch, strict=True))
        trainer_logp = torch.cat([logp[micro.keep].cpu() for logp, micro in pairs])
        engine_logp = torch.cat([micro.mu[micro.keep].cpu() for _, micro in pairs])
        result[name] = gap(trainer_logp, engine_logp)
    return result


async def _decode(client: EngineClient, figures: Figures) -> None:
    """Record generated tokens per second at each number of concurrent requests in CONCURRENCY."""

    async def responses(count: int, tokens: int) -> None:
        async def send(i: int) -> None:
            prompt = [9 + (i * j) % 100 for j in range(DECODE_PROMPT_TOKENS)]
            stream = client.generate(
                prompt, rid=f"decode-{count}-{tokens}-{i}-", max_new_tokens=tokens, temperature=1.0, seed=i,
                stop_ids=[],
            )  # fmt: skip
            async for _ in stream:
                pass

        await asyncio.gather(*(send(i) for i in range(count)))

    for count in CONCURRENCY:
        await responses(count, 8)  # compiles the kernels of this batch size
        start = time.perf_counter()
        await responses(count, RESPONSE_TOKENS)
        figures(
            **{f"decode_tokens_per_s_at_{count}": count * RESPONSE_TOKENS / (time.perf_counter() - start)}
        )


async def _sleep_and_wake(client: EngineClient) -> dict[str, float]:
    """Release the engine's memory, then allocate weights and cache again.

    Returns:
        seconds and bytes of device memory of each phase; `lost_bytes` is the free memory before minus the free
        memory after both phases.
    """

    def free_bytes() -> int:
        return int(torch.cuda.mem_get_info()[0])

    await client.flush()
    free_before, start = free_bytes(), time.monotonic()
    await client.release_memory()
    free_released, released_at = free_bytes(), time.monotonic()
    await client.resume_memory("weights")
    free_with_weights, weights_at = free_bytes(), time.monotonic()
    await client.resume_memory("kv_cache")
    return {
        "release_s": released_at - start, "released_bytes": free_released - free_before,
        "weights_s": weights_at - released_at, "weights_bytes": free_released - free_with_weights,
        "cache_s": time.monotonic() - weights_at, "lost_bytes": free_before - free_bytes(),
    }  # fmt: skip


def engine_nondeterministic(figures: Figures) -> None:
    """Measure start and decoding of an engine without `engine.deterministic`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = layer_config(
            folder / "run", LAYERS,
            engine={"return_routes": True, "deterministic": False, "extra_args": ["--skip-tokenizer-init"]},
        )  # fmt: skip
        start = time.monotonic()
        with running_engine(config, folder, START_SECONDS) as url:
            figures(engine_start_s=time.monotonic() - start)

            async def decode() -> None:
                async with make_session() as session:
                    await _decode(EngineClient(url, session), figures)

            asyncio.run(decode())


def fp8_rollout(figures: Figures) -> None:
    """Measure an attested weight update of an engine that computes in FP8, and its decoding."""
    need_cuda()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = layer_config(folder / "run", LAYERS, model={"fp8": "rollout"})
        trainer = Trainer(config)

        async def use(url: str) -> None:
            async with make_session() as session:
                client = EngineClient(url, session)
                router = Router(
                    [client], vocab_size=trainer.hf.vocab_size, context_length=4096, stop_ids=(),
                    bounds=Bounds.of(config),
                )  # fmt: skip
                figures(update=await _update(1, trainer, router, GatheredPush(config)))
                router.resume()
                await _decode(client, figures)

        with running_engine(config, folder, START_SECONDS) as url:
            asyncio.run(use(url))


def quickstart(figures: Figures) -> None:
    """Run ten steps of the quickstart on a GPU, or two on a CPU.

    Records the seconds of the run, and the last 40 lines of metrics.jsonl, every two seconds.

    Raises:
        SystemExit: the run failed.
    """
    steps, config = (10, "configs/quickstart_cuda.yaml") if CUDA else (2, "configs/quickstart.yaml")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        overrides = [f"run.dir={run}", f"trainer.steps={steps}"]
        overrides += [f"engine.extra_args={json.dumps(engine_arguments())}"]
        start = time.monotonic()
        command = [sys.executable, "-m", "rlsys.cli.main", "train", config, *overrides]
        with subprocess.Popen(command, cwd=ROOT) as process:
            code = None
            while code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(2)
                metrics = run / "metrics.jsonl"
                lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
                figures(seconds=time.monotonic() - start, metrics=[json.loads(line) for line in lines[-40:]])
        if code:
            raise SystemExit(f"rlsys train {config} ended with exit code {code}; expected 0")


def april(figures: Figures) -> None:
    """Run bench/april.py, without an additional delay of the engine's passes, and record its result.

    Raises:
        SystemExit: the bench failed.
    """
    command = [sys.executable, "bench/april.py", "--json", "--repeats", "1", "--cost", "cpu"]
    command += ["--only", "synchronous", "april-2", "saturated", "prefill", *([] if CUDA else ["--quick"])]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if process.returncode:
        raise SystemExit(f"bench/april.py ended with exit code {process.returncode}; expected 0")
    figures(**json.loads(process.stdout))
