"""Every family in a real engine, a random model of a real one's depth and vocabulary in whole runs, and a real
pretrained model from its folder to a trained step. Slow, all but one.

The pretrained model is SmolLM2-135M-Instruct: RLSYS_SMOLLM2 names its Hugging Face folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.config import Config
from rlsys.core.errors import RunError
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.obs.metrics import read_metrics
from rlsys.router.engine_checksums import ChecksumVerifier
from rlsys.trainer.checkpoints.conversion import hf_to_megatron, megatron_to_hf, verify
from rlsys.trainer.trainer import Trainer
from rlsys.weights.checksums import EngineChecksums
from tests.helpers import tiny
from tests.helpers import trainer_cases as cases
from tests.helpers.engine_stack import ENGINE_TENSORS, model, set_model, stack
from tests.helpers.runs import SYNCHRONOUS, train_locally
from tests.helpers.servers import ROOT, running_engine, tiny_moe_model
from tests.helpers.tiny import TINY

pytestmark = pytest.mark.integration

QUICK = "glm-4.5"
"""It differs most from the other tests' model: sigmoid router with a bias, shared experts, a dense layer."""
WIDE = (80, 81)
"""Of models that tests push: two with wider experts."""
SEQUENCES = [[(7 * i * j + 3 * i) % 96 for j in range(1, 60)] for i in range(1, 5)]
DECODED = 24
"""Tokens after each: more than a window of gpt-oss's tiny model."""
GAP = 5e-5
"""Largest gap of a log-prob between any two of engine, trainer and transformers."""


@dataclass(frozen=True)
class Served:
    """What an engine said: log-probs of SEQUENCES, then of the greedy tokens after them, and its checksums."""

    scored: list[list[float]]
    decoded: list[list[int]]
    logps: list[list[float]]
    checksums: list[dict[str, str]]


async def ask(url: str) -> Served:
    async with make_session() as session:
        client = EngineClient(url, session)

        async def decode(i: int) -> tuple[list[int], list[float]]:
            stream = client.generate(
                SEQUENCES[i], rid=f"r{i}-", max_new_tokens=DECODED, temperature=0.0, seed=1, stop_ids=[]
            )
            segments = [segment async for segment in stream]
            ids = [token for segment in segments for token in segment.ids]
            return ids, [logp for segment in segments for logp in segment.mu]

        scored = [await client.token_logprobs(ids) for ids in SEQUENCES]
        decoded = await asyncio.gather(*(decode(i) for i in range(len(SEQUENCES))))
        ids, logps = ([list(each[part]) for each in decoded] for part in (0, 1))
        return Served(scored, ids, logps, await client.checksums())


def transformers_logprobs(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Of each sequence `[tokens - 1, vocabulary]`."""
    model = tiny.load(folder)
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for ids in sequences]


def of_tokens(logps: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return logps.gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize(
    "family", [QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in TINY if f != QUICK)]
)
def test_engine_trainer_and_transformers_agree(family: str, tmp_path: Path) -> None:
    """Log-probs of given tokens, and of tokens that the engine decodes, which are those that transformers finds most
    likely; the engine's tensors have the checksums that we foretell."""
    folder = tiny.write(tmp_path / "model", TINY[family], **TINY[family].served, eos_token_id=None)
    engine = {"extra_args": ["--skip-tokenizer-init"], "max_running_requests": 8, "max_total_tokens": 4096}
    config = cases.config_of(folder, tmp_path / "run", engine=engine)
    with running_engine(config, tmp_path) as url:
        served = asyncio.run(ask(url))
    sequences = [ids + continuation for ids, continuation in zip(SEQUENCES, served.decoded, strict=True)]
    trainer = Trainer(config)
    try:
        trained = [torch.tensor(canary.logp) for canary in trainer.canaries(sequences)]
        checksums = EngineChecksums(trainer.hf, 1)
        for _ in checksums.watch(trainer.named_hf_tensors()):
            pass
    finally:
        trainer.close()
    gaps = {"trainer": 0.0, "engine": 0.0, "decoded": 0.0, "not the most likely": 0.0}
    references = transformers_logprobs(folder, sequences)
    for i, (ids, reference) in enumerate(zip(sequences, references, strict=True)):
        expected = of_tokens(reference, ids[1:])
        engine_logprobs, n = torch.tensor(served.logps[i]), len(SEQUENCES[i]) - 1
        best = reference[n:].max(-1).values
        for name, difference in (
            ("trainer", trained[i] - expected),
            ("engine", torch.tensor(served.scored[i]) - expected[:n]),
            ("decoded", engine_logprobs - expected[n:]),
            ("not the most likely", best - expected[n:]),
        ):
            gaps[name] = max(gaps[name], float(difference.abs().max()))
        assert len(engine_logprobs) == DECODED
    match = ChecksumVerifier().compare("engine", checksums.digests(), served.checksums)
    summary = ", ".join(f"{name} {difference:.1e}" for name, difference in gaps.items())
    print(
        f"{family}: {summary}; {match.equal} of {len(served.checksums[0])} tensors equal, unknown {match.unknown}"
    )
    assert max(gaps.values()) <= GAP
    assert match.equal == len(served.checksums[0]), match


@pytest.mark.slow
def test_a_push_reaches_every_rank_of_an_engine(engine_config: Config, tmp_path: Path) -> None:
    """Each method, to an engine of two tensor-parallel ranks; checksums of both. On a CPU a rank pads its part of an
    expert to 32 units, so the experts are wide enough."""
    for seed in WIDE:
        set_model(seed, tiny_moe_model(seed, moe_intermediate_size=64))
    model(WIDE[0]).save_pretrained(tmp_path / "model")
    changed = {
        "model": {"path": tmp_path / "model"},
        "engine": {"tp": 2, "extra_args": ["--skip-tokenizer-init"]},
    }
    config = merged(engine_config, changed)

    async def all_methods(url: str) -> None:
        for i, method in enumerate(("auto", "broadcast", "disk", "disk_delta")):
            of_method = {"weights": {"method": method}, "run": {"dir": tmp_path / method}}
            async with stack(merged(config, of_method), url) as s:
                _, metrics = await s.push(WIDE[i % 2])
            assert metrics["push_canary_mean"] <= 1e-6
            equal, unknown = metrics["push_tensors_equal"], metrics["push_tensors_unknown"]
            assert (equal, unknown) == (2 * ENGINE_TENSORS, 0), method

    with running_engine(config, tmp_path) as url:
        asyncio.run(all_methods(url))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{"rope_theta": 9000.0}, {"rms_norm_eps": 1e-5}], ids=["rope", "epsilon"])
