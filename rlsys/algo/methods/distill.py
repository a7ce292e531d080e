"""On-policy distillation: the policy learns a teacher's distributions at the places that it comes to by itself."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div

from rlsys.algo.losses import Figures, Loss, View

_LEAST = 1e-7


def with_rest(logp: Tensor) -> Tensor:
    """Return log-probs `[..., K]` of some tokens, and of all others together: `[..., K + 1]`."""
    total = logp.logsumexp(-1, keepdim=True).clamp(max=-_LEAST)
    return torch.cat([logp, torch.log(-torch.expm1(total))], -1)


def divergence(policy: Tensor, teacher: Tensor, direction: float) -> Tensor:
    """Compute the divergence `[...]` of log-probs `[..., K]` of the same tokens.

    1: KL(policy || teacher). 0: KL(teacher || policy). Between: the generalised Jensen-Shannon divergence with weight
    `direction` of the teacher (GKD, eq. 1).
    """
    if direction in (0.0, 1.0):
        of, to = (policy, teacher) if direction else (teacher, policy)
        return kl_div(to, of, reduction="none", log_target=True).sum(-1)
    share = torch.tensor(direction, dtype=policy.dtype, device=policy.device)
    mixed = torch.logaddexp(policy + torch.log1p(-share), teacher + share.log())
    parts = (kl_div(mixed, of, reduction="none", log_target=True).sum(-1) for of in (teacher, policy))
    of_teacher, of_policy = parts
    return direction * of_teacher + (1 - direction) * of_policy


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

    def needs(self) -> frozenset[str]:
        return frozenset({"divergence"})

    def needs_before(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, view: View, update_stats: Any) -> tuple[Tensor, Figures]:
        if view.divergence is None:
            raise ValueError("the loss was called without the divergence, which the term 'distill' needs")
        return self.weight * view.divergence, {"divergence": view.divergence.detach()}
