"""What bench/april.py says about its figures: the trace's shape, and the ratios of the summary. No engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample, SampleGroup, TrainBatch
from rlsys.core.weight_updates import Canary
from rlsys.engine.client import EngineClient
from tests.helpers.scripted_engine import Network, ScriptedEngine, canary_logprobs
from tests.integration.test_bench_april_quick import IN_THE_SUMMARY, MODES

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def april(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, found as when it is run: its folder is on the path."""
    monkeypatch.syspath_prepend(str(BENCH))
    import april

    return april


def test_half_of_the_trace_ends_within_a_tenth_of_the_cap_and_a_tail_reaches_it(april: ModuleType) -> None:
    lengths = april.trace(quick=False)
    cap = max(lengths)
    assert median(lengths) <= cap / 10
    assert 0.01 < sum(n == cap for n in lengths) / len(lengths) < 0.05
    assert min(lengths) > 0


def test_slots_are_whole_groups_and_the_two_baselines_match_april_2_in_batch_and_in_slots(
    april: ModuleType,
) -> None:
    modes = {m.name: m for m in april.MODES}
    assert all(m.slots % april.GROUP_SIZE == 0 == m.batch % april.GROUP_SIZE for m in modes.values())
    assert modes["synchronous"].batch == modes["april-2"].batch
    assert modes["synchronous-2N"].slots == modes["april-2"].slots == april.SATURATED_SLOTS


def test_a_mode_is_warm_when_the_longest_response_can_have_ended(april: ModuleType) -> None:
    modes = {m.name: m for m in april.MODES}
    lengths = [10] * 9 + [110]  # a step makes 20 / over_provision tokens of each slot
    assert modes["synchronous"].warm_steps(lengths) == 0
    assert [modes[f"april-{r}"].warm_steps(lengths) for r in ("1.25", "2", "3")] == [7, 11, 17]


def test_the_summary_compares_medians(april: ModuleType) -> None:
    def mode(rate: float, length_ratio: float = 1.0) -> dict[str, Any]:
        rates = {f"{kind}_tokens_per_s": {"median": rate} for kind in ("trained", "sampled")}
        return {**rates, "length_ratio": {"median": length_ratio}}

    costs = {
        "gpu-like": {
            "saturated": mode(1000), "synchronous": mode(300), "synchronous-2N": mode(450),
            "april-2": mode(900, 0.99), "april-2-abort": mode(800), "april-2-kept": mode(980),
        },
        "cpu": {
            "saturated": mode(4000), "synchronous": mode(2000), "synchronous-2N": mode(2500), "april-2": mode(3000)
        },
    }  # fmt: skip
    costs["gpu-like"]["prefill"] = {"seconds_per_token": {"median": 0.0001}}
    costs["cpu"]["prefill"] = {"seconds_per_token": {"median": 0.00005}}
    summary = april.summary(costs, [1, 3])
    # 2 x 5 / 4 / 2 tokens are read for a trained one.
    assert summary.pop("share_of_bound_at_2") == pytest.approx(0.9 * 1.125)
    assert summary.pop("share_of_bound_at_2_raw_cpu") == pytest.approx(0.75 * 1.25)
    assert summary == {
        "gain_at_2": 3.0,
        "gain_at_2_same_slots": 2.0,
        "gain_at_2_raw_cpu": 1.5,
        "gain_at_2_raw_cpu_same_slots": 1.2,
        "share_of_saturated_at_2": 0.9,
        "share_of_saturated_at_2_raw_cpu": 0.75,
        "share_of_saturated_at_2_abort": 0.8,
        "share_of_saturated_at_2_kept": 0.98,
        "length_ratio_at_2": 0.99,
    }
    del costs["gpu-like"], costs["cpu"]["synchronous"], costs["cpu"]["prefill"]
    assert april.summary(costs, [1, 3]) == {
        "gain_at_2_raw_cpu_same_slots": 1.2, "share_of_saturated_at_2_raw_cpu": 0.75,
    }, "as far as their modes have run"  # fmt: skip


@pytest.mark.gate
def test_the_bound_matches_the_prefixes_that_a_simulated_queue_recomputes(april: ModuleType) -> None:
    """Slots that decode a token a tick; every step, when N responses have ended, all prefixes are read again."""
    lengths, batch, slots = april.trace(quick=False), 40, 80
    draw = np.random.default_rng(0)
    target_lengths = draw.choice(lengths, slots)
    progress = np.zeros(slots, dtype=int)
    read = trained = finished_count = 0
    for _ in range(25_000):
        progress += 1
        if (over := progress == target_lengths).any():
            finished_count, trained = (
                finished_count + int(over.sum()),
                trained + int(target_lengths[over].sum()),
            )
            target_lengths[over], progress[over] = draw.choice(lengths, over.sum()), 0
        if finished_count >= batch:
            finished_count -= batch
            read += int(progress.sum())
    expected = 1 / april.bound_of(1.0, 1.0, slots / batch, lengths) - 1
    assert read / trained == pytest.approx(expected, rel=0.03)


