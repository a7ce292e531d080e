"""Branches that only a host with CUDA takes, on one without: each is named here with the test that takes it."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import rlsys.trainer  # noqa: F401 - patches megatron-core before anything below imports it
from rlsys.cli import explain, main
from rlsys.config import load_config
from rlsys.convert.config import HFConfig
from rlsys.engine.cpu import hooks, platform
from rlsys.planner import weight_update_cost
from rlsys.trainer import setup
from rlsys.trainer.model.model import transformer_config
from rlsys.weights import sharded_push, transports, weight_push

pytestmark = pytest.mark.gate

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs/quickstart.yaml"
MARK = re.compile(
    r"torch\.cuda\.\w+|(?<!def )\b(have|on)_cuda\(|\.is_cuda\b|(?<=device=).cuda.|\bif CUDA\b|\bneed_cuda\("
)

HERE = "tests/unit/test_cuda_branches.py"
PATCHES = "tests/unit/megatron_patches/test_megatron_patches.py::test_cpu_patches_are_inactive_with_cuda"
FINDINGS = "tests/unit/engine/test_findings_gpu.py"
INSTRUMENT = (
    "tests/unit/trainer/test_two_devices.py::test_gpu_tensors_take_the_cuda_branches_of_hashing_and_staging"
)
GROUPED = "tests/integration/test_grouped_experts.py"
PARTS = "tests/integration/test_drill_parts.py"
NCCL = "tests/helpers/fake_nccl.py::_on_cuda"
LAUNCH = "tests/unit/engine/test_engine_launch.py::test_"
GPU_ON_CPU = "tests/integration/test_gpu_tests_on_cpu.py"
TAKEN: dict[str, str] = {
    "bench/gpu.py": "tests/unit/bench/test_drill.py::test_gpu_engine_arguments_are_omitted_on_a_cpu",
    "bench/gpu_checks.py": PARTS,
    "bench/gpu_engine.py": PARTS,
    "bench/gpu_node.py": f"{PARTS}::pretended_gpu",
    "bench/gpu_trainer.py": PARTS,
    "bench/measure.py": f"{PARTS}::test_ceilings_and_figures_of_a_gpu",
    "bench/race_trl.py": "a CPU alone has a branch of its own",
    "bench/trainer.py": f"{PARTS}::test_ceilings_and_figures_of_a_gpu",
    "rlsys/core/devices.py": "tests/unit/core/test_devices.py",
    "rlsys/cli/main.py": "tests/unit/core/test_devices.py",
    "rlsys/obs/doctor.py": "tests/unit/core/test_devices.py",
    "rlsys/planner/model_preflight.py": "tests/unit/core/test_devices.py",
    "launch/environment.py": f"{FINDINGS}::test_gpu_p8_a_run_with_hidden_gpus_is_no_run_on_cuda",
    "launch/engine_join.py": "tests/unit/config/test_golden_environments.py",
    "rlsys/planner/layout.py": "tests/unit/config/test_golden_environments.py",
    "launch/plan.py": "tests/unit/config/test_golden_environments.py",
    "rlsys/planner/weight_update_cost.py": f"{HERE}::test_experts_are_hashed_apart_on_a_gpu",
    "megatron_patches/__init__.py": PATCHES,
    "megatron_patches/cpu_import.py": "a CPU alone has a branch of its own",
    "megatron_patches/cpu_rng.py": "a CPU alone has a branch of its own",
    "megatron_patches/moe_splits.py": "a CPU alone has a branch of its own",
    "rlsys/cli/explain.py": f"{HERE}::test_explain_reports_settings_without_effect_on_cpu_hosts",
    "rlsys/engine/cpu/hooks.py": f"{HERE}::test_an_engine_on_cuda_registers_no_cpu_hooks",
    "rlsys/engine/cpu/platform.py": f"{HERE}::test_an_engine_on_cuda_registers_no_cpu_hooks",
    "rlsys/engine/launch_args.py": "tests/unit/launch/test_environment.py",
    "rlsys/engine/turn_parser.py": "a CPU alone has a branch of its own",
    "rlsys/config/precision.py": "tests/unit/config/test_precision.py",
    "rlsys/trainer/model/model.py": f"{HERE}::test_layers_are_initialized_on_the_device",
    "rlsys/trainer/profiler.py": "tests/unit/trainer/test_profiler.py::test_a_gpus_kernels_are_recorded",
    "rlsys/trainer/setup.py": f"{HERE}::test_a_rank_uses_its_gpu_and_nccl_for_cuda_tensors",
    "rlsys/trainer/trainer.py": f"{FINDINGS}::test_gpu_p7_make_room_collects_the_buckets_that_were_sent",
    "rlsys/weights/buckets.py": INSTRUMENT,
    "rlsys/weights/checksums.py": INSTRUMENT,
    "rlsys/weights/sharded_push.py": f"{HERE}::test_experts_are_hashed_apart_on_a_gpu",
    "rlsys/ops/grouped_gemm.py": GROUPED,
    "rlsys/trainer/model/experts.py": GROUPED,
    "rlsys/weights/senders_group.py": NCCL,
    "rlsys/weights/transports.py": f"{HERE}::test_handles_name_their_gpu",
    "tests/gpu/test_fp8.py": f"{PARTS}::test_fp8_rollout_builds_its_trainer_and_starts_its_engine",
    "tests/gpu/test_objective.py": GPU_ON_CPU,
    "tests/gpu/test_one_gpu.py": GPU_ON_CPU,
    "tests/gpu/test_parts.py": PARTS,
}
"""File with a branch on CUDA -> FILE::TEST that takes it without a GPU, or why it needs none."""


def test_each_file_with_a_branch_on_cuda_has_a_test_that_takes_it() -> None:
    """A new one fails here: add a test that takes it, and its name to the table."""
    folders = ("rlsys", "launch", "megatron_patches", "bench", "tests/gpu")
    marked = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if MARK.search(path.read_text())
    }
    assert marked == TAKEN.keys(), {"new": marked - TAKEN.keys(), "gone": TAKEN.keys() - marked}
    for where in TAKEN.values():
        file, _, name = where.partition("::")
        if file.startswith("tests/"):
            assert name in (ROOT / file).read_text(), where


class Stop(Exception):
    """Ends what is tested at the call that is looked at."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Calls of torch.cuda on a host with an H100, as far as questions go."""
    cuda_calls: list[tuple[str, Any]] = []
    answers = {"is_available": True, "get_device_capability": (9, 0), "set_device": None, "empty_cache": None}
    for name, answer in answers.items():
        assert callable(getattr(torch.cuda, name))

        def call(*given: Any, name: str = name, answer: Any = answer) -> Any:
            cuda_calls.append((name, given))
            return answer

        monkeypatch.setattr(torch.cuda, name, call)
    yield cuda_calls


