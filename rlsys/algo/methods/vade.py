"""VADE: variance-aware dynamic sampling of prompts. Imports no torch, because it runs in the rollout process."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr

from rlsys.algo.prompts import PromptChooser, stream
from rlsys.core.types import SampleGroup

Decay = Annotated[float, Field(gt=0, le=1)]


class Vade(PromptChooser):
    """Thompson sampling of prompts of medium difficulty, with a Beta posterior of each prompt's success rate.

    For each group, the chooser draws p ~ Beta(alpha, beta) for every prompt of the pool, and chooses the prompt with
    the largest p (1 - p)^2 that no unfinished group uses. alpha and beta are 1 plus the decayed numbers of the
    prompt's successes and failures. A finished group multiplies the numbers of its prompt by `visited` before it adds
    its own, and the numbers of all prompts by `all_decay`. Posterior and score are those of the authors' project
    page, which does not state the decays.
    """

    paper: ClassVar[str] = "VADE: variance-aware dynamic sampling"
    evidence: ClassVar[str] = "P"
    pool: Annotated[int, Field(gt=0, le=2**20)] = 1024
    """Number of prompts in the pool, the first ones of the source."""
    visited: Decay = 0.9
    """Factor of a prompt's numbers for each finished group of the prompt."""
    all_decay: Decay = 0.999
    """Factor of all numbers for each finished group."""
    correct: float = 0.5
    """A sample is a success if its reward is above this."""
    seed: int = 0
    """Seed of the draws."""
    _record: dict[int, list[float]] = PrivateAttr(default_factory=dict)
    """Prompt index -> numbers of successes and failures, decayed up to `_time`, and this time."""
    _time: int = PrivateAttr(default=0)
    """Number of finished groups."""
    _running_prompts: dict[int, int] = PrivateAttr(default_factory=dict)
    """Unfinished group -> prompt index."""

    def posterior(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return alpha and beta of every prompt of the pool, `[pool]` each."""
        alpha, beta = np.ones(self.pool), np.ones(self.pool)
        for prompt, (successes, failures, time) in self._record.items():
            decay = self.all_decay ** (self._time - time)
            alpha[prompt] += successes * decay
            beta[prompt] += failures * decay
        return alpha, beta

    def index(self, group_id: int) -> int:
        if group_id in self._running_prompts:
            return self._running_prompts[group_id]
        p = stream("vade", self.seed, group_id).beta(*self.posterior())
        score = p * (1 - p) ** 2
        if len(set(self._running_prompts.values())) < self.pool:
            score[list(self._running_prompts.values())] = -1.0
        self._running_prompts[group_id] = int(score.argmax())
        return self._running_prompts[group_id]

    def forget(self, group_id: int) -> None:
        self._running_prompts.pop(group_id, None)

    def on_rewards(self, group: SampleGroup) -> None:
        self._running_prompts.pop(group.group_id, None)
        if not 0 <= group.prompt_index < self.pool:
            return
        rewards = [s.reward for s in group.samples if s.reward is not None]
        successes = sum(r > self.correct for r in rewards)
        old_successes, old_failures, time = self._record.get(
            group.prompt_index, [0.0, 0.0, float(self._time)]
        )
        decay = self.visited * self.all_decay ** (self._time - time)
        self._time += 1
        self._record[group.prompt_index] = [
            old_successes * decay + successes,
            old_failures * decay + len(rewards) - successes,
            float(self._time),
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "record": {str(k): v for k, v in self._record.items()},
            "time": self._time,
            "under_way": {str(k): v for k, v in self._running_prompts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._record = {int(k): [float(x) for x in v] for k, v in state["record"].items()}
        self._time = int(state["time"])
        self._running_prompts = {int(k): int(v) for k, v in state["under_way"].items()}
