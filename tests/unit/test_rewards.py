"""Rewards: what counts as an answer, which scores are refused, and that slow scoring holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.data import Tokenizer, build_source
from rlsys.data.quickstart_model import write_model
from rlsys.errors import UserError
from rlsys.rewards import build_reward
from rlsys.rewards.answer import final_answer
from rlsys.types import Prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


def reward_of(model: Path, name: str, prompt: Prompt, text: str) -> float:
    config = Config.model_validate({"model": {"path": model}, "data": {"reward": name}})
    return asyncio.run(build_reward(config)(prompt, text))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4-1=3</think><answer>3</answer><eos>", "3"),
        ("<answer>1</answer></think><answer> 2 </answer><eos>", "2"),
        ("<answer></answer><eos>", ""),
        ("</think><answer>3</answer>", None),  # never ended
        ("</think><answer>3<eos>", None),
        ("3</answer><eos>", None),
        ("<answer>3</answer><answer><eos>", None),
        ("<eos>", None),
        ("", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text, "<eos>") == answer


def test_reasoning_gym_verifier_judges_the_answer(model: Path) -> None:
    config = Config.model_validate({"model": {"path": model}})
    prompt = build_source(config, Tokenizer(model)).train(0)
    right = prompt.entry["answer"]
    assert reward_of(model, "reasoning_gym", prompt, f"</think><answer>{right}</answer><eos>") == 1
    assert reward_of(model, "reasoning_gym", prompt, f"</think><answer>{int(right) + 1}</answer><eos>") == 0
    assert reward_of(model, "reasoning_gym", prompt, f"</think><answer>{right}</answer>") == 0
    padded = f"</think><answer>x{right}</answer><eos>"  # contains the answer: part marks
    assert reward_of(model, "reasoning_gym", prompt, padded) == 0
    assert 0 < reward_of(model, "reasoning_gym_partial", prompt, padded) < 1


@pytest.mark.parametrize(
    ("text", "score"), [("<answer>blue</answer><eos>", 1), ("<answer>Blue</answer><eos>", 0), ("blue", 0)]
)
def test_exact_answer(model: Path, text: str, score: float) -> None:
    assert reward_of(model, "exact_answer", Prompt(0, "", [], {"answer": "blue"}), text) == score


def scores_nan(config: Config) -> object:
    return lambda prompt, text: float("nan")


def scores_two(config: Config) -> object:
    return lambda prompt, text: 2


@pytest.mark.parametrize("name", ["scores_nan", "scores_two"])
def test_a_score_outside_zero_and_one_is_refused(model: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"for prompt 5: not in \[0, 1\]"):
        reward_of(model, f"{__name__}:{name}", Prompt(5, "", [], {}), "")


def scores_async(config: Config) -> object:
    async def score(prompt: Prompt, text: str) -> float:
        await asyncio.sleep(0)
        return 0.5

    return score


def test_an_async_reward_by_import_path(model: Path) -> None:
    assert reward_of(model, f"{__name__}:scores_async", Prompt(0, "", [], {}), "") == 0.5


RELEASE = threading.Event()


def scores_when_released(config: Config) -> object:
    def score(prompt: Prompt, text: str) -> float:
        assert RELEASE.wait(20)
        return 1.0

    return score


def test_slow_scoring_does_not_hold_the_event_loop(model: Path) -> None:
    config = Config.model_validate(
        {"model": {"path": model}, "data": {"reward": f"{__name__}:scores_when_released"}}
    )

    async def main() -> float:
        scoring = asyncio.create_task(build_reward(config)(Prompt(0, "", [], {}), ""))
        await asyncio.sleep(0)  # the score starts to wait; this coroutine can still release it
        RELEASE.set()
        return await scoring

    assert asyncio.run(main()) == 1


def test_unknown_reward_is_told_with_the_nearest_name(model: Path) -> None:
    config = Config.model_validate({"model": {"path": model}, "data": {"reward": "reasoning_gim"}})
    with pytest.raises(
        UserError, match=r"data\.reward = 'reasoning_gim': unknown name; did you mean reasoning_gym\?"
    ):
        build_reward(config)


@pytest.mark.parametrize(
    ("working", "verdict"),
    [("4-1=3\n3-7=-4", -1), ("4-1=2\n2-7=-5", 0), ("4-1=3\n3-7=4", 1), ("", 0), ("4-1=3\nwell", 1)],
)
def test_the_rule_judge_names_the_first_wrong_line(working: str, verdict: int) -> None:
    from rlsys.algo.group_rewards import Fapo, flaw
    from rlsys.rewards.judges import build_judge

    async def never(question: str) -> str:
        raise AssertionError("the rule asks nobody")

    config = Config.model_validate({"model": {"path": "x"}, "data": {"judge": "chain_sum"}})
    judge = build_judge(config, never)
    assert judge is not None
    solution = f"{working}</think><answer>-4</answer>"
    asked = Fapo().question.replace("{prompt}", "4-1-7=").replace("{response}", solution)
    assert flaw(asyncio.run(judge(asked))) == verdict  # type: ignore[arg-type]
