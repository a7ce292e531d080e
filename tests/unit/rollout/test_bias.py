"""The bias monitor: hand-computed means, and a run whose long responses never get trained."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample, SampleGroup
from rlsys.rollout.bias import WARM_UP_STEPS, by_rank, by_resumes, mean_length
from tests.helpers.rollout_rig import make_config, rig


def test_mean_length_hand_computed() -> None:
    assert mean_length([]) == 0
    assert mean_length([(2, True), (4, True)]) == 3
    # One that runs at 2 stands for those that are longer than 2: the one at 4.
    assert mean_length([(2, True), (2, False), (4, True)]) == pytest.approx(2 + (1 - 1 / 3) * 2)
    assert mean_length([(3, False), (1, False)]) == 3  # nothing ended: at least so long


@given(st.lists(st.integers(1, 50), min_size=1))
def test_without_running_samples_it_is_the_mean(lengths: list[int]) -> None:
    assert mean_length((n, True) for n in lengths) == pytest.approx(sum(lengths) / len(lengths))


def test_running_samples_do_not_shorten_the_mean() -> None:
    rng = random.Random(0)
    true = [rng.expovariate(1 / 20) for _ in range(4000)]
    observations = [(round(min(n, cut) * 100), n <= cut) for n in true if (cut := rng.random() * 120)]
    plain = (
        sum(n for n, finished in observations if finished)
        / sum(finished for _, finished in observations)
        / 100
    )
    assert plain < 17
    assert mean_length(observations) / 100 == pytest.approx(20, rel=0.06)


def group(group_id: int, length: int, reward: float, resumes: int) -> SampleGroup:
    sample = Sample(
        group_id, group_id, 0, [1], seed=1, spans=[VersionSpan(1, 0, length)], reward=reward, resumes=resumes
    )
    return SampleGroup(group_id, group_id, [sample])


def test_length_and_reward_by_rank_and_resumes() -> None:
    groups = [group(i, length=10 * (i + 1), reward=i / 8, resumes=i) for i in range(6)]
    ranks = by_rank(groups)
    assert [ranks[f"length_rank_{i}"] for i in (1, 2, 3, 4)] == [10, 25, 40, 55]
    assert ranks["reward_rank_2"] == 1.5 / 8
    resumes = by_resumes(s for g in groups for s in g.samples)
    assert [resumes[f"length_resumes_{i}"] for i in range(4)] == [10, 20, 30, 50]
    assert "length_rank_1" not in by_rank(groups[:1])


async def test_a_run_that_never_trains_long_responses_raises_the_bias_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every fourth group takes longer than max_staleness allows: it expires."""

    async def test(staleness: int, step_of_alarm: int | None) -> None:
        folder = tmp_path / str(staleness)
        folder.mkdir()
        config = make_config(folder, rollout={"over_provision": 2, "max_staleness": staleness})
        async with rig(config, lambda s: 19 if s.group_id % 4 == 0 else 3) as r:
            await r.start()
            alarms = []
            for step in range(1, WARM_UP_STEPS + 5):
                metrics = (await r.take(step)).metrics
                await r.push()
                if metrics["bias_alarm"]:
                    alarms.append(step)
            assert (alarms[0] if alarms else None) == step_of_alarm
            if step_of_alarm:
                assert (
                    metrics["length_bias"] < -0.15
                )  # at least: how long the dropped ones had become is not known
                assert metrics["generated_len_mean"] > metrics["response_len_mean"]

    await test(1, WARM_UP_STEPS + 1)
    assert sum("trained responses are" in message for message in caplog.messages) == 1
    await test(9, None)
