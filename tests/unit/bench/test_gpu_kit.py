"""bench/gpu_kit.py and gpu_node.sh: archives for a GPU node, without a registry and without a GPU."""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import gpu_kit

SCRIPT = Path(gpu_kit.__file__).with_name("gpu_node.sh")
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then echo {packages}; else printf '%s\\n' "$PWD" "$SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND" "$@"; fi
"""


def test_the_lock_file_has_a_version_of_each_package() -> None:
    versions = gpu_kit.locked()
    names = (*gpu_kit.TRAINER, *gpu_kit.SOURCE_ONLY, *gpu_kit.ENGINE)
    assert [name for name in names if name not in versions] == []
    assert all(versions[name].startswith(f"{name}==") for name in names)


def test_libraries_of_a_wheels_data_folder_lie_beside_its_packages(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a/__init__.py", "")
        wheel.writestr("a-1.data/purelib/b/__init__.py", "")
        wheel.writestr("a-1.data/scripts/tool", "")
    gpu_kit.unpack(wheels, site)
    assert sorted(path.name for path in site.iterdir()) == ["a", "b"]


def test_the_node_unpacks_the_archives_once_and_starts_the_drill(tmp_path: Path) -> None:
    kit, packages = tmp_path / "kit", tmp_path / "packages"
    for folder in (kit, packages, tmp_path / "source"):
        folder.mkdir()
    (tmp_path / "source" / "file").write_text("1")
    for part in ("trainer", "engine", "tree"):
        with tarfile.open(kit / f"{part}.tar.xz", "w:xz") as archive:
            archive.add(tmp_path / "source" / "file", f"{part}.txt")
    python = tmp_path / "python"
    python.write_text(PYTHON.format(packages=packages))
    python.chmod(0o755)
    work, out = tmp_path / "work", tmp_path / "out"
    command = ["bash", str(SCRIPT), str(kit), str(work), str(out), "--seconds", "60"]
    for _ in range(2):
        done = subprocess.run(
            command, env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        (work / "site" / "trainer.txt").write_text("kept")
    current, backend, *arguments = done.stdout.splitlines()
    assert (current, backend) == (str(work / "tree"), "python")
    assert arguments[:4] == ["bench/gpu.py", "--out", str(out), "--attention-backend"]
    assert arguments[-2:] == ["--seconds", "60"]
    assert (packages / "rlsys_kit.pth").read_text().split() == [str(work / "site"), str(work / "tree")]
    assert (work / "site" / "trainer.txt").read_text() == "kept", "what is there is not unpacked again"
    assert (work / "site" / "engine.txt").exists() and (work / "tree" / "tree.txt").exists()
