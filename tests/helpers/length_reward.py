"""A reward that a model which knows nothing gets some of: the shorter, the more."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.config import Config
from rlsys.core.types import Prompt


def shorter(config: Config) -> Callable[[Prompt, str], float]:
    longest = 8 * config.rollout.max_response_tokens  # characters, roughly
    return lambda prompt, response: max(0.0, 1 - len(response) / longest)
