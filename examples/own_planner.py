"""A custom group policy: a prompt without success gets more samples once, and is dropped if they fail too.

    rlsys algo check examples/own_planner.py:SecondChance
    rlsys train examples/own_planner.yaml

The coordinator calls `decide(group)` when every sample of the group has its reward. `group.samples` are the samples,
without their tokens. A policy runs in the rollout process: it must not import torch, and must return at once.
Annotated class attributes are its parameters, which the config sets next to `name`. The ledger keeps `state_dict`
with each decision, and a restart passes it to `load_state_dict`.
"""

from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from rlsys.algo.planners import Accept, AddSamples, Decision, Drop, Planner, rewards_of
from rlsys.core.types import SampleGroup


class SecondChance(Planner):
    """Add samples to a group without success, once; then drop it if it still has none."""

    extra: Annotated[int, Field(gt=0, le=64)] = 4
    """Samples that a group without success gets."""
    _grown: set[int] = PrivateAttr(default_factory=set)
    """Ids of undecided groups that got more samples."""

    def limit(self, size: int) -> int:
        """Return the largest size of a group that starts with `size` samples."""
        return size + self.extra

    def decide(self, group: SampleGroup) -> Decision:
        """Decide about a group whose samples all have their rewards."""
        if any(reward > 0 for reward in rewards_of(group)):
            self._grown.discard(group.group_id)
            return Accept()
        if group.group_id in self._grown:
            self._grown.remove(group.group_id)
            return Drop("no success")
        self._grown.add(group.group_id)
        return AddSamples(self.extra)

    def forget(self, group_id: int) -> None:
        """Forget a group that was dropped undecided, for example because it was too old."""
        self._grown.discard(group_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"grown": sorted(self._grown)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self._grown = set(state["grown"])
