"""What one train step trains, from the choice of its rows to the denominator of its loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlsys.algo.batch import Samples
from rlsys.algo.reducers import Reduction


@dataclass
class StepPlan:
    """What is trained in one step. Rows are rows of `samples`; the optional fields are set by Objective.finish."""

    samples: Samples  # with the column `counted`
    weight: Tensor  # [N]
    rows: list[int]  # to be packed
    deferred: list[int]  # put off by a selector that defers
    updates: int = 1  # optimizer updates that share the rows
    advantages: Tensor | None = None  # [N]
    reduction: Reduction | None = None

    @property
    def counted(self) -> Tensor:
        """`[N]` bool: not dropped by a `before` selector."""
        return self.samples.column("counted")

    @property
    def denominator(self) -> float:
        """What the step's loss sum is divided by. Raises ValueError before it is known."""
        if self.reduction is None:
            raise ValueError("the denominator is known after Objective.finish")
        return self.reduction.denominator
