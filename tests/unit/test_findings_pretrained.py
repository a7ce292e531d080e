"""One test for each finding of facts/pretrained.md (tests/findings_world.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.cli import main
from rlsys.config import dump_config, load_config
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.data import Tokenizer
from rlsys.data.traces import trace_batches
from rlsys.evaluation.evaluation import judge
from rlsys.obs.metrics import read_metrics
from rlsys.obs.summary import summarise
from rlsys.trainer.pack import TrainSample, pack
from rlsys.worker.scoring import Verdict

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "quickstart-moe"
REAL = ROOT / "configs" / "models" / "Qwen3-30B-A3B"


def run_cli(*words: str) -> tuple[int, str]:
    """Exit code, and what an exception says that is no one-line error."""
    try:
        return main.main(list(words)), ""
    except SystemExit as e:
        return int(e.code or 0), ""
    except (LookupError, AttributeError, TypeError, ValueError, OSError) as e:
        return 1, f"{type(e).__name__}: {e}"


def test_pretrained_s2_a_run_without_gpus_is_compared_with_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-30B-A3B in float32 needs 592 GB of host memory where there is no GPU."""
    monkeypatch.chdir(ROOT)
    overrides = (f"model.path={REAL}", "trainer.token_budget=65536", "eval.prompts=4")
    assert run_cli("explain", "quickstart", *overrides) == (0, "")
    output = " ".join(capsys.readouterr().out.split())
    odd = output.rpartition(" odd ")[2]
    assert "memory" in odd and "a GPU has" not in odd


def test_pretrained_s2_new_writes_a_config_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli("new", "mine", "--model", str(MODEL)) == (0, "")


def fine_tuning(folder: Path) -> Path:
    """A run folder as `rlsys sft` leaves it after two steps."""
    run = folder / "run"
    run.mkdir()
    config = load_config(Path("quickstart_sft"), [f"run.dir={run}", f"model.path={MODEL}"])
    (run / "config.yaml").write_text(dump_config(config))
    lines: list[dict[str, object]] = [{"kind": "run", "event": "start", "step": 0, "time": 100.0}]
    for step in (1, 2):
        figures = {"loss": 4.5 - step, "grad_norm": 1.0, "lr": 1e-4, "tokens": 200, "tokens_per_s": 20.0}
        times = {"time_train": 10.0, "time_step": 10.0, "time": 100.0 + 10 * step}
        lines.append({"kind": "step", "step": step, **figures, **times})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_pretrained_s3_status_of_a_fine_tuning_run(tmp_path: Path) -> None:
    assert run_cli("status", str(fine_tuning(tmp_path))) == (0, "")


def test_pretrained_s3_the_report_of_a_fine_tuning_run_has_its_loss(tmp_path: Path) -> None:
    figures = summarise(read_metrics(fine_tuning(tmp_path)))
    assert any("loss" in name for name in figures)


def test_pretrained_s3_explain_describes_fine_tuning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    overrides = (f"model.path={MODEL}", f"run.dir={tmp_path}/run")
    assert run_cli("explain", "quickstart_sft", *overrides) == (0, "")
    output = capsys.readouterr().out
    assert "advantage" not in output and "chain_sum" in output


def chats(path: Path) -> tuple[str, ...]:
    return (f"model.path={MODEL}", "sft.traces=chats", f"sft.params={{path: {path}}}")


def test_pretrained_s3_explain_reads_the_rows_of_fine_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code, _ = run_cli("explain", "quickstart_sft", *chats(tmp_path / "none.jsonl"), f"run.dir={tmp_path}/run")
    assert code == 2


def test_pretrained_s3_a_missing_file_names_its_field(tmp_path: Path) -> None:
    config = load_config(Path("quickstart_sft"), chats(tmp_path / "none.jsonl"))
    message = ""
    try:
        next(iter(trace_batches(config, Tokenizer(MODEL, {}), 0)))
    except UserError as e:
        message = str(e)
    assert "sft.params" in message and "data.params" not in message


def test_pretrained_s4_an_evaluation_reports_the_mean_reward() -> None:
    answered = []
    for index in range(2):
        prompt = Prompt(index, "", [1], {})
        sample = Sample(index, index, 0, [1], seed=0)
        sample.append(Segment([2, 3], [-0.5, -0.5], [VersionSpan(0, 0, 2)]))
        sample.status = Status.FINISHED
        answered.append((sample, prompt))
    result = judge(answered, [Verdict(reward=0.25), Verdict(reward=0.75)], 2)
    figures = result.metrics()
    assert 0.5 in [figures.get(name) for name in figures if "reward" in name]


def test_pretrained_s6_the_prompt_of_a_group_is_computed_once() -> None:
    prompt, answers = list(range(60)), 8
    samples = [TrainSample(prompt, [100 + i] * 4, [-0.5] * 4, [0] * 4, row=i) for i in range(answers)]
    computed = sum(sum(micro.computed_lengths) for micro in pack(samples, 8192, 0, 1, shared="yes"))
    assert computed < 2 * len(prompt) + 4 * answers


def test_pretrained_m3_the_wall_seconds_of_an_evaluation(tmp_path: Path) -> None:
    line = {"kind": "eval", "step": 0, "time": 1.796e9, "accuracy": 0.5, "prompts": 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert summarise(read_metrics(tmp_path))["wall_seconds"] < 1e6
