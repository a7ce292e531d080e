"""One answer to "does this host compute on GPUs", for the launcher, the set-up and `rlsys doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import bootstrap
from launch.keeper import visible_gpus
from rlsys.cli import main
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.engine.launch_args import engine_command
from rlsys.obs.doctor import Finding, examine

ROOT = Path(__file__).resolve().parents[3]
ON_CUDA = ROOT / "configs/quickstart_cuda.yaml"


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with one GPU: the device is there, nvidia-smi is not."""
    original_which, original_glob = shutil.which, Path.glob

    def in_container(folder: Path, pattern: str) -> Iterator[Path]:
        if folder == Path("/dev") and pattern.startswith("nvidia"):
            return iter([Path("/dev/nvidia0")])
        return iter(original_glob(folder, pattern))

    monkeypatch.setattr(
        shutil, "which", lambda n, *a, **k: None if n == "nvidia-smi" else original_which(n, *a, **k)
    )
    monkeypatch.setattr(Path, "glob", in_container)
    for name in ("CUDA_VISIBLE_DEVICES", "RLSYS_DEVICE"):
        monkeypatch.delenv(name, raising=False)


def gpu() -> Finding:
    return next(finding for finding in examine() if finding.name == "gpu")


@pytest.mark.usefixtures("container")
def test_a_container_without_nvidia_smi_is_a_host_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bootstrap.host_kind() == "gpu"
    assert gpu().value != "none", "doctor does not see the device"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bootstrap.host_kind() == "cpu"
    assert (gpu().value, "CUDA_VISIBLE_DEVICES" in gpu().note) == ("none", True)


def test_doctor_counts_no_gpu_that_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert gpu().value == "none"


@pytest.mark.parametrize(("given", "gpus"), [("", "0"), ("-1", "0"), ("0,-1,1", "0,1"), ("4,5", "2")])
def test_a_role_receives_no_gpu_hidden_by_the_scheduler(
    given: str, gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA stops at the first -1."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises((UserError, IndexError)):
        pytest.fail(f"CUDA_VISIBLE_DEVICES = {visible_gpus(gpus)!r}")


def test_an_engine_of_a_plan_with_gpus_computes_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process that plans has none: the head of a Ray cluster, a login node. Its environment is that of
    a host with GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    argv, _ = engine_command(load_config(ON_CUDA, []), 0, 30000)
    assert "--device" not in argv


def test_a_run_on_this_host_needs_the_gpus_that_it_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(main, "pin_data", lambda config: config)
    monkeypatch.setattr(main, "supervise", lambda *_: pytest.fail("the run begins"))
    assert main.main(["train", str(ON_CUDA), f"run.dir={tmp_path / 'run'}"]) == 2
    stderr = capsys.readouterr().err
    assert "launch.gpus_per_node = 1" in stderr and "CUDA_VISIBLE_DEVICES" in stderr


# -- what an engine on CUDA needs beside the driver -------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a GPU; its folder of programs, which is all of PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    write_program(programs / "nvidia-smi", "echo 'NVIDIA H100, 81559 MiB'")
    monkeypatch.setenv("PATH", str(programs))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return programs


def write_program(file: Path, line: str = "exit 0") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)


def named(name: str) -> Finding | None:
    return next((finding for finding in examine() if finding.name == name), None)


def test_doctor_names_the_compiler_that_engines_lack(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_PATH", str(host / "gone"))  # else /usr/local/cuda counts
    nvcc, ninja = named("nvcc"), named("ninja")
    assert nvcc is not None and ninja is not None and not nvcc.ok and not ninja.ok
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert named("nvcc") is None, "a CPU run compiles nothing"


def test_doctor_names_the_folder_of_the_compiler(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = tmp_path / "cuda-13.0"
    write_program(toolkit / "bin/nvcc")
    (host / "nvcc").symlink_to(toolkit / "bin/nvcc")
    entry = named("nvcc")
    assert entry is not None and not entry.ok, "SGLang and torch take the link's folder for the toolkit's"
    assert f"CUDA_HOME={toolkit}" in entry.note
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert (entry := named("nvcc")) is not None and entry.ok
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    entry = named("nvcc")
    assert entry is not None and not entry.ok and "CUDA_HOME" in entry.note


@pytest.mark.usefixtures("host")
def test_with_a_gpu_the_torch_that_counts_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU environment may have another one, with its own extra's version; a GPU's may not."""
    original_version, original_requires = importlib.metadata.version, importlib.metadata.requires
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: "2.13.0" if n == "torch" else original_version(n)
    )
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda n: ["torch==2.99.1"] if n == "sglang" else original_requires(n)
    )
    torch = named("torch")
    assert torch is not None and not torch.ok and "2.99.1" in torch.note
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    torch = named("torch")
    assert torch is not None and torch.ok
