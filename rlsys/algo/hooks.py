"""Hooks around an optimizer update: factors of the learning rate, averages of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from rlsys.algo.batch import Samples
from rlsys.algo.plugin import Plugin


class Hook(Plugin):
    """Base of the plug-ins that run around an optimizer update."""

    prefix: ClassVar[str] = "average."
    """Prefix of the names of `totals` in a checkpoint."""

    def start(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Run before the first pass of a train step.

        Args:
            parameters: this rank's parameters by name; in the first step of a run, the initial weights.
        """

    def lr_factor(self, samples: Samples, rows: Sequence[int], size: float) -> float:
        """Return the factor by which the learning rate of an optimizer update is multiplied.

        Args:
            samples: the sample table of the step.
            rows: rows of the table that the update trains.
            size: number of samples of the update, including samples with advantage 0 that are not in `rows`.
        """
        return 1.0

    def after_step(self, parameters: Iterable[tuple[str, Tensor]], active_share: float) -> None:
        """Run after each optimizer update.

        Args:
            parameters: this rank's parameters by name.
            active_share: share of the tokens with an advantage that were neither clipped nor rejected.
        """

    def after_version(self, parameters: Iterable[tuple[str, Tensor]], active_share: float) -> None:
        """Run after the last update of a train step, when the parameters are a new weight version.

        Args:
            parameters: this rank's parameters by name.
            active_share: as in `after_step`, over all updates of the step; 1 without updates.
        """

    def average(self) -> dict[str, Tensor]:
        """Return this rank's averaged weights by name; empty if the hook computes none, and before `start`."""
        return {}

    def reference(self) -> dict[str, Tensor]:
        """Return this rank's weights of the reference model by name.

        Empty if the hook does not update them, and before `start`.
        """
        return {}

    def totals(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the hook's state tensors, one for each parameter of this rank, by the parameter's name.

        The checkpoint stores them in the same layout as the weights.
        """
        return {}

    def load_totals(self, totals: dict[str, Tensor]) -> None:
        """Restore the `totals` of a checkpoint."""


class EwmaAnchor(Hook):
    """A bias-corrected exponential average of the weights, as the anchor of stale data (`anchor: ewma`).

    theta_avg(t) = sum_k beta^(t-k) theta(k) / sum_k beta^(t-k) over weight versions k = 0 (the initial weights), 1,
    ..., t, with beta = W / (W + 2) for a staleness window of W versions. The average restarts from the current
    weights if fewer than a share `reset_below` of a step's tokens with an advantage were neither clipped nor
    rejected.
    """

    paper: ClassVar[str] = "Missing old logits: revised PPO-EWMA"
    evidence: ClassVar[str] = "P"
    window: Annotated[int, Field(gt=0)] = 4
    """Staleness window W in versions."""
    reset_below: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Smallest share of active tokens of a step without a restart of the average."""
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
            previous = self._total.get(name)
            current = parameter.detach().to(torch.float32)
            self._total[name] = current.clone() if previous is None else previous.mul_(keep).add_(current)

    def average(self) -> dict[str, Tensor]:
        """Return the averaged weights by name; empty before `start`."""
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
