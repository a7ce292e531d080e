"""Placement and back-off: pure functions, on all small pools."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.router.breaker import LONGEST_BACK_OFF, Breaker
from rlsys.router.strategy import (
    IMBALANCE,
    SLACK,
    STRATEGIES,
    Wish,
    is_hot,
    least_tokens,
    power_of_two,
    prefix_affinity,
    version_aware,
)


@dataclass(frozen=True)
class Engine:
    url: str
    load: int
    tokens: int = 0
    version: int = 0


LOADS = st.lists(st.integers(0, 300), min_size=1, max_size=8)
POOLS = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 9000), st.integers(0, 3)), min_size=1, max_size=8
).map(lambda rows: [Engine(f"http://e{i}:1", *row) for i, row in enumerate(rows)])
WISHES = st.builds(
    Wish,
    st.none() | st.integers(0, 9).map(lambda i: f"http://e{i}:1"),
    st.none() | st.integers(0, 3),
    st.integers(0, 2**31),
)


def candidates(loads: list[int]) -> list[Engine]:
    return [Engine(f"http://e{i}:1", load) for i, load in enumerate(loads)]


@pytest.mark.parametrize("name", STRATEGIES)
@given(pool=POOLS, wish=WISHES)
def test_every_strategy_chooses_a_candidate_and_always_the_same(
    name: str, pool: list[Engine], wish: Wish
) -> None:
    chosen = STRATEGIES[name](pool, wish)
    assert chosen in pool
    assert chosen == STRATEGIES[name](pool, wish)


@given(LOADS, st.integers(0, 9))
def test_affinity_holds_up_to_the_bound_and_gives_way_beyond(loads: list[int], prefer: int) -> None:
    chosen = prefix_affinity(candidates(loads), Wish(f"http://e{prefer}:1"))
    bound = IMBALANCE * min(loads) + SLACK
    if prefer < len(loads) and loads[prefer] <= bound:
        assert chosen.url == f"http://e{prefer}:1"
    else:
        assert chosen == candidates(loads)[loads.index(min(loads))], "the first of the least loaded"


@given(st.sampled_from(["prefix_affinity", "version_aware"]), st.integers(2, 6), st.integers(1, 600))
def test_no_engine_becomes_a_hot_spot(name: str, engines: int, requests: int) -> None:
    """Every request prefers the same engine; the loads stay within the bound of each other."""
    loads = [0] * engines
    for _ in range(requests):
        url = STRATEGIES[name](candidates(loads), Wish("http://e1:1", 0)).url
        loads[int(url[8])] += 1
    assert max(loads) <= IMBALANCE * min(loads) + SLACK + 1


@given(POOLS, WISHES)
def test_least_tokens(pool: list[Engine], wish: Wish) -> None:
    assert least_tokens(pool, wish).tokens == min(c.tokens for c in pool)


@given(POOLS, WISHES)
def test_the_better_of_two_is_never_the_worst_of_all(pool: list[Engine], wish: Wish) -> None:
    if len({c.load for c in pool}) == len(pool) > 1:
        assert power_of_two(pool, wish) != max(pool, key=lambda c: c.load)


@given(st.integers(2, 8), st.integers(0, 2**31))
def test_the_key_reaches_every_pair(engines: int, start: int) -> None:
    """Equally loaded, so the first of the pair is taken: each engine comes first for some keys."""
    pool = candidates([5] * engines)
    chosen = {power_of_two(pool, Wish(key=start + k)).url for k in range(engines)}
    assert len(chosen) == engines


@given(POOLS, WISHES)
def test_a_sample_keeps_its_weights_unless_that_is_a_hot_spot(pool: list[Engine], wish: Wish) -> None:
    wanted = max(c.version for c in pool) if wish.version is None else wish.version
    chosen = version_aware(pool, wish)
    own = [c for c in pool if c.version == wanted]
    if any(not is_hot(c, pool) for c in own):
        assert chosen.version == wanted
    assert not is_hot(chosen, pool)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_a_breaker_backs_off_longer_each_time_and_forgets_with_a_success(gaps: list[int]) -> None:
    breaker, now, last = Breaker(), 0.0, 0.0
    assert not breaker.open(now) and not breaker.on_trial(now)
    for gap in gaps:
        breaker.failed(now)
        assert breaker.open(now)
        wait = breaker.retry_at - now
        assert min(last, LONGEST_BACK_OFF) <= wait <= LONGEST_BACK_OFF
        breaker.failed(now)
        assert breaker.retry_at - now == wait, "failures of one outage count once"
        last, now = wait, breaker.retry_at + gap
        assert breaker.on_trial(now) and not breaker.open(now)
    assert last == min(30.0, 0.5 * 2 ** (len(gaps) - 1)), (
        "seconds: half of one, twice that, up to half a minute"
    )
    breaker.succeeded()
    assert not breaker.open(now) and not breaker.on_trial(now)
