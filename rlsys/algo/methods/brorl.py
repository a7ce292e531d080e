"""BroRL's learning rate, which grows with the batch. The planner of BroRL is in brorl_groups.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from rlsys.algo.batch import Samples
from rlsys.algo.hooks import Hook


class BatchScaling(Hook):
    """Multiply the learning rate by sqrt(B / B0) for updates on B samples instead of B0.

    With more samples per prompt, a batch is larger. B includes samples with advantage 0, so it depends only on the
    config.
    """

    paper: ClassVar[str] = "BroRL: broad scaling of rollouts"
    evidence: ClassVar[str] = "P"
    samples: Annotated[int, Field(gt=0)] = 128
    """B0, the number of samples per update for which trainer.lr was chosen."""

    def lr_factor(self, samples: Samples, rows: Sequence[int], size: float) -> float:
        return math.sqrt(size / self.samples)
