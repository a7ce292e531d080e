"""Plan, ports, run folder, preflight, set-up: what is decided before a process starts."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from launch import bootstrap
from launch.plan import (
    Ports,
    build_plan,
    build_sft_plan,
    describe_arithmetic,
    describe_plan,
    evaluations,
    mode,
)
from launch.ports import choose_ports
from launch.preflight import check_model
from launch.rundir import open_run_dir
from rlsys.config import Config, load_config
from rlsys.errors import UserError

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


def engine_command(c: Config, index: int, port: int) -> tuple[list[str], dict[str, str]]:
    return ["python", "-m", "engine", str(index), str(port)], {"SOME": "1 2"}


def quiet(_: str) -> None: ...


def test_the_plan_names_every_process_in_order() -> None:
    plan = build_plan(config("engine.count=2", "parallel.ep=2"), Ports([5000, 5001], 6000), engine_command)
    assert [r.name for r in plan.roles] == ["engine-0", "engine-1", "rollout", "trainer"]
    engine, rollout, trainer = plan.roles[1], plan.roles[2], plan.roles[3]
    assert engine.ready_url == "http://127.0.0.1:5001/health"
    assert rollout.argv[-4:] == ["--engine", "http://127.0.0.1:5000", "--engine", "http://127.0.0.1:5001"]
    assert trainer.argv[trainer.argv.index("--nproc-per-node") + 1] == "2"
    assert trainer.argv[-2:] == ["--rollout", "http://127.0.0.1:6000"]
    expected = {"HOME": "/h", "SOME": "1 2", "OMP_NUM_THREADS": "1"}
    assert plan.environment(engine, {"HOME": "/h"}).items() >= expected.items()
    assert "engine-1    SOME='1 2' python -m engine 1 5001" in describe_plan(plan)


def test_fine_tuning_needs_the_trainer_alone() -> None:
    assert [r.name for r in build_sft_plan(config()).roles] == ["trainer"]


def test_the_arithmetic_is_spelled_out() -> None:
    text = describe_arithmetic(
        config("rollout.groups_per_step=16", "rollout.group_size=8", "trainer.steps=60", "eval.every=10")
    )
    assert "16 groups x 8 samples = 128 samples" in text
    assert "in flight            256 samples (over_provision 2)" in text
    assert "60 steps = 7680 samples, 7 evaluations of 128 prompts" in text


@pytest.mark.parametrize(("steps", "every", "expected"), [(60, 10, 7), (61, 10, 8), (5, 10, 2), (0, 10, 1)])
def test_evaluations(steps: int, every: int, expected: int) -> None:
    assert evaluations(config(f"trainer.steps={steps}", f"eval.every={every}")) == expected


def test_three_numbers_make_the_mode() -> None:
    assert mode(config("rollout.over_provision=1", "rollout.max_staleness=0")) == "synchronous, on-policy"
    assert mode(config()).startswith("APRIL")
    assert mode(config("launch.placement=disaggregated")).startswith("asynchronous")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen(1)
        port = held.getsockname()[1]
        with pytest.raises(UserError, match=rf"engine\.port = {port}: port {port} of 127\.0\.0\.1 is in use"):
            choose_ports(config(f"engine.port={port}"))


def test_free_ports_differ() -> None:
    ports = choose_ports(config("engine.count=4"))
    assert len({*ports.engines, ports.rollout}) == 5


def test_ports_beyond_the_last_are_refused() -> None:
    with pytest.raises(UserError, match=r"engine\.port = 65534: 4 engines reach port 65537"):
        choose_ports(config("engine.port=65534", "engine.count=4"))


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UserError, match=r"engine\.host = '192\.0\.2\.1': cannot listen there"):
        choose_ports(config("engine.host=192.0.2.1"))


def begin(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"kind": "run", "event": "start", "step": 0, "time": 1.0}\n')


def test_a_run_that_never_began_does_not_hold_its_folder(tmp_path: Path) -> None:
    where = f"run.dir={tmp_path / 'run'}"
    with open_run_dir(config(where, "data.source=misspelt"), quiet):
        pass
    with open_run_dir(config(where), quiet) as run:
        assert not run.resumed
        assert load_config(run.path / "config.yaml").data.source != "misspelt"


def test_a_run_folder_is_made_once_and_resumed_with_other_steps(tmp_path: Path) -> None:
    where = f"run.dir={tmp_path / 'run'}"
    with open_run_dir(config(where), quiet) as run:
        assert not run.resumed
        begin(run.path)
    with open_run_dir(config(where, "trainer.steps=99"), quiet) as run:
        assert run.resumed
        assert load_config(run.path / "config.yaml").trainer.steps == 99


def test_a_run_folder_of_another_config_names_what_differs(tmp_path: Path) -> None:
    where = f"run.dir={tmp_path / 'run'}"
    with open_run_dir(config(where), quiet) as run:
        begin(run.path)
    before = (tmp_path / "run/config.yaml").read_text()
    with (
        pytest.raises(UserError, match=r"another config \(rollout\.group_size = 8 there, 4 here\)"),
        open_run_dir(config(where, "rollout.group_size=4"), quiet),
    ):
        pass
    assert (tmp_path / "run/config.yaml").read_text() == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with (
        pytest.raises(UserError, match=r"holds thesis\.tex but no config\.yaml"),
        open_run_dir(config(f"run.dir={tmp_path}"), quiet),
    ):
        pass


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    c = config(f"run.dir={tmp_path / 'run'}")
    with (
        open_run_dir(c, quiet),
        pytest.raises(UserError, match=f"in use by process {os.getpid()}"),
        open_run_dir(c, quiet),
    ):
        pass


def test_processes_of_a_dead_owner_are_waited_for_then_named(tmp_path: Path) -> None:
    c = config(f"run.dir={tmp_path}", "launch.grace_seconds=0.1")
    said: list[str] = []
    fd = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"999999999\n")  # no process has that id
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="in use by process 999999999"), open_run_dir(c, said.append):
        pass
    os.close(fd)
    assert said == ["waiting for the processes of an earlier, killed run to end"]
    with open_run_dir(c, said.append) as run:
        assert not run.resumed


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    hf = {"num_experts": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"max_position_embeddings": 1024}))
    return tmp_path


def test_a_model_folder_that_fits(model: Path) -> None:
    check_model(config(f"model.path={model}", "parallel.ep=2"))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.path=/no/such"], r"model\.path = /no/such: no such folder"),
        (["model.path=/dev/null"], "not a folder"),
        (["model.path=/"], r"not a Hugging Face model folder: no config\.json in it"),
        (["parallel.ep=16"], r"parallel\.ep = 16 does not divide the model's 8 experts"),
        (["parallel.pp=2"], r"parallel\.pp = 2 does not divide the model's 3 layers"),
        (["parallel.tp=4"], r"parallel\.tp = 4 does not divide the model's 2 key-value heads"),
        (["engine.tp=3"], r"engine\.tp = 3 does not divide the model's 4 attention heads"),
        (
            ["rollout.max_response_tokens=2048"],
            r"max_response_tokens = 2048 leaves no room for a prompt in the model's context of 1024",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_told_before_anything_starts(
    model: Path, overrides: list[str], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        check_model(config(f"model.path={model}", *overrides))


def test_an_incomplete_model_folder_is_told(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer in it \(tokenizer\.json\)"):
        check_model(config(f"model.path={model}"))
    (model / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        check_model(config(f"model.path={model}"))


def test_set_up_names_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(bootstrap.SetupError, match=r"3\.12 or 3\.13 is needed; this is 3\.9\.2"):
        bootstrap.fitting_python()


def test_set_up_finds_a_newer_python_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")  # a version manager's script for a version that it lacks
    shim.chmod(0o755)
    (tmp_path / "python3.12").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.fitting_python() == os.path.realpath(sys.executable)


def test_set_up_says_what_pip_suffered_from() -> None:
    assert bootstrap.cause("x\nOSError: [Errno 28] No space left on device\n") == "the disk is full"
    no_network = "WARNING: failure in name resolution\nERROR: No matching distribution found"
    assert bootstrap.cause(no_network).startswith("no network")
    assert bootstrap.cause("ERROR: one\nERROR: two") == "ERROR: two"


def test_set_up_refuses_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bootstrap.DISK_GB, "cpu", 10**9)
    with pytest.raises(bootstrap.SetupError, match=r"GB free on the disk of .*, 1000000000 GB are needed"):
        bootstrap.check_disk("cpu")


def test_set_up_is_done_again_when_something_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path)
    assert bootstrap.installed_extras("mark") == []
    (tmp_path / "stamp.json").write_text('{"fingerprint": "mark", "extras": ["cpu"]}')
    assert bootstrap.installed_extras("mark") == ["cpu"]
    assert bootstrap.installed_extras("other") == []
    assert bootstrap.fingerprint("/usr/bin/python3.11") != bootstrap.fingerprint("/usr/bin/python3.12")
