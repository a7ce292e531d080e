"""lm-evaluation-harness scores a task through the front of a real engine, by the command of docs/evaluation.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import openai
import pytest

from rlsys.config import load_config
from tests.helpers.servers import ROOT, running_engine, running_router

pytestmark = pytest.mark.integration

TASK = ROOT / "tests" / "data" / "lm_eval"
MODEL = ROOT / "configs" / "models" / "quickstart-moe"
LM_EVAL = os.environ.get("RLSYS_LM_EVAL") or shutil.which("lm_eval") or ""
"""The harness has an environment of its own, so it is seldom on the path."""


def documented() -> list[str]:
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (lm_eval (?:.*\\\n)*.*)$", text, re.MULTILINE)
    return shlex.split(command.replace("\\\n", " "))


def test_the_documented_command_contains_the_replaced_arguments() -> None:
    assert {"gsm8k", "--apply_chat_template"} <= set(documented())
    assert "model=some/model,base_url=http://127.0.0.1:8000/v1/" in " ".join(documented())


@pytest.mark.skipif(not LM_EVAL, reason="no lm_eval on the path, and RLSYS_LM_EVAL names none")
def test_the_harness_finds_the_accuracy_that_the_front_gives(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (TASK / "sums.jsonl").read_text().splitlines()]
    with (
        running_engine(load_config(Path("quickstart")), tmp_path) as engine,
        running_router(tmp_path, "--engine", engine) as url,
    ):
        words = [
            word.replace("gsm8k", "sums")
            .replace("some/model", str(MODEL))
            .replace("http://127.0.0.1:8000", url)
            for word in documented()[1:]
        ]
        where = ["--include_path", str(TASK), "--output_path", str(tmp_path / "scores")]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HOME": str(tmp_path / "hf")}
        env |= {"OPENAI_API_KEY": "none", "HF_DATASETS_OFFLINE": "1"}
        process = subprocess.run([LM_EVAL, *words, *where], cwd=TASK, env=env, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-3000:]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        right = 0
        for row in rows:
            chat = client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": row["question"]}],
                temperature=0,
                max_tokens=200,
            )
            match = re.search(r"<answer>\s*(-?[0-9]+)", chat.choices[0].message.content or "")
            right += match is not None and match[1] == row["answer"]
    (results,) = (tmp_path / "scores").rglob("results_*.json")
    score = json.loads(results.read_text())["results"]["sums"]["exact_match,answer"]
    assert score == pytest.approx(right / len(rows))
    assert score > 0, "the model guesses a few"
