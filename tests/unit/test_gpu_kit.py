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


def node(kit: Path, python: Path, work: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), str(kit), str(work), str(out), "--seconds", "60"]
    return subprocess.run(command, env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True)


def write_kit(folder: Path, *parts: str) -> tuple[Path, Path, Path]:
    """Archives with one file each, a node's `python3`, and the folder of that Python's packages."""
    kit, packages = folder / "kit", folder / "packages"
    for made in (kit, packages, folder / "source"):
        made.mkdir()
    (folder / "source" / "file").write_text("1")
    for part in parts:
        with tarfile.open(kit / f"{part}.tar.xz", "w:xz") as archive:
            archive.add(folder / "source" / "file", f"{part}.txt")
    python = folder / "python"
    python.write_text(PYTHON.format(packages=packages))
    python.chmod(0o755)
    return kit, python, packages


def test_the_node_unpacks_the_archives_once_and_starts_the_drill(tmp_path: Path) -> None:
    kit, python, packages = write_kit(tmp_path, "trainer", "engine", "tree")
    work, out = tmp_path / "work", tmp_path / "out"
    for _ in range(2):
        done = node(kit, python, work, out)
        assert done.returncode == 0, done.stderr
        (work / "site" / "trainer.txt").write_text("kept")
    current, backend, *arguments = done.stdout.splitlines()
    assert (current, backend) == (str(work / "tree"), "python")
    assert arguments[:4] == ["bench/gpu.py", "--out", str(out), "--attention-backend"]
    assert arguments[-2:] == ["--seconds", "60"]
    assert (packages / "rlsys_kit.pth").read_text().split() == [str(work / "site"), str(work / "tree")]
    assert (work / "site" / "trainer.txt").read_text() == "kept", "what is there is not unpacked again"
    assert (work / "site" / "engine.txt").exists() and (work / "tree" / "tree.txt").exists()


def test_the_node_joins_the_pieces_of_an_archive(tmp_path: Path) -> None:
    kit, python, _ = write_kit(tmp_path, "engine", "tree")
    whole = (kit / "engine.tar.xz").read_bytes()
    (kit / "engine.tar.xz").unlink()
    for i in range(3):
        piece = whole[i * len(whole) // 3 : (i + 1) * len(whole) // 3]
        (kit / f"engine.tar.xz.{i + 1}-of-3").write_bytes(piece)
    done = node(kit, python, tmp_path / "work", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work/site/engine.txt").exists()


def test_the_node_stops_at_an_archive_that_cannot_be_unpacked(tmp_path: Path) -> None:
    kit, python, _ = write_kit(tmp_path, "engine", "tree")
    (kit / "engine.tar.xz").write_bytes((kit / "engine.tar.xz").read_bytes()[:-20])
    done = node(kit, python, tmp_path / "work", tmp_path / "out")
    assert done.returncode != 0, "half a package would be taken for the whole"
    assert "engine.tar.xz" in done.stderr


def test_transformer_engine_has_a_folder_of_its_own(tmp_path: Path) -> None:
    kit, python, _ = write_kit(tmp_path, "trainer", "engine", "tree", "te")
    work = tmp_path / "work"
    done = node(kit, python, work, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (work / "te/te.txt").exists() and not (work / "site/te.txt").exists()
    arguments = done.stdout.split()
    assert arguments[arguments.index("--transformer-engine") + 1] == str(work / "te")