def test_the_modes_of_the_quick_bench_are_all_that_its_summary_needs(april: ModuleType) -> None:
    """tests/integration/test_bench_april_quick.py takes a part of them; before, its summary was empty."""
    assert {*MODES} <= {"saturated", "prefill", *(mode.name for mode in april.MODES)}
    keys = ("trained_tokens_per_s", "sampled_tokens_per_s", "length_ratio", "seconds_per_token")
    figures = {key: {"median": 1.0} for key in keys}
    costs = {cost: dict.fromkeys(MODES, figures) for cost in ("gpu-like", "cpu")}
    assert april.summary(costs, [1]).keys() >= IN_THE_SUMMARY


def test_figures_of_trained_groups(april: ModuleType) -> None:
    def sample(i: int, tokens: int, **fields: int) -> Sample:
        ids = list(range(tokens))
        return Sample(i, 0, i, [7, 8], 1, ids, [0.0] * tokens, [VersionSpan(1, 0, tokens)], **fields)

    # One sample unbroken; one interrupted after 4 of 6 tokens, read again but for 2 tokens from a cache.
    samples = [
        sample(0, 2, prefilled_tokens=2),
        sample(1, 6, prefilled_tokens=2 + 6, cached_tokens=2, resumes=1),
    ]
    batch = TrainBatch(
        1, 1, [SampleGroup(0, 0, samples)], {"tokens": 8, "off_policy_share": 0.25, "staleness_mean": 3.0}
    )
    assert april.trained_figures([batch], 2.0, true_mean=5.0) == {
        "trained_tokens_per_s": 4.0,
        "samples_per_s": 1.0,
        "off_policy_share": 0.25,
        "mean_age": 3.0,
        "length_ratio": 0.8,
        "re_prefilled_tokens_per_trained_token": 0.5,
    }


