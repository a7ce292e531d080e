"""A custom reward: a right answer gets 0.5 to 1, more for a shorter response, and a wrong answer 0.

    rlsys train examples/own_reward.yaml

rlsys calls `reward(config)` once in each reward process. The function that it returns gets a prompt and the model's
response, a str with the attribute `finished` (False if it was truncated), and returns a finite number or a dict of
named numbers.
"""

from collections.abc import Callable

from rlsys.config import Config
from rlsys.core.types import Prompt, Response
from rlsys.rewards.answer import final_answer


def reward(config: Config) -> Callable[[Prompt, Response], float]:
    """Return the reward function of a run."""
    longest = config.rollout.max_response_tokens

    def score(prompt: Prompt, response: Response) -> float:
        if final_answer(response) != prompt.entry["answer"]:
            return 0.0
        return 1.0 - 0.5 * min(len(response) / longest, 1.0)  # this model's tokens are single characters

    return score
