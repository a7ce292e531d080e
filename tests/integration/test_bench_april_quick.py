"""bench/april.py runs on a real engine and says all that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
MODES = ["saturated", "prefill", "synchronous", "synchronous-2N", "april-2", "april-2-abort", "april-2-kept"]
OF_A_MODE = {
    "trained_tokens_per_s", "samples_per_s", "share_below_half_slots", "off_policy_share", "mean_age", "length_ratio",
    "re_prefilled_tokens_per_trained_token", "cache_share", "seconds_per_step", "sampled_tokens_per_s",
    "tokens_read_per_sampled_token",
}  # fmt: skip
IN_THE_SUMMARY = {
    "gain_at_2", "gain_at_2_same_slots", "gain_at_2_raw_cpu", "gain_at_2_raw_cpu_same_slots",
    "share_of_saturated_at_2", "share_of_bound_at_2", "length_ratio_at_2",
}  # fmt: skip


def test_the_quick_bench_has_every_figure() -> None:
    command = [sys.executable, "bench/april.py", "--json", "--quick", "--repeats", "1", "--only", *MODES]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    result = json.loads(process.stdout)
    assert set(result["costs"]) == {"gpu-like", "cpu"}
    for modes in result["costs"].values():
        assert list(modes) == MODES
        assert all(modes[name].keys() >= OF_A_MODE for name in MODES[2:])
        assert modes["synchronous"]["off_policy_share"]["median"] == 0
        assert modes["april-2-abort"]["re_prefilled_tokens_per_trained_token"]["median"] > 0
        read = {name: modes[name]["tokens_read_per_sampled_token"]["median"] for name in MODES[4:]}
        assert read["april-2-kept"] < min(read["april-2"], read["april-2-abort"])
    assert result["summary"].keys() >= IN_THE_SUMMARY
