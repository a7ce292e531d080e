"""`make setup`: which Python, which kind of host, which packages; and what it says when something is missing."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch import bootstrap
from launch.bootstrap import SetupError
from rlsys.engine.cpu import platform


def test_set_up_names_a_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        bootstrap.SetupError, match=r"Python 3\.9\.2, .*expected Python 3\.11, 3\.12 or 3\.13"
    ):
        bootstrap.find_python()


def test_set_up_finds_a_newer_python_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")  # a version manager's script for a version that it lacks
    shim.chmod(0o755)
    (tmp_path / "python3.12").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.find_python() == os.path.realpath(sys.executable)


def test_set_up_reports_the_cause_of_a_pip_failure() -> None:
    assert bootstrap.cause("x\nOSError: [Errno 28] No space left on device\n") == "the disk is full"
    no_network = "WARNING: failure in name resolution\nERROR: No matching distribution found"
    assert bootstrap.cause(no_network).startswith("no network")
    assert bootstrap.cause("ERROR: one\nERROR: two") == "ERROR: two"


def test_set_up_refuses_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bootstrap.DISK_GB, "cpu", 10**9)
    with pytest.raises(bootstrap.SetupError, match=r"GB of free space; expected at least 1000000000 GB"):
        bootstrap.check_disk("cpu")


def test_set_up_is_repeated_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path)
    assert bootstrap.installed_extras("mark") == []
    (tmp_path / "stamp.json").write_text('{"fingerprint": "mark", "extras": ["cpu"]}')
    assert bootstrap.installed_extras("mark") == ["cpu"]
    assert bootstrap.installed_extras("other") == []
    assert bootstrap.fingerprint("/usr/bin/python3.11") != bootstrap.fingerprint("/usr/bin/python3.12")


def test_the_device_variable_determines_the_host_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.shutil, "which", lambda _: None)
    for device, kind in (("", "cpu"), ("cpu", "cpu"), ("cuda", "gpu")):
        monkeypatch.setenv("RLSYS_DEVICE", device)
        assert bootstrap.host_kind() == kind, "on a login node, too"
    monkeypatch.setenv("RLSYS_DEVICE", "gpu")
    with pytest.raises(bootstrap.SetupError, match=r"RLSYS_DEVICE = gpu: expected cpu or cuda"):
        bootstrap.host_kind()
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp.json")
    assert bootstrap.venv_kind() is None
    (tmp_path / "stamp.json").write_text('{"fingerprint": "x", "extras": ["dev", "gpu"]}')
    assert bootstrap.venv_kind() == "gpu", "a set-up for cpu makes .venv anew"


def installed(told: dict[str, str], folder: Path, patch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip is asked to install by a set-up on a machine where no driver answers."""
    pip_calls: list[tuple[str, ...]] = []
    patch.setattr(bootstrap, "pip", lambda label, *words: pip_calls.append(words))
    patch.setattr(bootstrap, "STAMP", folder / "stamp.json")
    patch.setattr(bootstrap, "check_disk", lambda kind: None)
    patch.setattr(bootstrap, "create_venv", lambda *_: None)
    patch.setattr(bootstrap.shutil, "which", lambda _: None)
    for name in ("RLSYS_DEVICE", "RLSYS_LOCKED"):
        patch.delenv(name, raising=False)
    for name, value in told.items():
        patch.setenv(name, value)
    bootstrap.set_up(dev=False)
    (folder / "stamp.json").unlink()
    return pip_calls


def test_a_login_node_can_set_up_for_the_nodes_with_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder for all nodes: the login node's own kind would give all of them a torch without CUDA."""
    assert installed({"RLSYS_DEVICE": "cuda"}, tmp_path, monkeypatch) == [("-e", ".[gpu]")]
    locked = installed({"RLSYS_DEVICE": "cuda", "RLSYS_LOCKED": "1"}, tmp_path, monkeypatch)
    assert locked == [("-e", ".[gpu]", "-c", str(bootstrap.ROOT / "requirements/cuda.lock"))]
    monkeypatch.setattr(bootstrap, "install_torchvision", lambda: None)
    monkeypatch.setattr(bootstrap, "compile_patched_modules", lambda: None)
    words = [word for words in installed({}, tmp_path, monkeypatch) for word in words]
    assert bootstrap.TORCH in words and ".[cpu]" in words


def test_torchvision_is_installed_in_a_folder_for_engine_processes_only() -> None:
    assert bootstrap.ENGINE_FOLDER == bootstrap.VENV / platform.FOLDER


def test_the_gpu_lock_satisfies_the_pins_of_sglang() -> None:
    """Its kernels are built against one torch."""
    locked = {
        re.sub(r"[-_.]+", "-", match[1]).lower(): match[2]
        for line in (bootstrap.ROOT / "requirements/cuda.lock").read_text().splitlines()
        if (match := re.match(r"([\w.-]+)==([\w.]+)", line))
    }
    where = {"extra": "", "sys_platform": "linux", "platform_machine": "x86_64"}
    for requirement in map(Requirement, importlib.metadata.requires("sglang") or ()):
        if requirement.marker is None or requirement.marker.evaluate(where):
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            assert requirement.specifier.contains(locked[name], prereleases=True), (
                f"{requirement}: {locked[name]}"
            )


