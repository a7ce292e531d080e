"""The command line: one line, the right exit code, no traceback."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from rlsys.cli import main
from rlsys.cli.models import find_subject
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.obs.metrics import MetricsWriter

QUICKSTART = str(Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train", "/no/m.yaml"], "/no/m.yaml: no such file, and no shipped config of this name"),
        (["train", QUICKSTART, "rollout.group_sise=4"], "rollout.group_sise: unknown key; did you mean"),
        (["train", QUICKSTART, "model.path=/no/such"], "model.path = /no/such: no such folder"),
        (["explain", QUICKSTART, "rollout.group_size=0"], "rollout.group_size = 0: "),
        (["report", "/no/such"], "/no/such: folder not found"),
        (["report", "/"], "/: contains no metrics.jsonl"),
        (["status", "/"], "/: not a run folder: contains no config.yaml"),
        (["doctor", "/"], "/: not a run folder: contains no config.yaml"),
        (["submit", QUICKSTART, "--dry-run", "algo.loss=[nonesuch]"], "algo.loss[0] = "),
        (["submit", QUICKSTART, "--dry-run", "--time", "8h"], "--time '8h': expected minutes"),
        (
            ["submit", QUICKSTART, "--dry-run", "--partition", ""],
            "--partition '': expected the name of a partition",
        ),
        (
            ["submit", QUICKSTART, "--dry-run", "--sbatch", "qos=high"],
            "--sbatch 'qos=high': expected an option",
        ),
        (
            ["explain", QUICKSTART, "weights.method=adapter"],
            "weights.method = adapter: expected trainer.lora; without it the whole model changes",
        ),
        (
            ["explain", QUICKSTART, "--gpu-memory", "nan"],
            "--gpu-memory nan: expected a finite number of GB above 0",
        ),
        (["explain", QUICKSTART, "data.reward=exact_anwser"], "data.reward = 'exact_anwser': unknown name"),
        (["train", QUICKSTART, "rollout.generator=nope"], "rollout.generator = 'nope': unknown name"),
        (["algo", "show", ""], "unknown algorithm ''; known: adaptive_entropy"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"rlsys: error: {told}")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["trian"], ["train"], ["report", "x", "--jsn"]])
def test_a_mistaken_command_line_is_one_line_too(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main.main(argv)
    assert exit_info.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("rlsys: error: ")
    assert stderr.count("\n") == 1


def test_overrides_may_follow_options(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["submit", QUICKSTART, "run.seed=3", "--nodes", "2", "--dry-run", "weights.method=disk"]
    assert main.main(argv) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in script
    assert (
        f"train {QUICKSTART} run.seed=3 weights.method=disk launch.backend=slurm launch.nodes=2\n" in script
    )


def test_report_json_prints_only_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("run", 0, event="start")
    writer.write("eval", 0, accuracy=0.5, prompts=4)
    writer.close()
    assert main.main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_accuracy_before"] == 0.5


def test_report_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("run", 0, event="start")
    writer.close()
    assert main.main(["report", str(tmp_path)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


def test_a_ledger_is_printed_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "identity", 2)
    buffer.issue(Prompt(0, "1+1", [1, 2], {}), [7, 8])
    buffer.flush()
    buffer.close()
    assert main.main(["ledger", str(tmp_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["issued"], figures["active"], figures["parked"], figures["lost"]) == (1, 1, 2, 0)
    assert main.main(["ledger", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["active", "1", "2", "0"] in rows
    assert ["parked", "2"] in rows


def test_a_ledger_with_losses_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buffer = RolloutBuffer(tmp_path / FILE_NAME, "identity", 2)
    buffer.add_lost_tokens(5)
    buffer.close()
    assert main.main(["ledger", str(tmp_path)]) == 1
    assert "rlsys: error: ledger: 5 tokens" in capsys.readouterr().err


def test_a_job_script_is_printed_for_a_model_without_weights_and_not_submitted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    experiment = str(Path(QUICKSTART).parent / "experiments" / "qwen2.5-7b_8gpu_colocated.yaml")
    assert main.main(["submit", experiment, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("#!/bin/bash\n#SBATCH ")
    assert "rlsys: warning: model.path = " in captured.err and "contains no weights" in captured.err
    assert main.main(["submit", experiment]) == 2
    captured = capsys.readouterr()
    assert "rlsys: error: model.path = " in captured.err and not captured.out


def test_submit_notes_a_method_implemented_from_its_abstract(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(QUICKSTART).parent / "algorithms" / "minpro.yaml")
    assert main.main(["submit", recipe, "--dry-run"]) == 0
    stderr = capsys.readouterr().err
    assert stderr.startswith(
        "rlsys: note: algo.corrections[0] (minpro) has evidence A (a reading of the abstract)"
    )
    assert stderr.count("\n") == 1


def test_algorithms_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["algo", "list"]) == 0
    assert "grpo" in capsys.readouterr().out
    assert main.main(["algo", "show", "grpo"]) == 0
    assert "paper:" in capsys.readouterr().out
    assert main.main(["algo", "show", "grop"]) == 2
    assert "did you mean grpo?" in capsys.readouterr().err


def test_doctor_lists_packages_gpus_and_ports(capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["doctor"])
    output = capsys.readouterr().out
    for name in ("python", "torch", "sglang", "megatron-core", "gpu", "ports", "transformer engine", "apex"):
        assert name in output


def test_eval_selects_model_step_and_a_new_output_folder(tmp_path: Path) -> None:
    """A config's model, or another folder; the newest checkpoint of a run; each time in a folder of its own."""
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "model.safetensors").touch()
    for step in (1, 2):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    (run / "config.yaml").write_text(f"model: {{path: {model}}}\nrun: {{dir: {run}}}\n")
    (run / "metrics.jsonl").touch()
    subject = find_subject(run / "config.yaml", None, ["eval.prompts=3"])
    assert (subject.model, subject.folder) == (model, run / "evaluations" / "model-1")
    with subject.serving_config() as config:
        assert (config.run.dir, config.model.path, config.eval.prompts) == (subject.folder, model, 3)
    subject.folder.mkdir(parents=True)
    assert find_subject(run / "config.yaml", None, []).folder.name == "model-2"
    assert [find_subject(run / "config.yaml", None, []).step, find_subject(run, None, []).step] == [0, 2]
    assert find_subject(run, None, []).model == run / "checkpoints" / "step-000002"
    older = run / "checkpoints" / "step-000001"
    assert find_subject(run, older, []).folder == run / "evaluations" / "step-000001-1"
    with pytest.raises(UserError, match="no such folder"):
        find_subject(run, tmp_path / "none", [])


