"""Compared answers in the real trainer: gradients of transformers, every layout alike, reward models that load."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlsys.algo import build
from rlsys.algo.sft.preferences import Answers
from rlsys.config import Config
from rlsys.convert.layout import to_hf
from rlsys.convert.table import entries
from rlsys.core.errors import UserError
from rlsys.data.quickstart_model import write_model
from rlsys.data.trace import Trace
from rlsys.obs.metrics import read_metrics
from rlsys.trainer import setup
from rlsys.trainer.sft import preference, sft
from rlsys.trainer.sft.sft import sft as run_sft
from tests.helpers import preference_cases as cases
from tests.helpers import trainer_cases

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    trainer_cases.write_model(folder / "model")
    return folder


def log_prob(model: Any, trace: Trace) -> Tensor:
    ids = torch.tensor([[*trace.prompt_ids, *trace.response_ids]])
    logp = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logp[len(trace.prompt_ids) - 1 :].sum()


@pytest.mark.gate
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_loss_and_gradient_are_those_of_transformers_and_autograd(name: str, tmp_path: Path) -> None:
    """With micro-batches too small for a pair. After one step, so that the reference is another model."""
    import transformers

    folder = trainer_cases.write_model(tmp_path / "model", "Qwen3ForCausalLM")
    trainer, loss = cases.start(
        folder, tmp_path / "run", name, trainer={"token_budget": 64, "grad_clip": 1e9}
    )
    traces = cases.traces()
    preference.preference_step(trainer, loss, traces, 1e-3)
    trainer.export_hf(tmp_path / "after")
    metrics = preference.preference_step(trainer, loss, traces, 1e-3)
    parameters = dict(trainer.named_parameters())

    ref, model = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, tmp_path / "after")
    )
    strangers = [Trace(t.prompt_ids, traces[i - 1].response_ids) for i, t in enumerate(traces)]
    logp = torch.stack([log_prob(model, t) for t in traces])
    with torch.no_grad():
        first = torch.stack([log_prob(ref, t) for t in traces])
        drift = torch.stack([log_prob(model, t) - log_prob(ref, t) for t in strangers])
    total = build("preference", name)(
        Answers(
            logp=logp, tokens=torch.tensor([len(t.response_ids) for t in traces]),
            pair=torch.tensor([t.pair for t in traces]), liked=torch.tensor([t.liked for t in traces]),
            margin=torch.zeros(len(traces)), ref=first, drift=drift,
        )
    )  # fmt: skip
    total.backward()
    assert metrics["loss"] == pytest.approx(float(total), abs=1e-6)
    hf_parameters = dict(model.named_parameters())
    for entry in entries(trainer.hf):
        gradient: Any = parameters[entry.megatron.format(e=entry.expert)]
        for key, part in zip(entry.hf, to_hf(entry.rule, gradient.main_grad, trainer.hf), strict=True):
            assert torch.allclose(part, hf_parameters[key].grad, rtol=0, atol=2e-6), key
    trainer.close()


@pytest.mark.gate
def test_a_reward_model_loads_in_transformers_with_the_same_values(workplace: Path, tmp_path: Path) -> None:
    import transformers

    trainer, loss = cases.start(workplace / "model", tmp_path / "run", "reward_model")
    metrics = [preference.preference_step(trainer, loss, cases.traces(), 1e-3) for _ in range(4)]
    trainer.export_hf(tmp_path / "model")
    batch = trainer.passes.pack(
        [preference._sample(t, i, uses_values=True) for i, t in enumerate(cases.traces())]
    )
    values = torch.zeros(len(cases.traces()))
    for micro, scores in zip(batch, trainer.passes.score(batch), strict=True):
        assert scores.values is not None
        values[micro.rows] = micro.per_sequence(scores.values)
    trainer.close()
    assert metrics[0]["loss"] == pytest.approx(
        0.8, abs=0.01
    )  # all values 0: log(1 + exp(margin)), which is 0.2 on average
    assert metrics[-1]["loss"] < metrics[0]["loss"] and metrics[-1]["reward_lead"] > 0
    hf_model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    hf_model.config.pad_token_id = 0
    with torch.no_grad():
        hf_values = [
            float(hf_model(torch.tensor([[*t.prompt_ids, *t.response_ids]])).logits) for t in cases.traces()
        ]
    assert torch.allclose(values, torch.tensor(hf_values), rtol=0, atol=1e-5)


LAYOUTS = ("tp=2", "pp=2", "cp=2", "dp=2", "ep=2")


@pytest.mark.full
def test_every_layout_matches_single_rank_training(workplace: Path, tmp_path: Path) -> None:
    single_steps = functools.cache(lambda name: cases.steps(workplace / "model", tmp_path / name, name))
    expected = {name: single_steps(name) for name in cases.LOSSES}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run([*torchrun, "-m", cases.__name__, str(workplace), *LAYOUTS], check=True, env=env)
    layout_steps = json.loads((workplace / "seen.json").read_text())
    reference_weights = load_file(tmp_path / "reward_model/exported-1/model.safetensors")
    for layout in LAYOUTS:
        for name, steps in expected.items():
            for step, expected_step in zip(layout_steps[f"{layout} {name}"], steps, strict=True):
                assert step == pytest.approx(expected_step, rel=1e-5, abs=1e-6), (layout, name)
        layout_weights = load_file(workplace / f"{layout}-reward_model/exported-2/model.safetensors")
        assert reference_weights.keys() == layout_weights.keys() and "score.weight" in reference_weights
        assert all(
            torch.allclose(reference_weights[key], layout_weights[key], rtol=0, atol=1e-5)
            for key in reference_weights
        )


def config_of(tmp_path: Path, run: str, **sft_section: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": tmp_path / "empty"},
            "run": {"dir": tmp_path / run},
            "trainer": {
                "steps": 4,
                "lr": 1e-3,
                "warmup_steps": 0,
                "checkpoint_every": 2,
                "token_budget": 1024,
            },
            "sft": {"traces": "chain_sum_pairs", "params": {"worked": 4}, **sft_section},
        }
    )


@pytest.mark.gate
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is that of the first session: the folder's weights, not the checkpoint's."""
    write_model(tmp_path / "empty")
    unbroken, broken = (config_of(tmp_path, run, loss={"name": "dpo"}) for run in ("unbroken", "broken"))
    run_sft(unbroken)

    class Killed(Exception): ...

    step: Callable[..., dict[str, object]] = preference.preference_step
    calls = []

    def killed_in_step_4(*args: Any) -> dict[str, object]:
        calls.append(1)
        if len(calls) == 4:
            raise Killed
        return step(*args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(sft, "preference_step", killed_in_step_4)
        run_sft(broken)
    setup.leave_layout()
    run_sft(broken)
    unbroken_steps, broken_steps = (read_metrics(config.run.dir).steps for config in (unbroken, broken))
    assert [s["loss"] for s in unbroken_steps] == [s["loss"] for s in broken_steps]
    assert (
        unbroken_steps[0]["loss"] == pytest.approx(0.6931, abs=1e-4) and unbroken_steps[-1]["reward_lead"] > 0
    )
    weights = [load_file(config.run.dir / "model/model.safetensors") for config in (unbroken, broken)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.gate
def test_traces_that_are_no_pairs_are_one_line(tmp_path: Path) -> None:
    write_model(tmp_path / "empty")
    with pytest.raises(
        UserError, match=r"sft.loss compares two answers to each prompt, .* use sft.traces = pairs"
    ):
        run_sft(config_of(tmp_path, "run", traces="chain_sum", loss={"name": "dpo"}))
    setup.leave_layout()
