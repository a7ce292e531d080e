"""`rlsys doctor` holds locks here and lets another process, or another node, try them."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from rlsys.obs.doctor import examine
from rlsys.obs.lock_probe import acquire_locks, examine_locks, hold_locks


def test_locks_exclude_another_process(tmp_path: Path) -> None:
    assert examine_locks(tmp_path, {}) == ("locks work between here and another process here", True)
    assert list(tmp_path.iterdir()) == []


def test_ineffective_locks_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: one lock in one process, and "locks work" on Lustre with localflock."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # of this process: it holds nothing
    finding = next(f for f in examine() if f.name == "this folder")
    assert "locks do NOT work: another process here took flock held here" in finding.value
    assert not finding.ok


def test_a_second_node_of_the_job_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, text in (
        ("scontrol", "echo node1; echo node2"),
        ("srun", 'for a in "$@"; do case $a in --nodelist=*) echo "$a" >&2; exit 3;; esac; done'),
    ):
        (bin_dir / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_dir / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_dir), prepend=":")
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURMD_NODENAME": "node1"}
    words, work = examine_locks(tmp_path, job)
    assert words == "locks: node node2 could not try: --nodelist=node2"
    assert not work


def test_each_kind_is_tried(tmp_path: Path) -> None:
    with hold_locks(tmp_path):
        (tmp_path / "create").unlink()
        assert "create" in acquire_locks(tmp_path)
