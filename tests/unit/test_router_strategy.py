"""Placement: pure functions over candidates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlsys.router.strategy import IMBALANCE, SLACK, Candidate, least_loaded, prefix_affinity

LOADS = st.lists(st.integers(0, 300), min_size=1, max_size=8)


def candidates(loads: list[int]) -> list[Candidate]:
    return [Candidate(f"http://e{i}:1", load) for i, load in enumerate(loads)]


@given(LOADS)
def test_the_least_loaded_is_chosen_and_the_first_of_equals(loads: list[int]) -> None:
    assert least_loaded(candidates(loads)) == candidates(loads)[loads.index(min(loads))]


@given(LOADS, st.integers(0, 9))
def test_affinity_holds_up_to_the_bound_and_gives_way_beyond(loads: list[int], prefer: int) -> None:
    chosen = prefix_affinity(candidates(loads), f"http://e{prefer}:1")
    bound = IMBALANCE * min(loads) + SLACK
    if prefer < len(loads) and loads[prefer] <= bound:
        assert chosen.url == f"http://e{prefer}:1"
    else:
        assert chosen.load == min(loads)


def test_no_engine_becomes_a_hot_spot() -> None:
    """Every sample prefers the same engine; the loads stay within the bound of each other."""
    loads = [0, 0, 0]
    for _ in range(600):
        url = prefix_affinity(candidates(loads), "http://e1:1").url
        loads[int(url[8])] += 1
    assert max(loads) <= IMBALANCE * min(loads) + SLACK + 1
