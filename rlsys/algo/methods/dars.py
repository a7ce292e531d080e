"""DARS: difficulty adaptive rollout sampling. No torch."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr

from rlsys.algo.planners import Accept, AddSamples, Decision, GroupLimit, Planner, success_rate
from rlsys.core.types import SampleGroup


class Dars(Planner):
    """Additional samples for hard prompts, by the accuracy of the first n samples.

    p is the share of successes (0 counts as 0.5 / n); for p >= 1/2 there are no more samples. With S = 2 p (1 - p)
    and peak n/2 ("plain" advantages), or S = 2 sqrt(p (1 - p)) and peak n ("std"), the schedule "equal" adds
    ceil((peak - n S) / S) and "hardness" ceil((2 (1 - p) peak - n S) / S) samples, up to `largest` in total. Combine
    with `dapo` to drop groups of p = 0 and 1.
    """

    paper: ClassVar[str] = "DARS: difficulty adaptive rollout sampling"
    evidence: ClassVar[str] = "R"
    schedule: Literal["hardness", "equal"] = "hardness"
    """equal: the same total signal for all prompts. hardness: more for harder prompts."""
    signal: Literal["std", "plain"] = "std"
    """std: the advantage divides by the standard deviation. plain: it does not."""
    largest: GroupLimit = 32
    """Maximum number of samples of a group."""
    correct: float = 0.5
    """A sample is a success if its reward is above this."""
    _stage: dict[str, int] = PrivateAttr(default_factory=dict)

    def limit(self, size: int) -> int:
        return max(size, self.largest)

    def forget(self, group_id: int) -> None:
        self._stage.pop(str(group_id), None)

    def extra(self, p: float, n: int) -> int:
        """Return the number of additional samples for accuracy `p` of `n` samples."""
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
