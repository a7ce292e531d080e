"""An engine in FP8 behind a trainer in bfloat16, and behind one in FP8. Not run on a GPU yet."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
import torch

from megatron_patches import have_transformer_engine
from rlsys.config import Config
from rlsys.config.precision import check_device
from rlsys.core.errors import UserError
from rlsys.core.types import Sample
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.trainer.trainer import Trainer
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.fp8 import quantise_for_engines
from rlsys.weights.gathered_push import GatheredPush
from tests.helpers.servers import running_engine, tiny_moe_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

BLOCKS = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 256, "moe_intermediate_size": 128,
}  # fmt: skip
PROMPT = [1, 4, 20, 40, 21, 40, 22, 30, 23, 5, 6]


@pytest.mark.parametrize("fp8", ["rollout", "both"])
def test_a_push_in_fp8_is_attested_and_its_mismatch_bounded(fp8: str, tmp_path: Path) -> None:
    tiny_moe_model(seed=0, **BLOCKS).save_pretrained(tmp_path / "model")
    config = Config.model_validate(
        {
            "model": {"path": tmp_path / "model", "dtype": "bfloat16", "fp8": fp8},
            "run": {"dir": tmp_path / "run"},
            "engine": {"extra_args": ["--skip-tokenizer-init"], "max_total_tokens": 16384},
            "rollout": {"max_response_tokens": 128},
        }
    )
    try:
        check_device(config, torch.cuda.get_device_capability(), have_transformer_engine())
    except UserError as e:
        pytest.skip(str(e))
    with closing(Trainer(config)) as trainer:
        sequences = [[9 + (7 * i * j) % 100 for j in range(40)] for i in range(1, 5)]

        async def body(url: str) -> tuple[dict[str, float], Sample]:
            async with make_session() as session:
                router = Router(
                    [EngineClient(url, session)], vocab_size=128, context_length=512, stop_ids=(),
                    bounds=Bounds.of(config),
                )  # fmt: skip
                ticket = WeightUpdate(1, await router.begin_push(1), sequences)
                checksums = EngineChecksums(trainer.hf, 1)
                tensors = checksums.watch(quantise_for_engines(config, trainer.named_hf_tensors()))
                GatheredPush(config).push(tensors, ticket)
                metrics = await router.end_push(1, trainer.canaries(sequences), checksums.digests())
                router.resume()
                sample = Sample(1, 1, 0, PROMPT, seed=7)
                return metrics, await router.generate(sample, max_response_tokens=64, temperature=1.0)

        with running_engine(config, tmp_path) as url:
            metrics, sample = asyncio.run(body(url))
        trainer_logprobs = trainer.canaries([[*PROMPT, *sample.response_ids]])[0].logp[len(PROMPT) - 1 :]
        mismatch = sum(abs(a - b) for a, b in zip(trainer_logprobs, sample.mu, strict=True)) / len(sample.mu)
        print(f"model.fp8 = {fp8}: canaries {metrics['push_canary_mean']:.1e}, mismatch_mean {mismatch:.1e}")
        assert 0 < mismatch < Bounds.of(config).mean
