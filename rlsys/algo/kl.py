"""KL from a reference model: estimators, the loss term, and a variant whose weight adapts to a target."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from rlsys.algo.losses import LOG_RATIO_LIMIT, Figures, Loss, View

KlKind = Literal["k1", "k2", "k3"]
KL_KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3")
K3_CAP = 10.0
"""The largest k3 of a token: without a bound, one token 20 nats from the reference has 4.9e8."""


def kl_estimate(logp: Tensor, ref: Tensor, kind: str, cap: float | None = K3_CAP) -> Tensor:
    """Estimate KL(policy || ref) on the policy's own samples; Schulman, "Approximating KL divergence".

    k1 = logp - ref; k2 = (logp - ref)^2 / 2; k3 = exp(ref - logp) - 1 - (ref - logp), at most `cap`. Unbiased (k2:
    nearly; k3: except for the cap).
    """
    gap = (logp - ref).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return gap
    if kind == "k2":
        return gap**2 / 2
    k3 = (-gap).exp() - 1 + gap
    return k3 if cap is None else k3.clamp(max=cap)


class Kl(Loss):
    """beta times an estimate of KL(policy || reference).

    The gradient of an estimate does not estimate the gradient of KL: k1's gradient is zero on average, k3's is that
    of the reverse KL, and only k2's is correct, on the policy's own samples. `gradient` selects a remedy. `ratio`
    multiplies the estimate by exp(logp - mu) and differentiates the product: correct for k1 and k3 on samples of any
    policy, including stale tokens (DeepSeek-V3.2; slime and TRL take the ratio to their old policy, which equals mu
    unless they recompute log-probs). `k2` has the value of the estimate and the gradient of k2 (verl: `k3+`).
    """

    paper: ClassVar[str] = "Schulman, Approximating KL divergence; GRPO eq. 4; DeepSeek-V3.2"
    evidence: ClassVar[str] = "R"
    policy: ClassVar[bool] = False
    ratio: ClassVar[bool] = False
    beta: Annotated[float, Field(ge=0)] = 1e-3
    """Weight."""
    kind: KlKind = "k3"
    """Estimator."""
    gradient: Literal["estimate", "ratio", "k2"] = "estimate"
    """Differentiated quantity: the estimate, the estimate times exp(logp - mu), or k2."""
    cap: Annotated[float, Field(gt=0)] | None = K3_CAP
    """Largest k3 of a token, after the ratio; above it there is no gradient. verl, slime, NeMo-RL: 10. null: none."""

    @model_validator(mode="after")
    def _ratio_of_an_estimate(self) -> Self:
        if self.kind == "k2" and self.gradient == "ratio":
            raise ValueError(
                "gradient = 'ratio' with kind = 'k2': k2 is a biased estimate, whose gradient with the ratio is not "
                "that of KL; use kind = k1 or k3, or gradient = k2 on the policy's own samples"
            )
        return self

    def needs(self) -> frozenset[str]:
        return frozenset({"ref"})

    def weight(self) -> float:
        """Return the coefficient of the estimate."""
        return self.beta

    def acts_on(self, advantages: Tensor, rewards: Tensor) -> Tensor:
        return torch.full_like(advantages, self.weight() != 0, dtype=torch.bool)

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        batch = view.batch
        logp, ref = batch.masked(view.logp), batch.masked(batch.signal("ref"))
        kl = kl_estimate(logp, ref, self.kind, cap=None)
        if self.gradient == "ratio":
            gap = batch.masked(view.logp - batch.mu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            kl = kl * gap.exp()
        if self.kind == "k3" and self.cap is not None:
            kl = kl.clamp(max=self.cap)
        figures = {"kl": kl.detach()}
        if self.gradient == "k2":
            k2 = kl_estimate(logp, ref, "k2")
            kl = k2 - k2.detach() + kl.detach()
        return self.weight() * kl, figures


class AdaptiveKl(Kl):
    """KL to the reference with a weight that grows while KL is above `target` and falls while it is below.

    After each optimizer update beta is multiplied by 1 + clip(KL / target - 1, -0.2, 0.2) / horizon, KL = the mean of
    the estimate over the update's tokens. Metric `kl_beta`; the checkpoint keeps it.
    """

    paper: ClassVar[str] = (
        "Fine-tuning language models from human preferences (Ziegler et al. 2019), section 2.2"
    )
    evidence: ClassVar[str] = "R"
    beta: Annotated[float, Field(gt=0)] = 1e-3
    """Weight at the start."""
    target: Annotated[float, Field(gt=0)] = 0.1
    """Target KL per token, in nats."""
    horizon: Annotated[float, Field(ge=1)] = 80.0
    """Optimizer updates in which the weight moves by a fifth at most. verl counts samples: 10000."""
    _beta: float | None = PrivateAttr(default=None)

    def weight(self) -> float:
        return self.beta if self._beta is None else self._beta

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        loss, figures = super().__call__(view, update_stats)
        return loss, figures | {"kl_beta": figures["kl"].new_full(figures["kl"].shape, self.weight())}

    def observe(self, metrics: dict[str, float]) -> None:
        kl = metrics["kl"]
        if math.isfinite(kl):  # otherwise the trainer skips that update as well
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self._beta = self.weight() * (1 + error / self.horizon)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._beta is None else {"beta": self._beta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._beta = float(state["beta"])
