"""Auxiliary models of an objective besides the policy: a critic and a teacher."""

from __future__ import annotations

from rlsys.algo.objective import Objective
from rlsys.trainer.critic import add_critic
from rlsys.trainer.teacher import add_teacher
from rlsys.trainer.trainer import Trainer


def add_models(policy: Trainer, objective: Objective) -> None:
    """Add the critic and the teacher that the objective requires. Collective.

    Call it before the first step and before a checkpoint is loaded: checkpoints contain the critic's state.
    """
    if objective.critic is not None:
        add_critic(policy, objective.critic)
    teacher = policy.config.algo.teacher
    if "divergence" in objective.requirements.passes and (teacher is None or teacher.engine is None):
        add_teacher(policy)
