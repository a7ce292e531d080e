"""The parts of the drill on the CPU up to the device call, as if there were a GPU: what they call must exist, and
their figures must be those that tests/gpu holds to what must be true.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import gpu_checks
import gpu_engine
import gpu_node
import gpu_trainer
import pytest
import torch
import trainer as bench_trainer

from rlsys.config import Config, load_config
from rlsys.engine.client import EngineClient
from rlsys.trainer.setup import leave_layout
from rlsys.weights.hashes import TileHash
from tests.gpu.test_fp8 import BLOCKS
from tests.gpu.test_parts import HOLDS

pytestmark = pytest.mark.integration

BYTES = 10**6
NAME = "NVIDIA H100 80GB HBM3"


class Stop(Exception):
    """Ends a part at the call that is looked at."""


class Recorded(dict[str, Any]):
    """A part's figures."""

    def __call__(self, **values: Any) -> None:
        self.update(values)


@pytest.fixture
def figures() -> Recorded:
    return Recorded()


@pytest.fixture(autouse=True)
def pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The parts take their branches of a GPU; tensors stay in host memory. Names of the calls of torch.cuda."""
    monkeypatch.setenv(gpu_node.MODELS, str(tmp_path))
    calls: list[str] = []
    answers: dict[str, Any] = {
        "get_device_name": NAME, "get_device_capability": (9, 0), "mem_get_info": (10 * BYTES, 80 * BYTES),
        "memory_allocated": BYTES, "memory_reserved": BYTES, "max_memory_allocated": BYTES,
        "reset_peak_memory_stats": None, "synchronize": None, "ipc_collect": None, "set_device": None, "_sleep": None,
    }  # fmt: skip

    def answer(name: str) -> Any:
        assert callable(getattr(torch.cuda, name)), "torch has it"

        def call(*_: Any) -> Any:
            calls.append(name)
            return answers[name]

        return call

    for name in answers:
        monkeypatch.setattr(torch.cuda, name, answer(name))
    for module in (gpu_node, gpu_checks, gpu_engine, gpu_trainer):
        monkeypatch.setattr(module, "CUDA", True)
    yield calls
    leave_layout()  # a part is a process of its own, and closes no trainer


@pytest.mark.parametrize("part", ["cache", "checkpoint"])
def test_a_part_of_the_allocator_runs(part: str, figures: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    if part == "checkpoint":  # its model has a size of its own on a GPU
        monkeypatch.setattr(gpu_checks, "CUDA", False)
    getattr(gpu_checks, f"_{part}")(figures)
    expected = {"cache": {"kept_bytes", "kept_after_make_room"}, "checkpoint": {"held_bytes", "peak_bytes"}}
    assert figures.keys() == expected[part]
    HOLDS[part](figures)


def test_offload_takes_its_steps(figures: Recorded) -> None:
    gpu_checks.offload(figures)
    assert HOLDS["offload"](figures), figures


def test_a_drill_writes_its_models_to_its_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_node, "CUDA", False)
    config = gpu_node.layer_config(tmp_path / "run", 2)
    assert config.model.path.parent == tmp_path
    assert (config.model.path / "model.safetensors").exists()


@pytest.mark.gate
def test_checksums_match_the_engines_kernel(figures: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "HASHED_BYTES", 2**22)
    kernel = ModuleType("kernel")

    def gpu_tensor_hash(tensor: torch.Tensor) -> int:
        state = TileHash()
        state.update(tensor)
        return int(state.digest(), 16)

    kernel.gpu_tensor_hash = gpu_tensor_hash  # type: ignore[attr-defined]
    name = "sglang.kernels.ops.memory.gpu_tensor_hash"
    path = Path(__import__("sglang").__file__).parent / "kernels/ops/memory/gpu_tensor_hash.py"
    assert path.is_file(), "SGLang has it"
    with mock.patch.dict(sys.modules, {name: kernel}):
        gpu_checks.checksums(figures)
    assert HOLDS["checksums"](figures), figures


@pytest.mark.gate
def test_buckets_are_passed_by_handle(figures: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "BUCKETS", 3)
    gpu_checks.handles(figures)
    assert HOLDS["handles"](figures), figures


@pytest.mark.gate
def test_a_product_in_eight_bits_is_compared(figures: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: torch.dtype) -> torch.Tensor:
        """What cuBLAS computes: scales of 1 x 128 and of 128 x 128."""
        left = a.float() * scale_a.repeat_interleave(128, 1)
        right = b.float() * scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (left @ right).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    gpu_checks.fp8(figures)
    assert figures["gemm_error"] and HOLDS["fp8"](figures), figures


@pytest.mark.gate
def test_nccl_is_started_and_its_refusal_recorded(
    figures: Recorded, monkeypatch: pytest.MonkeyPatch, pretended_gpu: list[str]
) -> None:
    groups: list[str] = []
    monkeypatch.setattr(gpu_checks.dist, "init_process_group", lambda backend, **_: groups.append(backend))
    monkeypatch.setattr(gpu_checks.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)), raising=False)
    gpu_checks.nccl(figures)
    assert figures.keys() == {"start_s", "version", "all_reduce_s"}
    answers: list[str] = []
    with mock.patch.dict(gpu_checks.os.environ):  # a rank is a process of its own
        gpu_checks._rank(0, 1, "nccl", 1.0, 0.0, SimpleNamespace(put=answers.append))
    assert groups == ["nccl", "nccl"] and answers == ["rank 0: went through"]
    assert "set_device" in pretended_gpu


@pytest.mark.gate
def test_a_kernel_spins_until_it_is_stopped(pretended_gpu: list[str]) -> None:
    gpu_checks._spin(SimpleNamespace(is_set=iter([False, False, True]).__next__))
    assert pretended_gpu == ["_sleep", "synchronize"] * 2


@pytest.mark.gate
def test_ceilings_and_figures_of_a_gpu(figures: Recorded, tmp_path: Path) -> None:
    gpu_trainer.ceilings(figures)
    assert figures["device"] == NAME and figures["copy_gb_per_s"] > 0
    from measure import machine, write_random_moe

    figures_of = bench_trainer.gpu_figures(write_random_moe(tmp_path / "model"), 1000.0)
    assert figures_of["mfu"] and figures_of["peak_memory_gb"] == BYTES / 1e9
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        assert machine()["gpu"] == NAME


@pytest.mark.gate
def test_the_transformer_engine_part_requires_an_installed_package(
    figures: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="--transformer-engine FOLDER"):
        gpu_trainer.speed_with_transformer_engine(figures)
    import megatron_patches

    steps: list[Any] = []
    monkeypatch.setattr(megatron_patches, "have_transformer_engine", lambda: True)
    monkeypatch.setattr(gpu_trainer, "_speed", steps.append)
    package = ModuleType("transformer_engine")
    package.__version__ = "2.11.0"  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"transformer_engine": package}):
        gpu_trainer.speed_with_transformer_engine(figures)
    assert figures["transformer_engine"] == "2.11.0" and steps == [figures]


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the drill is small, and its run one of a CPU."""
    upstream = gpu_node.layer_config

    def layer_config(run: Path, layers: int, **sections: Any) -> Config:
        with mock.patch.object(gpu_node, "CUDA", False):
            return upstream(run, layers, **sections)

    for module in (gpu_engine, gpu_trainer):
        monkeypatch.setattr(module, "layer_config", layer_config)


