"""What each role of a plan finds in its environment, on a CPU host and with GPUs; and how long it may start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from launch.plan import Node, Ports, Role, build_plan
from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.engine import launch_args
from rlsys.planner.layout import lay_out

CONFIGS = Path(__file__).parents[3] / "configs"
EXPERIMENT = CONFIGS / "experiments/qwen3-30b-a3b_8gpu_colocated.yaml"
QUICKSTART = CONFIGS / "quickstart.yaml"
EVERYWHERE = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
KINDS = {"engine", "rollout", "trainer"}


class Host:
    """Plans runs on it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def roles(
        self, path: Path, *overrides: str, cuda: bool, cores: int = 96
    ) -> list[tuple[Role, dict[str, str]]]:
        """Each role with its environment."""
        self._patch.setattr(
            shutil, "which", lambda name, *_: name if cuda else None
        )  # nvidia-smi is asked for
        self._patch.setattr(os, "cpu_count", lambda: cores)
        self._patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        config = load_config(path, ["run.dir=runs/x", *overrides])
        ports = Ports([5000 + i for i in range(config.engine.count)])
        plan = build_plan(config, lay_out(config), [Node("n")], ports, launch_args.engine_command)
        return [(role, plan.environment(role, {"HOME": "/h"})) for role in plan.roles]

    def environments(self, *overrides: str, cuda: bool = True, cores: int = 96) -> dict[str, dict[str, str]]:
        """By kind of role: of the experiment with GPUs, of the quickstart without."""
        path = EXPERIMENT if cuda else QUICKSTART
        return {
            role.kind: variables for role, variables in self.roles(path, *overrides, cuda=cuda, cores=cores)
        }


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_threads_and_compilation_are_limited_without_gpus_only(host: Host) -> None:
    cpu, cuda = host.environments(cuda=False), host.environments()
    assert set(cpu) == set(cuda) == KINDS
    for kind in KINDS:
        assert (cpu[kind]["OMP_NUM_THREADS"], cpu[kind]["TORCH_COMPILE_DISABLE"]) == ("1", "1")
        assert "TORCH_COMPILE_DISABLE" not in cuda[kind], (
            "it would turn off SGLang's compiled top-k and sampler"
        )
        assert cuda[kind].items() >= EVERYWHERE.items() <= cpu[kind].items()
        assert cuda[kind]["HOME"] == "/h"
    assert "OMP_NUM_THREADS" not in cuda["engine"]
    assert cuda["trainer"]["OMP_NUM_THREADS"] == "12", "96 cores, 8 ranks: Adam in host memory uses them"
    assert host.environments(cores=4)["trainer"]["OMP_NUM_THREADS"] == "1"


def test_both_ends_of_a_communicator_use_the_same_cumem_setting(host: Host) -> None:
    """SGLang sets its own value, 0, for itself; NCCL's is 1."""
    settings = {kind: variables.get("NCCL_CUMEM_ENABLE") for kind, variables in host.environments().items()}
    assert settings == dict.fromkeys(KINDS, "0")
    assert all("NCCL_CUMEM_ENABLE" not in variables for variables in host.environments(cuda=False).values())


def test_a_trainer_with_tensor_parallelism_has_one_queue(host: Host) -> None:
    environments = host.environments()
    assert environments["trainer"].get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environments["engine"]
    tp1_environments = host.environments("parallel.tp=1", "parallel.dp=8")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in tp1_environments["trainer"]


def test_engines_start_on_gpus_that_trainers_fill_unevenly(host: Host) -> None:
    assert host.environments()["engine"].get("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK") == "0"


def test_trainer_and_engine_use_the_same_fp8_scale_format(host: Host) -> None:
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    assert host.environments("model.fp8=both")["trainer"].get(name) == "1"
    assert name not in host.environments("model.fp8=rollout")["trainer"]


def test_engines_use_only_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: True)
    config = Config.model_validate({"model": {"path": "some/model"}, "engine": {"tp": 2, "count": 2}})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")
    assert launch_args.engine_command(config, 1, 3100)[1]["CUDA_VISIBLE_DEVICES"] == "6,GPU-7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES = 4,5 has 2 GPUs; engine 1 .* at least 4"):
        launch_args.engine_command(config, 1, 3100)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert launch_args.engine_command(config, 1, 3100)[1]["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_float32_on_a_gpu_has_an_attention_that_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: True)
    for dtype, expected in (("float32", True), ("bfloat16", False)):
        config = Config.model_validate(
            {"model": {"path": "some/model", "dtype": dtype}, "engine": {"deterministic": False}}
        )
        argv, _ = launch_args.engine_command(config, 0, 3100)
        assert (
            "--attention-backend" in argv and argv[argv.index("--attention-backend") + 1] == "triton"
        ) == expected


def test_the_engine_start_timeout_depends_on_model_size_and_kernel_compilation(
    host: Host, tmp_path: Path
) -> None:
    """Seconds: 240, four for each gigabyte of the folder, 300 for CUDA's kernels, 1,800 for those of FP8."""

    def seconds(path: Path, *overrides: str, cuda: bool) -> set[float | None]:
        overrides = (f"model.path={tmp_path}", *overrides)
        return {
            role.start_timeout for role, _ in host.roles(path, *overrides, cuda=cuda) if role.kind == "engine"
        }

    assert seconds(QUICKSTART, cuda=False) == {240.0}
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(60 * 10**9)  # sparse
    assert seconds(QUICKSTART, cuda=False) == {240.0 + 240.0}
    assert seconds(EXPERIMENT, cuda=True) == {240.0 + 240.0 + 300.0}
    assert seconds(EXPERIMENT, "model.fp8=rollout", cuda=True) == {240.0 + 240.0 + 300.0 + 1800.0}
    assert seconds(EXPERIMENT, "engine.start_timeout=9", cuda=True) == {9.0}