@pytest.fixture
def own_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where set-up makes its environment; the folder is not there yet."""
    venv = tmp_path / ".venv"
    monkeypatch.setattr(bootstrap, "VENV", venv)
    monkeypatch.setattr(bootstrap, "PYTHON", venv / "bin" / "python")
    for name, file in (("STAMP", "rlsys-setup.json"), ("LOG", "rlsys-setup.log")):
        monkeypatch.setattr(bootstrap, name, venv / file)
    return venv


def packages_of(venv: Path) -> set[str]:
    """What pip finds there; nothing where there is no pip."""
    command = [str(venv / "bin/python"), "-m", "pip", "list", "--format=freeze"]
    process = subprocess.run(command, capture_output=True, text=True)
    return {line.partition("==")[0] for line in process.stdout.split()}


@pytest.mark.gate
def test_a_venv_interrupted_before_pip_was_installed_is_recreated(own_venv: Path) -> None:
    """`python -m venv` writes bin/python first, and pip seconds later."""
    python = os.path.realpath(sys.executable)
    subprocess.run([python, "-m", "venv", "--without-pip", str(own_venv)], check=True)
    bootstrap.create_venv(python, "cpu")
    assert "pip" in packages_of(own_venv)


@pytest.mark.gate
def test_a_package_that_was_interrupted_is_installed_again(own_venv: Path) -> None:
    """pip takes a package for installed as soon as its METADATA is there; many wheels have that first. INSTALLER and
    the files of RECORD are there when it is whole."""
    python = os.path.realpath(sys.executable)
    bootstrap.create_venv(python, "cpu")
    (site,) = own_venv.glob("lib/python3*/site-packages")
    for name, files in {
        "cut": {"METADATA": "", "RECORD": "cut-1.0.dist-info/METADATA,,\n"},
        "lost": {
            "METADATA": "",
            "INSTALLER": "pip\n",
            "RECORD": "lost-1.0.dist-info/METADATA,,\nlost/core.so,,\n",
        },
        "whole": {
            "METADATA": "",
            "INSTALLER": "pip\n",
            "RECORD": "whole-1.0.dist-info/METADATA,,\nx/y.pyc,,\n",
        },
    }.items():
        (site / f"{name}-1.0.dist-info").mkdir()
        files["METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        for file, text in files.items():
            (site / f"{name}-1.0.dist-info" / file).write_text(text)
    bootstrap.create_venv(python, "cpu")
    assert packages_of(own_venv) & {"cut", "lost", "whole", "pip"} == {"whole", "pip"}


def test_a_stamp_that_was_cut_off_is_no_stamp(own_venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_calls: list[tuple[str, ...]] = []

    def pip(label: str, *words: str) -> None:
        pip_calls.append(words)
        bootstrap.PARITY_FOLDER.mkdir()

    monkeypatch.setattr(bootstrap, "pip", pip)
    monkeypatch.setattr(bootstrap, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(bootstrap, "PARITY_FOLDER", own_venv / "parity")
    monkeypatch.setattr(bootstrap, "PARITY_STAMP", own_venv / "parity" / "rlsys-parity.json")
    (own_venv / "parity").mkdir(parents=True)
    bootstrap.PARITY_STAMP.write_text('{"trl": "1.')
    try:
        bootstrap.set_up_parity()
    except ValueError as e:
        pytest.fail(f"set-up does not read its stamp: {e}")
    assert len(pip_calls) == 1


def test_an_interrupted_addition_is_not_considered_complete(
    own_venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip changes packages that an earlier set-up installed; interrupted, it leaves these half-made as well."""

    def interrupted(label: str, *words: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "pip", lambda label, *words: None)
    monkeypatch.setattr(bootstrap, "compile_patched_modules", lambda: None)
    monkeypatch.setattr(bootstrap, "install_torchvision", lambda: None)
    monkeypatch.setattr(bootstrap, "create_venv", lambda *_: own_venv.mkdir(exist_ok=True))
    monkeypatch.setattr(bootstrap, "PYTHON", Path(sys.executable))
    monkeypatch.setenv("RLSYS_DEVICE", "cpu")
    bootstrap.set_up(dev=False)
    stamp_text = bootstrap.STAMP.read_text()
    monkeypatch.setattr(bootstrap, "pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bootstrap.set_up(dev=True)
    assert not bootstrap.STAMP.exists() or bootstrap.STAMP.read_text() != stamp_text


def test_a_complete_environment_of_another_python_is_replaced_only_on_request(
    own_venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_venv.mkdir(exist_ok=True)
    stamp = own_venv / "rlsys-setup.json"
    stamp.write_text("{}")
    monkeypatch.setattr(bootstrap, "STAMP", stamp)
    monkeypatch.setattr(bootstrap, "venv_record", lambda: ["/usr/bin/python3.11", "cpu"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(
        SetupError, match=r"CPU host with /usr/bin/python3.11; .* replaces it: remove .* first"
    ):
        bootstrap.create_venv("/usr/bin/python3.12", "cpu")
    terminal = io.StringIO("n\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(
        SetupError, match=r"^set-up cancelled: \.venv was set up for a CPU host with .*, and is unchanged$"
    ):
        bootstrap.create_venv("/usr/bin/python3.12", "cpu")
    assert stamp.exists()
