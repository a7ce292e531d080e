"""BiasMonitor: compares the lengths of trained and generated responses.

APRIL trains the first groups to finish, which are the short ones. In the long run every group is trained unless
it expires, so the bias is temporary: the first steps train too many short responses, and long ones expire. The
monitor compares the mean length of trained responses with an estimated mean of all generated responses, including
those that still run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from rlsys.config import Config
from rlsys.core.types import Sample, SampleGroup, Status
from rlsys.ledger.buffer import RolloutBuffer

WINDOW_STEPS = 8
"""Number of train steps that the comparison covers."""
WARM_UP_STEPS = 2 * WINDOW_STEPS
"""Number of initial steps without an alarm. The first steps lack long responses, and must have left the window."""
QUARTERS = 4
MAX_RESUMES = 3
_TERMINAL = ", ".join(f"'{s}'" for s in Status if s.terminal)

log = logging.getLogger("rlsys.rollout")


class BiasMonitor:
    """Computes the length bias of train steps. Owns the state of the alarm; the buffer has the lengths."""

    def __init__(self, config: Config, buffer: RolloutBuffer) -> None:
        self._bound = config.rollout.length_bias_bound
        self._groups_per_step = config.rollout.groups_per_step
        self._buffer = buffer
        self._alarm = False

    def metrics(self, train_step: int, groups: Sequence[SampleGroup]) -> dict[str, float]:
        """Return the metrics of the step's groups and of the window that ends with the step.

        - generated_len_mean: estimated mean length of generated responses, in tokens.
        - length_bias: mean trained length divided by generated_len_mean, minus 1.
        - bias_alarm: 1 while length_bias is below -rollout.length_bias_bound.
        - length_*, reward_*: see by_rank and by_resumes.

        Args:
            groups: the groups that the step took.
        """
        window = (train_step - WINDOW_STEPS + 1, train_step)
        trained = [n for n, _ in self._lengths("train_step BETWEEN ? AND ?", *window)]
        first = self._buffer.next_group_id - WINDOW_STEPS * self._groups_per_step
        generated = mean_length(self._lengths("group_id >= ?", first))
        bias = sum(trained) / len(trained) / generated - 1 if generated else 0.0
        self._update_alarm(train_step, bias)
        return {
            "generated_len_mean": generated,
            "length_bias": bias,
            "bias_alarm": int(self._alarm),
            **by_rank(self._by_completion(groups)),
            **by_resumes(s for g in groups for s in g.samples),
        }

    def _update_alarm(self, train_step: int, bias: float) -> None:
        """Set or reset the alarm. Log a warning when it is set."""
        alarm = train_step > WARM_UP_STEPS and bias < -self._bound
        if alarm and not self._alarm:
            log.warning(
                "trained responses are %.0f %% shorter than generated ones over %d steps "
                "(rollout.length_bias_bound = %g): raise rollout.max_staleness, or lower rollout.over_provision",
                -100 * bias, WINDOW_STEPS, self._bound,
            )  # fmt: skip
        self._alarm = alarm

    def _lengths(self, condition: str, *values: int) -> list[tuple[int, bool]]:
        """Return (tokens so far, whether complete) of samples, except those censored before their first token."""
        query = (
            f"SELECT tokens, status IN ({_TERMINAL}) FROM samples JOIN groups USING (group_id) "
            f"WHERE {condition} AND (tokens > 0 OR status != '{Status.CENSORED}')"
        )
        return self._buffer.read(lambda db: db.execute(query, values).fetchall())

    def _by_completion(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Return the groups in the order in which they became READY."""
        ids = ", ".join(str(g.group_id) for g in groups)
        query = f"SELECT group_id, ready_order FROM groups WHERE group_id IN ({ids})"
        completion_order = dict(self._buffer.read(lambda db: db.execute(query).fetchall()))
        return sorted(groups, key=lambda g: completion_order[g.group_id])


def mean_length(lengths: Iterable[tuple[int, bool]]) -> float:
    """Estimate the mean length with the estimator of Kaplan and Meier (1958), restricted to the largest length.

    Args:
        lengths: length of each response, and whether it is complete; an incomplete length is a censored observation.

    Returns:
        0 if `lengths` is empty.
    """
    by_length = sorted(lengths, key=lambda x: (x[0], not x[1]))  # complete ones first among equals
    survival, mean, last = 1.0, 0.0, 0
    for at_risk, (length, complete) in zip(range(len(by_length), 0, -1), by_length, strict=True):
        mean += survival * (length - last)
        last = length
        if complete:
            survival *= 1 - 1 / at_risk
    return mean


def by_rank(ranked: Sequence[SampleGroup]) -> dict[str, float]:
    """Return mean length and reward per quarter of a step's groups.

    Args:
        ranked: the groups in the order of their completion.
    """
    metrics: dict[str, float] = {}
    for i in range(QUARTERS):
        quarter = ranked[i * len(ranked) // QUARTERS : (i + 1) * len(ranked) // QUARTERS]
        metrics |= _means(f"rank_{i + 1}", [s for g in quarter for s in g.samples])
    return metrics


def by_resumes(samples: Iterable[Sample]) -> dict[str, float]:
    """Return mean length and reward by the number of resumes; the last bin is MAX_RESUMES and more."""
    binned: dict[int, list[Sample]] = {}
    for sample in samples:
        binned.setdefault(min(sample.resumes, MAX_RESUMES), []).append(sample)
    return {k: v for n in sorted(binned) for k, v in _means(f"resumes_{n}", binned[n]).items()}


def _means(name: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the means of length and reward; empty without samples."""
    if not samples:
        return {}
    return {
        f"length_{name}": sum(s.all_tokens for s in samples) / len(samples),
        f"reward_{name}": sum(s.reward or 0.0 for s in samples) / len(samples),
    }
