"""The supervisor against small stand-ins for the roles: real processes, real signals, no engine."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import supervisor
from launch.process import RoleFailed
from launch.ranks import FAILED
from launch.stall_detector import StallDetector
from launch.status import status_lines
from launch.stops import StoppedBySignal
from launch.supervisor import Supervisor
from rlsys.core.errors import RlsysError, RunError, UserError
from rlsys.core.owner import Owner
from rlsys.obs import coordinator
from tests.helpers.clocks import FakeClock
from tests.helpers.supervisor_stage import SERVE_FOREVER, Stage, wait_until


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.02)
    return Stage(tmp_path)


def test_a_finished_trainer_ends_the_run_and_leaves_no_process(stage: Stage) -> None:
    stage.run(
        stage.role("engine", SERVE_FOREVER, serves=True),
        stage.role("rollout", SERVE_FOREVER, serves=True),
        stage.role("trainer", "wait_for('engine-0 probed', 'rollout probed')"),
    )
    assert [n for n in stage.notes if n.endswith("ended")] == ["rollout ended", "engine-0 ended"]
    assert len(stage.pids()) == 3
    assert not any(psutil.pid_exists(pid) for pid in stage.pids())


def test_a_completed_run_starts_no_role(stage: Stage) -> None:
    run = stage.config.run.dir
    run.mkdir()
    stage.run()  # claims the folder
    steps = stage.config.trainer.steps
    end = {"kind": "run", "event": "end", "step": steps, "time": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(end) + "\n")
    stage.run(stage.role("trainer", "pass"))
    assert stage.pids() == []
    assert f"all {steps} steps are done already; increase trainer.steps to continue" in stage.display.phases


def test_an_engine_that_does_not_start_shows_its_last_lines(stage: Stage) -> None:
    with pytest.raises(RoleFailed, match=r"engine-0 exited with code 3; its log: .*engine-0\.log") as failed:
        stage.run(
            stage.role("engine", "print('no such device'); sys.exit(3)", serves=True),
            stage.role("trainer", "signal.pause()"),
        )
    assert failed.value.log_lines == ["no such device"]
    assert failed.value.exit_code == 1
    assert not any(psutil.pid_exists(pid) for pid in stage.pids())


def test_an_engine_that_never_responds_fails_at_its_start_timeout(stage: Stage) -> None:
    with pytest.raises(
        RoleFailed, match=r"did not answer within engine\.start_timeout = 0\.1 s; a slow or busy"
    ):
        stage.run(
            stage.role("engine", "signal.pause()", serves=True, start_timeout=0.1),
            stage.role("trainer", "signal.pause()"),
        )


def test_an_engine_is_restarted(stage: Stage) -> None:
    dies_once = "again = count('engine-0 began') == 2\nserve()\nif again: signal.pause()\n"
    dies_once += "wait_for('engine-0 probed')\nos._exit(9)"
    stage.run(
        stage.role("engine", dies_once, serves=True),
        stage.role("trainer", "while count('engine-0 probed') < 2: time.sleep(0.01)"),
    )
    assert "engine-0 died (exit code 9); restart 1" in stage.display.phases
    assert len([n for n in stage.notes if n.startswith("engine-0 began")]) == 2


KILLED = "killed by signal 9 (SIGKILL), probably out of memory: "
RANKS = "launch.ranks: rank 0 exited with code {}"
SGLANG = "Subprocess scheduler_0 (pid=7) crashed with exit code {}. Triggering SIGQUIT for cleanup..."
SGLANG_EARLY = (
    "RuntimeError: Rank 0 scheduler died during initialization (exit code: {}). If exit code is -9,"
)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", KILLED),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11 (SIGSEGV)"),
        (f"print({RANKS.format(137)!r}, flush=True); os._exit(137)", KILLED),
        (f"print({RANKS.format(139)!r}, flush=True); os._exit(139)", "killed by signal 11 (SIGSEGV)"),
        (f"print({SGLANG.format(-9)!r}, flush=True); os.kill(os.getpid(), 9)", KILLED),
        (
            f"print({SGLANG.format(-11)!r}, flush=True); os.kill(os.getpid(), 9)",
            "killed by signal 11 (SIGSEGV)",
        ),
        (f"print({SGLANG_EARLY.format(-9)!r}, flush=True); os._exit(1)", KILLED),
        (f"print({RANKS.format(1)!r}, flush=True); os._exit(1)", "exit code 1)"),
    ],
    ids=[
        "killed",
        "segfault",
        "rank",
        "rank's segfault",
        "scheduler",
        "scheduler's segfault",
        "start",
        "error",
    ],
)
def test_a_death_by_signal_is_reported_with_signal_and_memory_use(stage: Stage, end: str, told: str) -> None:
    """Also where the process that the kernel killed is a child of the role's: a rank, a scheduler."""
    dies_once = "again = count('engine-0 began') == 2\nserve()\nif again: signal.pause()\n"
    dies_once += f"wait_for('engine-0 probed')\n{end}"
    stage.run(
        stage.role("engine", dies_once, serves=True),
        stage.role("trainer", "while count('engine-0 probed') < 2: time.sleep(0.01)"),
    )
    (message,) = [phase for phase in stage.display.phases if "restart 1" in phase]
    assert message.startswith(f"engine-0 died ({told}"), message
    if told == KILLED:
        assert re.search(
            r"largest process had \d+\.\d GB; \d+\.\d of \d+\.\d GB of the (host|cgroup)", message
        ), message


