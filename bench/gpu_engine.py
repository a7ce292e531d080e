"""Parts of the drill that start an engine or a whole run: weight updates, decoding, log-probs of both sides, sleep
and wake, the quickstart, APRIL.
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
CANARIES = [[9 + (7 * i * j) % 100 for j in range(40)] for i in range(1, 5)]
RESPONSES = 16 if CUDA else 4
RESPONSE_TOKENS = 256 if CUDA else 16
CONCURRENCY = (1, 64, 256) if CUDA else (1, 4)
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
    """Return the seconds of one attested weight update, by phase."""
    marks = [time.monotonic()]
    ticket = WeightUpdate(version, await router.begin_push(version), CANARIES)
    marks.append(time.monotonic())
    sums = EngineChecksums(trainer.hf, 1)
    sent_bytes = sync.push(sums.watch(trainer.served_tensors()), ticket)
    marks.append(time.monotonic())
    canaries, digests = trainer.canaries(CANARIES), sums.digests()
    marks.append(time.monotonic())
    metrics = await router.end_push(version, canaries, digests)
    marks.append(time.monotonic())
    names = ("begin_s", "send_s", "canaries_s", "end_s")
    phases = {name: b - a for name, a, b in zip(names, marks, marks[1:], strict=False)}
    return {
        "bytes": sent_bytes, **phases, "hashing_s": sums.seconds, "total_s": marks[-1] - marks[0],
        "gb_per_s": sent_bytes / 1e9 / phases["send_s"], "metrics": {k: v for k, v in metrics.items() if "push" in k},
    }  # fmt: skip


async def _log_probs(trainer: Trainer, client: EngineClient) -> dict[str, Any]:
    """Compare the engine's log-probs of its responses with the trainer's, with and without replayed experts."""

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
    """Measure generated tokens per second at several numbers of concurrent requests."""

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
        await responses(count, 8)  # the first batch of this size compiles
        start = time.perf_counter()
        await responses(count, RESPONSE_TOKENS)
        figures(
            **{f"decode_tokens_per_s_at_{count}": count * RESPONSE_TOKENS / (time.perf_counter() - start)}
        )


async def _sleep_and_wake(client: EngineClient) -> dict[str, float]:
    """Measure the seconds of sleep and wake, and the bytes of device memory that are released."""

    def free() -> int:
        return int(torch.cuda.mem_get_info()[0])

    await client.flush()
    awake, start = free(), time.monotonic()
    await client.release_memory()
    asleep, released = free(), time.monotonic()
    await client.resume_memory("weights")
    weights, with_weights = free(), time.monotonic()
    await client.resume_memory("kv_cache")
    return {
        "release_s": released - start, "released_bytes": asleep - awake,
        "weights_s": with_weights - released, "weights_bytes": asleep - weights,
        "cache_s": time.monotonic() - with_weights, "lost_bytes": awake - free(),
    }  # fmt: skip


def engine_nondeterministic(figures: Figures) -> None:
    """Measure start and decoding without `engine.deterministic`, to compare with the deterministic engine."""
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
    """Run ten steps of the quickstart on this device. Record accuracy, seconds of each phase and lost tokens, and
    each line of metrics.jsonl when it is written."""
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
            raise SystemExit(f"the run ended with exit code {code}")


def april(figures: Figures) -> None:
    """Run bench/april.py: APRIL against synchronous rollouts, with this engine's own cost of decoding."""
    command = [sys.executable, "bench/april.py", "--json", "--repeats", "1", "--cost", "cpu"]
    command += ["--only", "synchronous", "april-2", "saturated", "prefill", *([] if CUDA else ["--quick"])]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if process.returncode:
        raise SystemExit(f"bench/april.py ended with exit code {process.returncode}")
    figures(**json.loads(process.stdout))
