"""Hook that periodically moves the reference model towards the policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from rlsys.algo.hooks import Hook


class SyncReference(Hook):
    """Move the reference towards the policy every N train steps: ref <- alpha policy + (1 - alpha) ref.

    A KL to the reference, as a loss term or in the reward, then bounds the drift of recent steps instead of that from
    the initial weights. The reference is another copy of a rank's weights, in float32 in host memory.
    """

    paper: ClassVar[str] = "Trust-region methods for alignment (TR-DPO, arXiv 2404.09656); TRL sync_ref_model"
    evidence: ClassVar[str] = "R"
    prefix: ClassVar[str] = "reference."
    interval: Annotated[int, Field(gt=0)] = 512
    """N, in train steps (TRL counts optimizer updates)."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the policy; 1 makes the reference a copy of it."""
    _reference: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    _steps: int = PrivateAttr(default=0)

    def start(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        if not self._reference:
            self._reference = {name: _on_host(parameter) for name, parameter in parameters}

    def after_version(self, parameters: Iterable[tuple[str, Tensor]], active_share: float) -> None:
        self._steps += 1
        if self._steps % self.interval == 0:
            for name, parameter in parameters:
                self._reference[name].mul_(1 - self.alpha).add_(_on_host(parameter), alpha=self.alpha)

    def reference(self) -> dict[str, Tensor]:
        return self._reference

    def totals(self, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        self.start(parameters)
        return self._reference

    def load_totals(self, totals: dict[str, Tensor]) -> None:
        self._reference = dict(totals)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])


def _on_host(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", torch.float32, copy=True)
