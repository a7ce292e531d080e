"""Who waits for whom, told from stacks; and what a run's folder says from outside."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.diagnosis import RoleState, describe, file_time, frames, read_stacks, request_diagnosis, waits_for
from launch.keeper import handles_signal, visible_gpus
from launch.plan import Node
from launch.status import is_locked, lost_seconds, role_logs, show_logs, status_lines
from launch.submit import JobOptions, job_script, submit
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.obs.role import STACKS_VARIABLE

ROOT = Path(__file__).resolve().parents[3]

IN_TAKE = """Stack (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 706 in readinto
  File "/usr/lib/python3.11/http/client.py", line 279 in _read_status
  File "/opt/rlsys/rollout/client.py", line 104 in _http
  File "/opt/rlsys/rollout/client.py", line 95 in _command
  File "/opt/rlsys/rollout/client.py", line 58 in take
  File "/opt/rlsys/train.py", line 50 in <lambda>
"""
IN_BROADCAST = """Stack (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 2924 in broadcast
  File "/venv/torch/distributed/distributed_c10d.py", line 3760 in broadcast_object_list
  File "/opt/rlsys/trainer/trainer.py", line 82 in on_main
  File "/opt/rlsys/train.py", line 50 in take
"""


def test_a_stack_identifies_what_the_process_waits_for() -> None:
    assert waits_for(IN_TAKE) == "the rollout process: groups of the next step (client.py:104)"
    assert waits_for(IN_BROADCAST) == "the other ranks, in broadcast (trainer.py:82)"
    assert waits_for("") == "an unknown event: it wrote no stack"
    assert frames(IN_TAKE)[-1] == ("/opt/rlsys/train.py", 50, "<lambda>")


def test_a_diagnosis_begins_with_what_each_process_waits_for() -> None:
    roles = [RoleState("engine-0", Node("n1").name, 137, True, 12.0, "bye", "engine-0")]
    stacks = {"trainer-rank1": IN_BROADCAST, "trainer-rank0": IN_TAKE}
    status = {
        "train_step": 4,
        "waiting_for": "1 group",
        "engines": {"http://n1:1": "dead", "http://n2:1": "version 3"},
    }
    text = describe("asked for", roles, status, stacks)
    lines = text.splitlines()
    assert lines[3].split(maxsplit=1) == ["trainer-rank0", f"waits for {waits_for(IN_TAKE)}"]
    assert lines[5].split(maxsplit=1) == [
        "rollout",
        "step 4; 1 group; engines: http://n1:1 dead, http://n2:1 version 3",
    ]
    assert (
        "  engine-0         on n1, killed by signal 9 (SIGKILL), probably out of memory, 12 s old: bye"
        in lines
    )
    assert "does not respond" in describe("silence", [], None, {})


def test_a_process_that_gives_no_stack_is_named() -> None:
    roles = [RoleState("engine-0", "n1", None, True, 12.0, "bye", "engine-0")]
    silent = describe("asked for", roles, {}, {})
    assert "  engine-0         waits for an unknown event: it wrote no stack" in silent.splitlines()
    idle = """Stack (most recent call first):
  File "/venv/zmq/sugar/poll.py", line 106 in poll
  File "/venv/sglang/srt/managers/scheduler_components/idle_sleeper.py", line 2 in maybe_sleep
"""
    lines = describe("asked for", roles, {}, {"engine-0-process7": idle}).splitlines()
    assert (
        "  engine-0-process7 waits for no other process: a scheduler without requests (idle_sleeper.py:2)"
        in lines
    )
    assert not any("wrote no stack" in line for line in lines)


def test_a_role_writes_its_stack_on_the_signal(tmp_path: Path) -> None:
    code = "from rlsys.obs.role import dump_stack_on_signal as s; s(); print('up', flush=True); input()"
    env = {**os.environ, STACKS_VARIABLE: str(tmp_path / "stacks" / "trainer"), "RANK": "3"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert handles_signal(process.pid, signal.SIGUSR2)
        assert not handles_signal(process.pid, signal.SIGUSR1)
        process.send_signal(signal.SIGUSR2)
        process.send_signal(signal.SIGUSR2)
        process.communicate(b"\n")
    assert process.returncode == 0
    stack_frames = frames((tmp_path / "stacks" / "trainer-rank3.txt").read_text())
    assert stack_frames and stack_frames[-1][2] == "<module>"


def test_the_last_answer_of_a_process_counts(tmp_path: Path) -> None:
    (tmp_path / "logs/stacks").mkdir(parents=True)
    (tmp_path / "logs/stacks/trainer-rank0.txt").write_text(IN_TAKE + "\n" + IN_BROADCAST)
    assert read_stacks(tmp_path, start=0.0) == {"trainer-rank0": IN_BROADCAST}
    assert read_stacks(tmp_path, start=time.time() + 60) == {}


def test_gpu_indices_are_relative_to_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible_gpus("1,3") == "5,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus("1,3") == "1,3"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-0.log").write_text("one\ntwo\n")
    (tmp_path / "logs" / "rollout.log").write_text("three\n")
    entries = [
        {"kind": "run", "event": "start", "step": 0, "time": 100.0},
        {"kind": "step", "step": 1, "time": 110.0, "reward": 0.25},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    (tmp_path / ".lock").touch()
    (tmp_path / "config.yaml").write_text("model: {path: none}\nparallel: {ep: 2}\n")
    return tmp_path


def test_status_of_a_run_from_its_folder(run: Path) -> None:
    lines = status_lines(run, current_time=130.0)
    assert lines[:4] == [
        "processes     none",
        "train step    1",
        "last metric   20 s ago",
        "reward        0.250",
    ]
    with (run / ".lock").open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        assert is_locked(run)
    assert not is_locked(run)


def test_time_lost_to_stops_is_until_the_first_new_step() -> None:
    def step(n: int, time: float) -> dict[str, object]:
        return {"kind": "step", "step": n, "time": time, "time_step": 2.0}

    def run(event: str, time: float) -> dict[str, object]:
        return {"kind": "run", "event": event, "step": 0, "time": time}

    history = [run("start", 0.0), step(1, 2.0), step(2, 4.0), step(3, 6.0)]
    assert lost_seconds(history) == 0.0
    again = [run("resume", 30.0), step(3, 32.0), run("resume", 40.0), step(3, 42.0), step(4, 44.0)]
    assert lost_seconds([*history, *again]) == 44.0 - 2.0 - 6.0
    leave = [run("leave", 7.0), run("resume", 20.0), step(4, 22.0)]
    assert lost_seconds([*history, *leave]) == 22.0 - 2.0 - 7.0


def test_stacks_are_fresh_by_the_folders_own_clock(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's node may be a minute ahead of the file server."""
    current_time = time.time()
    monkeypatch.setattr(time, "time", lambda: current_time + 60)
    request_time = file_time(run)
    (run / "logs" / "stacks").mkdir()
    (run / "logs" / "stacks" / "trainer.txt").write_text("Stack (most recent call first):\n")
    assert list(read_stacks(run, request_time)) == ["trainer"]


def test_a_diagnosis_of_a_dead_run_shows_its_last_log_lines(run: Path) -> None:
    assert "no process of this run is running" in request_diagnosis(run)
    assert "  trainer-0: two" in request_diagnosis(run).splitlines()


def test_logs_of_a_role_and_its_parts(run: Path) -> None:
    assert list(show_logs(role_logs(run, "trainer"), 1, follow=False)) == ["two"]
    assert list(show_logs(role_logs(run, None), 1, follow=False)) == ["rollout: three", "trainer-0: two"]
    with pytest.raises(UserError, match=r"no log of engine-7; logs: rollout, trainer-0"):
        role_logs(run, "engine-7")


def test_a_followed_log_may_contain_invalid_bytes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.status.FOLLOW_SECONDS", 0.0)
    lines = show_logs(role_logs(run, "trainer"), 1, follow=True)
    assert next(lines) == "two"
    with (run / "logs" / "trainer-0.log").open("ab") as log:
        for data, expected in ((b"\xff\n", "\N{REPLACEMENT CHARACTER}"), (b"three\n", "three")):
            log.write(data)
            log.flush()
            assert next(lines) == expected


def test_spaces_in_job_options_are_quoted_and_line_breaks_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\n")
    config = load_config(file, ["run.dir=/r/a b"])
    script = job_script(config, file, [], JobOptions("1:00", "a;b"))
    assert "#SBATCH '--job-name=rlsys-a b'" in script
    assert "#SBATCH '--output=/r/a b/logs/slurm-%j.log'" in script
    assert "#SBATCH '--partition=a;b'" in script
    with pytest.raises(UserError, match="line breaks"):
        job_script(config, file, [], JobOptions(extra=("--qos=x\nrm -r y",)))


def test_a_run_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\n")
    with pytest.raises(UserError, match=r"run.dir = .*c.yaml: cannot create it: File exists"):
        submit(load_config(file, [f"run.dir={file}"]), "#!/bin/bash\n")


def test_the_job_script_contains_the_requested_options() -> None:
    overrides = ["launch.backend=slurm", "launch.nodes=2", "launch.gpus_per_node=8", "run.dir=runs/a"]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    script = job_script(config, Path("c.yaml"), ["a.b=1 2"], JobOptions("8:00:00", "gpu", ("--qos=high",)))
    lines = script.splitlines()
    for line in (
        "--nodes=2",
        "--gpus-per-node=8",
        "--time=8:00:00",
        "--partition=gpu",
        "--requeue",
        "--qos=high",
    ):
        assert f"#SBATCH {line}" in lines
    assert "#SBATCH --signal=B:USR1@40" in lines
    assert lines[-1].startswith("exec ")
    assert lines[-1].endswith("train c.yaml 'a.b=1 2' launch.backend=slurm launch.nodes=2")
