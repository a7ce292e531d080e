"""Real engines that get adapters alone: what moves, what they then compute, and what they hold under them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.weight_calls import ADAPTER
from rlsys.engine.wire import make_session
from rlsys.planner.layout import lay_out, push_plan
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.trainer.trainer import Trainer
from rlsys.weights.weight_push import WeightPush
from tests.helpers import tiny
from tests.helpers import trainer_cases as cases
from tests.helpers.ready_push import begin_push
from tests.helpers.servers import running_engine

pytestmark = [pytest.mark.integration, pytest.mark.full]

SEQUENCES = [[(7 * i * j + 3 * i) % 96 for j in range(1, 60)] for i in range(1, 5)]


@pytest.fixture(params=["qwen3", "qwen3-moe"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    made_of = tiny.TINY[request.param]
    folder = tiny.write(tmp_path / "model", made_of, **made_of.served)
    config = cases.config_of(
        folder, tmp_path / "run", weights={"method": "adapter"}, trainer={"lora": {"rank": 4, "alpha": 8}},
        engine={"extra_args": ["--skip-tokenizer-init"], "max_total_tokens": 4096},
    )  # fmt: skip
    instance = Trainer(config)
    yield instance
    instance.close()


def test_a_push_moves_the_adapter_and_the_engine_computes_with_it(trainer: Trainer, tmp_path: Path) -> None:
    config = trainer.config
    delivery = WeightPush(trainer, push_plan(config, lay_out(config)))
    numbers = sum(p.numel() for _, p in trainer.named_parameters())

    async def pushes(url: str) -> None:
        async with make_session() as session:
            client = EngineClient(url, session, index=0, adapter=ADAPTER)
            router = Router(
                [client], vocab_size=96, context_length=256, stop_ids=(), bounds=Bounds.of(config)
            )
            logprobs = []
            for version in (1, 2, 3):
                engines = await begin_push(router, version)
                if version == 3:
                    engines[0].holds = -1  # as if an earlier push had failed half-way
                result = await asyncio.to_thread(delivery.push, WeightUpdate(version, engines, SEQUENCES))
                canaries = await asyncio.to_thread(trainer.canaries, SEQUENCES)
                metrics = await router.end_push(version, canaries, result.digests, result.excluded)
                checksums = (await client.checksums())[0]
                print(version, metrics, len(checksums), delivery.sent_bytes)
                assert (metrics["push_tensors_equal"], metrics["push_tensors_unknown"]) == (len(checksums), 0)
                assert metrics["push_canary_mean"] <= 1e-5
                assert delivery.sent_bytes == 4 * numbers
                logprobs.append(await client.token_logprobs(SEQUENCES[0]))
                cases.randomize_adapters(trainer)
            assert max(abs(a - b) for a, b in zip(logprobs[0], logprobs[1], strict=True)) > 0.1, (
                "another adapter"
            )
            assert logprobs[1] == pytest.approx(logprobs[2], abs=1e-6)

    with running_engine(config, tmp_path) as url:
        asyncio.run(pushes(url))
