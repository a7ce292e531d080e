"""bench/gpu_kit.py and gpu_node.sh: archives for a GPU node, without a registry and without a GPU."""

from __future__ import annotations

import ast
import contextlib
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import gpu_kit
import pytest
from fatbin import keep
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCRIPT = Path(gpu_kit.__file__).with_name("gpu_node.sh")
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then echo {packages}; else printf '%s\\n' "$PWD" "$SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND" "$@"; fi
"""


def test_the_lock_file_has_a_version_of_each_package() -> None:
    versions = gpu_kit.locked()
    names = (*gpu_kit.TRAINER, *gpu_kit.SOURCE_ONLY, *gpu_kit.ENGINE)
    assert [name for name in names if name not in versions] == []
    assert all(versions[name].startswith(f"{name}==") for name in names)


def requirements(name: str) -> Iterator[str]:
    """Yield the packages that a package needs on this platform, without extras; none if it is not here."""
    with contextlib.suppress(PackageNotFoundError):
        for requirement in map(Requirement, requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield canonicalize_name(requirement.name)


def test_trainer_requirements_are_in_the_kit_or_on_the_node() -> None:
    """The node has NODE and its requirements."""
    distributions = packages_distributions()
    node: set[str] = set()
    new: set[str] = {
        canonicalize_name(name) for module in gpu_kit.NODE for name in distributions.get(module, [module])
    }
    while new:
        node |= new
        new = {needed for name in new for needed in requirements(name)} - node
    kit = {canonicalize_name(name) for name in (*gpu_kit.TRAINER, *gpu_kit.SOURCE_ONLY)}
    absent = {name: set(requirements(name)) - kit - node for name in (*kit, "rlsys")}
    assert {name: packages for name, packages in absent.items() if packages} == {}


@pytest.mark.gate
def test_the_drill_imports_no_pytest() -> None:
    """The node has none."""
    folder = Path(gpu_kit.__file__).parent
    modules = set()
    for path in folder.glob("gpu*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                files = [name for name in names if (folder.parent / f"{name.replace('.', '/')}.py").is_file()]
                modules |= set(files or [node.module])
    assert "tests.helpers.trainer_cases" in modules
    program = f"import sys; sys.modules['pytest'] = None\nimport {', '.join(sorted(modules))}"
    subprocess.run([sys.executable, "-c", program], cwd=folder.parent, check=True)


def test_unpack_installs_libraries_of_a_wheels_data_folder(tmp_path: Path) -> None:
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
    for directory in (kit, packages, folder / "source"):
        directory.mkdir()
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
        process = node(kit, python, work, out)
        assert process.returncode == 0, process.stderr
        (work / "site" / "trainer.txt").write_text("kept")
    current, backend, *arguments = process.stdout.splitlines()
    assert (current, backend) == (str(work / "tree"), "python")
    assert arguments[:4] == ["bench/gpu.py", "--out", str(out), "--attention-backend"]
    assert arguments[-2:] == ["--seconds", "60"]
    assert (packages / "rlsys_kit.pth").read_text().split() == [str(work / "site"), str(work / "tree")]
    assert (work / "site" / "trainer.txt").read_text() == "kept", "what is there is not unpacked again"
    assert (work / "site" / "engine.txt").exists() and (work / "tree" / "tree.txt").exists()


def test_the_node_joins_the_pieces_of_an_archive(tmp_path: Path) -> None:
    kit, python, _ = write_kit(tmp_path, "engine", "tree")
    content = (kit / "engine.tar.xz").read_bytes()
    (kit / "engine.tar.xz").unlink()
    for i in range(3):
        piece = content[i * len(content) // 3 : (i + 1) * len(content) // 3]
        (kit / f"engine.tar.xz.{i + 1}-of-3").write_bytes(piece)
    process = node(kit, python, tmp_path / "work", tmp_path / "out")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "work/site/engine.txt").exists()


def test_the_node_stops_at_an_archive_that_cannot_be_unpacked(tmp_path: Path) -> None:
    kit, python, _ = write_kit(tmp_path, "engine", "tree")
    (kit / "engine.tar.xz").write_bytes((kit / "engine.tar.xz").read_bytes()[:-20])
    process = node(kit, python, tmp_path / "work", tmp_path / "out")
    assert process.returncode != 0, "half a package would be taken for the whole"
    assert "engine.tar.xz" in process.stderr


def test_transformer_engine_has_a_folder_of_its_own(tmp_path: Path) -> None:
    kit, python, _ = write_kit(tmp_path, "trainer", "engine", "tree", "te")
    work = tmp_path / "work"
    process = node(kit, python, work, tmp_path / "out")
    assert process.returncode == 0, process.stderr
    assert (work / "te/te.txt").exists() and not (work / "site/te.txt").exists()
    arguments = process.stdout.split()
    assert arguments[arguments.index("--transformer-engine") + 1] == str(work / "te")


def test_an_archive_larger_than_the_copy_limit_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_kit, "COPY_MIB", 0.1)
    source, kit = tmp_path / "source", tmp_path / "kit"
    source.mkdir()
    kit.mkdir()
    (source / "library.so").write_bytes(content := os.urandom(250_000))
    (kit / "te.tar.xz.4-of-4").write_bytes(b"of an older kit")
    gpu_kit.pack(source, kit / "te.tar.xz")
    pieces = sorted(kit.iterdir())
    assert [piece.name for piece in pieces] == [f"te.tar.xz.{i}-of-3" for i in (1, 2, 3)]
    assert all(piece.stat().st_size <= 0.1 * 2**20 for piece in pieces)
    assert capsys.readouterr().out.startswith("te.tar.xz: 0.1 + 0.1 + 0.0 MiB")
    python = tmp_path / "python"
    python.write_text(PYTHON.format(packages=tmp_path))
    python.chmod(0o755)
    (tmp_path / "work/tree").mkdir(parents=True)
    process = node(kit, python, tmp_path / "work", tmp_path / "out")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "work/te/library.so").read_bytes() == content


def test_pieces_sort_as_they_follow_one_another(tmp_path: Path) -> None:
    archive = tmp_path / "engine.tar.xz"
    archive.write_bytes(content := bytes(range(120)))
    pieces = gpu_kit.split(archive, 10)
    assert len(pieces) == 12 and pieces == sorted(pieces) and not archive.exists()
    assert b"".join(piece.read_bytes() for piece in pieces) == content


def test_transformer_engine_is_not_built_without_nvcc_or_a_matching_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"

    def answers(script: str) -> str:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return str(python)

    for script, reason in (
        ("exit 1", "has no torch 2.11.0"),
        (
            """echo '["2.13.0+cpu", null, "/x"]'""",
            "has torch 2.13.0[+]cpu for CUDA None, not 2.11.0 for CUDA 13",
        ),
        (f"""echo '["2.11.0+cu130", "13.0", "{tmp_path}"]'""", "has no cuDNN headers"),
    ):
        with pytest.raises(gpu_kit.CannotBuild, match=reason) as raised:
            gpu_kit.packages_with_torch(answers(script))
        assert len(str(raised.value).splitlines()) == 1
    headers = tmp_path / "nvidia/cudnn/include"
    headers.mkdir(parents=True)
    (headers / "cudnn.h").touch()
    assert gpu_kit.packages_with_torch(str(python)) == tmp_path
    monkeypatch.setattr(gpu_kit.Path, "glob", lambda *_: [])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(gpu_kit.CannotBuild, match="no nvcc"):
        gpu_kit.cuda_home()
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert gpu_kit.cuda_home() == tmp_path


def test_a_changed_file_of_transformer_engine_is_not_changed_blindly(tmp_path: Path) -> None:
    file = tmp_path / "__init__.py"
    file.write_text("\n".join(old for old, _ in gpu_kit.TE_CHANGES))
    gpu_kit.change(file)
    assert 'find_spec("torch")' in file.read_text()
    with pytest.raises(SystemExit, match="TE_CHANGES was written for"):
        gpu_kit.change(file)


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """Of a fatbin: (kind, architecture, code)."""
    body = b""
    for kind, architecture, code in entries:
        body += struct.pack("<HHIQQII", kind, 1, 64, len(code), 0, 0, architecture) + bytes(32) + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_library_keeps_the_code_of_one_architecture() -> None:
    two = container((2, 80, b"a" * 16), (2, 90, b"b" * 24), (1, 90, b"p" * 8))
    other_container = container((2, 80, b"c" * 8))
    image = bytearray(bytes(8) + two + bytes(8) + other_container)
    size = len(image)
    assert keep(image, 0, size, 90) == 64 + 24
    assert len(image) == size, "no address changes"
    expected = container((2, 90, b"b" * 24))
    assert image[8 : 8 + len(expected)] == expected
    assert not any(image[8 + len(expected) : 8 + len(two)]), "what is left of the container is zeros"
    assert image.endswith(other_container), "a container without code for it stays as it is"


def test_a_package_that_the_node_must_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_kit.py", "--check-node"])
    monkeypatch.setattr(gpu_kit, "NODE", ("json", "no_such_package"))
    with pytest.raises(
        SystemExit, match=r"lacks packages that the kit requires on the node: no_such_package$"
    ):
        gpu_kit.main()
    monkeypatch.setattr(gpu_kit, "NODE", ("json",))
    gpu_kit.main()
