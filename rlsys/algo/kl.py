"""KL divergence of the policy from a reference model: estimators, a loss term, and one with an adaptive weight."""

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
"""Largest k3 of a token. Without this bound, the k3 of a token that is 20 nats from the reference is 4.9e8."""


def kl_estimate(logp: Tensor, ref: Tensor, kind: str, cap: float | None = K3_CAP) -> Tensor:
    """Estimate KL(policy || ref) from samples of the policy; Schulman, "Approximating KL divergence".

    k1 = logp - ref is unbiased; k2 = (logp - ref)^2 / 2 has a small bias; k3 = exp(ref - logp) - 1 - (ref - logp) is
    unbiased if `cap` does not limit it.

    Args:
        logp: log-probs of the policy, any shape.
        ref: log-probs of the reference model, same shape.
        kind: k1, k2 or k3.
        cap: largest k3; None for no limit.
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

    The gradient of an estimate is in general no estimate of the gradient of KL: on the policy's own samples, the
    gradient of k1 is 0 on average, that of k3 belongs to the reverse KL, and only that of k2 is correct. `gradient`
    selects the differentiated quantity:
    - `estimate`: the estimate.
    - `ratio`: the estimate times exp(logp - mu). The gradient is correct for k1 and k3 on samples of any policy,
      including stale tokens (DeepSeek-V3.2). slime and TRL use the ratio to their old policy, which equals mu unless
      they recompute log-probs.
    - `k2`: the term has the value of the estimate and the gradient of k2 (verl: `k3+`).
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
    """Largest k3 of a token, after the ratio; a token above it has no gradient (verl, slime, NeMo-RL: 10). null: no
    limit."""

    @model_validator(mode="after")
    def _ratio_of_an_estimate(self) -> Self:
        if self.kind == "k2" and self.gradient == "ratio":
            raise ValueError(
                "gradient = 'ratio' with kind = 'k2': k2 is biased, so the gradient with the ratio is not that of "
                "KL; use kind = k1 or k3, or gradient = k2 on the policy's own samples"
            )
        return self

    def needs(self) -> frozenset[str]:
        return frozenset({"ref"})

    def weight(self) -> float:
        """Return the current weight of the estimate."""
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

    After each optimizer update, beta is multiplied by 1 + clip(KL / target - 1, -0.2, 0.2) / horizon, where KL is the
    mean of the estimate over the update's tokens. The metric `kl_beta` is the current beta; checkpoints store it.
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
    """Number of optimizer updates in which the weight changes by at most a fifth. verl's horizon counts samples
    (10000)."""
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
