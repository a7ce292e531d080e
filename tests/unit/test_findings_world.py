"""One test for each finding of the review world.md (tests/findings_world.md)."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from launch.backends import keeper_command
from launch.environment import environment
from launch.plan import Role
from rlsys.cli import main
from rlsys.config import Config, load_config
from rlsys.core.errors import RlsysError, UserError
from rlsys.core.imports import resolve
from rlsys.core.process_pool import INHERITED_VARIABLES
from rlsys.data.tables import read_lines
from rlsys.obs.metrics import read_metrics
from tests.helpers.seen_run import write_run

ROOT = Path(__file__).resolve().parents[2]


def quickstart(*overrides: str) -> Config:
    return load_config(Path("quickstart"), overrides)


def refused(*overrides: str) -> bool:
    try:
        quickstart(*overrides)
    except UserError:
        return True
    return False


def run_cli(*words: str) -> tuple[int, str]:
    """Exit code, and the type of an exception that is no one-line error."""
    try:
        return main.main(list(words)), ""
    except SystemExit as e:
        return int(e.code or 0), ""
    except (LookupError, AttributeError, TypeError, ValueError, OSError) as e:
        return 1, f"{type(e).__name__}: {e}"


def test_world_06_rewards_can_start_processes(tmp_path: Path) -> None:
    file = tmp_path / "pool_reward.py"
    file.write_text("def work(x):\n    return float(x)\n")
    work = resolve("data.reward", f"{file}:work", {})
    message = ""
    try:
        pickle.dumps(work)
    except pickle.PicklingError as e:
        message = str(e)
    assert not message


def test_world_07_an_engine_without_a_writable_home_has_its_caches_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "SGLANG_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    variables = environment(quickstart(), "engine", cuda=False)
    caches = [variables[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "SGLANG_CACHE_DIR")]
    assert all(Path(path).is_relative_to(tmp_path) for path in caches)


def lines_of(file: Path) -> list[Any] | str:
    """The rows, or why there are none."""
    try:
        table = read_lines([file])
    except UserError as e:
        return str(e)
    return [table.row(i) for i in range(len(table))]


@pytest.mark.parametrize("code", [0x2028, 0x2029, 0x85])
def test_world_08_json_lines_end_at_a_line_feed_only(code: int, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "note": f"a{chr(code)}b"} for i in range(3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert lines_of(file) == rows


def test_world_08_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "1+1=", "answer": "2"}\n')
    assert lines_of(file) == [{"prompt": "1+1=", "answer": "2"}]


def test_world_10_user_files_do_not_shadow_project_modules(tmp_path: Path) -> None:
    (tmp_path / "launch.py").write_text("")
    (tmp_path / "run").mkdir()
    config = quickstart(f"run.dir={tmp_path}/run")
    command = keeper_command(Role("engine-0", ["true"], "engine"), config, shielded=False)
    module = command[: command.index("-m") + 2]
    process = subprocess.run([*module, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr


def test_world_11_the_engines_of_a_run_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path)
    listdir = os.listdir

    def closed(path: Any = ".") -> list[str]:
        if str(path).startswith(str(run)):
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", closed)
    assert run_cli("engines", "list", str(run))[1] == ""


@pytest.mark.parametrize("command", ["report", "status"])
def test_world_11_metrics_with_a_byte_that_is_no_text(command: str, tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", \xff')
    assert run_cli(command, str(run))[1] == ""


def test_world_11_status_names_the_config_that_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    with (run / "config.yaml").open("a") as file:
        file.write("oldsection: {}\n")
    run_cli("status", str(run))
    assert "config.yaml" in capsys.readouterr().err


# Minor


@pytest.mark.parametrize("path", ["~/run", "$HOME/run", "${HOME}/run"])
def test_world_12_a_home_folder_in_a_path_is_expanded_or_refused(path: str) -> None:
    try:
        run_folder = str(quickstart(f"run.dir={path}").run.dir)
    except UserError:
        run_folder = ""
    assert not run_folder.startswith(("~", "$"))


def test_world_13_a_reward_function_sees_proxy_and_certificate_variables() -> None:
    needed = {"http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"}
    assert needed <= set(INHERITED_VARIABLES)


def test_world_14_a_number_of_a_users_function_is_a_number() -> None:
    config = quickstart("data.reward=[{name: math, params: {scale: 1e-3}}]")
    assert config.data.reward[0].params["scale"] == 0.001


def test_world_19_a_command_without_a_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert run_cli("algo", "list")[1] == ""


def test_world_22_a_compressed_file_is_read_or_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "1+1=", "answer": "2"}\n'))
    result = lines_of(file)
    assert isinstance(result, list) or "gzip" in result.replace(str(file), "")


def test_world_22_an_integer_of_5000_digits_costs_no_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2", "note": ' + "9" * 5000 + "}\n")
    assert isinstance(lines_of(file), list)


@pytest.mark.parametrize(
    ("override", "hint"), [("trainer.learning_rate=1e-6", "trainer.lr"), ("rollout.keep_budget=None", "null")]
)
def test_world_23_the_hint_names_the_right_field(override: str, hint: str) -> None:
    message = ""
    try:
        quickstart(override)
    except UserError as e:
        message = str(e)
    assert hint in message.replace("trainer.learning_rate", "")


def test_world_24_the_cli_prints_its_version() -> None:
    assert run_cli("--version") == (0, "")


def test_world_25_a_job_requests_all_memory_of_its_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("submit", "quickstart", "--dry-run", f"run.dir={tmp_path}/run", "launch.gpus_per_node=8")
    code, _ = run_cli(*words)
    script = capsys.readouterr().out
    assert (code, "--exclusive" in script, "--mem=0" in script) == (0, True, True)


@pytest.mark.parametrize(
    "override",
    [
        "engine.start_timeout=1e30",
        "weights.bucket_mb=1e308",
        "data.reward_memory_gb=1e300",
        "data.judge_timeout=1e30",
        "launch.preemption_seconds=1e30",
        "launch.grace_seconds=1e30",
    ],
)
def test_world_w31_a_number_of_seconds_or_bytes_has_an_upper_bound(override: str) -> None:
    assert refused(override)


@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_world_w33_a_parameter_that_is_not_finite_is_refused(value: str) -> None:
    assert refused(f"data.reward=[{{name: math, params: {{scale: {value}}}}}]")


def test_world_11_a_torn_last_line_is_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", \xff')
    torn = 0
    with contextlib.suppress(UnicodeDecodeError, RlsysError):
        torn = read_metrics(run).torn_lines
    assert torn == 1
