"""Folders that publish their tokenizer in another form than tokenizer.json."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.data import Tokenizer
from rlsys.obs.metrics import read_metrics
from rlsys.rollout.dry_run import build_inputs
from tests.helpers.published_tokenizers import CODE_FORMS, FORMS, write_kimi
from tests.helpers.runs import RLSYS, ROOT, SYNCHRONOUS, checked_ledger, train_locally
from tests.helpers.stop_families import edit

pytestmark = [pytest.mark.integration]

QUICKSTART = ROOT / "configs" / "models" / "quickstart-moe"
TEXTS = [
    "Solve 17 + 25.\n\nStep 1:  17+25 = 42\n\n<think>hm…</think><answer>42</answer><|im_end|>\n",
    "Ĳsselmeer, Zażółć gęślą jaźń! Ætt Ǆ — “quotes” ‘it’s’ don’t DON'T",
    "量子力学は難しい。量子コンピュータ2024年、3000円です。漢字かな交じり文",
    "Быстрая коричневая лиса; אבגדה، ١٢٣ क्षत्रिय ภาษาไทย 한글",
    "\t\tfor (int i=0;i<100;i++) {\r\n\t\t\tx += i;  // ok\r\n\t\t}\r\n   \n \n  trailing   ",
    "\U0001f469\u200d\U0001f680\U0001f1eb\U0001f1f7 1\ufe0f\u20e3 \x00\x07\ufffd\ufffd e\u0301\u0323",
    "<|im_end <|im_end|>|><|<|im_user|>",
    "0123456789 3.14159265358979 1e-12 0xDEADBEEF 1_000_000 ½ ²",
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_form(folder: Path, form: str, **how: Any) -> Path:
    """The quickstart's model with another tokenizer: rows of tokens that both have are the quickstart's."""
    shutil.copytree(QUICKSTART, folder)
    quickstart_tokenizer = Tokenizer(QUICKSTART)
    size = -(-(write_kimi(folder, **how) if how else FORMS[form](folder)) // 8) * 8
    hf_tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = np.zeros((size, weights[name].shape[1]), np.float32)
        for i in range(quickstart_tokenizer.vocab_size):
            ids = hf_tokenizer.encode(quickstart_tokenizer.decode([i]), add_special_tokens=False)
            rows[ids[-1]] = weights[name][i]
        weights[name] = rows
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {
        "eos_token_id": hf_tokenizer.eos_token_id,
        "bos_token_id": hf_tokenizer.bos_token_id,
        "pad_token_id": None,
    }
    edit(folder / "config.json", vocab_size=size, **ids)
    edit(folder / "generation_config.json", **ids)
    return folder


def config_of(folder: Path) -> Config:
    """With consent to the folder's code."""
    return Config.model_validate({"model": {"path": folder, "trust_remote_code": True}})


def rlsys(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RLSYS, *words], cwd=ROOT, capture_output=True, text=True)


