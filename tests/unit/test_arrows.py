"""Who may import whom, read from the source: imports inside functions count too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("rlsys", "launch", "megatron_patches")

# A room is a sub-package or a top-level module. These import each other only.
BASE = {
    "arrays",
    "engine_requests",
    "forks",
    "spans",
    "tickets",
    "texts",
    "types",
    "errors",
    "sockets",
    "interfaces",
    "rendezvous",
    "yaml_text",
    "owner",
    "identity",
    "membership",
    "config",
    "imports",
    "precision",
    "model_folder",
    "tokenizer_files",
    "delta_rule",
    "devices",
    "records",
    "route_records",
    "support",
    "opinions",
    "workers",
    "obs",
}
ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    "machines": BASE,
    "plugins": {"types", "errors", "config", "imports"},
    "starter": {"errors", "imports"},
    "config": BASE | {"foreign"},
    "foreign": {"errors", "yaml_text", "model_folder"},
    "algo": {"arrays", "spans", "types", "errors", "config", "plugins", "imports"},
    "rewards": {
        "texts",
        "types",
        "errors",
        "config",
        "plugins",
        "imports",
        "workers",
        "data",
    },
    "data": {"texts", "types", "errors", "config", "plugins", "imports", "model_folder", "tokenizer_files"},
    "relay": set(),
    "engine": BASE | {"relay"},
    "router": BASE | {"engine"},
    "gateway": BASE | {"engine", "router"},
    "elsewhere": set(),
    "agents": BASE | {"data", "elsewhere"},
    "environments": set(),  # in the Python of an environment's own venv
    "rollout": BASE
    | {"plugins", "algo", "rewards", "data", "router", "engine", "agents", "environments", "elsewhere"},
    "planner": BASE | {"machines", "convert", "engine", "launch", "rollout", "router"},
    "dash": BASE | {"rollout"},
    "trackers": BASE | {"rollout"},
    "convert": BASE | {"algo", "megatron_patches"},
    "trainer": BASE | {"algo", "convert", "data", "plugins", "megatron_patches"},
    "rehearse": BASE | {"algo", "convert", "trainer", "megatron_patches", "launch"},
    "tenants": BASE | {"algo", "convert", "engine", "trainer"},
    "weights": BASE | {"trainer", "convert", "engine", "relay", "megatron_patches"},
    "megatron_patches": {"errors"},
    # What a model's folder says, before anything starts; who sends weights to whom.
    "launch": {
        "devices",
        "machines",
        "errors",
        "config",
        "obs",
        "sockets",
        "interfaces",
        "owner",
        "identity",
        "membership",
        "model_folder",
        "records",
        "route_records",
        "convert",
        "weights",
    },
}
FREE = {
    "train",
    "cli",
    "cli_engines",
    "cli_explain",
    "cli_import",
    "cli_look",
    "cli_models",
    "cli_own",
    "preflight",
}  # may import every room

TORCH_FREE = (
    "engine_requests",
    "spans",
    "tickets",
    "foreign",
    "arrays",
    "forks",
    "texts",
    "types",
    "owner",
    "identity",
    "membership",
    "errors",
    "yaml_text",
    "config",
    "precision",
    "records",
    "route_records",
    "support",
    "opinions",
    "workers",
    "obs",
    "plugins",
    "rewards",
    "relay",
    "router",
    "gateway",
    "agents",
    "environments",
    "rollout",
    "dash",
    "trackers",
    "launch",
    "cli",
    "cli_engines",
    "cli_explain",
    "cli_look",
    "cli_models",
    "cli_own",
    "starter",
    "preflight",
)
TORCH_FREE_FILES = (
    "rlsys/engine/client.py",
    "rlsys/engine/wire.py",
    "rlsys/engine/launch_args.py",
    "rlsys/engine/route_writer.py",
    "rlsys/data/source.py",
    *(f"rlsys/rehearse/{name}.py" for name in ("command", "figures", "kinds", "report")),
    *(
        f"rlsys/convert/{name}.py"
        for name in ("config", "fit", "adapters", "flops", "folder", "rope", "rows", "rules", "table")
    ),
    "rlsys/weights/plan.py",
    "rlsys/weights/senders.py",
)
MEGATRON_ROOMS = {"trainer", "convert", "weights", "rehearse", "megatron_patches"}
HEAVY = {"torch", "megatron", "sglang", "transformers"}


def sources() -> list[Path]:
    return sorted(p for top in OURS for p in (ROOT / top).rglob("*.py"))


def room_of(module: str) -> str | None:
    """`rlsys.router.pool` -> `router`; None for what is not ours, and for the bare package."""
    parts = module.split(".")
    if parts[0] in OURS[1:]:
        return parts[0]
    return parts[1] if parts[0] == "rlsys" and len(parts) > 1 else None


def room(path: Path) -> str | None:
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (f"{module}.{a.name}" for a in node.names) if module == "rlsys" else (module,)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    here = room(path)
    if here in FREE or here in (None, "__init__"):
        return
    assert here in ALLOWED, f"{path}: the room {here!r} has no arrows yet; add them here and in the docs"
    for module in imports(path):
        there = room_of(module)
        assert there in (None, here) or there in ALLOWED[here], f"{here} must not import {module}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_imports_stay_in_their_rooms(path: Path) -> None:
    here, name = room(path), str(path.relative_to(ROOT))
    tops = {module.split(".")[0] for module in imports(path)}
    if here in TORCH_FREE or name in TORCH_FREE_FILES:
        assert not tops & HEAVY
    if here not in MEGATRON_ROOMS:
        assert "megatron" not in tops


def test_only_tensor_files_of_algo_import_torch() -> None:
    """The rollout process uses planners and filters: they must cost no torch."""
    for name in (
        "__init__",
        "planners",
        "allocation",
        "prompts",
        "group_rewards",
        "put_off",
        "plugin",
        "registry",
        "catalogue",
        "handbook",
    ):
        path = ROOT / "rlsys/algo" / f"{name}.py"
        assert "torch" not in {m.split(".")[0] for m in imports(path)}, path


def test_launch_takes_of_heavy_rooms_what_needs_no_torch() -> None:
    heavy = ("rlsys.convert", "rlsys.weights")
    taken = {m for p in sources() if room(p) == "launch" for m in imports(p) if m.startswith(heavy)}
    assert {m.replace(".", "/") + ".py" for m in taken} <= set(TORCH_FREE_FILES)


def test_what_runs_in_any_python_imports_the_standard_library_only() -> None:
    in_a_venv = ("elsewhere/start", "agents/host", "imports", "errors", "devices")
    names = ["launch/bootstrap", *(f"rlsys/{n}" for n in in_a_venv)]
    names += [f"rlsys/environments/{p.stem}" for p in (ROOT / "rlsys/environments").glob("*.py")]
    found = {m for name in names for m in imports(ROOT / f"{name}.py")}
    ours = {m for m in found if m.startswith("rlsys.")}
    assert {m.split(".")[0] for m in found - ours} <= sys.stdlib_module_names
    assert {m.removeprefix("rlsys.").replace(".", "/") for m in ours if "environments" not in m} <= {
        *in_a_venv
    }


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


def test_the_map_in_the_docs_lists_exactly_the_files_there_are() -> None:
    """A new file needs a line in docs/architecture.md, section Map; an empty `__init__.py` needs none."""
    listed: list[str] = []
    folder = ""
    for line in (ROOT / "docs" / "architecture.md").read_text().partition("## Map")[2].splitlines():
        if line.startswith("### `"):
            folder = line.split("`")[1]
        elif line.startswith("| `"):
            _, name, what, _ = line.split("|")
            assert what.strip(), f"{folder}{name}: one line says what it does"
            listed.append(folder + name.strip(" `"))
    there = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.name != "__init__.py" or len(ast.parse(path.read_text(encoding="utf-8")).body) > 1
    ]
    assert (sorted(set(there) - set(listed)), sorted(set(listed) - set(there))) == ([], [])  # missing, gone
    assert len(listed) == len(set(listed))
