"""BroRL in the trainer: the learning rate grows with the group; brorl_groups.py has the group size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from rlsys.algo.batch import Samples
from rlsys.algo.hooks import Hook


class BatchScaling(Hook):
    """lr0 sqrt(B / B0) for updates on B samples instead of B0: more samples per prompt make a larger batch.

    B includes samples of advantage 0, so that it depends only on the configuration.
    """

    paper: ClassVar[str] = "BroRL: broad scaling of rollouts"
    evidence: ClassVar[str] = "P"
    samples: Annotated[int, Field(gt=0)] = 128
    """B0, the samples per update that trainer.lr was chosen for."""

    def lr_factor(self, samples: Samples, rows: Sequence[int], size: float) -> float:
        return math.sqrt(size / self.samples)
