"""Who may import whom, read from the source: imports inside functions count too."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from rlsys.algo import registry
from tests.gate import file_map

ROOT = Path(__file__).resolve().parents[2]
OURS = ("rlsys", "launch", "megatron_patches")

LEVELS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("engine_requests", "environments", "megatron_patches", "ops", "venv_runner", "weights_relay"),
    ("http_server", "importers", "obs", "segments"),
    ("config",),
    ("algo", "convert", "data", "engine"),
    ("agents", "ledger", "rewards", "router", "trainer"),
    ("generators", "rehearse", "tenants", "viewer", "weights"),
    ("gateway", "worker"),
    ("evaluation", "planning"),
    ("rollout",),
    ("planner",),
    ("launch", "train"),
    ("cli",),
)
"""Packages, the lowest level first. A package imports packages of lower levels only, so there are no cycles."""
FORBIDDEN: dict[str, set[str]] = {
    "trainer": {"rollout", "worker", "ledger", "router"},
    "weights": {"rollout", "worker", "ledger", "router"},
    "agents": {"algo", "config"},
    "ledger": {"config", "data", "engine"},
}
"""What a package of a lower level is, and still not to be imported."""

TORCH_FREE = (
    "core",
    "http_server",
    "config",
    "segments",
    "obs",
    "engine_requests",
    "importers",
    "rewards",
    "weights_relay",
    "router",
    "gateway",
    "agents",
    "environments",
    "venv_runner",
    "ledger",
    "generators",
    "worker",
    "planning",
    "evaluation",
    "rollout",
    "viewer",
    "launch",
    "cli",
)
TORCH_FREE_FILES = (
    "rlsys/engine/client.py",
    "rlsys/engine/wire.py",
    "rlsys/engine/launch_args.py",
    "rlsys/engine/hooks/route_writer.py",
    "rlsys/data/source.py",
    *(f"rlsys/rehearse/{name}.py" for name in ("command", "figures", "kinds", "report")),
    *(
        f"rlsys/convert/{name}.py"
        for name in (
            "config",
            "fit",
            "adapters",
            "flops",
            "folder",
            "hub",
            "prefixes",
            "rope",
            "rows",
            "rules",
            "table",
        )
    ),
    "rlsys/weights/push_plan.py",
    "rlsys/weights/shard_plan.py",
)
TORCH_IN_A_FUNCTION = ("rlsys/core/rendezvous.py",)
"""Makes a torch store for processes that have imported torch already."""
MEGATRON_PACKAGES = {"trainer", "convert", "weights", "rehearse", "megatron_patches"}
HEAVY = {"torch", "megatron", "sglang", "transformers"}


def sources() -> list[Path]:
    return sorted(p for top in OURS for p in (ROOT / top).rglob("*.py"))


def package_of(module: str) -> str | None:
    """`rlsys.router.pool` -> `router`; None for what is not ours, and for the bare package."""
    parts = module.split(".")
    if parts[0] in OURS[1:]:
        return parts[0]
    return parts[1] if parts[0] == "rlsys" and len(parts) > 1 else None


def package(path: Path) -> str | None:
    return package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (f"{module}.{a.name}" for a in node.names) if module == "rlsys" else (module,)


LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_package_imports_lower_levels_only(path: Path) -> None:
    source_package = package(path)
    if source_package in (None, "__init__"):
        return
    assert source_package in LEVEL, (
        f"{path}: the package {source_package!r} has no level yet; add it here and in the docs"
    )
    for module in imports(path):
        target_package = package_of(module)
        if target_package in (None, source_package):
            continue
        assert LEVEL[target_package] < LEVEL[source_package], f"{source_package} must not import {module}"
        assert target_package not in FORBIDDEN.get(source_package, ()), (
            f"{source_package} must not import {module}"
        )
        assert target_package != "launch" or source_package == "cli", (
            f"{source_package} must not import {module}"
        )


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_imports_stay_in_their_packages(path: Path) -> None:
    source_package, name = package(path), str(path.relative_to(ROOT))
    tops = {module.split(".")[0] for module in imports(path)}
    if (source_package in TORCH_FREE and name not in TORCH_IN_A_FUNCTION) or name in TORCH_FREE_FILES:
        assert not tops & HEAVY
    if source_package not in MEGATRON_PACKAGES:
        assert "megatron" not in tops


def test_plug_ins_of_the_rollout_process_import_no_torch() -> None:
    kinds = ("prompt", "planner", "group_reward")
    modules = {path.partition(":")[0] for kind in kinds for path in registry.TABLE[kind].values()}
    names = ("__init__", "plugin", "registry", "catalogue", "handbook", "methods.deferred_samples")
    for module in sorted({*modules, *(f"rlsys.algo.{name}" for name in names)}):
        path = ROOT / (module.replace(".", "/") + ".py")
        assert "torch" not in {m.split(".")[0] for m in imports(path)}, path


def test_launch_imports_only_torch_free_files_of_heavy_packages() -> None:
    heavy = ("rlsys.convert", "rlsys.weights")
    heavy_imports = {
        m for p in sources() if package(p) == "launch" for m in imports(p) if m.startswith(heavy)
    }
    assert {m.replace(".", "/") + ".py" for m in heavy_imports} <= set(TORCH_FREE_FILES)


def test_files_for_any_python_import_only_the_standard_library() -> None:
    in_a_venv = (
        "venv_runner/run",
        "agents/host",
        "core/imports",
        "core/errors",
        "core/devices",
        "core/sockets",
    )
    names = ["launch/bootstrap", *(f"rlsys/{n}" for n in in_a_venv)]
    names += [f"rlsys/environments/{p.stem}" for p in (ROOT / "rlsys/environments").glob("*.py")]
    modules = {m for name in names for m in imports(ROOT / f"{name}.py")}
    project_modules = {m for m in modules if m.startswith("rlsys.")}
    assert {m.split(".")[0] for m in modules - project_modules} <= sys.stdlib_module_names
    assert {
        m.removeprefix("rlsys.").replace(".", "/") for m in project_modules if "environments" not in m
    } <= {*in_a_venv}


def test_one_package_serves_and_opens_http() -> None:
    """So that every listener has its limits, and no client follows a redirect (issue 39)."""
    rules = {
        r"web\.Application\(|AppRunner\(|(TCP|Unix)Site|create_unix_server|HTTPServer|start_server": {
            "rlsys/http_server/server.py",
            "rlsys/environments/serve.py",  # in any Python, on a Unix socket of the run's user
        },
        r"ClientSession\(|urlopen\(|build_opener\(": {"rlsys/http_server/clients.py", "rlsys/obs/direct.py"},
    }
    for pattern, allowed in rules.items():
        users = {str(p.relative_to(ROOT)) for p in sources() if re.search(pattern, p.read_text())}
        assert users <= allowed, pattern


def test_the_loop_is_short_enough_to_read() -> None:
    assert len((ROOT / "rlsys/train.py").read_text(encoding="utf-8").splitlines()) < 200


def test_the_tree_of_errors_in_the_docs_is_the_one_in_the_source() -> None:
    parents = {"RlsysError": ""}
    classes = [
        node
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    for _ in range(5):  # as deep as they go
        for node in classes:
            if node.bases and isinstance(node.bases[0], ast.Name) and node.bases[0].id in parents:
                parents[node.name] = node.bases[0].id
    drawn: dict[str, str] = {}
    above: list[str] = []
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Errors")[2].partition("```")[2]
    for line in text.partition("```")[0].strip().splitlines():
        indent = next(i for i, c in enumerate(line) if c.isalpha())
        name = line[indent:].split()[0]
        above = [*above[: indent // 4], name]
        drawn[name] = above[-2] if len(above) > 1 else ""
    assert drawn == parents


def test_the_file_list_in_the_docs_matches_the_source() -> None:
    """`python -m tests.gate.file_map` writes it anew."""
    assert (ROOT / "docs" / "files.md").read_text(encoding="utf-8") == file_map.page()


def test_modules_that_processes_run_exist() -> None:
    """A module's name in a command line is a whole literal, which no import checks."""
    command = re.compile(r"(rlsys|launch|megatron_patches)(\.[a-z_0-9]+)+")
    module_names = set()
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for words in (node for node in ast.walk(tree) if isinstance(node, ast.List | ast.Tuple)):
            for flag, module in pairwise(words.elts):
                if isinstance(flag, ast.Constant) and flag.value == "-m":
                    assert not isinstance(module, ast.JoinedStr), (
                        f"{path}:{words.lineno}: write the whole name"
                    )
                    module_names.add(getattr(module, "value", None))
        if path.parts[-2:] in (("launch", "plan.py"), ("cli", "main.py"), ("cli", "project.py")):
            constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            module_names |= {text for text in constants if isinstance(text, str) and command.fullmatch(text)}
    modules = {name for name in module_names if isinstance(name, str) and command.fullmatch(name)}
    assert {"rlsys.evaluation.evaluation", "rlsys.evaluation.tryout", "rlsys.train"} <= modules
    assert [name for name in sorted(modules) if not (ROOT / (name.replace(".", "/") + ".py")).is_file()] == []
