"""On-policy distillation: the policy learns a teacher's distributions on its own samples."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div

from rlsys.algo.losses import Figures, Loss, View, Width, clipped_surrogate

_LEAST = 1e-7


def with_rest(logp: Tensor) -> Tensor:
    """Append to the log-probs `[..., K]` of some ids that of all other ids together: `[..., K + 1]`."""
    total = logp.logsumexp(-1, keepdim=True).clamp(max=-_LEAST)
    return torch.cat([logp, torch.log(-torch.expm1(total))], -1)


def divergence(policy: Tensor, teacher: Tensor, direction: float) -> Tensor:
    """Return the divergence `[...]` of the log-probs `[..., K]` of the same ids.

    A `direction` of 1 gives KL(policy || teacher), 0 gives KL(teacher || policy), and a value between them the
    generalised Jensen-Shannon divergence with weight `direction` of the teacher (GKD, eq. 1).
    """
    if direction in (0.0, 1.0):
        target, approximation = (policy, teacher) if direction else (teacher, policy)
        return kl_div(approximation, target, reduction="none", log_target=True).sum(-1)
    share = torch.tensor(direction, dtype=policy.dtype, device=policy.device)
    mixed = torch.logaddexp(policy + torch.log1p(-share), teacher + share.log())
    teacher_kl, policy_kl = (
        kl_div(mixed, target, reduction="none", log_target=True).sum(-1) for target in (teacher, policy)
    )
    return direction * teacher_kl + (1 - direction) * policy_kl


def divergence_over(
    policy: Tensor,
    teacher: Tensor,
    direction: float,
    *,
    tail_bucket: bool,
    least_logprob: float | None = None,
) -> Tensor:
    """Return the divergence `[...]` over K ids of the vocabulary.

    Args:
        policy: log-probs `[..., K]`.
        teacher: log-probs `[..., K]` of the same ids.
        direction: see `divergence`.
        tail_bucket: whether all other ids are compared together. Without them the sum may be negative; it is then 0
            without gradient (verl's forward_kl_topk).
        least_logprob: lower bound of both log-probs.
    """
    if tail_bucket:
        policy, teacher = with_rest(policy), with_rest(teacher)
    if least_logprob is not None:
        policy, teacher = policy.clamp(min=least_logprob), teacher.clamp(min=least_logprob)
    gap = divergence(policy, teacher, direction)
    return gap if tail_bucket else gap.clamp(min=0)


class Distill(Loss):
    """The divergence between policy and teacher at each token, with its gradient through the whole distribution.

    `algo.teacher` names the teacher, the compared tokens and the direction. As the only loss it is on-policy
    distillation; with a policy loss it is mixed with reinforcement learning. If the teacher is the policy's initial
    model, it keeps the policy near that model. Metric `divergence`: its mean over the trained tokens, in nats.
    """

    paper: ClassVar[str] = "On-policy distillation of language models: GKD (Agarwal et al. 2023), eq. 1"
    evidence: ClassVar[str] = "R"
    policy: ClassVar[bool] = False
    ratio: ClassVar[bool] = False
    trains_policy: ClassVar[bool] = True
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Largest divergence of a token, in nats; a token beyond has no gradient. Unset: no bound."""

    def needs(self) -> frozenset[str]:
        return frozenset({"divergence"})

    def needs_before(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        gap = _divergence_of(view, "distill")
        bounded = gap if self.cap is None else gap.clamp(max=self.cap)
        return self.weight * bounded, {"divergence": gap.detach()}


class DistillPolicyGradient(Loss):
    """On-policy distillation by policy gradient: a token's advantage is log(teacher / policy) at the sampled token.

    With `algo.teacher.top_k` = 0 the teacher returns only these log-probs. The expected gradient is that of
    KL(policy || teacher); an estimate from one id has more variance than `distill` and costs less. Metric
    `divergence`: the mean of log(policy / teacher), in nats.
    """

    paper: ClassVar[str] = "On-policy distillation (Lu and Thinking Machines Lab 2025); PPO, eq. 7; dual clip"
    evidence: ClassVar[str] = "R"
    policy: ClassVar[bool] = False
    ratio: ClassVar[bool] = False
    reads_anchor: ClassVar[bool] = True
    trains_policy: ClassVar[bool] = True
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Largest absolute advantage of a token, in nats. Unset: no bound."""
    clip_low: Width = 0.2
    """Lower width of the ratio's clip."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper width of the ratio's clip."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Cap of the ratio where the advantage is negative. Unset: none."""

    def needs(self) -> frozenset[str]:
        return frozenset({"divergence"})

    def needs_before(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        gap = _divergence_of(view, "distill_pg").detach()
        advantages = -gap if self.cap is None else -gap.clamp(-self.cap, self.cap)
        loss = clipped_surrogate(view.ratio, advantages, 1 - self.clip_low, 1 + self.clip_high, self.dual)
        return self.weight * loss, {"divergence": gap}


def _divergence_of(view: View, term: str) -> Tensor:
    if view.divergence is None:
        raise ValueError(f"the loss was called without the divergence, which the term '{term}' needs")
    return view.divergence
