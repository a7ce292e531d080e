"""Resume order, choice of groups in time, the over-provision controller: pure, with hand-made cases."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.rollout.controller import Occupancy, Target, next_factor
from rlsys.rollout.schedule import choose, choose_in_time, resume_key, too_old
from rlsys.types import GroupState, Sample, SampleGroup, Segment, Status, TokenSpan, VersionSpan


def group(group_id: int, *lengths: int, done: int = 0) -> SampleGroup:
    """Samples of these lengths; the first `done` have finished."""
    samples = []
    for i, n in enumerate(lengths):
        sample = Sample(group_id * 10 + i, group_id, i, [1], seed=1)
        sample.append(Segment([5] * n, [-1.0] * n, [VersionSpan(1, 0, n)]))
        sample.status = Status.FINISHED if i < done else Status.PARKED
        samples.append(sample)
    return SampleGroup(group_id, group_id, samples, GroupState.ACTIVE)


def test_resume_orders() -> None:
    a, b = group(0, 4, 2, 0), group(1, 9, 3, 8, done=2)
    waiting = [(s, g) for g in (a, b) for s in g.samples if not s.status.terminal]

    def order(name: str) -> list[int]:
        return [s.sample_id for s, g in sorted(waiting, key=lambda x: resume_key(name, *x))]  # type: ignore[arg-type]

    assert order("oldest") == [0, 1, 2, 12]
    assert order("nearest_done") == [12, 0, 1, 2]  # group 1 lacks one sample
    assert order("longest") == [12, 0, 1, 2]
    b.samples[2].response_ids = b.samples[2].response_ids[:1]
    assert order("nearest_done") == [12, 0, 1, 2]
    assert order("longest") == [0, 1, 12, 2]


def test_choose_takes_the_first_to_finish() -> None:
    ready = [group(i, 1) for i in (4, 2, 7)]
    assert choose(ready, 4) is None
    assert choose(ready, 2) == ready[:2]


def in_time(ready: dict[int, int], active: dict[int, int], wanted: int) -> list[int] | None:
    """Ids of groups -> their slack."""
    slack = {**ready, **active}
    chosen = choose_in_time(
        [group(i, 1) for i in ready], [group(i, 1) for i in active], wanted, lambda g: slack[g.group_id]
    )
    return None if chosen is None else [g.group_id for g in chosen]


def test_choose_in_time_hand_made() -> None:
    assert in_time({1: 3, 2: 3}, {}, 3) is None  # too few
    assert in_time({1: 3, 2: 0, 3: 3}, {}, 2) == [2, 1]  # the one with the least time first
    assert in_time({1: 3, 2: 3}, {9: 0}, 2) is None  # a running one that only this step can take
    assert in_time({1: 3, 2: 3}, {9: 1}, 2) == [1, 2]  # the next step can still take it
    # Two steps are left for five groups of two each: one too many, so wait for one of the five.
    assert in_time({1: 5, 2: 5}, dict.fromkeys(range(10, 15), 2), 2) is None
    assert in_time({1: 5, 10: 2}, dict.fromkeys(range(11, 15), 2), 2) == [10, 1]
    # Nothing that runs can help: what is late is finished already.
    assert in_time({1: 0, 2: 0, 3: 0}, {9: 4}, 2) == [1, 2]


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 10**6))
def test_whoever_waits_in_time_never_lets_a_group_grow_too_old(wanted: int, limit: int, seed: int) -> None:
    """The admission rule's groups, finishing in random order: every step takes `wanted`, none too old."""
    rng = random.Random(seed)
    born: dict[int, int] = {}
    ready: list[int] = []
    trained = issued = 0
    for step in range(12):
        while issued < (limit + 1 + step) * wanted:
            born[issued] = step
            issued += 1

        def slack(g: SampleGroup, now: int = step) -> int:
            return limit - (now - born[g.group_id])

        while True:
            chosen = choose_in_time(
                [group(i, 1) for i in ready], [group(i, 1) for i in born if i not in ready], wanted, slack
            )
            if chosen is not None:
                break
            ready.append(rng.choice([i for i in born if i not in ready]))
        for g in chosen:
            assert slack(g) >= 0
            ready.remove(g.group_id)
            del born[g.group_id]
        trained += len(chosen)
        assert all(limit - (step + 1 - b) >= 0 for b in born.values())
    assert trained == 12 * wanted


def test_tokens_that_are_too_old() -> None:
    sample = Sample(0, 0, 0, [1], seed=1)
    for version, n in ((3, 2), (4, 1), (7, 3)):
        sample.append(Segment([5] * n, [-1.0] * n, [VersionSpan(version, 0, n)]))
    assert too_old(sample, 3, lambda v: 7 - v) == [TokenSpan(0, 2)]
    assert too_old(sample, 2, lambda v: 7 - v) == [TokenSpan(0, 2), TokenSpan(2, 3)]
    assert too_old(sample, 4, lambda v: 7 - v) == []


# The controller


@pytest.mark.parametrize(("target", "high"), [("off_policy", False), ("idle", True)])
def test_the_factor_moves_towards_the_target_and_stays_in_bounds(target: Target, high: bool) -> None:
    """More off-policy tokens than wanted: fewer in flight; more idle slots than wanted: more."""
    more = next_factor(2.0, target, 0.4, 0.8, ceiling=9)
    less = next_factor(2.0, target, 0.4, 0.1, ceiling=9)
    assert (more > 2.0 > less) if high else (more < 2.0 < less)
    assert next_factor(2.0, target, 0.4, 0.4, ceiling=9) == 2.0
    assert next_factor(1.0, target, 0.0, 0.9 * (not high), ceiling=9) == 1.0
    assert next_factor(3.0, target, 0.9 * (not high), 0.9 * high, ceiling=3) == 3.0


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 9), st.sampled_from(["off_policy", "idle"]))
def test_any_measurement_keeps_the_factor_sane(
    wanted: float, measured: float, factor: float, target: Target
) -> None:
    assert 1.0 <= next_factor(factor, target, wanted, measured, ceiling=9.0) <= 9.0


def test_the_controller_settles_on_its_target() -> None:
    """A fluid model of APRIL: all in flight grow alike, the first `batch` to end are taken, the rest ages by one."""
    rng = random.Random(0)
    batch, factor, shares = 64, 2.0, []
    flight: list[tuple[float, float]] = []  # (length, tokens made so far by older weights and in this step)
    for _ in range(150):
        while len(flight) < factor * batch:
            flight.append((min(rng.lognormvariate(3, 1), 400), 0.0))
        flight.sort(key=lambda f: f[0] - f[1])
        end = flight[batch - 1][0] - flight[batch - 1][1]
        taken, flight = flight[:batch], [(n, made + end) for n, made in flight[batch:]]
        shares.append(sum(made for _, made in taken) / sum(n for n, _ in taken))
        factor = next_factor(factor, "off_policy", 0.4, shares[-1], ceiling=9)
    assert math.fsum(shares[50:]) / 100 == pytest.approx(0.4, abs=0.04)


def test_idle_share_hand_computed() -> None:
    occupancy = Occupancy(4)
    assert occupancy.idle_share() == 0
    occupancy.update(10.0, 4)
    occupancy.update(12.0, 1)  # 2 s full
    occupancy.update(14.0, 8)  # 2 s with three of four idle
    occupancy.update(15.0, None)  # 1 s more than full
    occupancy.update(99.0, 0)  # nobody wanted anything
    occupancy.update(100.0, None)  # 1 s empty
    assert occupancy.idle_share() == pytest.approx((2 * 0.75 + 1) / 6)
    assert occupancy.idle_share() == 0
