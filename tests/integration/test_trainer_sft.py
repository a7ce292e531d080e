"""Fine-tuning on traces with the real trainer, as `rlsys sft` does it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlsys.algo.sft.imitation import CrossEntropy
from rlsys.config import Config
from rlsys.config.trainer import Schedule, TrainerConfig
from rlsys.data.quickstart_model import write_model
from rlsys.data.trace import Trace
from rlsys.obs.metrics import read_metrics
from rlsys.trainer import setup
from rlsys.trainer.sft import sft as sft_module
from rlsys.trainer.sft.sft import sft
from rlsys.trainer.trainer import learning_rate
from tests.helpers import trainer_cases as cases

pytestmark = pytest.mark.integration


def config_of(tmp_path: Path, run: str, lora: dict[str, int] | None = None) -> Config:
    return Config.model_validate(
        {
            "model": {"path": tmp_path / "empty"},
            "run": {"dir": tmp_path / run},
            "trainer": {
                "steps": 4,
                "lr": 4e-3,
                "warmup_steps": 2,
                "checkpoint_every": 2,
                "token_budget": 1024,
                "lora": lora,
            },
            "rollout": {"temperature": 0.5},  # must not matter
            "sft": {"params": {"worked": 8}, "lr_end": 0.5},
        }
    )


def losses(config: Config) -> list[float]:
    return [entry["loss"] for entry in read_metrics(config.run.dir).steps]


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_an_interrupted_warm_start_resumes_bit_for_bit(
    lora: dict[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "empty")
    unbroken = config_of(tmp_path, "unbroken", lora)
    sft(unbroken)

    class Killed(Exception): ...

    def killed_in_step_4(t: TrainerConfig, step: int, schedule: Schedule, end: float) -> float:
        if step == 4:
            raise Killed
        return learning_rate(t, step, schedule, end)

    broken = config_of(tmp_path, "broken", lora)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(sft_module, "learning_rate", killed_in_step_4)
        sft(broken)
    setup.leave_layout()
    sft(broken)

    assert losses(broken) == losses(unbroken)
    assert losses(unbroken)[0] == pytest.approx(math.log(128), abs=0.2)  # random weights guess evenly
    assert losses(unbroken)[-1] < losses(unbroken)[0] - (0.02 if lora else 0.2)
    unbroken_weights, broken_weights, start = (
        load_file(folder / "model.safetensors")
        for folder in (unbroken.run.dir / "model", broken.run.dir / "model", tmp_path / "empty")
    )
    assert unbroken_weights.keys() == broken_weights.keys() == start.keys()
    assert all(torch.equal(unbroken_weights[name], broken_weights[name]) for name in unbroken_weights)
    embedding = "model.embed_tokens.weight"
    assert torch.equal(unbroken_weights[embedding], start[embedding]) == (lora is not None)
    assert (unbroken.run.dir / "adapter/adapter_model.safetensors").is_file() == (lora is not None)
    assert (unbroken.run.dir / "model/tokenizer.json").read_bytes() == (
        tmp_path / "empty/tokenizer.json"
    ).read_bytes()


@pytest.mark.gate
def test_turns_that_are_not_trained_count_in_no_loss(tmp_path: Path) -> None:
    """Packed chats of several turns: loss and gradient are transformers' cross entropy, with labels of -100 on what
    the assistant did not write, as TRL trains with `assistant_only_loss`."""
    import transformers

    folder = cases.write_model(tmp_path / "model", "Qwen3ForCausalLM")
    traces = [
        Trace(
            list(s.prompt_ids),
            [int(t) for t in s.response_ids],
            [i % 5 != k % 5 for i in range(len(s.response_ids))],
        )
        for k, s in enumerate(cases.samples())
        if len(s.response_ids) > 1
    ]
    config = cases.config_of(folder, tmp_path / "run", trainer={"grad_clip": 1e9})
    trainer = sft_module.trainer_for(sft_module.at_temperature_one(config), CrossEntropy())
    metrics = sft_module.imitate(trainer, CrossEntropy(), traces, 1e-30)
    trainer.close()

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, tokens = torch.zeros(()), 0
    for trace in traces:
        ids = torch.tensor([*trace.prompt_ids, *trace.response_ids])
        labels = ids.clone()
        labels[: len(trace.prompt_ids)] = -100
        labels[len(trace.prompt_ids) :][~torch.tensor(trace.trained)] = -100
        logits = model(ids[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
        tokens += int((labels[1:] >= 0).sum())
    (total / tokens).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert metrics["loss"] == pytest.approx(float(total / tokens), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
