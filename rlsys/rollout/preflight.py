"""Told before anything starts: a plug-in of the rollout process that does not exist."""

from __future__ import annotations

from rlsys.config import Config
from rlsys.data import SOURCES
from rlsys.plugins import resolve
from rlsys.rewards import REWARDS
from rlsys.rewards.judges import find_judge
from rlsys.rollout.generator import GENERATORS


def check_names(config: Config) -> None:
    """Raises UserError, one line, for an unknown name or an import path that leads nowhere; makes none of them."""
    resolve("data.source", config.data.source, SOURCES)
    resolve("data.reward", config.data.reward, REWARDS)
    resolve("rollout.generator", config.rollout.generator, GENERATORS)
    if config.data.judge is not None:
        find_judge(config.data.judge)