def test_an_engine_that_computes_another_model_of_the_same_tensors_never_serves(
    wrong: dict[str, float], engine_config: Config, tmp_path: Path
) -> None:
    """Its first push is refused, by canaries alone. Two layers, where such a fault shows least."""
    set_model(WIDE[0], model := tiny_moe_model(WIDE[0]))
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    raw = json.loads(file.read_text())
    raw["rope_parameters"] = {
        **raw["rope_parameters"],
        **{k: v for k, v in wrong.items() if k in raw["rope_parameters"]},
    }
    assert wrong.keys() <= raw.keys() | raw["rope_parameters"].keys()
    raw |= {k: v for k, v in wrong.items() if k in raw}
    file.write_text(json.dumps(raw))
    config = merged(engine_config, {"model": {"path": tmp_path / "model"}})

    async def first_push(url: str) -> None:
        async with stack(config, url) as s:
            with pytest.raises(RunError, match=r"canary log-probs differ from the trainer's"):
                await s.push(WIDE[0])

    with running_engine(config, tmp_path) as url:
        asyncio.run(first_push(url))


def merged(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)


def write_deep(folder: Path) -> Path:
    """Thirty layers and a vocabulary of 50,000, at random; the quickstart's tokenizer with as many tokens."""
    sizes = {"num_hidden_layers": 30, "vocab_size": 50_000, "max_position_embeddings": 512}
    tiny.write(folder, TINY["llama"], **TINY["llama"].served, **sizes, initializer_range=0.1)
    shipped = ROOT / "configs" / "models" / "quickstart-moe"
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(shipped / name, folder / name)
    tokenizer = json.loads((shipped / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"<{i}>": i for i in range(len(words), 50_000)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [(), ("model.dtype=bfloat16",), ("model.dtype=bfloat16", "trainer.lora={rank: 8}")],
    ids=["float32", "bfloat16", "bfloat16-lora"],
)
def test_a_deep_model_with_a_real_vocabulary_trains_with_default_bounds(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """No bound is set by hand; every push is attested, the first one too."""
    run = tmp_path / "run"
    train_locally(
        run, *SYNCHRONOUS, "trainer.steps=2", "parallel.ep=1", "rollout.max_response_tokens=16",
        f"model.path={write_deep(tmp_path / 'model')}", "data.reward=tests.helpers.length_reward:shorter",
        *overrides,
    )  # fmt: skip
    steps = read_metrics(run).steps
    names = ("push_canary_mean", "push_canary_p999", "push_canary_warnings", "mismatch_mean", "time_train")
    print([{name: step.get(name) for name in names} for step in steps])
    assert len(steps) == 2
    for step in steps:
        assert (step["push_tensors_unknown"], step["push_canary_warnings"]) == (0, 0)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    if not (name := os.environ.get("RLSYS_SMOLLM2")):
        pytest.skip("RLSYS_SMOLLM2 is not set: the Hugging Face folder of SmolLM2-135M-Instruct")
    return Path(name)


@pytest.mark.slow
def test_a_pretrained_model_converts_and_returns(smollm2: Path, tmp_path: Path) -> None:
    def quiet(done: int, total: int) -> None: ...

    done = hf_to_megatron(smollm2, tmp_path / "megatron", {"tp": 3, "pp": 5}, quiet)
    assert done.elements == 134_515_008
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", quiet)
    assert verify(smollm2, tmp_path / "hf", quiet).elements == done.elements


@pytest.mark.slow
def test_a_pretrained_model_is_served_and_trained_for_a_step(smollm2: Path, tmp_path: Path) -> None:
    overrides = {
        "run.dir": tmp_path / "run", "model.path": smollm2, "data.source": "reasoning_gym",
        "data.params": "{task: chain_sum}", "data.reward": "tests.helpers.length_reward:shorter",
        "rollout.groups_per_step": 4, "rollout.group_size": 4,
        "rollout.over_provision": 1, "rollout.max_staleness": 0, "rollout.max_response_tokens": 48,
        "trainer.steps": 1, "trainer.lr": 1e-5, "trainer.token_budget": 1024, "eval.prompts": 4,
        "engine.max_running_requests": 16, "engine.max_total_tokens": 8192,
    }  # fmt: skip
    command = [sys.executable, "-m", "rlsys.cli.main", "train", "configs/quickstart.yaml"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    (step,) = read_metrics(tmp_path / "run").steps
    print(
        {
            name: value
            for name, value in step.items()
            if name.startswith(("time_", "push_")) or name == "tokens"
        }
    )
    assert step["effective_groups"] > 0
    assert step["grad_norm"] > 0
    assert step["mismatch_mean"] < 2e-5
    assert (step["push_tensors_equal"], step["push_tensors_unknown"]) == (2 + 30 * 6, 0)