def explain(folder: Path, run: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return rlsys("explain", "configs/quickstart.yaml", f"run.dir={run}", f"model.path={folder}", *overrides)


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_those_of_autotokenizer(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's folder stays as it is, and the second time nothing is converted."""
    folder = write_form(tmp_path / "model", form)
    original_files = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    overrides = ["model.trust_remote_code=true"] if form in CODE_FORMS else []
    process = explain(folder, tmp_path / "run", *overrides)
    assert process.returncode == 0, process.stderr
    assert "NOT CHECKED" not in process.stdout
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == original_files

    def never(*words: object, **how: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(subprocess, "run", never)
    tokenizer = Tokenizer.of(config_of(folder))
    hf_tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for text in TEXTS:
        assert tokenizer.encode(text) == hf_tokenizer.encode(text, add_special_tokens=False), text
    assert (tokenizer.eos_id, tokenizer.eos_token) == (hf_tokenizer.eos_token_id, hf_tokenizer.eos_token)
    chat = [{"role": "user", "content": "1+1="}]
    expected = hf_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat(chat) == expected
    if form == "kimi":
        assert tokenizer.stop_ids == {tokenizer.eos_id, hf_tokenizer.convert_tokens_to_ids("<|im_end|>")}
        assert "<|tool_call_begin|>" in tokenizer.without_special("a<|tool_call_begin|><|im_end|>")
        assert "<|im_end|>" not in tokenizer.without_special("a<|im_end|>")


def test_code_of_a_folder_runs_with_consent_only(tmp_path: Path) -> None:
    folder, ran = write_form(tmp_path / "model", "kimi"), tmp_path / "ran"
    code = folder / "tokenization_ranks.py"
    code.write_text(f"{code.read_text()}\nopen({str(ran)!r}, 'w')\n")
    for command in ("explain", "train"):
        process = rlsys(
            command, "configs/quickstart.yaml", f"run.dir={tmp_path / 'run'}", f"model.path={folder}"
        )
        assert process.returncode == 2
        (line,) = process.stderr.strip().splitlines()
        assert "tokenization_ranks.RankTokenizer" in line and "model.trust_remote_code=true" in line
    assert not ran.exists()


def test_a_tokenizer_that_no_tokenizer_json_equals_is_one_line(tmp_path: Path) -> None:
    folder = write_form(tmp_path / "model", "kimi", normalized="text.lower()")
    process = explain(folder, tmp_path / "run", "model.trust_remote_code=true")
    assert process.returncode == 2
    (line,) = process.stderr.strip().splitlines()
    assert "cannot be converted to tokenizer.json" in line and "AutoTokenizer gives the ids" in line


def test_a_damaged_vocabulary_is_one_line(tmp_path: Path) -> None:
    folder = write_form(tmp_path / "model", "gpt2")
    (folder / "vocab.json").write_text("{")
    with pytest.raises(UserError) as error:
        build_inputs(config_of(folder))
    assert "cannot be converted to tokenizer.json" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["kimi", "gpt2", "llama"])
def test_two_steps_and_an_export_that_loads(form: str, tmp_path: Path) -> None:
    folder, run = write_form(tmp_path / "model", form), tmp_path / "run"
    train_locally(
        run,
        *SYNCHRONOUS,
        "trainer.steps=2",
        "trainer.export_every=2",
        f"model.path={folder}",
        "data.reward=tests.helpers.length_reward:shorter",
        *(["model.trust_remote_code=true"] if form in CODE_FORMS else []),
    )
    assert len(read_metrics(run).steps) == 2
    checked_ledger(run)
    export = run / "exports" / "step-000002"
    source_tokenizer, exported = (
        AutoTokenizer.from_pretrained(f, trust_remote_code=True) for f in (folder, export)
    )
    for text in TEXTS:
        assert exported.encode(text, add_special_tokens=False) == source_tokenizer.encode(
            text, add_special_tokens=False
        )
    assert exported.chat_template == source_tokenizer.chat_template
    assert json.loads((export / "config.json").read_text())["vocab_size"] % 8 == 0


@pytest.mark.slow
def test_a_folder_that_was_converted_both_ways_loads(tmp_path: Path) -> None:
    """Its configuration class is code of the folder, too."""
    folder = write_form(tmp_path / "model", "kimi")
    (folder / "configuration_own.py").write_text(
        "from transformers import Qwen3MoeConfig\n\n\nclass OwnConfig(Qwen3MoeConfig):\n    own = 7\n"
    )
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "plain.jinja").write_text("{{ messages[0].content }}")
    edit(folder / "config.json", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    for words in (
        ("hf-to-megatron", "--hf", folder, "--out", megatron),
        ("megatron-to-hf", "--checkpoint", megatron, "--out", back),
    ):
        process = rlsys("convert", *map(str, words))
        assert process.returncode == 0, process.stderr
    source_tokenizer, back_tokenizer = (
        AutoTokenizer.from_pretrained(f, trust_remote_code=True) for f in (folder, back)
    )
    assert [back_tokenizer.encode(t) for t in TEXTS] == [source_tokenizer.encode(t) for t in TEXTS]
    assert (back / "additional_chat_templates" / "plain.jinja").is_file()
    assert AutoConfig.from_pretrained(back, trust_remote_code=True).own == 7
