"""Is what is trained on like what is generated? APRIL trains the first to finish, and those are the short ones.

In the long run every group is trained unless it expires, so the bias is one of time: the first steps see too many
short responses, and what grows too old is long. The monitor compares the mean length of what was trained with an
estimate of what the model generates that does not leave out those still running.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from rlsys.config import Config
from rlsys.core.types import Sample, SampleGroup, Status
from rlsys.ledger.buffer import RolloutBuffer

WINDOW_STEPS = 8
"""Train steps that the comparison covers."""
WARM_UP_STEPS = 2 * WINDOW_STEPS
"""No alarm before: the first steps cannot have long responses, and the window must have left them behind."""
RANKS = 4
MOST_RESUMES = 3
_ENDED = ", ".join(f"'{s}'" for s in Status if s.terminal)

log = logging.getLogger("rlsys.rollout")


class BiasMonitor:
    """Holds nothing but whether the alarm is on: the buffer knows the lengths."""

    def __init__(self, config: Config, buffer: RolloutBuffer) -> None:
        self._bound = config.rollout.length_bias_bound
        self._groups_per_step = config.rollout.groups_per_step
        self._buffer = buffer
        self._alarm = False

    def metrics(self, train_step: int, groups: Sequence[SampleGroup]) -> dict[str, float]:
        """Of the groups that this step took, and of the window that ends with it.

        `length_bias`: trained over generated mean length, less 1. `bias_alarm` is 1 while it is below the bound.
        """
        window = (train_step - WINDOW_STEPS + 1, train_step)
        trained = [n for n, _ in self._lengths("train_step BETWEEN ? AND ?", *window)]
        first = self._buffer.next_group_id - WINDOW_STEPS * self._groups_per_step
        generated = mean_length(self._lengths("group_id >= ?", first))
        bias = sum(trained) / len(trained) / generated - 1 if generated else 0.0
        alarm = train_step > WARM_UP_STEPS and bias < -self._bound
        if alarm and not self._alarm:
            log.warning(
                "trained responses are %.0f %% shorter than generated ones over %d steps "
                "(rollout.length_bias_bound = %g): raise max_staleness, or lower over_provision",
                -100 * bias, WINDOW_STEPS, self._bound,
            )  # fmt: skip
        self._alarm = alarm
        return {
            "generated_len_mean": generated,
            "length_bias": bias,
            "bias_alarm": int(alarm),
            **by_rank(self._by_completion(groups)),
            **by_resumes(s for g in groups for s in g.samples),
        }

    def _lengths(self, where: str, *values: int) -> list[tuple[int, bool]]:
        """Of samples: tokens so far, and whether that is all. Without those refused before their first token."""
        query = (
            f"SELECT tokens, status IN ({_ENDED}) FROM samples JOIN groups USING (group_id) "
            f"WHERE {where} AND (tokens > 0 OR status != '{Status.CENSORED}')"
        )
        return self._buffer.read(lambda db: db.execute(query, values).fetchall())

    def _by_completion(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """In the order in which they became READY."""
        ids = ", ".join(str(g.group_id) for g in groups)
        query = f"SELECT group_id, ready_order FROM groups WHERE group_id IN ({ids})"
        place = dict(self._buffer.read(lambda db: db.execute(query).fetchall()))
        return sorted(groups, key=lambda g: place[g.group_id])


def mean_length(lengths: Iterable[tuple[int, bool]]) -> float:
    """Mean of `(length, ended)`, where what has not ended is longer than its length (Kaplan and Meier 1958).

    Up to the longest length there is; 0 for none.
    """
    ordered = sorted(lengths, key=lambda x: (x[0], not x[1]))  # of equals, those that ended first
    survival, mean, last = 1.0, 0.0, 0
    for at_risk, (length, ended) in zip(range(len(ordered), 0, -1), ordered, strict=True):
        mean += survival * (length - last)
        last = length
        if ended:
            survival *= 1 - 1 / at_risk
    return mean


def by_rank(ranked: Sequence[SampleGroup]) -> dict[str, float]:
    """Length and reward by quarters of the order in which a step's groups were completed."""
    out: dict[str, float] = {}
    for i in range(RANKS):
        quarter = ranked[i * len(ranked) // RANKS : (i + 1) * len(ranked) // RANKS]
        out |= _means(f"rank_{i + 1}", [s for g in quarter for s in g.samples])
    return out


def by_resumes(samples: Iterable[Sample]) -> dict[str, float]:
    """Length and reward by how often samples were resumed; MOST_RESUMES stands for that and more."""
    binned: dict[int, list[Sample]] = {}
    for sample in samples:
        binned.setdefault(min(sample.resumes, MOST_RESUMES), []).append(sample)
    return {k: v for n in sorted(binned) for k, v in _means(f"resumes_{n}", binned[n]).items()}


def _means(name: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Nothing for no samples."""
    if not samples:
        return {}
    return {
        f"length_{name}": sum(s.all_tokens for s in samples) / len(samples),
        f"reward_{name}": sum(s.reward or 0.0 for s in samples) / len(samples),
    }
