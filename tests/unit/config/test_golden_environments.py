"""Every variable that every role of every shipped config gets, held against a file that people read.

After a change that is meant: `python -m tests.unit.config.test_golden_environments`, and look at the difference.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch import environment
from launch.plan import Node, Ports, build_plan
from rlsys.config import load_config
from rlsys.core.membership import WEIGHTS_VARIABLE
from rlsys.engine import launch_args
from rlsys.obs.role import STACKS_VARIABLE
from rlsys.planner.layout import lay_out
from rlsys.segments.route_records import ROUTES_VARIABLE

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = Path(__file__).with_name("golden_environments.json")
CONFIGS = sorted(
    [p for p in (ROOT / "configs/experiments").glob("*.yaml") if p.stem != "base"]
    + [ROOT / "configs/quickstart.yaml", ROOT / "configs/quickstart_cuda.yaml"]
)
CORES = 96


def roles(path: Path, patch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Names of the roles that have it -> the environment, on nodes of 96 cores; CUDA but for the quickstart."""
    cuda = path.stem != "quickstart"
    patch.setattr(launch_args, "have_cuda", lambda: cuda)
    patch.setattr(shutil, "which", lambda _: "nvidia-smi" if cuda else None)
    patch.setattr(environment.os, "cpu_count", lambda: CORES)
    patch.setenv("HOME", "/home/somebody")
    for name in ("CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME", *environment.CACHES, *environment.ALLOCATORS):
        patch.delenv(name, raising=False)
    config = load_config(path, ["run.dir=runs/golden"])
    nodes = [Node(f"node-{i}", f"10.0.0.{i + 1}") for i in range(config.launch.nodes)]
    ports = Ports([5000] * config.engine.count, 7000, (8000,) * config.engine.count)
    plan = build_plan(config, lay_out(config), nodes, ports, launch_args.engine_command)
    alike: dict[str, list[str]] = {}
    for role in plan.roles:
        variables = plan.environment(role, {})
        del variables[STACKS_VARIABLE]  # a folder of the run's
        assert (variables.pop(WEIGHTS_VARIABLE, None) is not None) == (role.kind == "engine")  # new
        assert (variables.pop(ROUTES_VARIABLE, None) is not None) == (role.kind == "engine")  # another one
        alike.setdefault(json.dumps(variables, sort_keys=True), []).append(role.name)
    return {" ".join((names[0], f"to {names[-1]}") if len(names) > 1 else names): json.loads(variables_json)
            for variables_json, names in alike.items()}  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_environment_of_every_role(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert roles(path, monkeypatch) == json.loads(GOLDEN.read_text())[path.stem]


def test_both_ends_of_a_communicator_agree_and_no_gpu_is_limited_like_a_cpu() -> None:
    golden: dict[str, Any] = json.loads(GOLDEN.read_text())
    for config, environments in golden.items():
        cuda = config != "quickstart"
        for variables in environments.values():
            assert variables.get("NCCL_CUMEM_ENABLE") == ("0" if cuda else None)
            assert ("TORCH_COMPILE_DISABLE" in variables) is not cuda


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as made:
        GOLDEN.write_text(json.dumps({p.stem: roles(p, made) for p in CONFIGS}, indent=1) + "\n")
