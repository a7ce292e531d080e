"""Every family in a whole run of the real stack: rollouts, three train steps, pushes, an export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlsys.obs.metrics import read_metrics
from tests.helpers import published_families, tiny
from tests.helpers.published_tokenizers import CODE_FORMS
from tests.helpers.runs import ROOT, SYNCHRONOUS, checked_ledger, train_locally

pytestmark = [pytest.mark.integration, pytest.mark.slow]

QUICKSTART = ROOT / "configs" / "models" / "quickstart-moe"
DENSE = ("qwen2", "qwen3", "llama")
REPLAYED = ("engine.return_routes=true", "trainer.replay=engine")


def with_tokenizer(folder: Path, family: str) -> Path:
    """A tiny random model that speaks the quickstart's characters."""
    made_of = tiny.TINY[family]
    tiny.write(folder, made_of, **made_of.served, vocab_size=128, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(QUICKSTART / name, folder / name)
    return folder


@pytest.mark.parametrize("family", tiny.TINY)
def test_three_steps_replay_the_engines_experts(family: str, tmp_path: Path) -> None:
    """Where there are experts. Every tensor of the engine is attested after each push; what is not trained comes out
    of it unchanged."""
    folder, run = with_tokenizer(tmp_path / "model", family), tmp_path / "run"
    train_locally(
        run,
        *SYNCHRONOUS,
        *(() if family in DENSE else REPLAYED),
        "parallel.ep=1",
        "trainer.export_every=3",
        f"model.path={folder}",
        "data.reward=tests.helpers.length_reward:shorter",
    )
    steps = read_metrics(run).steps
    metric_names = ("grad_norm", "mismatch_mean", "replay_share")
    print(family, [{name: step.get(name) for name in metric_names} for step in steps])
    assert len(steps) == 3
    for step in steps:
        assert step["push_tensors_unknown"] == 0
        assert family in DENSE or step["replay_share"] == 1
        assert step["mismatch_mean"] < 2e-5
    assert any(step["grad_norm"] > 0 for step in steps)
    checked_ledger(run)
    tensors_before, tensors_after = (
        load_file(path / "model.safetensors") for path in (folder, run / "exports" / "step-000003")
    )
    assert tensors_before.keys() == tensors_after.keys()
    unchanged_names = {
        name for name in tensors_before if torch.equal(tensors_before[name], tensors_after[name])
    }
    tower = {name for name in tensors_before if ".visual." in name}
    assert tower <= unchanged_names
    assert len(unchanged_names - tower) < len(tensors_before) / 4, "the others were trained"
    assert json.loads((run / "exports" / "step-000003" / "config.json").read_text())["architectures"] == [
        tiny.TINY[family].architecture
    ]


PUBLISHED = {
    "qwen3-moe": "grouped heads with norms",
    "deepseek-v3": "latent",
    "gpt-oss": "sinks and windows",
    "qwen3-next": "gated delta net",
}
"""One family for each kind of attention."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_folder_as_published_is_served_as_it_is_trained(family: str, tmp_path: Path) -> None:
    """With the makers' tokenizer, template, stop ids and files: an engine samples, and the trainer's log-probs of the
    same tokens are the engine's."""
    spec, run = published_families.FAMILIES[family], tmp_path / "run"
    folder = published_families.write(tmp_path / "model", spec)
    train_locally(
        run, *SYNCHRONOUS, *REPLAYED, "parallel.ep=1", "trainer.steps=1", "eval.prompts=0", f"model.path={folder}",
        f"model.trust_remote_code={str(spec.form in CODE_FORMS).lower()}", "rollout.max_response_tokens=32",
        "data.reward=tests.helpers.length_reward:shorter",
    )  # fmt: skip
    (step,) = read_metrics(run).steps
    assert step["push_tensors_unknown"] == 0
    assert step["replay_share"] == 1
    assert step["mismatch_mean"] < 2e-5
    checked_ledger(run)
