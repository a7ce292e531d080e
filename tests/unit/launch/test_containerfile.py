"""What holds for the Containerfile without building it: its stages, arguments and files."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from launch.bootstrap import DEVICE, KINDS, LOCKED, PYTHONS

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in TEXT.replace("\\\n", " ").splitlines()
    if re.match("[A-Z]", line)
]
COPIED = [
    source for name, rest in INSTRUCTIONS if name == "COPY" for source in rest.split()[:-1]
]  # the last word is the target
DEFAULTS = dict(rest.partition("=")[::2] for name, rest in INSTRUCTIONS if name == "ARG")
IGNORED = [
    line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
]


def ignored(path: str) -> bool:
    parts = path.split("/")
    prefixes = ("/".join(parts[: i + 1]) for i in range(len(parts)))
    return any(
        fnmatch(p, line) or fnmatch(f"/{p}", line.replace("**", "*")) for p in prefixes for line in IGNORED
    )


def test_files_of_a_set_up_are_copied() -> None:
    assert [source for source in COPIED if not (ROOT / source).exists() or ignored(source)] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    needed = {
        "pyproject.toml",
        "setup.py",
        "LICENSE",
        "requirements",
        "configs",
        project["project"]["readme"],
    }
    assert needed | packages <= set(COPIED)


@pytest.mark.parametrize(
    "path",
    [".git", ".venv", "runs", "rlsys/core/__pycache__", "rlsys/a.pyc", ".mypy_cache", "rlsys.egg-info"],
)
def test_generated_files_of_a_checkout_are_excluded_from_the_build_context(path: str) -> None:
    assert ignored(path) and not ignored("rlsys/core/hub.py")


def test_the_default_is_a_gpu_node_and_arguments_make_a_cpu_host() -> None:
    stages = [arguments.partition(" AS ")[::2] for name, arguments in INSTRUCTIONS if name == "FROM"]
    assert stages == [("$BASE", "packages"), ("packages", "kernels")]
    assert DEFAULTS["RLSYS_DEVICE"] == "cuda" and set(KINDS) == {"cpu", "cuda"}
    environment = [arguments for name, arguments in INSTRUCTIONS if name == "ENV"]
    assert f"{DEVICE}=${DEVICE} {LOCKED}=1" in environment
    comments = " ".join(line.lstrip("# ") for line in TEXT.splitlines() if line.startswith("#"))
    assert re.findall(r"--target (\w+)", comments) == ["packages"]
    build_args = dict(re.findall(r"--build-arg (\w+)=(\S+)", comments))
    assert build_args.keys() <= DEFAULTS.keys() and build_args[DEVICE] == "cpu"
    assert {DEFAULTS["PYTHON"], build_args["PYTHON"]} <= {
        f"python{major}.{minor}" for major, minor in PYTHONS
    }


def test_every_argument_is_used() -> None:
    used = " ".join(arguments for name, arguments in INSTRUCTIONS if name != "ARG")
    read_by_builds = {"MAX_JOBS"}
    assert {name for name in DEFAULTS if f"${name}" not in used} == read_by_builds


def test_it_names_no_registry_and_no_proxy() -> None:
    assert not re.search(r"index-url|find-links|proxy|pip\.conf", " ".join(r for _, r in INSTRUCTIONS), re.I)
