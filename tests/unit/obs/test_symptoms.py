"""A run that does not learn says so: each symptom on made-up curves, none on the curves of runs that learn."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlsys.config import Config
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample, SampleGroup, Status
from rlsys.obs.metrics import MetricsWriter, read_metrics
from rlsys.obs.progress import LiveProgress, PlainProgress
from rlsys.obs.report import render_page
from rlsys.obs.summary import summarise
from rlsys.obs.symptoms import QUIET, RULES, History, SymptomMonitor, find_symptoms
from rlsys.trainer.recorder import Recorder, samples_for_warning

CURVES = Path(__file__).parents[2] / "data" / "curves"
MODEL = Path(__file__).parents[3] / "configs" / "models" / "quickstart-moe"

Entry = dict[str, Any]


def healthy(n: int) -> Entry:
    return {
        "kind": "step", "step": n, "reward": 0.2 + 0.01 * n, "effective_groups": 12, "truncated_share": 0.02,
        "response_len_mean": 100.0, "sampled_entropy": 0.8, "mismatch_mean": 2e-3, "expert_load_max": 1.6,
        "expert_idle_share": 0.0,
    }  # fmt: skip


def history(count: int = 20, evals: tuple[float, ...] = (), **late: Any) -> History:
    """Healthy steps, of which the last five have the figures `late`. Evaluations lie five steps apart."""
    steps = [healthy(n) | (late if n > count - 5 else {}) for n in range(1, count + 1)]
    return History(steps, [evaluation(5 * i, a) for i, a in enumerate(evals)])


def evaluation(step: int, accuracy: float) -> Entry:
    return {"kind": "eval", "step": step, "accuracy": accuracy, "prompts": 128}


def names(of: History) -> list[str]:
    return [s.name for s in find_symptoms(of)]


def test_a_healthy_run_has_no_symptom() -> None:
    assert names(history()) == []
    assert names(history(2)) == names(History([])) == []


@pytest.mark.parametrize(
    ("name", "late"),
    [
        ("no_signal", {"effective_groups": 0, "reward": 0.0}),
        ("at_the_cap", {"truncated_share": 0.4}),
        ("entropy_collapse", {"sampled_entropy": 0.01, "reward": 0.3}),
        ("mismatch_grows", {"mismatch_mean": 0.03}),
        ("router_collapse", {"expert_load_max": 4.0}),
        ("router_collapse", {"expert_idle_share": 0.3}),
        ("asked_aside", {"agent_calls": 100, "agent_side_calls": 51}),
    ],
)
def test_each_symptom_is_found_alone_with_cause_and_knob(name: str, late: Entry) -> None:
    (symptom,) = find_symptoms(history(**late))
    assert symptom.name == name
    assert symptom.observation and symptom.cause
    assert any(section in symptom.knob for section in ("rollout.", "trainer.", "algo.", "data."))


@pytest.mark.parametrize(
    "late",
    [
        {"truncated_share": 0.2},
        {"sampled_entropy": 0.1, "reward": 0.3},
        {"sampled_entropy": 0.01},  # the reward goes on rising
        {"mismatch_mean": 9e-3},
        {"expert_load_max": 3.0, "expert_idle_share": 0.2},
        {"agent_calls": 100, "agent_side_calls": 50},
        {"agent_calls": 0, "agent_side_calls": 0},
    ],
)
def test_less_than_that_is_none(late: Entry) -> None:
    assert names(history(**late)) == []


def test_one_odd_step_is_no_symptom() -> None:
    steps = [healthy(n) for n in range(1, 20)]
    odd = healthy(20) | {"effective_groups": 0, "mismatch_mean": 0.5, "expert_load_max": 9.0}
    assert names(History([*steps, odd])) == []


def test_no_signal_reports_which_rewards_are_equal() -> None:
    steps = [healthy(n) | {"effective_groups": 0, "reward": 0.0} for n in (1, 2, 3)]
    (symptom,) = find_symptoms(History(steps))
    assert "for 3 steps: all rewards are 0" in symptom.observation
    steps[1]["reward"] = 0.5
    (symptom,) = find_symptoms(History(steps))
    assert "the rewards of each group are equal" in symptom.observation
    assert names(History(steps, [evaluation(0, 0.95)])) == [], "nothing is left to be learned"
    steps[2]["effective_groups"] = 1
    assert names(History(steps)) == []


def test_reward_up_and_held_out_down() -> None:
    assert names(history(evals=(0.2, 0.6, 0.4, 0.35))) == ["held_out_falls"]
    (symptom,) = find_symptoms(history(evals=(0.2, 0.6, 0.4, 0.35)))
    assert "0.600 after step 5, 0.350 now" in symptom.observation
    assert "checkpoint of step 5" in symptom.knob
    assert names(history(evals=(0.2, 0.6, 0.4, 0.55))) == [], "the last one is within chance of the best"
    assert names(history(evals=(0.2, 0.6, 0.4))) == [], "one low evaluation alone"
    assert names(history(evals=(0.2, 0.6, 0.4, 0.35), reward=0.1)) == [], "both fall: another illness"


def test_a_pretrained_model_losing_accuracy_is_detected() -> None:
    """SmolLM2-135M on sums, lr 3e-5, seed 2 (measured 2026-11); entropies between the first and last are a line."""
    accuracies = (0.414, 0.484, 0.477, 0.461, 0.461, 0.430, 0.375)
    steps = [
        healthy(n) | {"reward": 0.32 if n < 9 else 0.43, "sampled_entropy": 0.74 - 0.54 * (n - 1) / 23}
        for n in range(1, 25)
    ]
    evals = [evaluation(4 * i, a) for i, a in enumerate(accuracies)]
    assert names(History(steps[:20], evals[:6])) == [], "the fall is within chance"
    (symptom,) = find_symptoms(History(steps, evals))
    assert symptom.name == "held_out_falls"
    assert "0.484 after step 4, 0.375 now" in symptom.observation
    assert "entropy is 36% of that of the first steps" in symptom.observation
    assert "trainer.lr" in symptom.knob and "checkpoint of step 4" in symptom.knob
    lively = [s | {"sampled_entropy": 0.74} for s in steps]
    assert names(History(lively, evals)) == [], "by chance, without a second sign"
    steady = [evaluation(4 * i, a) for i, a in enumerate((0.414, 0.508, 0.5, 0.516, 0.51, 0.5, 0.516))]
    assert names(History(steps, steady)) == [], "entropy falls while a model learns"


def aged(bound: int, *ages: int, expired: tuple[int, ...] = ()) -> History:
    """Healthy steps, the last of which have these ages of their oldest group."""
    steps = [healthy(n) | {"staleness_max": 0, "expired": 0} for n in range(1, 16)]
    for i, age in enumerate(ages):
        late = {"staleness_max": age, "expired": expired[i] if expired else 0}
        steps.append(healthy(16 + i) | late)
    return History(steps, max_staleness=bound)


def test_staleness_persistently_at_its_bound_is_a_symptom() -> None:
    (symptom,) = find_symptoms(aged(8, 8, 8, 8, 8, 8, expired=(1, 1, 4, 5, 7)))
    assert symptom.name == "staleness_at_bound"
    assert "rollout.max_staleness = 8, and 6 groups expired" in symptom.observation
    assert "rollout.over_provision" in symptom.knob
    assert names(aged(2, 2, 2, 2, 2, 2)) == ["staleness_at_bound"]
    assert names(aged(8, 8, 8, 7, 8, 8)) == [], "it comes and goes, as with every long response"
    assert names(aged(8, 5, 7, 8, 3, 7)) == [], "the quickstart"
    assert names(aged(0, 0, 0, 0, 0, 0)) == [], "on-policy"
    assert names(aged(1, 1, 1, 1, 1, 1)) == [], "one step ahead, as intended"
    assert names(aged(1, 1, 1, 1, 1, 1, expired=(0, 1, 2, 3, 4))) == ["staleness_at_bound"]


def test_the_monitor_uses_the_staleness_bound() -> None:
    steps = aged(2, 2, 2, 2, 2, 2).steps
    monitor = SymptomMonitor(steps[:-1], max_staleness=2)
    assert [s.name for s in monitor.add(steps[-1])] == ["staleness_at_bound"]
    assert SymptomMonitor(steps[:-1]).add(steps[-1]) == []


def guesses(*of: tuple[float, float, float], rising: bool = False) -> History:
    """Evaluations of (accuracy, share of the commonest answer, accuracy of the best constant one)."""
    late = {} if rising else {"reward": 0.3}
    evals = [
        evaluation(5 * i, a) | {"same_answer_share": same_share, "constant_accuracy": best}
        for i, (a, same_share, best) in enumerate(of)
    ]
    return History(history(**late).steps, evals)


def test_one_answer_to_every_prompt_is_a_guess() -> None:
    (symptom,) = find_symptoms(guesses((0.05, 0.2, 0.3), (0.3, 0.95, 0.3), (0.3, 0.97, 0.3), rising=True))
    assert symptom.name == "learned_to_guess"
    assert "97% of the held-out prompts the same answer; accuracy is 30%" in symptom.observation
    assert names(guesses((0.05, 0.2, 0.3), (0.3, 0.95, 0.3), (0.35, 0.8, 0.3), rising=True)) == []
    assert names(guesses((0.3, 0.95, 0.95), (0.3, 0.95, 0.95), (0.3, 0.97, 0.95))) == [], "as it was at first"
    assert names(guesses((0.05, 0.2, 0.95), (0.95, 0.95, 0.95), (0.96, 0.95, 0.95))) == [], (
        "most answers are alike"
    )
    assert names(History(history().steps, [evaluation(5 * i, 0.2 * i) for i in range(3)])) == [], (
        "nothing is known"
    )


def test_no_better_than_the_best_constant_answer_is_a_guess() -> None:
    """Frequent answers in turn: no single one has most prompts."""
    run_history = guesses((0.05, 0.2, 0.35), (0.3, 0.4, 0.35), (0.33, 0.4, 0.35))
    (symptom,) = find_symptoms(run_history)
    assert symptom.name == "learned_to_guess"
    assert (
        "rose from 0.050 to 0.330 and stagnates, and the same answer to every prompt would get 0.350"
        in symptom.observation
    )
    assert names(History(history().steps, run_history.evals)) == [], "the reward still rises"
    assert names(guesses((0.3, 0.2, 0.35), (0.3, 0.4, 0.35), (0.33, 0.4, 0.35))) == [], (
        "it has learned nothing"
    )
    assert names(guesses((0.05, 0.2, 0.35), (0.3, 0.4, 0.35), (0.36, 0.4, 0.35))) == [], "better than a guess"


def test_a_reward_that_no_evaluation_counts_as_right() -> None:
    assert names(history(evals=(0.0, 0.0), reward=0.9)) == ["never_right"]
    (symptom,) = find_symptoms(history(evals=(0.0, 0.0), reward=0.9))
    assert "mean reward is 0.9, but held-out accuracy is 0 in all 2 evaluations" in symptom.observation
    assert names(history(evals=(0.0, 0.0), reward=0.4)) == [], "it may be hard"
    assert names(history(evals=(0.0, 0.01), reward=0.9)) == []
    assert names(history(evals=(0.0,), reward=0.9)) == [], "before the first step nothing was learned"


def test_a_solved_task_may_have_no_entropy() -> None:
    late = {"sampled_entropy": 0.001, "reward": 0.3}
    assert names(history(evals=(0.1, 0.95), **late)) == []
    assert names(history(evals=(0.1, 0.5), **late)) == ["entropy_collapse"]


def test_exact_entropy_takes_precedence_over_sampled_entropy() -> None:
    steps = [
        healthy(n) | {"entropy": 0.8, "sampled_entropy": 1.0 / n**3, "reward": 0.3} for n in range(1, 21)
    ]
    assert names(History(steps)) == []
    steps = [healthy(n) | {"entropy": 0.8 if n < 16 else 0.01, "reward": 0.3} for n in range(1, 21)]
    assert names(History(steps)) == ["entropy_collapse"]


def test_a_rule_needs_its_figures() -> None:
    steps: list[Entry] = [{"kind": "step", "step": n, "loss": 1.0} for n in range(1, 30)]
    assert all(rule(History(steps)) is None for rule in RULES)
    assert names(history(mismatch_mean=None, sampled_entropy=None)) == []


@pytest.mark.parametrize("path", sorted(CURVES.glob("*.jsonl")), ids=lambda p: p.stem)
def test_curves_of_real_runs(path: Path) -> None:
    """The first line of each says which warnings it must give."""
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    watch = SymptomMonitor()
    assert [s.name for entry in lines for s in watch.add(entry)] == first["warnings"]


def test_curves_of_runs_that_learn_exist() -> None:
    assert {"small_batch", "quickstart_8_steps"} <= {p.stem for p in CURVES.glob("*.jsonl")}


def test_a_persistent_symptom_is_reported_once_and_again_when_it_recurs() -> None:
    watch, reports = SymptomMonitor(), []
    ill = {"effective_groups": 0}
    for n in range(1, 60):
        sick = n <= 10 or n >= 40
        reports += [(n, s.name) for s in watch.add(healthy(n) | (ill if sick else {}))]
    assert reports == [(3, "no_signal"), (42, "no_signal")]


def test_a_resumed_run_does_not_repeat_a_symptom_report() -> None:
    steps = [healthy(n) | {"effective_groups": 0} for n in range(1, 8)]
    assert SymptomMonitor(steps).add(healthy(8) | {"effective_groups": 0}) == []
    assert [s.name for s in SymptomMonitor(steps[:2]).add(steps[2])] == ["no_signal"]
    assert QUIET > 1


def groups() -> list[SampleGroup]:
    """Of five groups with two samples; ids 10 and more are text of the shipped model's vocabulary."""

    def sample(group: int, i: int) -> Sample:
        cut = Status.TRUNCATED if (group, i) == (3, 1) else Status.FINISHED
        reward = 1.0 if (group, i) == (4, 1) else 0.0
        return Sample(
            2 * group + i,
            group,
            i,
            [20 + group],
            0,
            response_ids=[30 + i] * 3,
            spans=[VersionSpan(1, 0, 3)],
            status=cut,
            reward=reward,
        )

    return [SampleGroup(g, g, [sample(g, 0), sample(g, 1)]) for g in range(5)]