def test_the_help_lists_each_command_once_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main.main(["--help"])
    output = capsys.readouterr().out
    for title, names in main.GROUPS.items():
        group = output.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        listed = [line.split()[0] for line in group.splitlines() if line[2:3].strip()]
        assert listed == list(names)
    with pytest.raises(KeyError, match="commands without a group: dance"):
        main.command_list(
            dict.fromkeys((n for names in main.GROUPS.values() for n in names), "x") | {"dance": "x"}
        )


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main.main(["--version"])
    assert capsys.readouterr().out == f"rlsys {metadata.version('rlsys')}\n"


@pytest.mark.parametrize(
    ("steps", "checkpoints", "expected"),
    [
        (0, [], ""),
        (1, [], "after train step 1; no checkpoint exists, so train step 1 will be repeated"),
        (
            12,
            [5, 10],
            "after train step 12; the newest checkpoint is of step 10, so train steps 11 to 12 will be repeated",
        ),
        (10, [10], "after train step 10, which is saved"),
    ],
)
def test_a_stop_names_the_steps_that_will_be_repeated(
    steps: int, checkpoints: list[int], expected: str, tmp_path: Path
) -> None:
    lines = [{"kind": "step", "step": step, "time": float(step)} for step in range(1, steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in checkpoints:
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    (tmp_path / "checkpoints" / "step-000099.partial").mkdir(parents=True)
    assert main.resume_point(tmp_path) == expected
