"""PuzzleCraft's RAC: whether the answer follows from the reasoning, by a judge that is not shown the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt
from rlsys.evaluation.eval_sets import eval_set_config
from rlsys.rewards import make_score
from rlsys.rewards.workers import RewardError
from tests.helpers.responses import response_of

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
JUDGE = '''
def judge(config, ask):
    """A rule in the place of a model: the last line of the working ends with the answer."""

    async def say(text):
        assert "99" not in text, "the key"
        working = text.partition("Reasoning:\\n")[2].partition("\\n\\nAnswer:\\n")
        last, answer = working[0].splitlines()[-1], working[2].partition("\\n")[0]
        if answer == "?":
            return "who knows"
        return "Yes." if last.endswith("=" + answer) else "**No**, it does not"

    return say
'''
PROMPT = Prompt(0, "", [1], {"answer": "99"}, "3+4-1=")
REWARD = "reasoning_answer_consistency"


def config(judge: str | None) -> Config:
    return Config.model_validate({"model": {"path": MODEL}, "data": {"reward": REWARD, "judge": judge}})


@pytest.fixture
def judge(tmp_path: Path) -> str:
    file = tmp_path / "rule.py"
    file.write_text(JUDGE)
    return f"{file}:judge"


async def test_the_consistency_score_is_1_if_the_answer_follows_the_reasoning(judge: str) -> None:
    score = make_score(config(judge))
    expected = {
        "3+4=7\n7-1=6</think><answer>6</answer><eos>": 1.0,
        "3+4=8\n8-1=7</think><answer>7</answer><eos>": 1.0,  # wrong, and consistent
        "3+4=7\n7-1=6</think><answer>5</answer><eos>": 0.0,
        "</think><answer>6</answer><eos>": 0.0,  # guessed
        "3+4=7\n7-1=6</think>": 0.0,  # never said
        "so 7-1=6 <answer>6</answer><eos>": 1.0,
    }
    assert {text: await score(PROMPT, response_of(text)) for text in expected} == expected
    with pytest.raises(RewardError, match="replied 'who knows'; expected yes or no"):
        await score(PROMPT, response_of("3+4=7</think><answer>?</answer><eos>"))


def test_it_needs_a_judge_of_its_own(judge: str) -> None:
    for name in (None, "engines"):
        with pytest.raises(UserError, match="expected a separate judge"):
            make_score(config(name))
    run = load_config(
        Path("quickstart"),
        [f"eval.sets=[{{name: rac, data: {{reward: {REWARD}, judge: '{judge}'}}}}]"],
    )
    assert callable(make_score(eval_set_config(run, run.eval.sets[0])))
