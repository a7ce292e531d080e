"""Process that runs plain reward functions: `python -m rlsys.rewards.worker`, started by RewardWorkers.

The first message is the config; each later message has a prompt and a response.
"""

from __future__ import annotations

import pickle
import resource
from collections.abc import Callable
from typing import Any

from rlsys.config import Config
from rlsys.core.process_pool import serve
from rlsys.rewards import make_scores
from rlsys.rewards.signatures import is_async
from rlsys.rewards.workers import location_and_row


def prepare(message: bytes) -> Callable[[bytes], list[Any]]:
    """Limit the memory of the process, and create the plain reward functions.

    Args:
        message: the config as JSON.

    Returns:
        Handler of the later messages, which returns the value of each plain function, in their order in data.reward.
    """
    config = Config.model_validate_json(message)
    limit = round(config.data.reward_memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    scores = [score for score in make_scores(config) if not is_async(score)]

    def answer(message: bytes) -> list[Any]:
        prompt, response = pickle.loads(message)
        return [score(prompt, response) for score in scores]

    return answer


if __name__ == "__main__":
    serve(prepare, location_and_row)