@pytest.mark.usefixtures("small_layers")
def test_memory_records_real_and_rehearsed_figures(figures: Recorded) -> None:
    gpu_trainer.memory(figures)
    assert figures["allocator"] == BYTES
    HOLDS["memory"](figures)
    assert figures["rehearsed"].keys() == figures["real"].keys()


@pytest.mark.usefixtures("small_layers")
def test_the_speed_of_a_step_with_the_figures_of_a_gpu(
    figures: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_trainer, "GROUPS", 2)
    monkeypatch.setattr(bench_trainer, "GROUP_SIZE", 2)
    monkeypatch.setattr(bench_trainer, "VOCAB", 512)
    monkeypatch.setattr(gpu_trainer, "LAYERS", 2)
    gpu_trainer._speed(figures)
    assert figures["gpu"].keys() == {"bare", "step", "logprobs"} and figures["held_bytes"] == BYTES
    assert figures["profile_step"].keys() == figures["profile_bare"].keys()


@pytest.mark.gate
def test_an_engine_sleeps_and_wakes() -> None:
    client = mock.create_autospec(EngineClient, instance=True)
    figures = asyncio.run(gpu_engine._sleep_and_wake(client))
    assert {"release_s", "released_bytes", "weights_s", "weights_bytes", "cache_s"} < figures.keys()
    assert [c[0] for c in client.method_calls] == [
        "flush",
        "release_memory",
        "resume_memory",
        "resume_memory",
    ]


@pytest.mark.usefixtures("small_layers")
def test_fp8_rollout_builds_its_trainer_and_starts_its_engine(
    figures: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsys.trainer.setup.check_device", lambda *_: None)
    monkeypatch.setattr(gpu_node, "SMALL_SHAPE", gpu_node.SMALL_SHAPE | BLOCKS)
    started: list[Config] = []

    @contextmanager
    def running_engine(config: Config, folder: Path, seconds: float) -> Iterator[str]:
        started.append(config)
        raise Stop
        yield ""

    monkeypatch.setattr(gpu_engine, "running_engine", running_engine)
    monkeypatch.setattr(gpu_engine, "LAYERS", 2)
    with pytest.raises(Stop):
        gpu_engine.fp8_rollout(figures)
    assert started[0].model.fp8 == "rollout"


@pytest.mark.gate
def test_the_quickstarts_config_of_a_gpu_is_read(figures: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], **_: Any) -> Any:
        commands.append(command)
        raise Stop

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(Stop):
        gpu_engine.quickstart(figures)
    (*_, train, path, run, steps, arguments) = commands[0]
    config = load_config(gpu_engine.ROOT / path, [run, steps, arguments])
    assert train == "train" and config.trainer.steps == 10 and config.launch.gpus_per_node == 1


@pytest.mark.gate
def test_april_runs_at_full_size(figures: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout='{"bench": "april"}')

    monkeypatch.setattr(subprocess, "run", run)
    gpu_engine.april(figures)
    assert "--quick" not in commands[0] and figures == {"bench": "april"}
