"""Placement and back-off: pure functions, on all small pools."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.router.breaker import LONGEST_BACK_OFF, Breaker
from rlsys.router.strategy import (
    IMBALANCE,
    SLACK,
    STRATEGIES,
    RoutingRequest,
    hardware_affinity,
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
    pending_prefill: int = 0
    slots: int = 2**31
    prefill_seconds: float | None = None
    decode_seconds: tuple[float, float] | None = None


LOADS = st.lists(st.integers(0, 300), min_size=1, max_size=8)
RATES = st.none() | st.floats(1e-6, 1)
POOLS = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.integers(0, 9000),
        st.integers(0, 3),
        st.integers(0, 9000),
        st.integers(1, 300),
        RATES,
        st.none() | st.tuples(st.floats(1e-6, 1), st.floats(0, 1)),
    ),
    min_size=1,
    max_size=8,
).map(lambda rows: [Engine(f"http://e{i}:1", *row) for i, row in enumerate(rows)])
WISHES = st.builds(
    RoutingRequest,
    st.none() | st.integers(0, 9).map(lambda i: f"http://e{i}:1"),
    st.none() | st.integers(0, 3),
    st.integers(0, 2**31),
    prompt_tokens=st.integers(1, 5000),
    expected_tokens=st.floats(0, 5000),
)


def candidates(loads: list[int]) -> list[Engine]:
    return [Engine(f"http://e{i}:1", load) for i, load in enumerate(loads)]


@pytest.mark.parametrize("name", STRATEGIES)
@given(pool=POOLS, wish=WISHES)
def test_every_strategy_chooses_a_candidate_and_always_the_same(
    name: str, pool: list[Engine], wish: RoutingRequest
) -> None:
    chosen = STRATEGIES[name](pool, wish)
    assert chosen in pool
    assert chosen == STRATEGIES[name](pool, wish)


@given(LOADS, st.integers(0, 9))
def test_affinity_holds_up_to_the_bound_and_gives_way_beyond(loads: list[int], prefer: int) -> None:
    chosen = prefix_affinity(candidates(loads), RoutingRequest(f"http://e{prefer}:1"))
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
        url = STRATEGIES[name](candidates(loads), RoutingRequest("http://e1:1", 0)).url
        loads[int(url[8])] += 1
    assert max(loads) <= IMBALANCE * min(loads) + SLACK + 1


@given(POOLS, WISHES)
def test_least_tokens(pool: list[Engine], wish: RoutingRequest) -> None:
    assert least_tokens(pool, wish).tokens == min(c.tokens for c in pool)


@given(POOLS, WISHES)
def test_the_better_of_two_is_never_the_worst_of_all(pool: list[Engine], wish: RoutingRequest) -> None:
    if len({c.load for c in pool}) == len(pool) > 1:
        assert power_of_two(pool, wish) != max(pool, key=lambda c: c.load)


@given(st.integers(2, 8), st.integers(0, 2**31))
def test_the_key_reaches_every_pair(engines: int, start: int) -> None:
    """Equally loaded, so the first of the pair is taken: each engine comes first for some keys."""
    pool = candidates([5] * engines)
    chosen = {power_of_two(pool, RoutingRequest(key=start + k)).url for k in range(engines)}
    assert len(chosen) == engines


@given(POOLS, WISHES)
def test_a_sample_keeps_its_weights_unless_that_is_a_hot_spot(
    pool: list[Engine], wish: RoutingRequest
) -> None:
    target_version = max(c.version for c in pool) if wish.version is None else wish.version
    chosen = version_aware(pool, wish)
    candidates = [c for c in pool if c.version == target_version]
    if any(not is_hot(c, pool) for c in candidates):
        assert chosen.version == target_version
    assert not is_hot(chosen, pool)


READS_FAST = {"prefill_seconds": 0.001, "decode_seconds": (0.05, 0.0)}
WRITES_FAST = {"prefill_seconds": 0.004, "decode_seconds": (0.01, 0.0)}


def unlike(*loads: int, **more: object) -> list[Engine]:
    """One that reads fast, and one that writes fast."""
    return [
        Engine("http://e0:1", loads[0], **{**READS_FAST, **more}),  # type: ignore[arg-type]
        Engine("http://e1:1", loads[1], **{**WRITES_FAST, **more}),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("read", "write", "chosen"),
    [
        (1000, 10, "http://e0:1"),  # 1 + 0.5 s there, 4 + 0.1 s here
        (100, 100, "http://e1:1"),  # 0.1 + 5 s there, 0.4 + 1 s here
        (1000, 75, "http://e0:1"),  # 1 + 3.75 s there, 4 + 0.75 s here: equal, so the first
    ],
)
def test_long_prompts_go_to_fast_prefill_and_long_responses_to_fast_decode(
    read: int, write: int, chosen: str
) -> None:
    assert (
        hardware_affinity(unlike(0, 0), RoutingRequest(prompt_tokens=read, expected_tokens=write)).url
        == chosen
    )


def test_a_prompt_goes_to_the_engine_where_it_delays_fewer_responses() -> None:
    """Equally fast engines: 100 ms for each response that waits, or 200 ms more to write at the other one."""
    fast = {"prefill_seconds": 0.001, "decode_seconds": (0.01, 0.0)}
    pool = unlike(3, 0, **fast)
    assert (
        hardware_affinity(pool, RoutingRequest("http://e0:1", prompt_tokens=100, expected_tokens=10)).url
        == "http://e0:1"
    ), "it is in its cache"
    assert hardware_affinity(pool, RoutingRequest(prompt_tokens=100, expected_tokens=10)).url == "http://e1:1"
    behind = [pool[0], replace(pool[1], pending_prefill=400)]
    assert (
        hardware_affinity(behind, RoutingRequest(prompt_tokens=100, expected_tokens=10)).url == "http://e0:1"
    ), "there it waits for 400 tokens"


def test_a_full_engine_takes_as_many_times_longer_to_write() -> None:
    """0.1 s a token alone and 8 slots: with 15 in it a sixteenth takes 0.2 s, as long as at the slower engine."""
    fast = Engine("http://e0:1", 15, slots=8, decode_seconds=(0.1, 0.0))
    slow = Engine("http://e1:1", 0, slots=8, decode_seconds=(0.2, 0.0))
    assert hardware_affinity([fast, slow], RoutingRequest(expected_tokens=100)) is fast
    assert hardware_affinity([replace(fast, load=16), slow], RoutingRequest(expected_tokens=100)) is slow


@given(POOLS, WISHES, st.integers(0, 7))
def test_an_unknown_engine_counts_as_the_average(pool: list[Engine], wish: RoutingRequest, i: int) -> None:
    """Where all others are alike, it is taken for one of them."""
    rates = {"prefill_seconds": 0.25, "decode_seconds": (0.5, 0.125)}
    known_pool = [replace(c, **rates) for c in pool]
    hidden = [*known_pool]
    if len(pool) > 1:
        hidden[i % len(pool)] = replace(known_pool[i % len(pool)], prefill_seconds=None, decode_seconds=None)
    assert hardware_affinity(hidden, wish).url == hardware_affinity(known_pool, wish).url


def test_equal_engines_share_requests_equally_before_any_measurement() -> None:
    loads = [0, 0, 0]
    for i in range(60):
        chosen = hardware_affinity(
            candidates(loads), RoutingRequest(key=i, prompt_tokens=20, expected_tokens=50.0)
        )
        loads[int(chosen.url[8])] += 1
    assert loads == [20, 20, 20]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_a_breaker_backs_off_longer_each_time_and_forgets_with_a_success(gaps: list[int]) -> None:
    breaker, current_time, last = Breaker(), 0.0, 0.0
    assert not breaker.open(current_time) and not breaker.on_trial(current_time)
    for delay in gaps:
        breaker.record_failure(current_time)
        assert breaker.open(current_time)
        wait = breaker.retry_at - current_time
        assert min(last, LONGEST_BACK_OFF) <= wait <= LONGEST_BACK_OFF
        breaker.record_failure(current_time)
        assert breaker.retry_at - current_time == wait, "failures of one outage count once"
        last, current_time = wait, breaker.retry_at + delay
        assert breaker.on_trial(current_time) and not breaker.open(current_time)
    assert last == min(30.0, 0.5 * 2 ** (len(gaps) - 1)), (
        "seconds: half of one, twice that, up to half a minute"
    )
    breaker.record_success()
    assert not breaker.open(current_time) and not breaker.on_trial(current_time)
