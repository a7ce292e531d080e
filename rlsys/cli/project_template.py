"""Files that `rlsys new` writes: a starter project for the shipped model, or a config for other data or models."""

from __future__ import annotations

import ast
import json
import os
import random
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError, disk_errors
from rlsys.planner.recommendation import Sections, as_yaml
from rlsys.rewards import find_reward

ROWS = 200
"""Number of rows in the starter project's data."""
_CONFIG = """\
# rlsys try {config}      shows prompts, answers and rewards before anything is trained
# rlsys train {config}
base: quickstart            # a shipped config, which has the defaults of this one
run:
  dir: {run}
# model: {{path: FOLDER}}     # a Hugging Face folder; the shipped model knows hardly more than sums of digits
data:
  source: jsonl
  params: {{path: {data}}}
  reward: {reward}
trainer:
  steps: 10
eval:
  prompts: 16
"""
_REWARD = r'''"""Reward of this run: 1 for a response with the correct answer, else 0."""

import re


def reward(config):
    def score(prompt, text):  # prompt.entry: the row of the data; text: the response, a str;
        # text.finished: whether the model ended it itself
        answer = re.search(r"<answer>\s*(.*?)\s*</answer>", text)
        return float(answer is not None and answer[1] == str(prompt.entry["answer"]))

    return score
'''
_TEST = """\
from pathlib import Path

import pytest

from rlsys.config import load_config
from rlsys.data import Tokenizer, build_source
from rlsys.core.imports import resolve

HERE = Path(__file__).parent
START = HERE / {start}  # paths in the config are relative to this folder


def test_the_right_answer_is_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(START)
    config = load_config(HERE / "config.yaml")
    tokenizer = Tokenizer.of(config)
    prompt = build_source(config, tokenizer).train(0)
    score = resolve("data.reward", f"{{HERE / 'reward.py'}}:reward", {{}})(config)
    right = f"<think></think><answer>{{prompt.entry['answer']}}</answer>"
    assert score(prompt, right) == 1
    assert score(prompt, right.replace("<answer>", "<answer>1")) == 0
"""


_DATA_CONFIG = """\
# rlsys try {config}      shows prompts, answers and rewards before anything is trained
# rlsys train {config}
base: quickstart            # the shipped small model, which knows hardly more than sums of digits
run: {{dir: {run}}}
data: {data}
trainer: {{steps: 10}}
"""
_MODEL_CONFIG = """\
# rlsys explain {config}      shows sizes, memory and time, and tries data and reward
# rlsys train {config}
# The values suit the model and the machine; the comment behind each says why.
run: {{dir: {run}}}
"""
_TABLES = {".jsonl": "jsonl", ".json": "jsonl", ".gz": "jsonl", ".zst": "jsonl", ".parquet": "parquet"}
"""Suffix of a data file -> prompt source."""


def data_section(data: Path | None, reward: str | None, heldout: Path | None = None) -> dict[str, Any]:
    """Return the config section `data` for the options of `rlsys new`.

    Args:
        data: value of --data; None for the default data.
        reward: value of --reward; None for the default reward.
        heldout: value of --heldout; None for one row in eight of `data`.

    Raises:
        UserError: a file does not exist or has an unknown suffix, there is no such reward, or --data is missing.
    """
    reward = reward and _reward_name(reward)
    if data is None:
        section: dict[str, Any] = {"source": "reasoning_gym", "params": {"task": "gsm_symbolic"}}
        if heldout is not None:
            raise UserError(f"--heldout {heldout}: expected together with --data FILE")
        return section | ({"reward": reward} if reward else {})
    params = {"path": str(data)}
    source = _check_table("--data", data)
    if heldout is not None:
        _check_table("--heldout", heldout)
        params["heldout_path"] = str(heldout)
    return {"source": source, "params": params, "reward": reward or "math"}


