"""Trainer, engine and push on one CUDA device, in bfloat16: what the CPU tests show, where NCCL, Triton and CUDA IPC
take the place of gloo, plain torch and shared memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlsys.config import Config
from rlsys.core.types import Sample, Status
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.trainer.trainer import Trainer
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.gathered_push import GatheredPush
from tests.helpers import trainer_cases as cases
from tests.helpers.servers import running_engine, write_tiny_moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

PROMPT = [1, 4, 20, 40, 21, 40, 22, 30, 23, 5, 6]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("gpu")
    model = write_tiny_moe(folder / "model", seed=0)
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": "bfloat16"},
            "run": {"dir": folder / "run"},
            "engine": {"extra_args": ["--skip-tokenizer-init"], "max_total_tokens": 16384},
            "rollout": {"max_response_tokens": 128},
        }
    )


@pytest.fixture(scope="module")
def trainer(config: Config) -> Iterator[Trainer]:
    with closing(Trainer(config)) as instance:
        yield instance


def test_log_probs_are_close_to_float32_on_the_cpu(trainer: Trainer, config: Config) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    ids = [9 + (7 * i) % 100 for i in range(60)]
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    logprobs = torch.tensor(trainer.canaries([ids])[0].logp)
    assert (logprobs - expected).abs().mean() < 0.05  # bfloat16 carries 8 bits


def test_a_push_over_cuda_ipc_is_attested_and_serves(
    trainer: Trainer, config: Config, tmp_path: Path
) -> None:
    sequences = [[9 + (7 * i * j) % 100 for j in range(40)] for i in range(1, 5)]

    async def body(url: str) -> Sample:
        async with make_session() as session:
            router = Router(
                [EngineClient(url, session)],
                vocab_size=128,
                context_length=512,
                stop_ids=(),
                bounds=Bounds.of(config),
            )
            engines = await router.begin_push(1)
            ticket = WeightUpdate(1, engines, sequences)
            checksums = EngineChecksums(trainer.hf, 1)
            GatheredPush(config).push(checksums.watch(trainer.named_hf_tensors()), ticket)
            metrics = await router.end_push(1, trainer.canaries(sequences), checksums.digests())
            print({name: value for name, value in metrics.items() if "tensors" in name})
            assert metrics["push_tensors_equal"] > 0  # at least the norms, whatever kernels do with the rest
            router.resume()
            sample = Sample(1, 1, 0, PROMPT, seed=7)
            return await router.generate(sample, max_response_tokens=64, temperature=1.0)

    with running_engine(config, tmp_path) as url:
        sample = asyncio.run(body(url))
    assert sample.status in (Status.FINISHED, Status.TRUNCATED)
    assert sample.versions() == [1] * len(sample.response_ids)
    trainer_logprobs = trainer.canaries([[*PROMPT, *sample.response_ids]])[0].logp[len(PROMPT) - 1 :]
    gaps = [abs(a - b) for a, b in zip(trainer_logprobs, sample.mu, strict=True)]
    assert sum(gaps) / len(gaps) < 0.05


def test_steps_reduce_the_loss_and_a_checkpoint_resumes_training(trainer: Trainer) -> None:
    """Last: it changes the weights. Kernels may add in any order, so the numbers are close, not equal."""
    batch = trainer.passes.pack(cases.samples(vocab_size=128))

    def step() -> float:
        return trainer.update(batch, cases.policy_loss, 1e-3).loss

    losses = [step() for _ in range(3)]
    assert losses[2] < losses[0]
    cases.save(trainer, 3)
    unbroken = step()
    assert trainer.load_checkpoint() == 3
    assert step() == pytest.approx(unbroken, rel=1e-2)
