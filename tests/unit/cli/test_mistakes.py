"""What a newcomer does, and the one line that it gives, or `starts`. Most rows come from people who know slime, verl
or TRL (the first hour of a user, told in an issue): what was a mistake once and works now stays in the table."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlsys.cli.main import main
from rlsys.config import Config, load_config
from rlsys.convert.hub import pin_models
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt
from rlsys.planner.model_preflight import check_model
from rlsys.rewards import make_scores
from rlsys.rewards.workers import RewardWorkers
from rlsys.rollout.dry_run import dry_run
from rlsys.rollout.preflight import check_names

STARTS = "starts"
CHATS = [[{"role": "user", "content": f"{i}+1="}] for i in range(60)]
FILES: dict[str, str | list[dict[str, Any]]] = {
    "ours.jsonl": [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(60)],
    "slime.jsonl": [{"prompt": c, "label": str(i + 1)} for i, c in enumerate(CHATS)],
    "other.jsonl": [{"question": f"{i}+1=", "solution": str(i + 1)} for i in range(60)],
    "no_answer.jsonl": [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(60)],
    "sft.jsonl": [{"messages": [*c, {"role": "assistant", "content": "2"}]} for c in CHATS],
    "image.jsonl": [{"prompt": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}],
    "broken.jsonl": '{"prompt": "1+1="}\n{"prompt": ',
    "array.jsonl": json.dumps({"prompt": "x"}, indent=1),
    "empty.jsonl": "",
    "long.jsonl": [{"prompt": f"{i}+" * 800, "answer": "1"} for i in range(60)],
    "rewards.py": (
        "import helper_that_is_not_there\n"
    ),
    "typo.py": "def reward(config:\n    return 1\n",
    "mine.py": (
        "def raises(config):\n"
        "    def score(prompt, text):\n"
        "        return 1 / 0\n"
        "    return score\n"
        "def words(config): return lambda prompt, text: 'good'\n"
        "def nothing(config): return lambda prompt, text: None\n"
        "def negative(config): return lambda prompt, text: -3\n"
        "def half(config): return lambda prompt, text: {'right': 2.5, 'brief': -1}\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 2.0\n"
        "async def custom_rm(args, sample, **kwargs): return 1.0\n"
        "def trl(completions, **kwargs): return [0.5 for _ in completions]\n"
        "def any_order(a, b): return 1.0\n"
        "def no_factory(prompt): return 1.0\n"
        "def source(config, tokenizer): return 3\n"
    ),
}  # fmt: skip

OURS = "data={source: jsonl, params: {path: ours.jsonl}, reward: exact_answer}"


def rows_of(path: str, **data: Any) -> str:
    fields = {"source": "jsonl", "params": {"path": path}, "reward": "exact_answer", **data}
    return f"data={json.dumps(fields)}"


def reward(name: str) -> str:
    return rows_of("ours.jsonl", reward=name)


TABLE: list[tuple[str, str]] = [
    # what a slime or verl user's first hour met
    (rows_of("slime.jsonl"), STARTS),
    ("data.input_key=question", "data.input_key: an option of slime; here it is data.keys.prompt"),
    ("data={source: parquet, params: {path: verl.parquet}, reward: 'mine.py:compute_score'}", STARTS),
    (rows_of("verl.parquet"), "verl.parquet: a Parquet file; expected JSON, or data.source = parquet"),
    (
        "model.path=Qwen/Qwen3-4B",
        "model.path = 'Qwen/Qwen3-4B': no such folder, and the cache has no copy; `hf download Qwen/Qwen3-4B`",
    ),
    (reward("mine.py:compute_score"), STARTS),
    (reward("mine.py:custom_rm"), STARTS),
    (reward("mine.py:trl"), STARTS),
    (reward("mine.py:negative"), STARTS),
    (reward("mine.py:half"), STARTS),
    (rows_of("ours.jsonl", reward="math"), STARTS),
    (
        "rollout.top_p=0.9",
        "rollout: top_p = 0.9 needs top_k: the trainer must know which ids an engine kept",
    ),
    ("rollout.stop=['END']", STARTS),
    ("rollout.stop=['</answer>']", STARTS),
    ("data.chat_template_args={enable_thinking: false}", "does not use it; it uses none"),
    (
        "eval.sets=[{name: aime, n: 4}]",
        "eval.sets.0.n: unknown key; known keys: name, data, prompts, samples",
    ),
    ("run.wandb=true", "run.wandb: there is no such field: run.trackers names the trackers of a run"),
    ("rollout.n_samples_per_prompt=8", "an option of slime; here it is rollout.group_size"),
    ("algo.adv_estimator=grpo", "algo.adv_estimator: there is no such field: it is algo.advantage"),
    (
        reward("mine.compute_score"),
        "data.reward = 'mine.compute_score': unknown name; did you mean mine:compute_score?",
    ),
    ("algo.planners=[dapo]", STARTS),
    (
        "model.path=iter_0000010",
        "model.path = iter_0000010: contains no config.json; expected a Hugging Face model folder",
    ),
    # data
    (rows_of("other.jsonl"), "or messages (a chat); did you mean data.keys.prompt=question?"),
    (rows_of("other.jsonl", keys={"prompt": "question", "answer": "solution"}), STARTS),
    (rows_of("other.jsonl", keys={"prompt": "question", "answer": "solutoin"}), "did you mean solution?"),
    (
        rows_of("no_answer.jsonl"),
        "has no answer; its keys: prompt, solution (data.keys.answer=KEY selects another key)",
    ),
    (
        rows_of("sft.jsonl"),
        "sft.jsonl:1: the prompt ends with the assistant's turn; expected a chat that ends with",
    ),
    (rows_of("image.jsonl"), "image.jsonl:1: a message has the part "),
    (rows_of("broken.jsonl"), "broken.jsonl:2: not JSON: Expecting value"),
    (
        rows_of("array.jsonl"),
        "array.jsonl:1: not JSON; the file is one JSON object, expected one a line, or an array",
    ),
    (rows_of("empty.jsonl"), "empty.jsonl: no rows; expected at least one"),
    (
        rows_of("our.jsonl"),
        "our.jsonl: cannot read: No such file or directory; paths are relative to the current",
    ),
    (rows_of("long.jsonl"), "the prompt has "),
    ("data={source: jsonl, reward: exact_answer}", "data.params.path: missing; it has no default"),
    ("data={source: dataset, params: {name: me/sums}}", "no such folder, and the cache has no copy"),
    ("data={source: 'mine.py:source'}", "data.source = 'mine.py:source': AttributeError"),
    ("eval.prompts=60", "different prompts are held out (about one in eight); expected at most"),
    # rewards
    (reward("mine.py"), "data.reward = 'mine.py': unknown name; did you mean mine.py:FUNCTION?"),
    (reward("mine.py:compute_scores"), "data.reward = 'mine.py:compute_scores': mine.py has no function"),
    (reward("rewards.py:f"), "cannot import rewards.py: No module named 'helper_that_is_not_there'"),
    (reward("typo.py:reward"), "cannot import typo.py: SyntaxError: '(' was never closed (typo.py, line 1)"),
    (reward("mine.py:raises"), "reward raised ZeroDivisionError: division by zero (mine.py:3)"),
    (reward("mine.py:words"), "reward words returned 'good'; expected a finite number"),
    (reward("mine.py:nothing"), "reward nothing returned None; expected at least one reward for a sample"),
    (
        reward("mine.py:any_order"),
        "unknown parameters (a, b); expected (config), (data_source",
    ),
    (
        reward("mine.py:no_factory"),
        "no_factory(config) returned a float; expected a function score(prompt, text)",
    ),
    (reward("exact_anwser"), "unknown name; did you mean exact_answer?"),
    (
        "data.reward=[{name: math, wieght: 2}]",
        "data.reward.0.wieght: unknown key; did you mean data.reward.0.weight?",
    ),
    # numbers
    ("rollout.temperature=warm", "rollout.temperature = 'warm': expected a number"),
    ("rollout.max_turns=3", "it is a parameter of the generator: rollout.generator_params={max_turns: 4}"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A newcomer's folder. Rewards score in this process: one of their own takes two seconds to start."""
    for name, content in FILES.items():
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / name).write_text(text)
    (tmp_path / "iter_0000010").mkdir()
    rows = [
        {"data_source": "sums", "prompt": c, "reward_model": {"style": "rule", "ground_truth": str(i + 1)}}
        for i, c in enumerate(CHATS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "verl.parquet")
    monkeypatch.chdir(tmp_path)

    @asynccontextmanager
    async def scores(self: RewardWorkers) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        scorers = make_scores(Config.model_validate_json(self._config))

        async def ask(prompt: Prompt, text: str) -> list[Any]:
            return [score(prompt, text) for score in scorers]

        yield ask

    monkeypatch.setattr(RewardWorkers, "scores", scores)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "told"), TABLE, ids=[f"{i} {given[:60]}" for i, (given, _) in enumerate(TABLE)]
)
def test_a_mistake_is_one_line(folder: Path, given: str, told: str) -> None:
    field = given.partition("=")[0]
    overrides = [given] if field == "data" else [OURS, given]
    try:
        prompts = [] if field.startswith("eval") else ["eval.prompts=2"]
        config = pin_models(load_config(Path("quickstart"), [*prompts, *overrides]))
        check_model(config)
        check_names(config)
        dry_run(config)
        line = STARTS
    except UserError as e:
        line = str(e)
    assert told in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "quickstrat"], "no such file, and no shipped config of this name; did you mean quickstart?"),
        (["train", "."], ".: a folder; expected a YAML file, or one of the shipped configs"),
        (["train", "quickstart", "--n-samples-per-prompt", "8"], "an option of slime; here it is rollout.group_size"),
        (["train", "quickstart", "--trainer.steps", "5"], "expected a field without dashes: trainer.steps=5"),
        (["train", "quickstart", "--trainer.steps=5"], "expected a field without dashes: trainer.steps=5"),
        (["train", "mien/config.yaml"], "did you mean mine/config.yaml?"),
        (["try", "mine"], "mine: a folder; did you mean mine/config.yaml?"),
        (["eval", "mine"], "mine: not a run, or one that has not started; did you mean mine/config.yaml?"),
        (["eval", "runs/x/checkpoints/step-000001"], "a checkpoint; use rlsys eval runs/x --checkpoint runs/x/ch"),
        (["eval", "model"], "model: a model folder, which has no prompts; use rlsys eval CONFIG --checkpoint model"),
        (["train", "tabs.yaml"], "tabs.yaml:2:1: not valid YAML"),
        (["train", "quickstart", "trainer.steps"], "override 'trainer.steps': expected section.field=value"),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    (folder / "tabs.yaml").write_text("trainer:\n\tsteps: 3\n")
    run_folder = folder / "runs" / "x"
    for file in ("mine/config.yaml", "runs/x/config.yaml", "model/config.json"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    (run_folder / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
    (run_folder / "checkpoints" / "step-000001" / "manifest.json").touch()
    try:
        code = main(words)
    except SystemExit as e:  # argparse's own
        code = int(str(e.code))
    (line,) = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("rlsys: note")]
    assert code == 2
    assert line.startswith("rlsys: error: ")
    assert told in line


def test_the_table_has_thirty_mistakes() -> None:
    assert sum(message != STARTS for _, message in TABLE) >= 30
