"""What happens around an optimizer update: factors of the learning rate, averages of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from rlsys.algo.batch import Samples
from rlsys.algo.plugin import Plugin


class Hook(Plugin):
    """Around an optimizer update."""

    prefix: ClassVar[str] = "average."
    """Before the names of its `totals` in a checkpoint."""

    def start(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Before a train step, with this rank's parameters; in the first of a run they are the initial ones."""

    def lr_factor(self, samples: Samples, rows: Sequence[int], size: float) -> float:
        """Factor of the learning rate of an update on these rows of the table.

        size: the samples that the update stands for, with those of advantage 0, which are not among `rows`.
        """
        return 1.0

    def after_step(self, parameters: Iterable[tuple[str, Tensor]], active_share: float) -> None:
        """After the update. `active_share`: of the policy's tokens that neither clip nor rejection took out."""

    def after_version(self, parameters: Iterable[tuple[str, Tensor]], active_share: float) -> None:
        """After the last update of a train step: the parameters are a weight version now. `active_share` is of all
        updates of the step; 1 if there was none."""

    def average(self) -> dict[str, Tensor]:
        """Averaged weights by name, where the hook keeps such."""
        return {}

    def reference(self) -> dict[str, Tensor]:
        """The reference's weights by name, where the hook moves them; empty before `start`."""
        return {}

    def totals(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors of state, one per parameter of this rank, by its name; the checkpoint keeps them like weights."""
        return {}

    def load_totals(self, totals: dict[str, Tensor]) -> None:
        """Go on from `totals` of an earlier process."""


class EwmaAnchor(Hook):
    """A bias-corrected exponential average of the weights, as the anchor of stale data (`anchor: ewma`).

    theta_avg(t) = sum_k beta^(t-k) theta(k) / sum_k beta^(t-k) over weight versions k = 0 (the initial weights), 1,
    ..., t; beta near W / (W + 2) for a staleness window of W versions. It restarts from the current weights when the
    share of active tokens of a step falls below `reset_below`.
    """

    paper: ClassVar[str] = "Missing old logits: revised PPO-EWMA"
    evidence: ClassVar[str] = "P"
    window: Annotated[int, Field(gt=0)] = 4
    """Staleness window W in versions."""
    reset_below: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Restart when fewer tokens than this share have a gradient."""
    _total: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    _mass: float = PrivateAttr(default=0.0)

    @property
    def beta(self) -> float:
        return self.window / (self.window + 2)

    def start(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        if not self._mass:
            self.after_version(parameters, 1.0)

    def after_version(self, parameters: Iterable[tuple[str, Tensor]], active_share: float) -> None:
        keep = self.beta if active_share >= self.reset_below else 0.0
        self._mass = keep * self._mass + 1.0
        for name, parameter in parameters:
            before = self._total.get(name)
            now = parameter.detach().to(torch.float32)
            self._total[name] = now.clone() if before is None else before.mul_(keep).add_(now)

    def average(self) -> dict[str, Tensor]:
        """The averaged weights by name; empty before `start`."""
        return {name: total / self._mass for name, total in self._total.items()} if self._mass else {}

    def totals(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        for name, parameter in parameters:
            if name not in self._total:
                self._total[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return self._total

    def load_totals(self, totals: dict[str, Tensor]) -> None:
        self._total = dict(totals)

    def state_dict(self) -> dict[str, Any]:
        return {"mass": self._mass}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mass = float(state["mass"])