def test_samples_that_show_the_symptom() -> None:
    def told(name: str) -> list[Entry]:
        return samples_for_warning(name, groups(), lambda ids: " ".join(map(str, ids)), lambda sample: sample)

    assert [s["prompt"] for s in told("no_signal")] == ["20", "21", "22"]
    assert told("at_the_cap")[0] == {"prompt": "23", "response": "31 31 31", "tokens": 3, "reward": 0.0}
    assert told("held_out_falls")[0]["reward"] == 1.0
    assert samples_for_warning("no_signal", [], str, lambda sample: sample) == []
    (long, *_) = samples_for_warning("no_signal", groups(), lambda ids: "x" * 5000, lambda sample: sample)
    assert len(long["response"]) < 1300 and " [...] " in long["response"]


def config(folder: Path) -> Config:
    return Config.model_validate({"run": {"dir": folder}, "model": {"path": MODEL}})


def test_a_run_writes_its_warning_down_with_three_samples(tmp_path: Path) -> None:
    recorder = Recorder(config(tmp_path), 0)
    recorder.write("run", 0, event="start")
    for n in (1, 2, 3, 4):
        recorder.show(groups())
        values = {k: v for k, v in healthy(n).items() if k not in ("kind", "step")}
        recorder.write("step", n, **values | {"effective_groups": 0, "reward": 0.0})
    (warning,) = read_metrics(tmp_path).warnings
    assert (warning["step"], warning["name"], len(warning["samples"])) == (3, "no_signal", 3)
    assert all(s["prompt"] and s["response"] and s["reward"] == 0.0 for s in warning["samples"])
    assert summarise(read_metrics(tmp_path))["warnings"] == 1

    again = Recorder(config(tmp_path), 2)  # the checkpoint of step 2: step 3 comes, and warns, again
    again.write("run", 2, event="resume")
    assert read_metrics(tmp_path).warnings == []
    again.show(groups())
    again.write("step", 3, **values | {"effective_groups": 0, "reward": 0.0})
    assert [w["step"] for w in read_metrics(tmp_path).warnings] == [3]


