"""Ids of folders with a tokenizer.json are AutoTokenizer's, which reads more than that file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlsys.core.errors import UserError
from rlsys.data import Tokenizer
from rlsys.data.tokenizer_conversion import check_texts

pytestmark = pytest.mark.integration
MODEL = Path(__file__).resolve().parents[2] / "configs/models/quickstart-moe"
ZZ = {
    "content": "zz",
    "special": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
CASES: dict[str, dict[str, Any]] = {
    "an added token of the config": {"added_tokens_decoder": {"106": ZZ}},
    "additional special tokens": {"additional_special_tokens": ["<tool_call>"]},
    "extra special tokens": {"extra_special_tokens": {"image_token": "<image>"}},
    "an eos that the file lacks": {"eos_token": "<|end|>"},
    "an eos that is a plain token": {"eos_token": "e"},
    "another class": {"tokenizer_class": "Qwen2Tokenizer"},
    "Llama's class": {"tokenizer_class": "LlamaTokenizerFast"},
    "no class": {"tokenizer_class": None},
    "templates by name": {
        "chat_template": [
            {"name": "default", "template": "{{ messages[0].content }}"},
            {"name": "tool_use", "template": "T{{ messages[0].content }}"},
        ]
    },
}


def folder_of(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    if "chat_template" in changes:
        (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_ids_are_those_of_autotokenizer(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = folder_of(tmp_path, **changes)
    hf_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    try:
        tokenizer = Tokenizer(folder)
    except UserError as refusal:
        raise AssertionError(str(refusal)) from None
    texts = list(check_texts(["<eos>", "<tool_call>", "<image>", "<|end|>", "zz"]))
    assert [t for t in texts if tokenizer.encode(t) != hf_tokenizer.encode(t, add_special_tokens=False)][
        :3
    ] == []
    assert tokenizer.eos_id == hf_tokenizer.eos_token_id and tokenizer.vocab_size == len(hf_tokenizer)
    chat = [{"role": "user", "content": "1+1="}]
    for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        expected = hf_tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, tools=tools
        )
        assert tokenizer.apply_chat(chat, tools=tools) == expected
