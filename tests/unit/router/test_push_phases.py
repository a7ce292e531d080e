"""What a weight update and a take cost, by phase, in metrics."""

from __future__ import annotations

from rlsys.router.push import PushMetrics, merge_push_metrics


def test_push_metrics_report_the_phase_seconds_of_the_slowest_engine() -> None:
    metrics = PushMetrics().to_dict()
    phases = {name for name in metrics if name.startswith("time_push_")}
    assert phases == {
        "time_push_wake_weights", "time_push_open", "time_push_close", "time_push_wake_cache", "time_push_flush",
        "time_push_version", "time_push_checksums", "time_push_canaries",
    }  # fmt: skip
    slow = {**metrics, "time_push_flush": 2.0, "push_left": 0}
    assert merge_push_metrics([slow, {**metrics, "push_left": 0}])["time_push_flush"] == 2.0
