"""A custom reward: right answers count, and of two right answers the one with less work counts more.

    rlsys train examples/own_reward.yaml

`reward(config)` makes the function once in each reward process. The function gets a prompt and the model's response,
a str with `finished` (False where it was cut off), and gives a finite number, or a dict of named numbers.
"""

from collections.abc import Callable

from rlsys.config import Config
from rlsys.core.types import Prompt, Response
from rlsys.rewards.answer import final_answer


def reward(config: Config) -> Callable[[Prompt, Response], float]:
    longest = config.rollout.max_response_tokens

    def score(prompt: Prompt, response: Response) -> float:
        if final_answer(response) != prompt.entry["answer"]:
            return 0.0
        return 1.0 - 0.5 * min(len(response) / longest, 1.0)  # this model's tokens are single characters

    return score
