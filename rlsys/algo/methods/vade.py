"""VADE: variance-aware dynamic sampling. No torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr

from rlsys.algo.prompts import PromptChooser, stream
from rlsys.core.types import SampleGroup

Decay = Annotated[float, Field(gt=0, le=1)]


class Vade(PromptChooser):
    """Thompson sampling of prompts of medium difficulty, with a Beta posterior of each prompt's success rate.

    For each group, p ~ Beta(alpha, beta) is drawn for all prompts of the pool, and the prompt with the largest p (1
    - p)^2 that no unfinished group uses is chosen. A finished group decays its prompt's record by `visited`, then
    adds its successes and failures; all records decay by `all_decay` per finished group, towards the prior 1, 1. The
    posterior and the score are those of the authors' project page, which does not state the decays.
    """

    paper: ClassVar[str] = "VADE: variance-aware dynamic sampling"
    evidence: ClassVar[str] = "P"
    pool: Annotated[int, Field(gt=0, le=2**20)] = 1024
    """Number of candidate prompts: the first ones of the source."""
    visited: Decay = 0.9
    """Decay of a prompt's record per finished group of this prompt."""
    all_decay: Decay = 0.999
    """Decay of every record per finished group."""
    correct: float = 0.5
    """A sample is a success when its reward is above this."""
    seed: int = 0
    """Seed of the draws."""
    _record: dict[int, list[float]] = PrivateAttr(default_factory=dict)
    _time: int = PrivateAttr(default=0)
    _under_way: dict[int, int] = PrivateAttr(default_factory=dict)

    def posterior(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return alpha and beta of every prompt of the pool."""
        alpha, beta = np.ones(self.pool), np.ones(self.pool)
        for prompt, (successes, failures, time) in self._record.items():
            fade = self.all_decay ** (self._time - time)
            alpha[prompt] += successes * fade
            beta[prompt] += failures * fade
        return alpha, beta

    def index(self, group_id: int) -> int:
        if group_id in self._under_way:
            return self._under_way[group_id]
        p = stream("vade", self.seed, group_id).beta(*self.posterior())
        score = p * (1 - p) ** 2
        if len(set(self._under_way.values())) < self.pool:
            score[list(self._under_way.values())] = -1.0
        self._under_way[group_id] = int(score.argmax())
        return self._under_way[group_id]

    def forget(self, group_id: int) -> None:
        self._under_way.pop(group_id, None)

    def on_rewards(self, group: SampleGroup) -> None:
        self._under_way.pop(group.group_id, None)
        if not 0 <= group.prompt_index < self.pool:
            return
        rewards = [s.reward for s in group.samples if s.reward is not None]
        successes = sum(r > self.correct for r in rewards)
        previous = self._record.get(group.prompt_index, [0.0, 0.0, float(self._time)])
        fade = self.visited * self.all_decay ** (self._time - previous[2])
        self._time += 1
        self._record[group.prompt_index] = [
            previous[0] * fade + successes,
            previous[1] * fade + len(rewards) - successes,
            float(self._time),
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "record": {str(k): v for k, v in self._record.items()},
            "time": self._time,
            "under_way": {str(k): v for k, v in self._under_way.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._record = {int(k): [float(x) for x in v] for k, v in state["record"].items()}
        self._time = int(state["time"])
        self._under_way = {int(k): int(v) for k, v in state["under_way"].items()}