def test_a_role_that_is_killed_at_its_start_ends_the_run_with_the_signal(stage: Stage) -> None:
    with pytest.raises(
        RoleFailed, match=r"engine-0 was killed by signal 9 .*out of memory: .*; its log: "
    ) as failed:
        stage.run(
            stage.role("engine", "print('loading', flush=True); os.kill(os.getpid(), 9)", serves=True),
            stage.role("trainer", "signal.pause()"),
        )
    assert failed.value.log_lines == ["loading"]


def test_an_engine_that_dies_too_often_stops_the_run(stage: Stage) -> None:
    always_dies = "before = count('engine-0 probed')\nserve()\n"
    always_dies += "while count('engine-0 probed') == before: time.sleep(0.01)\nos._exit(9)"
    with pytest.raises(RoleFailed, match="engine-0 exited with code 9 again, after 1 restart"):
        stage.run(stage.role("engine", always_dies, serves=True), stage.role("trainer", "signal.pause()"))
    assert len([n for n in stage.notes if n.startswith("engine-0 began")]) == 2


def test_a_server_that_samples_again_has_its_engines_restarts_forgiven(stage: Stage) -> None:
    """Its clients may never train. launch.max_restarts is 1."""
    dies_twice = "again = count('engine-0 began') == 3\nserve()\nif again: signal.pause()\n"
    dies_twice += "before = count('work')\nwhile count('work') == before: time.sleep(0.01)\nos._exit(9)"
    entry = '{"kind": "work", "event": "sampled", "step": 0, "time": 0}'
    works = "metrics = here / 'run/metrics.jsonl'\nfor i in (1, 2):\n"
    works += "    while count('engine-0 began') < i: time.sleep(0.01)\n    time.sleep(0.3)\n"
    works += f"    with metrics.open('a') as f: f.write({entry!r} + chr(10))\n    time.sleep(0.5)\n    note('work')\n"
    works += "while count('engine-0 began') < 3: time.sleep(0.01)"
    stage.run(stage.role("engine", dies_twice, serves=True), stage.role("trainer", works))
    assert len([n for n in stage.notes if n.startswith("engine-0 began")]) == 3


