"""DARS: difficulty adaptive rollout sampling. Imports no torch, because it runs in the rollout process."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from rlsys.algo.planners import Accept, AddSamples, Decision, GroupLimit, Planner, success_rate
from rlsys.core.types import SampleGroup


class Dars(Planner):
    """Add samples to groups of hard prompts, where the first n samples have a share p of successes below 1/2.

    The number of additional samples is ceil((target - n S) / S), up to `largest` samples in total. p = 0 counts as
    0.5 / n.
    - `signal: plain` (advantages without division by the standard deviation): S = 2 p (1 - p), peak = n / 2.
    - `signal: std` (advantages with division): S = 2 sqrt(p (1 - p)), peak = n.
    - `schedule: equal`: target = peak. `schedule: hardness`: target = 2 (1 - p) peak.

    Combine it with `dapo` to drop groups with p = 0 or 1.
    """

    paper: ClassVar[str] = "DARS: difficulty adaptive rollout sampling"
    evidence: ClassVar[str] = "R"
    schedule: Literal["hardness", "equal"] = "hardness"
    """equal: all prompts have the same total signal. hardness: harder prompts have more."""
    signal: Literal["std", "plain"] = "std"
    """Estimator of the advantage. std: divides by the standard deviation. plain: does not."""
    largest: GroupLimit = 32
    """Largest number of samples of a group."""
    correct: float = 0.5
    """A sample is a success if its reward is above this."""
    _stage: dict[str, int] = PrivateAttr(default_factory=dict)

    def limit(self, size: int) -> int:
        return max(size, self.largest)

    def forget(self, group_id: int) -> None:
        self._stage.pop(str(group_id), None)

    def extra(self, p: float, n: int) -> int:
        """Return the number of additional samples for a share `p` of successes among `n` samples."""
        p = p or 0.5 / n
        if p >= 0.5:
            return 0
        if self.signal == "plain":
            signal, peak = 2 * p * (1 - p), n / 2
        else:
            signal, peak = 2 * math.sqrt(p * (1 - p)), float(n)
        target = peak if self.schedule == "equal" else 2 * (1 - p) * peak
        return max(0, min(math.ceil((target - n * signal) / signal - 1e-9), self.largest - n))

    def decide(self, group: SampleGroup) -> Decision:
        key = str(group.group_id)
        if self._stage.pop(key, 0):
            return Accept()
        extra = self.extra(success_rate(group, self.correct), len(group.samples))
        if not extra:
            return Accept()
        self._stage[key] = 1
        return AddSamples(extra)

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self._stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stage = {k: int(v) for k, v in state["stage"].items()}
