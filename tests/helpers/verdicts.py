"""Verdicts of rewards in this process, and a correct response for each built-in reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from rlsys.config import Config
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer
from rlsys.evaluation.evaluation import score_all
from rlsys.rewards import Rewards, make_scores
from rlsys.rewards.results import parse_reward
from rlsys.worker.assembly import build_scorer
from rlsys.worker.scoring import Verdict

SUM = {"source_dataset": "chain_sum", "difficulty": {}}
ENTRY = {"answer": "7", "metadata": SUM, "step": 7, "steps": 9, "question": "3 + 4"}
REWARDS: list[tuple[Any, str]] = [
    ("exact_answer", "</think><answer>7</answer>"),
    ("answer_and_format", "</think><answer>7</answer>"),
    ("reasoning_gym", "</think><answer>7</answer>"),
    ("reasoning_gym_partial", "</think><answer>7</answer>"),
    ("math", r"\boxed{7}"),
    ("math", "Answer: 7"),
    ("fapo_judge", r"\boxed{7}"),
    ("format", "</think><answer>7</answer>"),
    ({"name": "json_schema", "params": {"schema": {"type": "number"}}}, "no: 3<answer>7</answer>"),
    ({"name": "regex", "params": {"pattern": "7", "full_match": True}}, "7"),
    ({"name": "code"}, "```python\nprint(7)\n```"),
    ("reasoning_answer_consistency", "3+4=7</think><answer>7</answer>"),
]


def agrees(config: Config, ask: Any) -> Any:
    async def judge(text: str) -> str:
        return "yes"

    return judge


class InProcessRewards:
    """The rewards of a config, in this process."""

    def __init__(self, config: Config) -> None:
        (self._score,) = make_scores(config)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async def reward(prompt: Prompt, text: str) -> Any:
            result = cast(Any, self._score)(prompt, text)
            return parse_reward(await result if inspect.isawaitable(result) else result)

        yield reward


def sample_of(ids: list[int], status: Status) -> Sample:
    sample = Sample(0, 0, 0, [1], seed=0, status=status)
    sample.response_ids.extend(ids)
    return sample


def score_response(
    folder: Path,
    reward: Any,
    ids: list[int],
    status: Status,
    tokenizer: Tokenizer | None = None,
    trusted: bool = False,
    **rollout: Any,
) -> Verdict:
    """Return the verdict on a response to a sum whose answer is 7.

    Args:
        folder: Model folder.
        reward: The reward's name or specification.
        ids: The response.
        status: Status of the sample.
        tokenizer: None: the tokenizer of the folder.
        trusted: The tokenizer may run code of the folder.
        rollout: Fields of the config section.
    """
    data = {"reward": reward, "judge": f"{Path(__file__)}:agrees"}
    config = Config.model_validate(
        {"model": {"path": folder, "trust_remote_code": trusted}, "data": data, "rollout": rollout}
    )
    scorer = build_scorer(config, cast(Rewards, InProcessRewards(config)), tokenizer or Tokenizer(folder))
    entry = ENTRY if "code" not in str(reward) else {"answer": [{"input": "", "output": "7"}]}
    prompt = Prompt(0, "3+4=", [1], entry, "3+4=")
    (verdict,) = asyncio.run(score_all([(sample_of(ids, status), prompt)], scorer))
    assert verdict.reason is None
    return verdict