class Clock(FakeClock):
    """It goes on only while the supervisor sleeps; the roles, which are real, get a moment then."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        assert self.now < 1000, "the supervisor waits for something that will not come"
        time.sleep(0.01)


def test_restart_delays_grow_and_a_single_dead_engine_restarts_without_settling(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, restart_times, role_starts = Clock(), [], []
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "_SETTLE_SECONDS", 1e9)  # of roles that others may have died of
    stage.config = stage.config.model_copy(
        update={"launch": stage.config.launch.model_copy(update={"max_restarts": 3})}
    )

    def phase(text: str) -> None:
        if "; restart" in text:
            restart_times.append(clock.now)

    monkeypatch.setattr(stage.display, "phase", phase)
    start = Supervisor._start

    def noted(self: Supervisor, role: Any) -> Any:
        role_starts.append((role.name, clock.now))
        return start(self, role)

    monkeypatch.setattr(Supervisor, "_start", noted)
    always_dies = "before = count('engine-0 probed')\nserve()\n"
    always_dies += "while count('engine-0 probed') == before: time.sleep(0.01)\nos._exit(9)"
    with pytest.raises(RoleFailed, match="engine-0 exited with code 9 again, after 3 restarts"):
        stage.run(stage.role("engine", always_dies, serves=True), stage.role("trainer", "signal.pause()"))
    again = [timestamp for name, timestamp in role_starts if name == "engine-0"][1:]
    waited = [
        start_time - restart_time for restart_time, start_time in zip(restart_times, again, strict=True)
    ]
    assert waited == pytest.approx([0.0, 1.0, 3.0], abs=2 * supervisor.POLL_SECONDS)


def test_each_progress_line_of_opening_the_ledger_is_shown_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.console._PROGRESS_SECONDS", 0.0)
    answers = [(0, b""), (503, b"opening: 1 MiB"), (503, b"opening: 1 MiB"), (503, b"opening: 2 MiB")]

    def probe(owner: Owner, path: str, *_: object) -> tuple[int, bytes]:
        if answers:
            return answers.pop(0)
        (stage.folder / "opened").touch()
        return 200, b"{}"

    monkeypatch.setattr(supervisor, "probe", probe)
    stage.run(
        stage.role("rollout", "signal.pause()", serves=True),
        stage.role("trainer", "while not (here / 'opened').exists(): time.sleep(0.01)"),
    )
    progress_lines = [text for text in stage.display.phases if text.startswith("opening")]
    assert progress_lines == ["opening: 1 MiB", "opening: 2 MiB"]


def test_the_last_lines_of_a_trainer_are_its_own(stage: Stage) -> None:
    failure_line = f"{FAILED} 1 exited with code 1"
    body = f"print('AssertionError'); print({failure_line!r}); print('of another rank'); sys.exit(1)"
    with pytest.raises(RoleFailed) as failed:
        stage.run(stage.role("trainer", body))
    assert failed.value.log_lines == ["AssertionError", failure_line]


def test_a_roles_own_error_line_is_the_error(stage: Stage) -> None:
    body = "print('noise'); print('rlsys: error: model.layers.0 is missing [exit 2]'); sys.exit(1)"
    with pytest.raises(UserError, match=r"^model\.layers\.0 is missing$"):
        stage.run(stage.role("trainer", body))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("print('rlsys: error: no model [exit 2]'); sys.exit(2)", "no model (trainer"),
        ("print('rlsys: error: no memory [exit 1]'); sys.exit(1)", "no memory (trainer"),
        ("print('Segmentation fault'); sys.exit(3)", "trainer exited with code 3"),
    ],
)
def test_the_status_of_a_failed_start_reports_the_failure_and_log(stage: Stage, body: str, told: str) -> None:
    """The role, its error line and its log."""
    with pytest.raises(RlsysError):
        stage.run(stage.role("trainer", body))
    run = stage.config.run.dir
    *_, last = status_lines(run, time.time())
    assert f" ended: {told}" in last and f"; its log: {run}/logs/trainer" in last


def test_a_keeper_that_is_slow_to_end_does_not_hide_why_the_run_stops(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, "its keeper does not end" was all that was told."""
    monkeypatch.setattr("launch.supervisor._STOP_MARGIN", -60.0)
    trainer = "note('rlsys: trained'); print('rlsys: error: no such thing [exit 1]', flush=True); sys.exit(1)"
    with pytest.raises(RunError, match="no such thing"):
        stage.run(stage.role("engine", SERVE_FOREVER, serves=True), stage.role("trainer", trainer))
    assert any("its keeper does not end" in phase for phase in stage.display.phases)


def test_the_cause_is_blamed_not_its_consequence(stage: Stage) -> None:
    trainer = "wait_for('rollout began')\nprint('rlsys: error: no answer [exit 1]'); sys.exit(1)"
    rollout = "print('rlsys: error: rollouts.sqlite is corrupt [exit 2]'); sys.exit(2)"
    with pytest.raises(UserError, match="sqlite is corrupt"):
        stage.run(stage.role("rollout", rollout), stage.role("trainer", trainer))


def trainer_that_works(then: str) -> str:
    """Writes a first line of metrics, by which the supervisor knows that it works."""
    entry = '{"kind": "run", "event": "start", "step": 0, "time": 0}'
    return f"with (here / 'run/metrics.jsonl').open('a') as f: f.write({entry!r} + chr(10))\n{then}"


