"""Reward functions in the signatures of verl, slime, TRL and verifiers; several of them; what each mark means."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt, Response
from rlsys.data.quickstart_model import write_model
from rlsys.rewards import Rewards, make_scores, short_names
from rlsys.rewards.results import InvalidReward, RewardResult, join_rewards, parse_reward
from rlsys.rewards.signatures import infer_framework
from rlsys.worker.scoring import Scorer, Verdict
from tests.helpers.responses import sample_of

CHAT = [{"role": "user", "content": "1+2="}]
ENTRY = {
    "prompt": CHAT,
    "answer": "3",
    "data_source": "sums",
    "reward_model": {"ground_truth": "3"},
    "extra_info": {"index": 7},
    "label": "3",
    "metadata": {"level": 2},
    "info": {"hard": False},
}
TEXT = "<answer>3</answer><eos>"
IDS = [8, 13, 9, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


# --- functions as their frameworks' users write them ---


def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    assert (data_source, ground_truth, extra_info) == ("sums", "3", {"index": 7})
    assert solution_str == "<answer>3</answer>"
    return {"score": -1.5, "acc": True, "pred": "3", "length": 4}


async def custom_rm(args, sample, **kwargs):  # type: ignore[no-untyped-def]
    assert sample.prompt == CHAT and sample.label == "3" and sample.metadata == {"level": 2}
    assert args.n_samples_per_prompt == 8 and sample.response_length == len(sample.tokens) - 2
    return 2.0 if sample.response == "<answer>3</answer>" else 0.0


async def batched_rm(args, samples):  # type: ignore[no-untyped-def]
    assert args.group_rm
    return [len(sample.response) for sample in samples]


async def keyed_rm(args, sample):  # type: ignore[no-untyped-def]
    return {"acc": 0.25, "other": 9}


def correct(completions, answer, **kwargs):  # type: ignore[no-untyped-def]
    assert kwargs["prompts"] == [CHAT] and kwargs["label"] == ["3"]
    return [
        1.0 if f"<answer>{a}</answer>" in c[0]["content"] else 0.0
        for c, a in zip(completions, answer, strict=True)
    ]


def short(completions: list[Any], completion_ids: list[list[int]]) -> list[float]:
    return [-0.5 * len(ids) for ids in completion_ids]


def not_for_sums(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [None]


def two_for_one(completions, **kwargs):  # type: ignore[no-untyped-def]
    return [1.0, 2.0]


def graded(completion, answer, state):  # type: ignore[no-untyped-def]
    assert state["info"] == {"hard": False}
    return float(completion[-1]["content"] == f"<answer>{answer}</answer>")


def ours(config: Config) -> Any:
    return lambda prompt, text: {"right": 1.0, "brief": 0.25}


def nobodys(a, b, c):  # type: ignore[no-untyped-def]
    return 1.0


def no_factory(prompt):  # type: ignore[no-untyped-def]
    return 1.0


async def verdict(model: Path, *rewards: Any, entry: dict[str, Any] = ENTRY) -> Verdict:
    reward_entries = [r if isinstance(r, dict) else {"name": r} for r in rewards]
    specs = [{**r, "name": f"{Path(__file__)}:{r['name']}"} for r in reward_entries]
    config = Config.model_validate({"model": {"path": model}, "data": {"reward": specs}})
    all_rewards = Rewards(config)
    try:
        scorer = Scorer(all_rewards.open, lambda ids: TEXT, timeout=60)
        return await scorer.score(Prompt(0, "", [1, 2], entry, "1+2="), sample_of(IDS))
    finally:
        await all_rewards.close()


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        ("custom_rm", 2.0),
        ("batched_rm", 18.0),
        ({"name": "keyed_rm", "params": {"reward_key": "acc"}}, 0.25),
    ],
)
async def test_async_rewards_of_others_run_in_the_loop(model: Path, reward: Any, value: float) -> None:
    assert (await verdict(model, reward)).reward == value


def score(model: Path, name: str, entry: dict[str, Any] = ENTRY, **spec: Any) -> Any:
    """Of a plain function, in this process."""
    reward = {"name": f"{__name__}:{name}", **spec}
    config = Config.model_validate({"model": {"path": model}, "data": {"reward": reward}})
    (score_fn,) = make_scores(config)
    return score_fn(Prompt(0, "", [1, 2], entry, "1+2="), Response(TEXT, finished=True, ids=IDS))


def test_plain_rewards_of_others(model: Path) -> None:
    assert score(model, "correct") == 1.0
    assert score(model, "graded") == 1.0
    assert score(model, "not_for_sums") is None
    assert score(model, "short") == -0.5 * len(IDS)
    with pytest.raises(ValueError, match="the function returned 2 rewards for one response"):
        score(model, "two_for_one")
    with pytest.raises(KeyError, match="answer"):  # the scorer says of which row, and what mends it
        scores = make_scores(Config.model_validate(
            {"model": {"path": model}, "data": {"reward": f"{__name__}:compute_score"}}))  # fmt: skip
        scores[0](Prompt(0, "", [], {}, location="mine:4"), Response(TEXT, finished=True, ids=IDS))
    mark = parse_reward(score(model, "compute_score"))
    assert mark == RewardResult(-1.5, right=True, metrics={"acc": 1.0, "length": 4.0})


async def test_several_rewards_are_added_with_their_weights(model: Path) -> None:
    result = await verdict(
        model,
        {"name": "correct", "weight": 2},
        "custom_rm",
        {"name": "short", "weight": 0.1},
        "not_for_sums",
        "ours",
    )
    assert result.parts == {
        "correct": 2.0, "custom_rm": 2.0, "short": pytest.approx(-0.2), "not_for_sums": 0.0,
        "ours.right": 1.0, "ours.brief": 0.25,
    }  # fmt: skip
    assert result.reward == pytest.approx(5.05)
    assert result.right


async def test_a_reward_that_applies_to_no_sample_is_no_zero(model: Path) -> None:
    result = await verdict(model, "not_for_sums")
    assert result.reward is None
    assert result.reason == "reward not_for_sums returned None; expected at least one reward for a sample"


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        (compute_score, "verl"), (custom_rm, "slime"), (batched_rm, "slime"), (correct, "trl"), (short, "trl"),
        (graded, "verifiers"), (ours, "rlsys"), (nobodys, None), (len, "rlsys"), (SimpleNamespace, None),
    ],
)  # fmt: skip
def test_a_signature_is_inferred_from_its_parameter_names(name: Any, signature: str | None) -> None:
    assert infer_framework(name) == signature


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "nobodys"}, "unknown parameters (a, b, c); expected (config), (data_source"),
        ({"name": "no_factory"}, "no_factory(config) returned a float; expected a function score(prompt, text)"),
        ({"name": "ours", "params": {"x": 1}}, "data.reward: got an unexpected keyword argument 'x'"),
    ],
)  # fmt: skip
def test_an_unusable_reward_function_is_an_error(model: Path, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        score(model, **spec)
    assert message in str(caught.value)


def test_marks_by_hand() -> None:
    assert parse_reward(3) == RewardResult(3.0, right=True)
    assert parse_reward(True).reward == 1.0
    assert parse_reward({"score": 1, "acc": 0}).right is False
    assert parse_reward({"a": 1, "b": -2}) == RewardResult(-1.0, {"a": 1.0, "b": -2.0})
    joined = join_rewards(
        ["x", "y"], [1, 0.5], [RewardResult(0.5, right=False), RewardResult(4, metrics={"n": 2})]
    )
    assert joined == RewardResult(2.5, {"x": 0.5, "y": 2.0}, right=False, metrics={"y.n": 2})
    assert join_rewards(["x"], [1], [RewardResult(1, {"a": 1})]) == RewardResult(1, {"a": 1})
    with pytest.raises(InvalidReward, match="x, y returned None"):
        join_rewards(["x", "y"], [1, 1], [None, None])
    assert short_names(["m.a:f", "b.py:f", "math"]) == ["f_1", "f_2", "math"]


def test_a_weight_or_a_signature_that_is_none_is_one_line() -> None:
    from pydantic import ValidationError

    from rlsys.config import explain_error

    for reward, message in (
        ([{"name": "x", "wieght": 2}], "did you mean"),
        ([{"name": "x", "signature": "verll"}], "did you mean verl?"),
        ("", "data.reward.0.name = ''"),
        ([], "data.reward = []"),
    ):
        with pytest.raises(ValidationError) as caught:
            Config.model_validate({"model": {"path": "x"}, "data": {"reward": reward}})
        assert message in explain_error(caught.value, Config)
    valid_rewards: list[Any] = ["x", {"name": "x", "weight": 2.0, "signature": "auto", "params": {}}]
    for reward in valid_rewards:
        dumped = Config.model_validate({"model": {"path": "x"}, "data": {"reward": reward}}).model_dump(
            mode="json"
        )
        assert dumped["data"]["reward"] == [reward]
