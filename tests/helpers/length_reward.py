"""A reward that decreases with the length of the response, so that an untrained model can learn from it."""

from __future__ import annotations

from collections.abc import Callable

from rlsys.config import Config
from rlsys.core.types import Prompt


def shorter(config: Config) -> Callable[[Prompt, str], float]:
    """Return a reward of 1 minus the relative length of the response, at least 0."""
    max_characters = 8 * config.rollout.max_response_tokens  # roughly 8 characters per token
    return lambda prompt, response: max(0.0, 1 - len(response) / max_characters)
