"""Advantages that differ from token to token: REINFORCE++, MSSR. GAE has a file of its own.

Shapes: N samples, T packed tokens. All statistics over tokens are sums over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor

from rlsys.algo.advantages import Advantage, Eps, dr_grpo, whiten
from rlsys.algo.batch import Batch, Samples
from rlsys.algo.reduction import Reduce
from rlsys.algo.segments import discounted_suffix_sum

Unit = Annotated[float, Field(ge=0, le=1)]


def whiten_tokens(
    values: Sequence[Tensor], parts: Sequence[Batch], reduce: Reduce, eps: float = 1e-6
) -> list[Tensor]:
    """(x - mean) / (std + eps) over the trained tokens of all ranks, std with n - 1; 0 elsewhere."""

    def total(fields: list[Tensor]) -> Tensor:
        return reduce(
            torch.stack([p.masked(f).double().sum() for f, p in zip(fields, parts, strict=True)]).sum()
        )

    count = total([torch.ones_like(v) for v in values])
    mean = total(list(values)) / count.clamp(min=1)
    variance = total([(v.double() - mean) ** 2 for v in values]) / (count - 1).clamp(min=1)
    return [
        p.masked(((v - mean) / (variance.sqrt() + eps)).to(v.dtype))
        for v, p in zip(values, parts, strict=True)
    ]


def on_trained(part: Batch, values: Tensor, scan: Any) -> Tensor:
    """`scan(values, ids)` over the trained tokens only, as if the others were not there; 0 on the others. `[T]`."""
    return torch.zeros_like(values).masked_scatter(part.keep, scan(values[part.keep], part.ids[part.keep]))


def last_token(part: Batch) -> Tensor:
    """True on each sequence's last trained token, `[T]`."""
    position = torch.arange(len(part.mask), device=part.mask.device)
    last = torch.full((part.sequences,), -1, dtype=torch.long, device=part.mask.device)
    last = last.scatter_reduce(0, part.ids[part.keep], position[part.keep], "amax")
    out = torch.zeros_like(part.keep)
    out[last[last >= 0]] = True
    return out


def turn_ends(part: Batch) -> Tensor:
    """True on the last trained token of each turn, `[T]`."""
    place, turns = part.keep.nonzero().flatten(), part.signal("turns")[part.keep]
    ids, last = part.ids[part.keep], torch.ones_like(place, dtype=torch.bool)
    last[:-1] = (turns[1:] != turns[:-1]) | (ids[1:] != ids[:-1])
    out = torch.zeros_like(part.keep)
    out[place[last]] = True
    return out


class ReinforcePP(Advantage):
    """R minus the KL still to come, whitened over all tokens of the step.

    A_t = R - beta * sum_{j >= t} (old_j - ref_j); then (A - mean) / std over every trained token. No critic, no
    group baseline.
    """

    paper: ClassVar[str] = "REINFORCE++ (Hu 2025), section 3"
    evidence: ClassVar[str] = "R"
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference inside the reward."""
    eps: Eps = 1e-6
    """Added to the standard deviation."""

    def needs(self) -> frozenset[str]:
        return frozenset({"old", "ref"}) if self.beta else frozenset()

    def __call__(self, samples: Samples) -> Tensor:
        return samples.reward

    def per_token(
        self, advantages: Tensor, samples: Samples, parts: Sequence[Batch], reduce: Reduce
    ) -> list[Tensor]:
        values = [part.masked(part.expand(advantages)) for part in parts]
        if self.beta:
            values = [v - self.beta * self._kl_to_come(part) for v, part in zip(values, parts, strict=True)]
        return whiten_tokens(values, parts, reduce, self.eps)

    @staticmethod
    def _kl_to_come(part: Batch) -> Tensor:
        kl = part.masked(part.signal("old") - part.signal("ref"))
        return on_trained(part, kl, lambda x, ids: discounted_suffix_sum(x, ids, 1.0))


class ReinforcePPBaseline(ReinforcePP):
    """REINFORCE++ after taking the group's mean off the reward."""

    evidence: ClassVar[str] = "R"
    compares: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Tensor:
        return dr_grpo(samples.reward, samples.group_ids)


class Mssr(Advantage):
    """One sample per prompt: reward minus a running Beta mean of the prompt, plus a bonus for uncertain tokens.

    v = alpha / (alpha + beta) from before this sample; a = whiten(r - v) over the step; then
    alpha <- eta alpha + r, beta <- eta beta + 1 - r, with eta falling from eta_max to eta_min as the policy moves
    (mean KL of the last updates against kl_target). A_t = a + min(|a| / gamma, lam H_t), H the token's entropy. The
    KL is the metric `policy_kl`, between successive versions on the tokens of the earlier one: with one update a step
    and no tokens of an earlier version, nothing shows it, and memory stays at eta_max. The start alpha = beta = 1 is
    ours.
    """

    paper: ClassVar[str] = "MSSR: memory-surrogate single-rollout RL"
    group_local: ClassVar[bool] = False
    evidence: ClassVar[str] = "P"
    gamma: Annotated[float, Field(gt=0)] = 0.4
    """The bonus is at most |a| / gamma."""
    lam: Annotated[float, Field(ge=0)] = 2.0
    """Bonus per nat of entropy."""
    eta_max: Unit = 0.96
    """Memory of the prompt's record while the policy is calm."""
    eta_min: Unit = 0.875
    """Memory while it moves."""
    kl_target: Annotated[float, Field(gt=0)] = 0.01
    """KL between versions at which memory is shortest."""
    window: Annotated[int, Field(gt=0)] = 20
    """Optimizer updates whose mean KL counts."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.eta_min > self.eta_max:
            raise ValueError(f"eta_min = {self.eta_min} must not be above eta_max = {self.eta_max}")
        return self

    _record: dict[str, list[float]] = PrivateAttr(default_factory=dict)
    _kl: list[float] = PrivateAttr(default_factory=list)

    def needs(self) -> frozenset[str]:
        return frozenset({"prompt_index", "entropy"} if self.lam else {"prompt_index"})

    def __call__(self, samples: Samples) -> Tensor:
        prompts = [str(p) for p in samples.column("prompt_index").tolist()]
        rewards = samples.reward.double()
        before = [self._record.get(p, [1.0, 1.0]) for p in prompts]
        surplus = rewards - torch.tensor(
            [a / (a + b) for a, b in before], dtype=torch.float64, device=rewards.device
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