def _reward_name(name: str) -> str:
    """Return the value of `data.reward` for the value of --reward.

    For a file without the name of a function, this is the file's only public function.

    Raises:
        UserError: there is no such reward, or the file has several public functions or none.
    """
    if name.endswith(".py"):
        try:
            nodes = ast.parse(Path(name).read_bytes(), name).body
        except (OSError, SyntaxError, ValueError) as e:  # ValueError: null bytes
            raise UserError(f"--reward {name}: {' '.join(str(e).split())}") from None
        functions = [n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        public = [function for function in functions if not function.startswith("_")]
        if not public:
            raise UserError(f"--reward {name}: the file defines no public function; expected one")
        if len(public) > 1:
            raise UserError(
                f"--reward {name}: the file defines {', '.join(public)}; expected {name}:FUNCTION"
            )
        name = f"{name}:{public[0]}"
    find_reward(name)
    return name


def _check_table(option: str, file: Path) -> str:
    """Return the prompt source that reads a file.

    Raises:
        UserError: the file does not exist, or no prompt source reads files with its suffix.
    """
    if file.suffix not in _TABLES:
        raise UserError(f"{option} {file}: expected a file that ends in {', '.join(_TABLES)}")
    if not file.is_file():
        raise UserError(f"{option} {file}: no such file")
    return _TABLES[file.suffix]


def write_data_config(folder: Path, data: dict[str, Any]) -> None:
    """Write a new folder with a config that trains the shipped small model on the user's data.

    Args:
        folder: folder to create.
        data: config section `data`.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    config = folder / "config.yaml"
    text = _DATA_CONFIG.format(
        config=shlex.quote(config.as_posix()), run=_yaml_string(f"runs/{folder.name}"),
        data=json.dumps(data, ensure_ascii=False),
    )  # fmt: skip
    _write_folder(folder, {"config.yaml": text})


def write_config(folder: Path, sections: Sections, data: dict[str, Any]) -> Path:
    """Write a new folder with a config for a model.

    Args:
        folder: folder to create.
        sections: other sections of the config, with comments.
        data: config section `data`.

    Returns:
        Path of the config.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    config = folder / "config.yaml"
    text = _MODEL_CONFIG.format(
        config=shlex.quote(config.as_posix()), run=_yaml_string(f"runs/{folder.name}")
    )
    text += f"data: {json.dumps(data, ensure_ascii=False)}\n{as_yaml(sections)}"
    _write_folder(folder, {"config.yaml": text})
    return config


def write_starter(folder: Path) -> list[Path]:
    """Write a starter project into a new folder, and return the paths of its files.

    Raises:
        UserError: the folder exists, cannot be created, or has a name that a config cannot contain.
    """
    name = folder.as_posix()
    if ":" in name or not name.isprintable():
        raise UserError(
            f"{name!r}: expected a name without colons and line breaks, because data.reward contains it in "
            "FILE:FUNCTION"
        )
    texts = {
        "config.yaml": _CONFIG.format(
            config=shlex.quote(f"{name}/config.yaml"),
            run=_yaml_string(f"runs/{folder.name}"),
            data=_yaml_string(f"{name}/data.jsonl"),
            reward=_yaml_string(f"{name}/reward.py:reward"),
        ),
        "data.jsonl": _sums(),
        "reward.py": _REWARD,
        "test_reward.py": _TEST.format(start=_yaml_string(os.path.relpath(Path.cwd(), folder))),
    }
    return _write_folder(folder, texts)


def _write_folder(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write a new folder, and return the paths of its files.

    Args:
        folder: folder to create.
        texts: name of each file -> its content.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    with disk_errors(folder, UserError):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise UserError(f"{folder}: already exists; expected the name of a new folder") from None
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    return [folder / file for file in texts]


def _yaml_string(text: str) -> str:
    """Return the text as a YAML string: every JSON string is one."""
    return json.dumps(text, ensure_ascii=False)


def _sums() -> str:
    """Return JSON lines with sums in the format of the shipped model, such as `4-1-7=`, and their answers.

    Each call returns the same lines.
    """
    rng, rows = random.Random(0), dict[str, str]()
    while len(rows) < ROWS:
        terms = [rng.randint(1, 9) * rng.choice((1, -1)) for _ in range(rng.randint(3, 6))]
        terms[0] = abs(terms[0])
        rows["".join(f"{t:+d}" for t in terms)[1:] + "="] = str(sum(terms))
    return "".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows.items())
