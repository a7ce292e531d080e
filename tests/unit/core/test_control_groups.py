"""Limits for several processes together: in a real control group, with the controllers that this machine gives."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.core import control_groups
from rlsys.core.control_groups import limited, limiting_group
from rlsys.rewards.sandbox import FOLDER_BYTES, Sandbox


@pytest.fixture
def no_controllers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A group in which groups can be made, whatever they limit."""
    monkeypatch.setattr(control_groups, "CONTROLLERS", frozenset())
    limiting_group.cache_clear()
    group_folder = limiting_group()
    if group_folder is None:
        pytest.skip("no writable cgroup v2 tree on this machine")
    yield group_folder
    limiting_group.cache_clear()


def test_a_command_runs_in_a_limited_group_and_leaves_no_process(no_controllers: Path) -> None:
    with limited({"cgroup.max.depth": 3}) as words:
        (group,) = no_controllers.glob("rlsys-limited-*")
        assert (group / "cgroup.max.depth").read_text() == "3\n"
        output = subprocess.run(
            [*words, "sh", "-c", "cat /proc/self/cgroup; setsid sleep 600 >/dev/null 2>&1 & echo $!"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert f"/{group.name}\n" in output
        process = output.splitlines()[-1]
        assert process in (group / "cgroup.procs").read_text().split()
    assert not group.exists(), "a group with a live process cannot be removed"


def test_the_group_of_a_process_that_was_killed_is_removed(no_controllers: Path) -> None:
    stale_group = no_controllers / "rlsys-limited-99999999-0"
    stale_group.mkdir()
    limiting_group.cache_clear()
    assert limiting_group() == no_controllers
    assert not stale_group.exists()


def test_no_limits_apply_without_cgroup_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "CONTROLLERS", frozenset(("no such controller",)))
    limiting_group.cache_clear()
    with limited({"memory.max": 1}) as words:
        assert words == []
    assert any("of all processes of a program together" in lack for lack in Sandbox.unlimited())
    limiting_group.cache_clear()


def test_a_programs_processes_share_its_memory_and_one_cpu() -> None:
    limits = Sandbox(2, 512)._group_limits()
    assert limits == {
        "memory.max": 512 * 2**20 + 2 * FOLDER_BYTES,
        "pids.max": 24,
        "cpu.max": "100000 100000",
    }
