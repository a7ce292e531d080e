"""What each role finds in its environment, on a CPU host and on one with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import environment as module
from launch.environment import environment
from launch.layout import lay_out
from launch.plan import Node, Ports, build_plan
from rlsys.config import Config, load_config
from rlsys.engine import launch_args
from rlsys.errors import UserError

EXPERIMENT = Path(__file__).parents[2] / "configs/experiments/qwen3-30b-a3b_8gpu_colocated.yaml"


def of(kind: str, *overrides: str, cuda: bool = True) -> dict[str, str]:
    return environment(load_config(EXPERIMENT, overrides), kind, cuda=cuda, cores=96)  # type: ignore[arg-type]


def test_threads_and_compilation_are_limited_without_gpus_only() -> None:
    for kind in ("engine", "rollout", "trainer"):
        cpu, cuda = of(kind, cuda=False), of(kind)
        assert (cpu["OMP_NUM_THREADS"], cpu["TORCH_COMPILE_DISABLE"]) == ("1", "1")
        assert "NCCL_CUMEM_ENABLE" not in cpu
        assert "TORCH_COMPILE_DISABLE" not in cuda, "it would turn off SGLang's compiled top-k and sampler"
        assert cuda["NCCL_CUMEM_ENABLE"] == "0", "SGLang's value, on both sides of a communicator"
        assert cuda.items() >= module.EVERYWHERE.items() <= cpu.items()
    assert "OMP_NUM_THREADS" not in of("engine")
    assert of("trainer")["OMP_NUM_THREADS"] == "12", "96 cores, 8 ranks: Adam in host memory uses them"
    assert environment(load_config(EXPERIMENT), "trainer", cuda=True, cores=4)["OMP_NUM_THREADS"] == "1"


def test_a_trainer_with_tensor_parallelism_has_one_queue() -> None:
    assert of("trainer")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in of("trainer", "parallel.tp=1", "parallel.dp=8")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in of("engine")


def test_engines_start_beside_trainers_that_fill_gpus_unevenly() -> None:
    assert of("engine")["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"


def test_both_sides_of_fp8_scale_alike() -> None:
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    assert of("trainer", "model.fp8=both")[name] == "1"
    assert name not in of("trainer", "model.fp8=rollout")


def test_a_plan_gives_each_role_its_kinds_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: True)
    config = load_config(EXPERIMENT, ["run.dir=runs/x"])
    ports = Ports([5000 + i for i in range(4)], 6000)
    plan = build_plan(config, lay_out(config), [Node("n")], ports, launch_args.engine_command)
    found = {role.kind: plan.environment(role, {"HOME": "/h"}) for role in plan.roles}
    assert found["trainer"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert {kind: env["NCCL_CUMEM_ENABLE"] for kind, env in found.items()} == dict.fromkeys(found, "0")
    assert all("TORCH_COMPILE_DISABLE" not in env for env in found.values())
    assert found["engine"]["HOME"] == "/h"


def test_given_gpus_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: True)
    config = Config.model_validate({"model": {"path": "some/model"}, "engine": {"tp": 2, "count": 2}})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")
    assert launch_args.engine_command(config, 1, 3100)[1]["CUDA_VISIBLE_DEVICES"] == "6,GPU-7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES = 4,5 has 2 GPUs, but engine 1 .* number 4"):
        launch_args.engine_command(config, 1, 3100)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert launch_args.engine_command(config, 1, 3100)[1]["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_float32_on_a_gpu_has_an_attention_that_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: True)
    for dtype, wanted in (("float32", True), ("bfloat16", False)):
        config = Config.model_validate({"model": {"path": "some/model", "dtype": dtype}})
        argv, _ = launch_args.engine_command(config, 0, 3100)
        assert (
            "--attention-backend" in argv and argv[argv.index("--attention-backend") + 1] == "triton"
        ) == wanted


def test_an_engine_has_time_for_what_it_reads_and_compiles(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(60 * 10**9)  # sparse
    base = {"path": tmp_path, "dtype": "bfloat16"}
    small = Config.model_validate({"model": {"path": tmp_path / "none"}})
    assert small.start_seconds == 240.0
    assert Config.model_validate({"model": base}).start_seconds == 240.0 + 240.0
    fp8 = {"model": {**base, "fp8": "rollout"}, "launch": {"gpus_per_node": 8}}
    assert Config.model_validate(fp8).start_seconds == 240.0 + 240.0 + 300.0 + 1800.0
    assert Config.model_validate({**fp8, "engine": {"start_timeout": 9}}).start_seconds == 9.0
