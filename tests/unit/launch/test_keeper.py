"""A keeper ends its command's whole tree, also when the keeper itself is killed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch import cgroup
from launch.backends.local import PipedKeeper
from tests.helpers.supervisor_stage import wait_until

ROOT = Path(__file__).resolve().parents[3]
GRANDCHILD = """
import os, pathlib, signal, sys
os.setsid()
if os.fork():
    os._exit(0)
part = pathlib.Path(sys.argv[1] + ".part")
part.write_text(str(os.getpid()))
part.rename(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True: signal.pause()
"""
COMMAND = """
import signal, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
while True: signal.pause()
"""


KEEP = [sys.executable, "-m", "launch.keeper", "--grace", "60"]


def started(tmp_path: Path) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """A keeper, and a grandchild of its command: in a session of its own, without a parent, deaf to SIGTERM."""
    pid_path = tmp_path / "grandchild"
    argv = [sys.executable, "-m", "launch.keeper", "--grace", "60", "--"]
    keeper = subprocess.Popen(
        [*argv, sys.executable, "-c", COMMAND, GRANDCHILD, str(pid_path)], cwd=ROOT, stdin=subprocess.PIPE
    )
    wait_until(pid_path.exists)
    return keeper, psutil.Process(int(pid_path.read_text()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_killed_keeper(tmp_path: Path, number: signal.Signals) -> None:
    """Before: a SIGKILL of the keeper left what had called setsid to init."""
    keeper, grandchild = started(tmp_path)
    with keeper:
        if number == signal.SIGTERM:
            keeper.send_signal(signal.SIGTERM)
            keeper.send_signal(signal.SIGQUIT)  # or it would wait for its grace time
        else:
            keeper.kill()
        grandchild.wait(60)


def test_no_process_outlives_a_killed_child_of_the_guard(tmp_path: Path) -> None:
    keeper, grandchild = started(tmp_path)
    with keeper:
        inner = next(p for p in psutil.Process(keeper.pid).children() if "launch.keeper" in p.cmdline())
        inner.kill()
        grandchild.wait(60)
        assert keeper.wait(60) == 128 + signal.SIGKILL


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "launch.keeper", "--", sys.executable, "-c", "import sys; sys.exit(7)"]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE) as keeper:
        assert keeper.wait(60) == 7


# -- control groups -----------------------------------------------------------------------------------------------


@pytest.fixture
def name() -> Iterator[str]:
    """Of a control group that nobody else has. Skips where this user can make none."""
    name = f"rlsys-test-{secrets.token_hex(4)}"
    if cgroup.create(name) is None:
        pytest.skip("no writable cgroup v2 tree on this machine")
    yield name
    cgroup.end(name)


def kept(tmp_path: Path, name: str) -> tuple[PipedKeeper, psutil.Process]:
    """As `started`, by the backend of this machine."""
    pid_path = tmp_path / "grandchild"
    command = [*KEEP, "--cgroup", name, "--", sys.executable, "-c", COMMAND, GRANDCHILD, str(pid_path)]
    with (tmp_path / "lock").open("w") as lock:
        keeper = PipedKeeper(command, dict(os.environ), tmp_path / "log", lock.fileno(), name)
    wait_until(pid_path.exists)
    return keeper, psutil.Process(int(pid_path.read_text()))


def kill_guard_and_keeper(grandchild: psutil.Process) -> None:
    """At once: stopped first, so that neither sees the other's end."""
    above = [p for p in psutil.Process(grandchild.pid).parents() if "launch.keeper" in p.cmdline()]
    assert len(above) == 2
    for process in above:
        process.suspend()
    for process in above:
        process.kill()


@pytest.mark.gate
def test_no_process_outlives_guard_and_keeper_killed_together(tmp_path: Path, name: str) -> None:
    """Who started them kills the control group. Without one, what had called setsid lived on under init."""
    keeper, grandchild = kept(tmp_path, name)
    kill_guard_and_keeper(grandchild)
    wait_until(lambda: keeper.exit_code is not None)
    assert keeper.exit_code == 128 + signal.SIGKILL
    grandchild.wait(60)
    keeper.release()
    home = cgroup.current_group()
    assert home is not None and not (home / name).exists()


@pytest.mark.gate
def test_a_launch_kills_leftover_processes_in_the_cgroup_of_a_role(tmp_path: Path, name: str) -> None:
    """All guards and keepers were killed, and the supervisor with them: nobody was left to end the role."""
    _, grandchild = kept(tmp_path, name)
    kill_guard_and_keeper(grandchild)
    assert grandchild.is_running()
    with subprocess.Popen(
        [*KEEP, "--cgroup", name, "--", sys.executable, "-c", ""], cwd=ROOT, stdin=subprocess.PIPE
    ) as keeper:
        assert keeper.wait(60) == 0
    grandchild.wait(60)


def test_a_keeper_that_ends_late_spares_the_next_start(tmp_path: Path, name: str) -> None:
    """Ray says that a role is gone while its keeper still ends it: that keeper was seen to kill the next engine."""
    late = cgroup.create(name)
    keeper, grandchild = kept(tmp_path, name)
    assert late is not None
    cgroup.end_start(late)
    home = cgroup.current_group()
    assert home is not None and (home / name).exists()
    assert grandchild.is_running() and keeper.exit_code is None
    keeper.order(b"Q")
    grandchild.wait(60)
    wait_until(lambda: keeper.exit_code is not None)
    keeper.release()


def test_a_command_that_is_killed_at_its_birth_has_ended() -> None:
    """Between fork and exec: the keeper had waited for ever for the end of a process that nobody knew any more."""
    keep = (
        "import os, signal, sys; from launch import cgroup, keeper\n"
        "cgroup.create = lambda name: __import__('pathlib').Path('/')\n"
        "cgroup.kill = cgroup.end_start = lambda group: None\n"
        "cgroup.enter = lambda group: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(keeper.main())"
    )
    argv = [sys.executable, "-c", keep, "--cgroup", "x", "--", sys.executable, "-c", ""]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 128 + signal.SIGKILL


def test_a_command_that_ends_leaves_no_group(tmp_path: Path, name: str) -> None:
    inside = "import pathlib, sys; sys.exit(f'/{sys.argv[1]}' not in pathlib.Path('/proc/self/cgroup').read_text())"
    with subprocess.Popen(
        [*KEEP, "--cgroup", name, "--", sys.executable, "-c", inside, name], cwd=ROOT, stdin=subprocess.PIPE
    ) as keeper:
        assert keeper.wait(60) == 0
    home = cgroup.current_group()
    assert home is not None and not (home / name).exists()


@pytest.mark.parametrize("tree", ["none", "read-only", "old"])
def test_no_cgroup_is_created_without_a_writable_cgroup_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: str
) -> None:
    """The keeper then does without. "old": Linux before 5.14, whose groups have no cgroup.kill."""
    above = {"none": None, "read-only": tmp_path / "file", "old": tmp_path}[tree]
    (tmp_path / "file").touch()
    monkeypatch.setattr(cgroup, "current_group", lambda: above)
    assert cgroup.create("rlsys-x-engine-0") is None
    cgroup.end("rlsys-x-engine-0")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_creating_and_entering_a_cgroup_writes_its_control_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that stands for a group, also on a machine that has none."""
    monkeypatch.setattr(cgroup, "current_group", lambda: tmp_path)
    role = tmp_path / "rlsys-x-engine-0"
    role.mkdir()
    (role / "cgroup.kill").touch()
    (role / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    start = cgroup.create(role.name)
    assert start is not None and start.parent == role and start.is_dir()
    assert (role / "cgroup.kill").read_text() == "1"
    cgroup.enter(start)
    assert (start / "cgroup.procs").read_text() == "0"


def test_a_group_belongs_to_the_folder_and_the_role(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    group = cgroup.group_name(tmp_path / "run", "engine-0")
    assert group == cgroup.group_name(tmp_path / "link", "engine-0")
    assert group != cgroup.group_name(tmp_path, "engine-0")
    assert group != cgroup.group_name(tmp_path / "run", "engine-1")