@pytest.mark.gate
@pytest.mark.virtual_clock
@pytest.mark.parametrize("name", ["synchronous", "april-2", "april-2-abort", "april-2-kept", "asynchronous"])
async def test_a_mode_on_a_scripted_engine(
    april: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine("http://engine", ends_at=lambda seed: 10**6)

    class Sync:
        def __init__(self, *_: object, **__: object) -> None: ...

        def push(self, *_: object) -> None:
            engine.load(0)

    monkeypatch.setattr(april, "GatheredPush", Sync)
    lengths = april.trace(quick=True)
    config = Config.model_validate(
        {
            "model": {"path": april.write_random_moe(tmp_path / "model")},
            "rollout": {"max_response_tokens": max(lengths)},
            # No digests of its tensors are given below.
            "engine": {"extra_args": ["--moe-runner-backend", "triton"]},
        }
    )
    canaries = [Canary(ids, canary_logprobs(ids, 0)) for ids in april.canary_ids()]
    stage = april.Stage(EngineClient(engine.url, Network(engine)), config, {}, canaries, lengths, tmp_path)  # type: ignore[arg-type]
    mode = next(m for m in april.MODES if m.name == name)
    figures = await april.run_mode(stage, mode, april.BATCH)
    assert figures["length_ratio"] > 0.3
    assert (figures["off_policy_share"] > 0) == (mode.max_staleness > 0)
    assert (figures["re_prefilled_tokens_per_trained_token"] > 0) == (
        name in ("april-2-abort", "asynchronous")
    )


def claim(ratio: float, seed: int, *curve: tuple[int, float, float], tokens: int = 1000) -> dict[str, Any]:
    """Return a record of bench/april_claim.py; the last evaluation is at its end."""
    return {
        "algorithm": "grpo", "ratio": ratio, "seed": seed, "tokens": tokens, "seconds": curve[-1][2],
        "steps": curve[-1][0], "curve": [list(point) for point in curve], "settings": {"lr": 1},
    }  # fmt: skip


@pytest.fixture
def april_claim(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import april_claim

    return april_claim


@pytest.mark.gate
def test_the_claim_pairs_runs_by_seed(april_claim: ModuleType) -> None:
    records = [
        claim(1.0, 0, (0, 0.1, 0.0), (4, 0.6, 30.0), (8, 0.90, 60.0)),
        claim(1.0, 1, (0, 0.1, 0.0), (4, 0.6, 40.0), (8, 0.92, 80.0)),
        claim(1.0, 2, (0, 0.1, 0.0), (4, 0.2, 40.0), (8, 0.40, 80.0)),
        claim(2.0, 0, (0, 0.1, 0.0), (4, 0.4, 10.0), (8, 0.91, 30.0)),
        claim(2.0, 1, (0, 0.1, 0.0), (4, 0.6, 20.0), (8, 0.91, 40.0)),
        claim(2.0, 2, (0, 0.1, 0.0), (4, 0.6, 20.0), (8, 0.42, 40.0)),
    ]
    table = april_claim.table({(r["algorithm"], r["ratio"], r["seed"]): r for r in records}, (0.5, 0.9))
    synchronous, double_ratio = table["grpo"]["1"], table["grpo"]["2"]
    assert synchronous["to_0.5"] == {
        "steps": [4, 4, None],
        "seconds": {"mean": 35.0, "interval": [-28.53, 98.53], "n": 2},
    }
    assert double_ratio["to_0.9"]["steps"] == [8, 8, None]
    paired = double_ratio["against_synchronous"]
    assert paired["seconds_to_0.5"]["mean"] == 0.75 and paired["seconds_to_0.5"]["n"] == 2, (
        "a run without the target is in no pair"
    )
    # Differences 0.01, -0.01, 0.02: standard deviation 0.01528, t with 2 degrees of freedom 4.303.
    assert paired["accuracy"] == {"mean": 0.0067, "interval": [-0.0313, 0.0446], "n": 3}
    # By the end of each run, the synchronous one has 0.6, 0.6 and 0.2.
    assert paired["accuracy_in_equal_seconds"]["mean"] == pytest.approx((0.31 + 0.31 + 0.22) / 3)
    assert paired["throughput"] == {"mean": 2.0, "interval": [2.0, 2.0], "n": 3}
    assert april_claim.interval([0.1]) is None
    head, _, first, second = april_claim.table_lines(table, (0.5, 0.9))
    assert head.count("|") == first.count("|") == second.count("|")
    assert first.startswith("| grpo | 1 | 3 | 14 (") and "| 4 4 - | 35 (-29 to 99) |  |" in first
    assert second.startswith("| grpo | 2 | 3 | 28 (") and second.endswith(
        "| +0.007 (-0.031 to +0.045) | +0.280 (+0.151 to +0.409) |"
    )


@pytest.mark.gate
def test_seconds_of_evaluations_are_in_no_figure_of_the_claim(april_claim: ModuleType) -> None:
    def line(kind: str, step: int, time: float, **values: float) -> dict[str, Any]:
        return {"kind": kind, "step": step, "time": time, **values}

    lines = [
        line("run", 0, 100.0),
        line("eval", 0, 107.0, accuracy=0.1),
        line("step", 1, 110.0, tokens=50),
        line("eval", 1, 118.0, accuracy=0.4),
        line("step", 2, 120.0, tokens=70),
        line("step", 3, 125.0, tokens=1000),
    ]
    measured = april_claim.measured(lines, 2)
    assert measured == {"seconds": 5.0, "tokens": 120, "steps": 2, "curve": [[0, 0.1, 0.0], [1, 0.4, 3.0]]}


@pytest.mark.gate
def test_the_claim_continues_with_the_missing_records(april_claim: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    records = [claim(1.0, 1, (1, 0.5, 1.0)), claim(2.0, 1, (1, 0.5, 1.0))]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    stored_records = april_claim.read_records(file, {"lr": 1})
    assert april_claim.missing_keys(stored_records, ["grpo"], [0, 1], [1.0, 1.5, 2.0]) == [
        ("grpo", 1.0, 0), ("grpo", 1.5, 0), ("grpo", 2.0, 0), ("grpo", 1.5, 1),
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"records\.jsonl:1: settings are \{'lr': 1\}; expected \{'lr': 2\}"):
        april_claim.read_records(file, {"lr": 2})


@pytest.mark.gate
def test_the_page_has_the_table_of_the_recorded_runs(april_claim: ModuleType) -> None:
    records = april_claim.read_records(april_claim.RECORDS, april_claim.SETTINGS)
    assert records
    lines = april_claim.table_lines(april_claim.table(records))
    assert april_claim.PAGE.read_text() == april_claim.page_with(lines), "python bench/april_claim.py --table"
