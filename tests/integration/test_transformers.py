"""transformers in the product's environment, as a user's own script or reward imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[2] / "configs/models/quickstart-moe"
pytestmark = [pytest.mark.integration, pytest.mark.gate]

SCRIPT = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(MODEL)!r})
model = AutoModelForCausalLM.from_pretrained({str(MODEL)!r})
ids = tokenizer("1+2=", return_tensors="pt").input_ids
print(type(model).__name__, model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] - ids.shape[1])
"""


def test_transformers_loads_the_shipped_model_and_generates() -> None:
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-600:]
    assert process.stdout.split()[0] == "Qwen3MoeForCausalLM"
