"""A real engine that gets every weight by a push of the smallest buckets there are.

DeepSeek: SGLang joins q_a_proj and kv_a_proj_with_mqa as it loads them, and forgets one whose partner comes in
another call. gpt-oss: it skips names that it does not know without a word, so experts must come stacked. Qwen3-VL:
the engine has no vision tower, so that what is pushed is all that it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.trainer.trainer import Trainer
from rlsys.weights.buckets import split_into_buckets
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.gathered_push import GatheredPush
from tests.helpers import tiny
from tests.helpers import trainer_cases as cases
from tests.helpers.ready_push import begin_push
from tests.helpers.servers import running_engine

pytestmark = pytest.mark.integration

SEQUENCES = [[(7 * i * j + 3 * i) % 96 for j in range(1, 60)] for i in range(1, 5)]


@pytest.fixture(params=["deepseek-v3", "gpt-oss", "qwen3-vl-moe"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    made_of = tiny.TINY[request.param]
    folder = tiny.write(tmp_path / "model", made_of, **made_of.served)
    config = cases.config_of(
        folder, tmp_path / "run", weights={"bucket_mb": 0.001},
        engine={"extra_args": ["--skip-tokenizer-init", "--load-format", "dummy"], "max_total_tokens": 4096},
    )  # fmt: skip
    trainer = Trainer(config)
    yield trainer
    trainer.close()


def test_no_bucket_separates_tensors_that_the_engine_fuses(trainer: Trainer, tmp_path: Path) -> None:
    config = trainer.config
    bucket_sizes = [
        len(bucket)
        for bucket in split_into_buckets(trainer.named_hf_tensors(), int(config.weights.bucket_mb * 2**20))
    ]
    pairs = 4 if trainer.hf.latent is not None else 0
    assert bucket_sizes.count(2) >= pairs
    assert bucket_sizes.count(1) > bucket_sizes.count(2), "nearly every tensor comes alone"

    async def push(url: str) -> tuple[dict[str, float], int]:
        async with make_session() as session:
            client = EngineClient(url, session)
            router = Router(
                [client], vocab_size=96, context_length=256, stop_ids=(), bounds=Bounds.of(config)
            )
            ticket = WeightUpdate(1, await begin_push(router, 1), SEQUENCES)
            checksums, sync = EngineChecksums(trainer.hf, 1), GatheredPush(config)
            await asyncio.to_thread(sync.push, checksums.watch(trainer.named_hf_tensors()), ticket)
            canaries = await asyncio.to_thread(trainer.canaries, SEQUENCES)
            metrics = await router.end_push(1, canaries, checksums.digests())
            return metrics, len((await client.checksums())[0])

    with running_engine(config, tmp_path) as url:
        metrics, tensors = asyncio.run(push(url))
    print(metrics, tensors)
    assert (metrics["push_tensors_equal"], metrics["push_tensors_unknown"]) == (tensors, 0)
    assert metrics["push_canary_mean"] <= 1e-5