def test_a_restarted_run_discards_earlier_measurements(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("run", 0, event="start")
    for n in (1, 2):
        writer.write("step", n, reward=0.0, effective_groups=0)
    writer.close()
    recorder = Recorder(config(tmp_path), 0)
    recorder.write("run", 0, event="start")
    recorder.write("step", 1, reward=0.0, effective_groups=0)
    assert read_metrics(tmp_path).warnings == []


WARNING: Entry = {
    "kind": "warning", "step": 3, "time": 1.0, "name": "no_signal", "seen": "no learning signal for 3 steps",
    "cause": "Equal rewards give no gradient", "knob": "Change data.reward",
    "samples": [{"prompt": "1 + 1 =\n", "response": "<b>2", "tokens": 2, "reward": 0.0}],
}  # fmt: skip


def test_plain_lines_of_a_warning() -> None:
    out = io.StringIO()
    with PlainProgress(10, Console(file=out, width=60)) as display:
        display.entry(WARNING, live=False)
        assert out.getvalue() == "", "told by an earlier session"
        display.entry(WARNING, live=True)
    assert out.getvalue().splitlines() == [
        "rlsys: warning: step 3: no learning signal for 3 steps. Equal rewards give no gradient. Change data.reward.",
        "    prompt    1 + 1 =",
        "    response  <b>2",
        "    reward    0, 2 tokens",
    ]


def test_the_panel_keeps_a_warning_in_view_while_it_is_fresh() -> None:
    out = io.StringIO()

    def drawn(display: LiveProgress) -> str:
        console = Console(file=io.StringIO(), width=120)  # its own: the display refreshes in a thread
        console.print(display._draw())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    with LiveProgress(100, Console(file=out, force_terminal=True, width=120, height=40), "a run") as display:
        display.entry({"kind": "run", "event": "start", "step": 0}, live=True)
        display.entry(WARNING, live=True)
        assert "no signal: no learning signal for 3 steps" in drawn(display)
        display.entry(healthy(3 + QUIET), live=True)
        assert "no signal" not in drawn(display)
    assert "Change data.reward" in out.getvalue(), "above the panel, for good"


def test_the_report_shows_warnings_and_their_samples_as_text(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("run", 0, event="start")
    writer.close()
    page = render_page("run", summarise(read_metrics(tmp_path)), {}, [WARNING])
    assert "Warning, step 3:" in page and "Change data.reward." in page
    assert "&lt;b&gt;2" in page and "reward 0" in page
