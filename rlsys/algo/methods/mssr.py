"""MSSR: memory-surrogate single-rollout RL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from rlsys.algo.advantages import Advantage, whiten
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.reduction import Reduce
from rlsys.algo.token_advantages import Unit


class Mssr(Advantage):
    """One sample per prompt: reward minus a running Beta mean of the prompt, plus a bonus for uncertain tokens.

    v = alpha / (alpha + beta) before this sample, and a = whiten(r - v) over the step. Then alpha <- eta alpha + r
    and beta <- eta beta + 1 - r, where eta falls from eta_max to eta_min as the mean KL of the last updates
    approaches kl_target. A_t = a + min(|a| / gamma, lam H_t), where H is the token's entropy. The KL is the metric
    `policy_kl`, between successive versions on tokens of the earlier one; without such tokens and with one update
    per step it is not measured, and eta stays at eta_max. The paper does not state the initial values; rlsys uses
    alpha = beta = 1.
    """

    paper: ClassVar[str] = "MSSR: memory-surrogate single-rollout RL"
    group_local: ClassVar[bool] = False
    evidence: ClassVar[str] = "P"
    gamma: Annotated[float, Field(gt=0)] = 0.4
    """The bonus is at most |a| / gamma."""
    lam: Annotated[float, Field(ge=0)] = 2.0
    """Bonus per nat of entropy."""
    eta_max: Unit = 0.96
    """Decay of the prompt's record while the policy does not change."""
    eta_min: Unit = 0.875
    """Decay while the policy changes by `kl_target` or more."""
    kl_target: Annotated[float, Field(gt=0)] = 0.01
    """KL between versions at which the decay is `eta_min`."""
    window: Annotated[int, Field(gt=0)] = 20
    """Number of optimizer updates over which the KL is averaged."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.eta_min > self.eta_max:
            raise ValueError(f"eta_min = {self.eta_min}: expected at most eta_max = {self.eta_max}")
        return self

    _record: dict[str, list[float]] = PrivateAttr(default_factory=dict)
    _kl: list[float] = PrivateAttr(default_factory=list)

    def needs(self) -> frozenset[str]:
        return frozenset({"prompt_index", "entropy"} if self.lam else {"prompt_index"})

    def __call__(self, samples: Samples) -> Tensor:
        prompts = [str(p) for p in samples.column("prompt_index").tolist()]
        rewards = samples.reward.double()
        records = [self._record.get(p, [1.0, 1.0]) for p in prompts]
        surplus = rewards - torch.tensor(
            [a / (a + b) for a, b in records], dtype=torch.float64, device=rewards.device
        )
        eta = self._memory()
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            alpha, beta = self._record.get(prompt, [1.0, 1.0])
            self._record[prompt] = [eta * alpha + reward, eta * beta + 1 - reward]
        return whiten(surplus).to(samples.reward.dtype)

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        plain = super().per_token(advantages, samples, parts, reduce)
        if not self.lam:
            return plain
        bonus = [
            torch.minimum(a.abs() / self.gamma, self.lam * p.signal("entropy").detach())
            for a, p in zip(plain, parts, strict=True)
        ]
        return [part.masked(a + b) for a, b, part in zip(plain, bonus, parts, strict=True)]

    def _memory(self) -> float:
        drift = sum(self._kl) / len(self._kl) / self.kl_target if self._kl else 0.0
        return self.eta_max - min(max(drift, 0.0), 1.0) * (self.eta_max - self.eta_min)

    def observe(self, metrics: dict[str, float]) -> None:
        if "policy_kl" in metrics:
            self._kl = [*self._kl, metrics["policy_kl"]][-self.window :]

    def state_dict(self) -> dict[str, Any]:
        return {"record": self._record, "kl": self._kl}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._record = {k: list(v) for k, v in state["record"].items()}
        self._kl = list(state["kl"])
