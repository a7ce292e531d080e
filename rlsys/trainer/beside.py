"""The models that an objective wants beside the policy: a critic, a teacher."""

from __future__ import annotations

from rlsys.algo.objective import Objective
from rlsys.trainer.critic import add_critic
from rlsys.trainer.teacher import add_teacher
from rlsys.trainer.trainer import Trainer


def add_models(policy: Trainer, objective: Objective) -> None:
    """Before the first step, and before a checkpoint is loaded: it holds the critic. Collective."""
    if objective.critic is not None:
        add_critic(policy, objective.critic)
    teacher = policy.config.algo.teacher
    if "divergence" in objective.asks.passes and (teacher is None or teacher.engine is None):
        add_teacher(policy)