def test_a_rank_uses_its_gpu_and_nccl_for_cuda_tensors(
    calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    backends: list[str] = []
    checked: list[Any] = []

    def init(backend: str, **_: Any) -> None:
        backends.append(backend)
        raise Stop

    monkeypatch.setattr(setup.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(setup.dist, "init_process_group", init)
    monkeypatch.setattr(setup, "store_of_ranks", lambda rank, world: None)
    monkeypatch.setattr(setup, "check_device", lambda config, capability, te: checked.append(capability))
    with pytest.raises(Stop):
        setup.init_distributed(load_config(QUICKSTART, []))
    assert ("set_device", (torch.device("cuda", 3),)) in calls
    assert backends == ["cpu:gloo,cuda:nccl"] and checked == [(9, 0)]


def test_missing_libraries_are_logged_on_a_gpu_host(
    calls: list[tuple[str, Any]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        setup.log_missing_libraries()
    assert "Transformer Engine" in caplog.text and "Apex" in caplog.text


def test_layers_are_initialized_on_the_device(calls: list[tuple[str, Any]]) -> None:
    config = load_config(QUICKSTART, [])
    model_config = transformer_config(config, HFConfig.read(config.model.path))
    assert not model_config.use_cpu_initialization and not model_config.deterministic_mode


def test_an_engine_on_cuda_registers_no_cpu_hooks(
    calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert platform.activate() is None
    registry, registered = ModuleType("hook_registry"), list[str]()
    kinds = SimpleNamespace(AFTER="after", AROUND="around", REPLACE="replace")
    registry.HookType = kinds  # type: ignore[attr-defined]
    registry.HookRegistry = SimpleNamespace(  # type: ignore[attr-defined]
        register=lambda target, hook, kind: registered.append(target)
    )
    monkeypatch.setattr(hooks, "dump_stack_on_signal", lambda name: None)
    monkeypatch.setattr(hooks, "register_scheme", lambda: None)
    with mock.patch.dict(sys.modules, {"sglang.srt.plugins.hook_registry": registry}):
        hooks.register()
    assert hooks.rope_hooks.TARGET in registered and hooks.sampler_hooks.TARGET in registered
    assert not any(
        "_cuda_host_register" in target or "FlattenedTensorBucket" in target for target in registered
    )


def test_handles_name_their_gpu(calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's patch of torch's reductions, before the first handle."""
    assert transports.backend() == "nccl"
    patched: list[str] = []
    package = ModuleType("patch_torch")
    package.monkey_patch_torch_reductions = lambda: patched.append("reductions")  # type: ignore[attr-defined]
    monkeypatch.setattr(transports.importlib, "import_module", lambda name: patched.append(name))
    with mock.patch.dict(sys.modules, {"sglang.srt.utils.patch_torch": package}):
        transports.prepare_sglang.__wrapped__()
    assert patched == ["reductions", "sglang.srt.weight_sync.tensor_bucket"]


@pytest.mark.parametrize("cuda", [False, True])
def test_experts_are_hashed_apart_on_a_gpu(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile hash of a GPU puts experts together that several ranks send; a host's hash needs them from one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(weight_update_cost, "on_cuda", lambda config: cuda)
    together_flags: list[bool] = []

    def plan_senders(config: Any, hf: Any, *, experts_together: bool) -> None:
        together_flags.append(experts_together)
        raise Stop

    monkeypatch.setattr(sharded_push, "plan_senders", plan_senders)
    monkeypatch.setattr(weight_update_cost, "plan_senders", plan_senders)
    config = SimpleNamespace(weights=SimpleNamespace(method="sharded"))
    with pytest.raises(Stop):
        weight_push.WeightPush(SimpleNamespace(config=config, served_config=None), SimpleNamespace())
    with pytest.raises(Stop):
        weight_update_cost.sender_plan(config, None)
    assert together_flags == [not cuda, not cuda]


@pytest.mark.parametrize("cuda", [False, True])
def test_explain_reports_settings_without_effect_on_cpu_hosts(
    cuda: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain, "have_cuda", lambda: cuda)
    assert main.main(["explain", str(QUICKSTART), "launch.release_memory=true"]) == 0
    assert ("launch.release_memory = true: it frees nothing" in capsys.readouterr().out) is not cuda
