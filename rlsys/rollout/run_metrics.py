"""RunMetrics: computes the metrics of train steps, and the status for the live display."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rlsys.config import Config
from rlsys.core.types import GroupState, SampleGroup, Status
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.planning.planning import Planning
from rlsys.rewards.code import missing_protections
from rlsys.rollout.bias import BiasMonitor
from rlsys.worker.scoring import Scorer
from rlsys.worker.worker_engines import WorkerEngines

_BUSIEST_FIRST = sorted(Status, key=lambda status: (status is not Status.IN_FLIGHT, status.terminal))
"""A sample with several sequences has the first of these statuses that one of its sequences has."""


class RunMetrics:
    """Computes metrics and status from the other components."""

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        engines: WorkerEngines,
        scorer: Scorer,
        planning: Planning,
        counts: Callable[[], Mapping[str, int]],
    ) -> None:
        """Create the metrics.

        Args:
            counts: returns the counts of the generator and of censored samples.
        """
        self._counts = counts
        self._buffer = buffer
        self._engines = engines
        self._scorer = scorer
        self._planning = planning
        self._bias = BiasMonitor(config, buffer)
        self._missing_protections = missing_protections(config)

    def step_metrics(self, train_step: int, version: int, groups: Sequence[SampleGroup]) -> dict[str, float]:
        """Return the metrics of a train step.

        Args:
            version: weight version that the step updates.
            groups: the groups that the step took.
        """
        trained_steps = self._buffer.versions.trained_steps(version)
        metrics = step_metrics(groups, lambda v: trained_steps - self._buffer.versions.trained_steps(v))
        return {**metrics, **self._bias.metrics(train_step, groups)}

    def counts(self) -> dict[str, float]:
        """Return the number of samples that are `in_flight` or `parked`, and the number of groups by state."""
        samples = [s for g in self._buffer.active() for s in g.samples]
        statuses = Counter(s.status for s in samples if not s.extra_sequences)
        statuses.update(
            min((q.status for q in s.sequences), key=_BUSIEST_FIRST.index)
            for s in samples
            if s.extra_sequences
        )
        return {
            "in_flight": statuses[Status.IN_FLIGHT],
            "parked": statuses[Status.PARKED],
            "issued": self._buffer.next_group_id,
            **{state.value: self._buffer.counts[state] for state in GroupState},
        }

    def status(self) -> dict[str, object]:
        """Return the status for the live display."""
        return {
            **self.counts(),
            **self.totals(),
            "weight_version": self._buffer.versions.newest,
            "engines": self._engines.engine_states(),
            "engine_figures": self._engines.engine_metrics(),
        }

    def totals(self) -> dict[str, float]:
        """Return totals since the start of this process; `lost` counts since the start of the run."""
        stats = self._engines.stats()
        exported = (
            "received_tokens", "engine_tokens", "engines_serving", "engine_deaths", "engine_rank_seconds"
        )  # fmt: skip
        totals: dict[str, float] = {"lost": self._buffer.lost_tokens}
        if stats["draft_checks"]:
            totals["tokens_per_check"] = stats["checked_tokens"] / stats["draft_checks"]
        if rounded := stats.get("rounded_log_probs", 0):
            totals["rounded_log_probs"] = rounded
        totals["cache_share"] = stats["cached_tokens"] / max(1, stats["prefilled_tokens"])
        totals["resumes_total"] = stats["resumes"]
        totals["reward_hung"] = self._scorer.timeouts + stats.get("reward_hung", 0)
        totals["reward_failed"] = self._scorer.failures + stats.get("reward_failed", 0)
        if self._missing_protections is not None:
            totals["sandbox_missing"] = len(self._missing_protections)
        return {
            **totals,
            **self._planning.counts,
            **self._counts(),
            **{k: v for k, v in stats.items() if k in exported or k.startswith(("cache_share_", "pool_"))},
        }


def step_metrics(groups: Sequence[SampleGroup], age: Callable[[int], int]) -> dict[str, float]:
    """Return the metrics of taken groups.

    - reward, reward_part_NAME: mean over samples.
    - response_len_*: tokens of all sequences of a sample.
    - tokens: number of trained tokens.
    - sampled_entropy: mean of -mu over sampled tokens, in nats: an unbiased estimate of the mean entropy of their
      distributions.
    - off_policy_share: fraction of trained tokens that older than the current weights sampled.
    - staleness_*: age of a group's oldest token, in train steps.
    - resumed_samples: number of samples that were interrupted and resumed.
    - sequences: number of trained sequences, if samples have several.
    - truncated_share: fraction of samples that ended at a token limit.

    Args:
        age: returns the number of train steps between the weights of a version and the current weights.
    """
    samples = [s for g in groups for s in g.samples]
    sequences = [q for s in samples for q in s.trained_sequences]
    lengths = sorted(s.all_tokens for s in samples)
    tokens = sum(q.tokens for q in sequences)
    sampled = sum(q.sampled_tokens for q in sequences)
    spans = [span for q in sequences for span in q.spans]
    off_policy = sum(span.end - span.start for span in spans if age(span.version))
    named_rewards = [s.named_rewards for s in samples if s.named_rewards]
    parts = {
        f"reward_part_{n}": sum(r[n] for r in named_rewards) / len(named_rewards)
        for n in (named_rewards[0] if named_rewards else ())
    }
    staleness = [
        max((age(x.version) for s in g.samples for q in s.trained_sequences for x in q.spans), default=0)
        for g in groups
    ]
    return {
        "reward": sum(s.reward or 0.0 for s in samples) / len(samples),
        **parts,
        "response_len_mean": sum(lengths) / len(samples),
        "response_len_p50": quantile(lengths, 0.5),
        "response_len_p99": quantile(lengths, 0.99),
        "response_len_max": lengths[-1],
        "tokens": tokens,
        "sampled_entropy": -math.fsum(q.mu_sum for q in sequences) / sampled if sampled else 0.0,
        "off_policy_share": off_policy / tokens if tokens else 0.0,
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
        "resumed_samples": sum(any(q.resumes for q in s.sequences) for s in samples),
        **({"sequences": len(sequences)} if len(sequences) > len(samples) else {}),
        "truncated_share": sum(s.status is Status.TRUNCATED for s in samples) / len(samples),
    }


def quantile(values: Sequence[int], q: float) -> int:
    """Return the `q`-quantile of sorted values by the nearest-rank method.

    At least the fraction `q` of the values is less than or equal to the result, the smallest such value.
    """
    return values[max(0, math.ceil(q * len(values)) - 1)]