def test_a_trainer_that_worked_is_restarted(stage: Stage) -> None:
    dies_once = "if count('trainer began') == 2: sys.exit(0)\nwait_for('rollout read')\nos._exit(9)"
    watches = "serve()\nwhile count('trainer began') < 1 or count('rollout probed') < 3: time.sleep(0.01)\n"
    watches += "note('rollout read')\nwhile True: signal.pause()"
    stage.run(
        stage.role("rollout", watches, serves=True), stage.role("trainer", trainer_that_works(dies_once))
    )
    assert "trainer died (exit code 9); restart 1" in stage.display.phases
    assert len([n for n in stage.notes if n.startswith("rollout began")]) == 1


def test_a_dead_rollout_process_takes_the_trainer_with_it(stage: Stage) -> None:
    dies_once = "again = count('rollout began') == 2\nserve()\nif again: signal.pause()\n"
    dies_once += "while count('rollout probed') < 3: time.sleep(0.01)\nos._exit(9)"
    stage.run(
        stage.role("rollout", dies_once, serves=True),
        stage.role("trainer", "if count('trainer began') == 2: sys.exit(0)\nsignal.pause()"),
    )
    assert "rollout died (exit code 9); restart 1, with trainer" in stage.display.phases
    assert len([n for n in stage.notes if n.startswith("trainer began")]) == 2


def test_nodes_of_a_trainer_live_and_die_together(stage: Stage) -> None:
    first = stage.role("trainer", trainer_that_works("while count('twin began') < 2: time.sleep(0.01)"))
    twin = "again = count('twin began') == 1\nnote('twin began')\nif again: sys.exit(0)\n"
    twin += "wait_for('rollout read')\nos._exit(9)"
    second = replace(stage.role("trainer", twin), name="trainer-1", unit="trainer")
    watches = "serve()\nwhile count('rollout probed') < 3: time.sleep(0.01)\n"
    watches += "note('rollout read')\nwhile True: signal.pause()"
    stage.run(stage.role("rollout", watches, serves=True), first, second)
    assert "trainer-1 died (exit code 9); restart 1" in stage.display.phases
    assert len([n for n in stage.notes if n.startswith("trainer began")]) == 4


def test_a_preempted_trainer_saves_and_exits_by_itself(stage: Stage) -> None:
    trainer = f"wait_for('rollout probed')\nos.kill({os.getpid()}, signal.SIGTERM)\n"
    trainer += "wait_for('rollout asked /leave?seconds=20')\nnote('trainer saved')"
    with pytest.raises(StoppedBySignal, match="stopped by SIGTERM"):
        stage.run(
            stage.role("engine", SERVE_FOREVER, serves=True),
            stage.role("rollout", SERVE_FOREVER, serves=True),
            stage.role("trainer", trainer),
        )
    assert "trainer saved" in stage.notes
    assert "the trainer has exited" in stage.display.phases
    assert stage.notes.index("trainer saved") < stage.notes.index("rollout ended")
    assert not any(psutil.pid_exists(pid) for pid in stage.pids())


def test_a_silence_and_a_request_are_diagnosed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STATUS_SECONDS", 0.02)
    monkeypatch.setattr("launch.stall_detector._STACKS_SECONDS", 0.02)
    rollout = stage.config.rollout.model_copy(update={"stall_timeout": 0.1})
    stage.config = stage.config.model_copy(update={"rollout": rollout})
    hangs = "answer, request = here / 'run/diagnosis.txt', here / 'run/.diagnose'\n"
    hangs += "while not answer.exists(): time.sleep(0.01)\n"
    hangs += "(here / 'first').write_text(answer.read_text())\nrequest.touch()\n"
    hangs += "while 'requested;' not in answer.read_text(): time.sleep(0.01)\n"
    hangs += "wait_for('rollout shows its stack')"
    shows = "signal.signal(signal.SIGUSR2, lambda *_: note('rollout shows its stack'))\n"
    stage.run(stage.role("rollout", shows + SERVE_FOREVER, serves=True), stage.role("trainer", hangs))
    assert "nothing has changed for " in (stage.folder / "first").read_text()
    assert any("diagnosis.txt" in phase for phase in stage.display.phases)
    assert not (stage.folder / "run/.diagnose").exists()


