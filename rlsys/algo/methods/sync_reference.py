"""Hook that periodically updates the reference model from the policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from rlsys.algo.hooks import Hook


class SyncReference(Hook):
    """Update the weights of the reference model every N train steps: ref <- alpha policy + (1 - alpha) ref.

    A KL penalty then limits the change of the policy over recent steps instead of that since the initial weights. The
    hook holds another copy of a rank's weights, in float32 in host memory.
    """

    paper: ClassVar[str] = "Trust-region methods for alignment (TR-DPO, arXiv 2404.09656); TRL sync_ref_model"
    evidence: ClassVar[str] = "R"
    prefix: ClassVar[str] = "reference."
    interval: Annotated[int, Field(gt=0)] = 512
    """Number N of train steps between updates (TRL counts optimizer updates)."""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Weight of the policy; with 1 the reference becomes a copy of the policy."""
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
    """Return a float32 copy of a parameter in host memory."""
    return parameter.detach().to("cpu", torch.float32, copy=True)
