"""MSSR: single-rollout RL with a running estimate of each prompt's success rate as baseline."""

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
    """Reward minus the mean of a Beta distribution of the prompt, plus a bonus for uncertain tokens.

    Each prompt has one sample per group.

    1. The baseline of a prompt is v = alpha / (alpha + beta) from its earlier samples; initially alpha = beta = 1,
       which the paper does not state. The advantage of the sample is a = whiten(r - v) over the step.
    2. Then alpha <- eta alpha + r and beta <- eta beta + 1 - r. eta falls from eta_max to eta_min as the mean KL of
       the last updates approaches kl_target.
    3. The advantage of a token is A_t = a + min(|a| / gamma, lam H_t), where H_t is its entropy.

    The KL is the metric `policy_kl`, between successive weight versions on tokens of the earlier one. Without such
    tokens and with one update per step, the KL is not measured, and eta stays at eta_max.
    """

    paper: ClassVar[str] = "MSSR: memory-surrogate single-rollout RL"
    group_local: ClassVar[bool] = False
    evidence: ClassVar[str] = "P"
    gamma: Annotated[float, Field(gt=0)] = 0.4
    """Divisor of |a| in the largest bonus."""
    lam: Annotated[float, Field(ge=0)] = 2.0
    """Bonus per nat of entropy."""
    eta_max: Unit = 0.96
    """Decay eta of the earlier samples of a prompt if the policy does not change."""
    eta_min: Unit = 0.875
    """Decay eta if the mean KL is `kl_target` or more."""
    kl_target: Annotated[float, Field(gt=0)] = 0.01
    """Mean KL from which eta is `eta_min`."""
    window: Annotated[int, Field(gt=0)] = 20
    """Number of optimizer updates over which the KL is averaged."""

    @model_validator(mode="after")
    def _check_decays(self) -> Self:
        if self.eta_min > self.eta_max:
            raise ValueError(f"eta_min = {self.eta_min}: expected at most eta_max = {self.eta_max}")
        return self

    _record: dict[str, list[float]] = PrivateAttr(default_factory=dict)
    """Prompt index -> alpha and beta."""
    _kl: list[float] = PrivateAttr(default_factory=list)

    def needs(self) -> frozenset[str]:
        return frozenset({"prompt_index", "entropy"} if self.lam else {"prompt_index"})

    def __call__(self, samples: Samples) -> Tensor:
        prompts = [str(p) for p in samples.column("prompt_index").tolist()]
        rewards = samples.reward.double()
        records = [self._record.get(p, [1.0, 1.0]) for p in prompts]
        baselines = [alpha / (alpha + beta) for alpha, beta in records]
        surplus = rewards - torch.tensor(baselines, dtype=torch.float64, device=rewards.device)
        eta = self._decay()
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            alpha, beta = self._record.get(prompt, [1.0, 1.0])
            self._record[prompt] = [eta * alpha + reward, eta * beta + 1 - reward]
        return whiten(surplus).to(samples.reward.dtype)

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        token_advantages = super().per_token(advantages, samples, parts, reduce)
        if not self.lam:
            return token_advantages
        with_bonus = []
        for a, part in zip(token_advantages, parts, strict=True):
            bonus = torch.minimum(a.abs() / self.gamma, self.lam * part.signal("entropy").detach())
            with_bonus.append(part.masked(a + bonus))
        return with_bonus

    def _decay(self) -> float:
        """Return eta for the mean KL of the last updates."""
        relative_kl = sum(self._kl) / len(self._kl) / self.kl_target if self._kl else 0.0
        return self.eta_max - min(max(relative_kl, 0.0), 1.0) * (self.eta_max - self.eta_min)

    def observe(self, metrics: dict[str, float]) -> None:
        if "policy_kl" in metrics:
            self._kl = [*self._kl, metrics["policy_kl"]][-self.window :]

    def state_dict(self) -> dict[str, Any]:
        return {"record": self._record, "kl": self._kl}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._record = {k: list(v) for k, v in state["record"].items()}
        self._kl = list(state["kl"])
