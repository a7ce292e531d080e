"""How tokens are drawn and turns end: a real engine with the shipped model, and the trainer on what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from rlsys.config import Config, load_config
from rlsys.core.types import GroupState, Prompt, SampleGroup, TrainBatch
from rlsys.data import Tokenizer
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.generators.turns import sampling_turns
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.router.router import Router
from rlsys.trainer.step import pack_rows
from rlsys.trainer.trainer import Trainer
from rlsys.worker.assembly import build_router
from tests.helpers.engine_stack import SLOW, wait_until
from tests.helpers.servers import ROOT, running_engine

pytestmark = pytest.mark.integration

QUESTIONS = [f"{a}+{b}+{c}" for a in (3, 17) for b in (4, 28) for c in (5, 9, 31, 77)]
GROUP_SIZE = 4


def config_of(run: Path, *overrides: str) -> Config:
    sizes = ("engine.stream_interval=4", "engine.max_running_requests=32", "engine.max_total_tokens=16384")
    return load_config(ROOT / "configs/quickstart.yaml", [f"run.dir={run}", *sizes, *overrides])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sampling")
    with running_engine(config_of(folder / "run"), folder) as url:
        yield url


@asynccontextmanager
async def routed(config: Config, url: str) -> AsyncIterator[tuple[Router, EngineClient, Tokenizer]]:
    tokenizer = Tokenizer(config.model.path)
    async with make_session() as session:
        client = EngineClient(url, session)
        router = build_router(config, [client], tokenizer, skip_attestation=True)
        watch = asyncio.create_task(router.watch())
        router.resume()
        try:
            yield router, client, tokenizer
        finally:
            watch.cancel()
            await client.slow_down(None)


async def interrupted(
    router: Router, client: EngineClient, config: Config, groups: list[SampleGroup]
) -> None:
    """All samples to their end, over two interrupts."""
    speak = sampling_turns(config, router)
    await client.slow_down(SLOW)
    samples = [s for g in groups for s in g.samples]
    every = asyncio.gather(*(speak(s) for s in samples))
    for tokens in (4, 16):
        await wait_until(lambda n=tokens: max(s.tokens for s in samples) >= n, every)  # type: ignore[misc]
        await router.interrupt()
        router.resume()
    await client.slow_down(None)
    await every
    assert sum(s.resumes for s in samples) >= len(samples) // 2


@pytest.mark.parametrize("cut", [("rollout.top_p=0.9", "rollout.top_k=20"), ("rollout.top_k=5",)])
def test_log_probs_of_a_cut_distribution_are_the_engines(
    cut: tuple[str, ...], url: str, tmp_path: Path
) -> None:
    """From the engine over interrupts, the ledger and the packer to the trainer's softmax: |logp - mu| is rounding.
    Over the whole vocabulary, the same tokens would be off by what was cut."""
    config = config_of(tmp_path, *cut, f"rollout.group_size={GROUP_SIZE}", "rollout.temperature=1.3")
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "run", GROUP_SIZE)
    version = buffer.versions.new(0)

    async def body() -> list[SampleGroup]:
        async with routed(config, url) as (router, client, tokenizer):
            prompts = [
                tokenizer.encode(tokenizer.apply_chat([{"role": "user", "content": q}])) for q in QUESTIONS
            ]
            seeds = range(GROUP_SIZE)
            groups = [buffer.issue(Prompt(i, "", ids, {}), seeds) for i, ids in enumerate(prompts)]
            await interrupted(router, client, config, groups)
            return groups

    groups = asyncio.run(body())
    for group in groups:
        for s in group.samples:
            s.reward = float(s.index % 2)
            for span in s.spans:
                span.version = version
        buffer.finish(group, GroupState.READY)
    buffer.take(1, groups)
    buffer.flush()
    train_batch = TrainBatch(1, version, buffer.read_step(1)[1], {})
    buffer.close()
    samples = [s for g in groups for s in g.samples]
    tokens, support_bytes = sum(s.tokens for s in samples), sum(len(s.support) for s in samples)

    trainer = Trainer(config)
    batch = pack_rows(train_batch, range(len(samples)), trainer)
    gaps = []
    for full_vocabulary in (False, True):
        for micro in batch if full_vocabulary else ():
            micro.support_at = micro.support_ids = None
        scored = zip(batch, trainer.passes.logprobs(batch), strict=True)
        gaps.append(torch.cat([(logp - micro.mu)[micro.keep].abs() for micro, logp in scored]))
    trainer.close()
    difference, off = gaps
    print(
        f"{', '.join(cut)}: |logp - mu| of {tokens} tokens: mean {difference.mean():.1e}, "
        f"p99.9 {difference.quantile(0.999):.1e}, maximum {difference.max():.1e}; "
        f"without the support {off.mean():.1e}; {support_bytes / tokens:.2f} bytes a token"
    )
    assert len(difference) == tokens
    assert difference.mean() <= 1e-6
    assert difference.quantile(0.999) <= 1e-4
    assert off.mean() > 1000 * difference.mean()