def test_the_progress_of_an_evaluation_is_shown_and_is_a_change(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STATUS_SECONDS", 0.02)
    monkeypatch.setattr("launch.console._PROGRESS_SECONDS", 0.0)
    changes: list[str] = []
    monkeypatch.setattr(StallDetector, "reset", lambda _: changes.append(stage.display.phases[-1]))
    display_phase = stage.display.phase

    def show(text: str) -> None:
        display_phase(text)
        (stage.folder / text.replace(" ", "-")).touch()

    monkeypatch.setattr(stage.display, "phase", show)
    evaluates = "for tokens in ('1 token', '2 tokens'):\n"
    evaluates += "    (here / 'run/part').write_text(tokens)\n"
    evaluates += "    os.replace(here / 'run/part', here / 'run/progress.txt')\n"
    evaluates += "    while not (here / tokens.replace(' ', '-')).exists(): time.sleep(0.01)"
    stage.run(stage.role("engine", SERVE_FOREVER, serves=True), stage.role("trainer", evaluates))
    progress_texts = ["1 token", "2 tokens"]
    assert [text for text in stage.display.phases if text in progress_texts] == progress_texts
    assert [text for text in changes if text in progress_texts] == progress_texts


def test_a_full_disk_while_answering_readers_does_not_end_the_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the supervisor ended with a traceback, and the run with it."""
    monkeypatch.setattr(supervisor, "STATUS_SECONDS", 0.02)

    def full(path: Path, *_: object, **__: object) -> None:
        (stage.folder / f"refused {path.name}").touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(coordinator, "replace_file", full)
    monkeypatch.setattr("launch.stall_detector.replace_file", full)
    monkeypatch.setattr("launch.stall_detector._STACKS_SECONDS", 0.02)
    asks = "wait_for('rollout probed')\nrun = here / 'run'\n(run / '.ask').mkdir()\n"
    asks += "(run / '.ask/ledger').touch(); (run / '.diagnose').touch()\n"
    asks += "refused = [here / 'refused ledger.told', here / 'refused diagnosis.txt']\n"
    asks += "while not all(path.exists() for path in refused): time.sleep(0.01)"
    stage.run(stage.role("rollout", SERVE_FOREVER, serves=True), stage.role("trainer", asks))
    phases = stage.display.phases
    assert "cannot write the response to rlsys ledger: No space left on device" in phases
    assert any(phase.endswith("diagnosis.txt: No space left on device") for phase in phases)


def test_ctrl_c_ends_trainer_then_rollout_then_engines(stage: Stage) -> None:
    interrupt = f"wait_for('engine-0 probed', 'rollout probed')\nos.kill({os.getpid()}, signal.SIGINT)\n"
    interrupt += "signal.pause()"
    with pytest.raises(StoppedBySignal, match="stopped by SIGINT") as stopped:
        stage.run(
            stage.role("engine", SERVE_FOREVER, serves=True),
            stage.role("rollout", SERVE_FOREVER, serves=True),
            stage.role("trainer", interrupt),
        )
    assert stopped.value.exit_code == 130
    assert "stopping" in stage.display.phases
    ends = [n for n in stage.notes if n.endswith("ended")]
    assert ends == ["trainer ended", "rollout ended", "engine-0 ended"]


def test_a_second_ctrl_c_kills_immediately(stage: Stage) -> None:
    stage.config = stage.config.model_copy(
        update={"launch": stage.config.launch.model_copy(update={"grace_seconds": 600.0})}
    )
    stubborn = (
        f"signal.signal(signal.SIGTERM, lambda *_: os.kill({os.getpid()}, signal.SIGTERM))\n"
        f"os.kill({os.getpid()}, signal.SIGTERM)\nwhile True: signal.pause()"
    )
    with pytest.raises(StoppedBySignal):
        stage.run(stage.role("trainer", stubborn))
    assert not any(psutil.pid_exists(pid) for pid in stage.pids())


def test_grandchildren_outside_the_process_group_are_also_terminated(stage: Stage) -> None:
    spawn = "note('grandchild began ' + str(subprocess.Popen(['sleep', '600'], start_new_session=True).pid))"
    stage.run(stage.role("trainer", spawn))
    assert len(stage.pids()) == 2
    assert not any(psutil.pid_exists(pid) for pid in stage.pids())


def test_roles_of_a_killed_supervisor_end_and_free_the_folder(stage: Stage) -> None:
    code = f"""
from pathlib import Path
from tests.helpers.supervisor_stage import SERVE_FOREVER, Stage
stage = Stage(Path({str(stage.folder)!r}))
trainer = "wait_for('engine-0 probed'); note('up'); signal.pause()"
stage.run(stage.role("engine", SERVE_FOREVER, serves=True), stage.role("trainer", trainer))
"""
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
    wait_until(lambda: "up" in stage.notes)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    stage.run(stage.role("trainer", "pass"))  # waits for the folder, then takes over
    assert not any(psutil.pid_exists(pid) for pid in stage.pids())
