"""How fast engines are, from what their requests show: by hand, and through the router before scripted servers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.router.speed import MIN_PREFILLED_TOKENS, Speed
from tests.helpers.router_rig import A, B, routing, sample
from tests.helpers.scripted_engine import TOKEN_SECONDS, ScriptedEngine


def test_prompts_that_are_read_one_after_the_other_share_the_time() -> None:
    """Sent together at 1 s; the first comes after 0.5 s, the second 0.3 s later: 400 tokens in 0.8 s."""
    speed = Speed()
    speed.record_prefill(250, 1.0, 1.5)
    speed.record_prefill(150, 1.0, 1.8)
    speed.update(fade=False)
    assert speed.prefill == pytest.approx(0.002)
    assert speed.metrics(0)["prefill_tokens_per_s"] == pytest.approx(500)


def test_cached_prefill_and_tokens_after_a_pause_are_not_measured() -> None:
    speed = Speed()
    for i in range(100):
        speed.record_prefill(3, float(i), i + 0.5)
    speed.record_prefill(1000, None, 200.0)
    speed.record_decode(1000, 3, None, 300.0)
    speed.update(fade=False)
    assert speed.prefill is None and speed.decode is None


def test_the_decode_cost_line_is_fitted_from_different_loads() -> None:
    """10 ms a pass and 1 ms for each response in it, at loads of 1 and 40."""
    speed = Speed()
    for load in (1, 40):
        speed.record_decode(1000, load, 0.0, 1000 * (0.010 + 0.001 * load))
    speed.update(fade=False)
    assert speed.decode == pytest.approx((0.010, 0.001), rel=0.02)


@given(load=st.integers(1, 1000), pace=st.floats(1e-4, 10), tokens=st.integers(16, 10**6))
def test_where_loads_do_not_differ_half_of_a_pass_is_its_own(load: int, pace: float, tokens: int) -> None:
    speed = Speed()
    speed.record_decode(tokens, load, 5.0, 5.0 + tokens * pace)
    speed.update(fade=False)
    assert speed.decode is not None
    base_seconds, load_seconds = speed.decode
    assert base_seconds + load_seconds * load == pytest.approx(pace)
    assert base_seconds == pytest.approx(pace / 2)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 300), st.floats(0, 100)), min_size=16, max_size=30)
)
def test_the_fitted_decode_cost_never_falls_with_load(seen: list[tuple[int, int, float]]) -> None:
    speed = Speed()
    for tokens, load, seconds in seen:
        speed.record_decode(tokens, load, 0.0, seconds)
    speed.update(fade=False)
    assert speed.decode is not None and min(speed.decode) >= -1e-9


def test_work_makes_the_old_fade_and_rest_does_not() -> None:
    speed = Speed()
    speed.record_prefill(10 * int(MIN_PREFILLED_TOKENS), 0.0, 64.0)
    for _ in range(1000):
        speed.update(fade=False)
    assert speed.prefill == pytest.approx(0.1)
    for _ in range(113):  # 0.98^113 = 0.102
        speed.update(fade=True)
    assert speed.prefill == pytest.approx(0.1)
    for _ in range(2):
        speed.update(fade=True)
    assert speed.prefill is None, "less than ENOUGH_READ is left"


def test_the_recent_weighs_more() -> None:
    """As much work as before, half of which is forgotten by then: (0.5 * 1 + 1 * 4) / 1.5."""
    speed = Speed()
    speed.record_decode(10_000, 8, 0.0, 10_000.0)
    for _ in range(34):
        speed.update(fade=True)
    speed.record_decode(10_000, 8, 0.0, 40_000.0)
    speed.update(fade=False)
    assert speed.decode is not None
    assert speed.decode[0] + 8 * speed.decode[1] == pytest.approx(3.0, rel=0.01)


@pytest.mark.virtual_clock
async def test_the_router_measures_each_engine_and_starts_over_after_a_restart() -> None:
    engines = ScriptedEngine(A), ScriptedEngine(B)
    async with routing(*engines, strategy="hardware_affinity") as rig:
        await rig.push()
        assert rig.router.engine_metrics()[A]["decode_tokens_per_s"] is None
        prompt = [5 + i % 100 for i in range(70)]
        tasks = [rig.start(sample(i, prompt=[7 + i, *prompt]), 40) for i in range(2)]
        await asyncio.gather(*tasks)
        await asyncio.sleep(2)
        for url in (A, B):
            rates = rig.router.engine_metrics()[url]
            assert rates["decode_tokens_per_s"] == pytest.approx(1 / TOKEN_SECONDS, rel=0.05)
            assert rates["prefill_tokens_per_s"] is not None
        engines[1].restart()
        await asyncio.sleep(2)
        figures = rig.router.engine_metrics()
        assert figures[A]["decode_tokens_per_s"] is not None
        assert figures[B]["decode_tokens_per_s"] is None and figures[B]["prefill_tokens_per_s"] is None


@pytest.mark.virtual_clock
async def test_a_wait_for_a_free_slot_does_not_count_as_slow_prefill() -> None:
    """One place: the second request is read when the first has ended, after 1.1 s."""
    prompt = [5 + i % 100 for i in range(70)]
    read = []
    for slots in (1, 1000):
        server = ScriptedEngine(A, max_running=1, ends_at=lambda seed: 180)
        async with routing(server, slots=slots) as rig:
            await rig.push()
            await asyncio.gather(*(rig.start(sample(i, prompt=[7 + i, *prompt])) for i in range(2)))
            await asyncio.sleep(2)
            prefill_rate = rig.router.engine_metrics()[A]["prefill_tokens_per_s"]
            assert isinstance(prefill_rate, float)
            read.append(prefill_rate)
    assert read[0] > 10 * read[1]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("interruption", ["retract", "in_place"])
async def test_a_push_does_not_lower_the_measured_decode_speed(interruption: str) -> None:
    async with routing(ScriptedEngine(A, ends_at=lambda seed: 150), interruption=interruption) as rig:
        await rig.push()
        task = rig.start(sample())
        await asyncio.sleep(0.3)
        rig.version += 1
        await rig.router.begin_push(rig.version)
        await asyncio.sleep(100)
        rig.version -= 1
        await rig.push()
        await task
        await asyncio.sleep(2)
        assert rig.router.engine_metrics()[A]["decode_tokens_per_s"] == pytest.approx(
            1 / TOKEN_SECONDS, rel=0.05
        )
