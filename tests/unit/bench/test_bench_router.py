"""The pure parts of bench/router.py: its ratios and its summary, its requests, and the samples that it holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, found as when it is run: its folder is on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    import router

    return router


def test_no_two_requests_share_a_prefix_and_all_ids_are_in_the_vocabulary(router: ModuleType) -> None:
    prompts = [tuple(router.request_body(i, 8)["input_ids"]) for i in range(256)]
    assert len({p[:3] for p in prompts}) == len(prompts)
    assert all(min(p) > 0 and max(p) < router.VOCAB and len(p) == router.PROMPT for p in prompts)


def test_ratios_are_computed_per_repeat(router: ModuleType) -> None:
    ratios = router.ratios({"direct": [100.0, 50.0], "rlsys": [90.0, 50.0]})
    assert ratios == {"direct": [1.0, 1.0], "rlsys": [0.9, 1.0]}


def test_added_latency_is_computed_per_round(router: ModuleType) -> None:
    assert router.added({"direct": [10.0, 30.0], "rlsys": [11.0, 31.5]}, "rlsys") == [1.0, 1.5]


def test_every_target_occupies_every_position_of_a_round(router: ModuleType) -> None:
    urls = dict.fromkeys(("direct", "rlsys", "sglang_router"), "")
    rounds = [router.turns(urls, i) for i in range(6)]
    assert all(sorted(r) == sorted(urls) for r in rounds)
    for position in range(3):
        assert sorted(r[position] for r in rounds) == sorted([*urls, *urls])
    assert len({tuple(r) for r in rounds}) == 6


@pytest.mark.parametrize("theirs", [{"sglang_router": 2.0}, {}])
def test_the_summary_contains_the_required_figures(router: ModuleType, theirs: dict[str, float]) -> None:
    whole_throughput = {"ratio_to_direct": {"rlsys": {"median": 0.99}}}
    real: dict[str, Any] = {
        "throughput": {"whole": whole_throughput, "streamed": {}},
        "added_p50_ms": {"rlsys": 1.0, **theirs},
    }
    capacity = {"requests_per_s": {"rlsys": {"median": 900.0}}}
    assert router.summary(real, capacity) == {
        "throughput_ratio_to_direct": 0.99,
        "added_p50_ms": 1.0,
        "sglang_router_added_p50_ms": 2.0 if theirs else None,
        "requests_per_second": 900.0,
    }


async def test_all_tokens_of_concurrent_requests_are_counted(
    router: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one(_session: Any, _url: str, body: dict[str, Any]) -> int:
        await asyncio.sleep(0)
        return int(body["sampling_params"]["max_new_tokens"])

    monkeypatch.setattr(router, "send", one)
    assert (await router.send_many("http://engine:1", 300, 7))[1] == 300 * 7


async def test_samples_are_held_parked_and_ended(router: ModuleType) -> None:
    import router_stage

    figures = await router_stage.hold(40)
    assert figures["samples"] == 40
    assert figures.keys() >= {"start_s", "interrupt_s", "resume_s", "kib_per_sample_parked"}
