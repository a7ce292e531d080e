"""Folders and files that another user has made at a path where a run writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.exporter import Exporter, serve_metrics, targets_path
from launch.rundir import open_run_dir
from launch.submit import submit
from rlsys.config import Config
from rlsys.core.cache import cache_folder
from rlsys.core.errors import UserError
from tests.unit.launch.test_exporter import Quiet

OTHER = 54777
MODEL = "/models/tiny"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


def config_of(run: Path, share: str | None = None) -> Config:
    return Config.model_validate({"model": {"path": MODEL}, "run": {"dir": run, "share": share}})


def start(run: Path, share: str | None = None) -> None:
    with open_run_dir(config_of(run, share), lambda _: None):
        pass


def refusal(begin: Callable[[], object], victim: Path) -> str:
    """Return the one line with which `begin` ends; it has not touched the file `victim`."""
    victim.write_text("of the victim")
    try:
        begin()
    except UserError as e:
        line = str(e)
        assert e.exit_code == 2 and "\n" not in line
    else:
        line = "not refused"
    assert victim.read_text() == "of the victim"
    return line


@needs_root
@pytest.mark.parametrize("share", [None, "group"])
def test_security_h4_a_run_folder_of_another_user_is_refused(share: str | None, tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir(mode=0o777)
    (run / ".lock").symlink_to(victim)
    os.chown(run, OTHER, OTHER)
    line = refusal(lambda: start(run, share), victim)
    assert f"run.dir = {run}: belongs to user {OTHER}" in line and "root" in line
    assert run.stat().st_mode & 0o777 == 0o755 and sorted(os.listdir(run)) == [".lock"]


@needs_root
@pytest.mark.parametrize("name", [".lock", "checkpoints", "logs", "owners", "config.yaml", "metrics.jsonl"])
def test_security_h4_another_users_files_in_a_run_folder_are_refused(name: str, tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    run.chmod(0o777)
    (run / name).symlink_to(victim if name in (".lock", "metrics.jsonl") else tmp_path)
    os.chown(run / name, OTHER, OTHER, follow_symlinks=False)
    line = refusal(lambda: start(run), victim)
    assert f"run.dir = {run}: {name} in it belongs to user {OTHER}" in line


@needs_root
def test_security_h4_a_link_of_another_user_is_no_run_folder(tmp_path: Path) -> None:
    run, home = tmp_path / "run", tmp_path / "home"
    home.mkdir(mode=0o755)
    run.symlink_to(home)
    os.chown(run, OTHER, OTHER, follow_symlinks=False)
    line = refusal(lambda: start(run), tmp_path / "victim")
    assert f"run.dir = {run}: belongs to user {OTHER}" in line and not os.listdir(home)


def test_security_h4_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    (run / ".lock").symlink_to(victim)
    assert str(run) in refusal(lambda: start(run), victim)


@needs_root
def test_security_h4_submit_writes_into_no_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / "logs").mkdir(parents=True)
    (run / "logs/submit.sbatch").symlink_to(victim)
    os.chown(run, OTHER, OTHER)
    monkeypatch.setattr("launch.submit.client", lambda _: "1")
    assert f"belongs to user {OTHER}" in refusal(lambda: submit(config_of(run), "script"), victim)


def test_security_h4_a_targets_file_is_written_through_no_link(tmp_path: Path) -> None:
    path, victim = targets_path(tmp_path / "mine"), tmp_path / "victim"
    path.parent.mkdir()
    victim.write_text("of the victim")
    for link in (path, path.with_name(f"{path.name}.part")):
        link.symlink_to(victim)
    with serve_metrics(Exporter(Quiet()), 0, tmp_path / "mine", []):
        assert victim.read_text() == "of the victim"
        assert json.loads(path.read_text()) and not path.is_symlink()


@needs_root
def test_security_h4_a_cache_behind_a_link_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "keys").mkdir(mode=0o700)
    link = tmp_path / "cache/rlsys"
    link.symlink_to(tmp_path / "keys")
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    line = refusal(lambda: cache_folder("rows"), tmp_path / "victim")
    assert f"{link}: belongs to user {OTHER}" in line


@pytest.mark.parametrize(("share", "mode"), [(None, 0o700), ("group", 0o750)])
def test_a_run_resumes_in_a_folder_behind_its_users_symlinks(
    share: str | None, mode: int, tmp_path: Path
) -> None:
    """Only this user can write to what a run makes, under any umask."""
    disk, run, previous_umask = tmp_path / "disk", tmp_path / "run", os.umask(0o002)
    try:
        (disk / "checkpoints").mkdir(parents=True)
        run.symlink_to(disk)
        (disk / "checkpoints").rmdir()
        for _ in range(2):
            start(run, share)
        assert disk.stat().st_mode & 0o777 == mode
        assert not [p for p in disk.rglob("*") if p.stat().st_mode & 0o022]
    finally:
        os.umask(previous_umask)
