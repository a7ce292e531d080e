"""What a step says of the groups that it took."""

from __future__ import annotations

from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample, SampleGroup, Status
from rlsys.rollout.run_metrics import step_metrics


def sample(spans: list[tuple[int, int]], status: Status, reward: float | None, resumes: int) -> Sample:
    """`spans`: weight version and how many tokens it sampled."""
    new_sample = Sample(0, 0, 0, [1], seed=0, status=status, reward=reward, resumes=resumes)
    for version, tokens in spans:
        start = len(new_sample.response_ids)
        new_sample.spans.append(VersionSpan(version, start, start + tokens))
        new_sample.response_ids.extend([7] * tokens)
        new_sample.mu.extend(mu := [-0.25 if version == 5 else -1.0] * tokens)
        new_sample.mu_sum += sum(mu)
    return new_sample


def test_step_metrics_of_groups_of_different_age_by_hand() -> None:
    """Weights of version 5 are current; a version is one train step."""
    finished, cut = Status.FINISHED, Status.TRUNCATED
    groups = [
        SampleGroup(0, 0, [sample([(5, 2)], finished, 1.0, 0), sample([(4, 1), (5, 3)], finished, None, 1)]),
        SampleGroup(1, 1, [sample([(2, 4), (3, 2)], cut, 0.0, 2), sample([(5, 8)], finished, 1.0, 0)]),
        SampleGroup(2, 2, [sample([(5, 1)], finished, 1.0, 0), sample([(5, 1)], finished, 0.0, 0)]),
    ]
    assert step_metrics(groups, lambda version: 5 - version) == {
        "reward": 3 / 6,
        "response_len_mean": 22 / 6,
        "response_len_p50": 2,
        "response_len_p99": 8,
        "response_len_max": 8,
        "tokens": 22,
        "sampled_entropy": (15 * 0.25 + 7 * 1.0) / 22,
        "off_policy_share": 7 / 22,
        "staleness_mean": (1 + 3 + 0) / 3,
        "staleness_max": 3,
        "resumed_samples": 2,
        "truncated_share": 1 / 6,
    }


def test_a_step_without_a_token_has_no_age() -> None:
    metrics = step_metrics([SampleGroup(0, 0, [sample([], Status.FINISHED, None, 0)])], lambda version: 1)
    assert (metrics["tokens"], metrics["off_policy_share"], metrics["staleness_mean"]) == (0, 0.0, 0.0)
    assert metrics["sampled_entropy"] == 0.0


def test_tool_tokens_are_excluded_from_sampled_entropy() -> None:
    tool_sample = sample([(5, 2)], Status.FINISHED, 1.0, 0)
    tool_sample.observe([8, 9, 10])
    assert step_metrics([SampleGroup(0, 0, [tool_sample])], lambda version: 0)["sampled_entropy"] == 0.25
