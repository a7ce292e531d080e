"""On-policy distillation: the policy learns the distributions of a teacher on its own samples.

Shapes: K ids of the vocabulary, T packed tokens. Log-probs `[..., K]` have the same ids for policy and teacher.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div

from rlsys.algo.losses import Figures, Loss, View, Width, clipped_surrogate

_MIN_REST = 1e-7
"""Smallest probability of the other ids, so that its logarithm is finite."""


def with_rest(logp: Tensor) -> Tensor:
    """Append the log-prob of all other ids together to the log-probs `[..., K]` of some ids, as `[..., K + 1]`."""
    total = logp.logsumexp(-1, keepdim=True).clamp(max=-_MIN_REST)
    return torch.cat([logp, torch.log(-torch.expm1(total))], -1)


def divergence(policy: Tensor, teacher: Tensor, direction: float) -> Tensor:
    """Return the divergence of policy and teacher, `[...]`.

    Args:
        policy: log-probs, `[..., K]`.
        teacher: log-probs of the same ids, `[..., K]`.
        direction: 1: KL(policy || teacher). 0: KL(teacher || policy). Between 0 and 1: the generalised Jensen-Shannon
            divergence, with this weight of the teacher (GKD, eq. 1).
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
    """Return the divergence of policy and teacher over some ids of the vocabulary, `[...]`.

    Args:
        policy: log-probs, `[..., K]`.
        teacher: log-probs of the same ids, `[..., K]`.
        direction: see `divergence`.
        tail_bucket: whether all other ids together are compared as one id. If not, a negative sum counts as 0 without
            gradient (verl's forward_kl_topk).
        least_logprob: lower bound of both log-probs; None for no bound.
    """
    if tail_bucket:
        policy, teacher = with_rest(policy), with_rest(teacher)
    if least_logprob is not None:
        policy, teacher = policy.clamp(min=least_logprob), teacher.clamp(min=least_logprob)
    gap = divergence(policy, teacher, direction)
    return gap if tail_bucket else gap.clamp(min=0)


class Distill(Loss):
    """The divergence of policy and teacher at each token, with the gradient through the whole distribution.

    `algo.teacher` sets the teacher, the compared ids and the direction. As the only loss, this term is on-policy
    distillation; with a policy loss, it combines distillation and reinforcement learning. With the policy's initial
    model as teacher, it keeps the policy near that model. The metric `divergence` is the mean over the trained
    tokens, in nats.
    """

    paper: ClassVar[str] = "On-policy distillation of language models: GKD (Agarwal et al. 2023), eq. 1"
    evidence: ClassVar[str] = "R"
    policy: ClassVar[bool] = False
    ratio: ClassVar[bool] = False
    trains_policy: ClassVar[bool] = True
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the divergence."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Largest divergence of a token, in nats. A token above it has no gradient. Unset: no bound."""

    def needs(self) -> frozenset[str]:
        return frozenset({"divergence"})

    def needs_before(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        gap = _divergence_of(view, "distill")
        bounded = gap if self.cap is None else gap.clamp(max=self.cap)
        return self.weight * bounded, {"divergence": gap.detach()}


class DistillPolicyGradient(Loss):
    """On-policy distillation by policy gradient: the advantage of a sampled token is log(teacher / policy).

    It needs `algo.teacher.top_k` = 0, with which the teacher computes only the log-probs of the sampled tokens. The
    expected gradient is that of KL(policy || teacher). The estimate from one id costs less than `distill` and has
    more variance. The metric `divergence` is the mean of log(policy / teacher), in nats.
    """

    paper: ClassVar[str] = "On-policy distillation (Lu and Thinking Machines Lab 2025); PPO, eq. 7; dual clip"
    evidence: ClassVar[str] = "R"
    policy: ClassVar[bool] = False
    ratio: ClassVar[bool] = False
    reads_anchor: ClassVar[bool] = True
    trains_policy: ClassVar[bool] = True
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the loss."""
    cap: Annotated[float, Field(gt=0)] | None = None
    """Largest absolute advantage of a token, in nats. Unset: no bound."""
    clip_low: Width = 0.2
    """Clip width below a ratio of 1."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Clip width above a ratio of 1."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio with a gradient where the advantage is negative. Unset: no bound."""

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
    """Return the divergence from the teacher, `[T]`.

    Raises:
        ValueError: it is not set; the message names the loss term.
    """
    if view.divergence is None:
        raise ValueError(
            f"divergence = None; expected the teacher's divergence, which the loss term '{term}' needs"
        )
    return view.divergence
