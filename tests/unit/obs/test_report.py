"""Metrics file, display lines, summary and report."""

from __future__ import annotations

import bisect
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlsys.core.errors import RunError, UserError
from rlsys.obs.metrics import (
    MISMATCH_EDGES,
    MetricsTail,
    MetricsWriter,
    mismatch_quantile,
    mismatch_quantiles,
    read_metrics,
)
from rlsys.obs.progress import LiveProgress, PlainProgress, format_clock
from rlsys.obs.report import summary_table, write_report
from rlsys.obs.role import format_error, parse_error, run_role
from rlsys.obs.summary import summarise


def mismatch_counts(gaps: Iterable[float]) -> list[int]:
    """Counts of the gaps in the bins of MISMATCH_EDGES; the outermost bins have the outliers."""
    counts = [0] * (len(MISMATCH_EDGES) - 1)
    for mismatch in gaps:
        counts[min(max(bisect.bisect_right(MISMATCH_EDGES, mismatch) - 1, 0), len(counts) - 1)] += 1
    return counts


def step(n: int, **more: Any) -> dict[str, Any]:
    gaps = [1e-7] * 999 + [3e-5]
    values: dict[str, Any] = {
        "reward": n / 10, "tokens": 100, "off_policy_share": 0.25, "resumed_samples": 4, "lost": 0,
        "time_rollout": 2.0, "time_train": 0.5, "time_sync": 0.5, "time_step": 3.0, "tokens_per_s": 33.3,
        "response_len_p50": 20, "response_len_p99": 90, "staleness_max": 2,
    }  # fmt: skip
    hist = mismatch_counts(gaps)
    values |= {"mismatch_mean": sum(gaps) / len(gaps), "mismatch_hist": hist}
    return values | mismatch_quantiles(values) | more


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three steps, a crash after the third, a resume from the checkpoint of step 2, two more steps."""
    writer = MetricsWriter(tmp_path)
    writer.write("run", 0, event="start")
    writer.write("eval", 0, accuracy=0.1, prompts=128, mean_length=20.0, truncated=1)
    for n in (1, 2, 3):
        writer.write("step", n, **step(n, reward=-1.0 if n == 3 else n / 10))
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"kind": "step", "st')  # torn by the crash
    writer = MetricsWriter(tmp_path, resume_step=2)
    writer.write("run", 2, event="resume")
    for n in (3, 4):
        writer.write("step", n, **step(n))
    writer.write("eval", 4, accuracy=0.8, prompts=128, mean_length=20.0, truncated=1)
    writer.write("run", 4, event="end")
    writer.close()
    return tmp_path


def test_steps_trained_again_count_once(run_dir: Path) -> None:
    metrics = read_metrics(run_dir)
    assert [s["step"] for s in metrics.steps] == [1, 2, 3, 4]
    assert metrics.steps[2]["reward"] == pytest.approx(0.3)
    assert [e["step"] for e in metrics.evals] == [0, 4]
    assert metrics.torn_lines == 0, "the writer cut the torn line off before it went on"


def test_a_resume_discards_later_steps_not_yet_retrained(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("run", 0, event="start")
    for n in (1, 2, 3):
        writer.write("step", n, **step(n))
    writer.write("run", 1, event="resume")
    writer.close()
    assert read_metrics(tmp_path).last_step == 1


def test_a_torn_last_line_is_skipped_and_counted(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as f:
        f.write('{"kind": "st')
    metrics = read_metrics(run_dir)
    assert (metrics.torn_lines, metrics.last_step) == (1, 4)


def test_other_broken_lines_are_an_error(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: not JSON"):
        read_metrics(run_dir)
    path.write_text('{"kind": "step"}\n')
    with pytest.raises(UserError, match="expected an object with kind, step and time"):
        read_metrics(run_dir)


def test_a_folder_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run, or one that has not started"):
        read_metrics(tmp_path)


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("step", 1, loss=float("nan"), grad_norm=float("inf"))
    writer.close()
    (entry,) = read_metrics(tmp_path).steps
    assert entry["loss"] is None
    assert entry["grad_norm"] is None


def test_metrics_are_written_to_tensorboard(run_dir: Path) -> None:
    assert list((run_dir / "tensorboard").glob("events.*"))


def test_the_tail_hands_out_whole_lines_and_names_a_foreign_one(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    assert tail.read() == []
    path = tmp_path / "metrics.jsonl"
    first_entry, second_entry = ({"kind": "eval", "step": n, "time": 1.0} for n in (1, 2))
    path.write_text(f'{json.dumps(first_entry)}\n{{"a"')
    assert tail.read() == [first_entry]
    path.write_text(f"{json.dumps(first_entry)}\n{json.dumps(second_entry)}\nnot ours\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:3: not JSON"):
        tail.read()


def test_mismatch_bins_by_hand() -> None:
    counts = mismatch_counts([0.0, 1e-20, 1e-6, 50.0, 1e9])
    assert sum(counts) == 5
    assert counts[0] == 2, "exact agreement and anything below the first edge"
    assert counts[-1] == 1
    assert mismatch_quantile([0, 10, 0] + [0] * 109, 0.5) == MISMATCH_EDGES[2]


@given(st.lists(st.floats(min_value=1e-11, max_value=50), min_size=1, max_size=60), st.floats(0.01, 1))
def test_a_binned_quantile_is_never_below_the_true_one_and_within_a_bin(gaps: list[float], q: float) -> None:
    ordered = sorted(gaps)
    rank = next(i for i in range(1, len(gaps) + 1) if i >= q * len(gaps))
    true, binned = ordered[rank - 1], mismatch_quantile(mismatch_counts(gaps), q)
    assert true <= binned <= true * 10 ** (1 / 8) * 1.0001


def test_the_summary_adds_up(run_dir: Path) -> None:
    summary = summarise(read_metrics(run_dir))
    assert summary["steps"] == 4
    assert (summary["eval_accuracy_before"], summary["eval_accuracy_after"]) == (0.1, 0.8)
    assert (summary["trained_tokens"], summary["resumed_samples"], summary["tokens_lost"]) == (400, 16, 0)
    assert summary["off_policy_share"] == pytest.approx(0.25)
    assert summary["mean_abs_logprob_diff"] == pytest.approx((999 * 1e-7 + 3e-5) / 1000)
    assert 1e-7 < summary["p999_abs_logprob_diff"] < 2e-7
    assert 3e-5 < summary["max_abs_logprob_diff"] < 5e-5
    assert (summary["sessions"], summary["finished"]) == (2, True)


def test_summary_values_absent_from_all_steps_are_none(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("run", 0, event="start")
    writer.write("step", 1, tokens=5)
    writer.close()
    summary = summarise(read_metrics(tmp_path))
    for key in (
        "tokens_lost",
        "off_policy_share",
        "resumed_samples",
        "max_abs_logprob_diff",
        "staleness_max",
    ):
        assert summary[key] is None, key


def test_a_run_that_has_just_begun_has_a_summary_and_a_report(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("run", 0, event="start")
    writer.close()
    summary = summarise(read_metrics(tmp_path))
    assert summary["eval_accuracy_after"] is None
    assert summary["tokens_lost"] is None
    write_report(tmp_path)
    assert (tmp_path / "report.html").exists()


def test_the_report_is_one_page_with_its_plots_inside(run_dir: Path) -> None:
    write_report(run_dir)
    page = (run_dir / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 6
    assert "http" not in page, "nothing is loaded from elsewhere"
    assert "0.1 → 0.8" in page
    names = {"reward", "accuracy", "lengths", "staleness", "time_split", "mismatch"}
    assert {p.stem for p in (run_dir / "plots").glob("*.png")} == names


def test_plain_progress_lines_show_the_main_metrics(run_dir: Path) -> None:
    out = io.StringIO()
    with PlainProgress(4, Console(file=out, width=80)) as display:
        display.status({"in_flight": 128, "parked": 7, "ready": 3})
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            display.entry(json.loads(line), live=True)
    lines = out.getvalue().splitlines()
    assert lines[-2] == (
        "step 4/4  reward 0.400  33 tok/s  length p50/p99 20/90  off-policy 25%  "
        "in flight/parked/ready 128/7/3  3.0 s = rollout 2.0 + train 0.5 + sync 0.5  ETA 0:00"
    )
    assert lines[-1] == "eval at step 4: held-out accuracy 0.800 on 128 prompts, mean length 20.0"


def test_censored_and_excluded_samples_are_shown_with_their_causes(tmp_path: Path) -> None:
    def step(n: int, **counts: float) -> dict[str, Any]:
        causes = {f"censored_samples_{cause}": n for cause, n in counts.items()}
        return {"kind": "step", "step": n, "time": 0.0, "reward": 0.5, "censored": n, **causes}

    evaluation = {
        "kind": "eval", "step": 3, "time": 0.0, "accuracy": 0.5, "prompts": 6, "mean_length": 2.0, "left_out": 2,
        "hard/accuracy": 0.5, "hard/pass_1": 0.5, "hard/pass_1_low": 0.1, "hard/pass_1_high": 0.9,
        "hard/prompts": 4, "hard/samples": 1, "hard/mean_length": 5.0, "hard/truncated": 0, "hard/left_out": 1,
    }  # fmt: skip
    restarted = [step(1, row=0, reward=0), step(2, row=1, reward=3), step(3, row=0, reward=2)]
    entries = [*restarted, evaluation]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    out = io.StringIO()
    with PlainProgress(4, Console(file=out, width=80)) as display:
        for entry in entries:
            display.entry(entry, live=True)
    _, second, third, heldout, set_line = out.getvalue().splitlines()
    assert second.endswith("  censored: 2 groups (row 1, reward 3 samples)")
    assert third.endswith("  censored: 3 groups (reward 2 samples)")
    assert heldout.endswith("on 6 prompts, mean length 2.0, 2 left out")
    assert set_line.endswith("0 truncated, 1 left out")
    summary = summarise(read_metrics(tmp_path))
    assert (summary["eval_left_out"], summary["censored_groups"]) == (2, 3)
    assert summary["censored_samples"] == {"row": 1, "reward": 5}
    table = io.StringIO()
    Console(file=table, width=80).print(summary_table(tmp_path, summary))
    assert "row 1, reward 5" in table.getvalue()


def test_a_plain_line_of_fine_tuning_shows_the_loss() -> None:
    out = io.StringIO()
    with PlainProgress(2, Console(file=out, width=80)) as display:
        entry = {"kind": "step", "step": 1, "time": 0.0, "loss": 1.5, "tokens_per_s": 900.0, "time_step": 2.0}
        display.entry(entry, live=True)
    assert out.getvalue() == "step 1/2  loss 1.5000  900 tok/s  2.0 s  ETA 0:02\n"


def test_the_live_panel_draws_before_and_after_the_first_step(run_dir: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=110, force_terminal=True, color_system=None)
    with LiveProgress(4, console, "rlsys x") as display:
        display.phase("starting engine-0")
        display.status({"in_flight": 128, "parked": 7, "ready": 3})
        for line in (run_dir / "metrics.jsonl").read_text().splitlines():
            display.entry(json.loads(line), live=True)
    output = out.getvalue()
    assert "starting engine-0" in output
    assert "0.100 → 0.800" in output
    assert "in flight 128   parked 7   ready 3" in output
    assert "resumed samples    16" in output, "a step that was trained twice counts once"


def test_clock() -> None:
    assert [format_clock(s) for s in (None, 0, 61, 3725)] == ["-", "0:00", "1:01", "1:02:05"]


def test_an_error_line_round_trips_with_its_exit_code() -> None:
    assert parse_error(format_error(UserError("a\n b"))) == ("a b", 2)
    assert parse_error(format_error(RunError("c [d]"))) == ("c [d]", 1)
    assert parse_error("rlsys: error: no code") is None
    assert parse_error("Traceback: rlsys: error: x") is None


def test_a_role_ends_with_one_line_and_the_errors_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise UserError("model.path = x: no such folder")

    with pytest.raises(SystemExit) as exc_info:
        run_role(fail)
    assert exc_info.value.code == 2
    assert capsys.readouterr().err == "rlsys: error: model.path = x: no such folder [exit 2]\n"
    with pytest.raises(ZeroDivisionError):
        run_role(lambda: 1 // 0)
