"""Which groups may start, and with which seeds. Pure."""

from __future__ import annotations

from rlsys.data.source import stable_hash


def admission_capacity(*, max_staleness: int, trained_steps: int, groups_per_step: int, accepted: int) -> int:
    """Groups that may start now; not above 0 when none may. AReaL's admission by version lag.

        (max_staleness + trained_steps + 1) * groups_per_step - accepted

    `trained_steps`: train steps that the engines' weights contain. `accepted`: groups trained, ready or
    running; what was expired, filtered or censored makes room. With max_staleness 0, exactly the groups of the
    next train step may run. After a restart, groups that later steps took before the crash count as accepted,
    while `trained_steps` is the checkpoint's: nothing is let in until the trainer has caught up.
    """
    return (max_staleness + trained_steps + 1) * groups_per_step - accepted


def sample_seed(run_seed: int, group_id: int, index: int) -> int:
    """Seed of one sample, 1 .. 2**31 - 1; the same in every process and every run with this run.seed."""
    return 1 + stable_hash(run_seed, group_id, index) % (2**31 - 1)
