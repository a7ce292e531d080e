"""Arguments and environment of engines and trainers on GPUs: what they compute with, keep, compile and give back."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from launch.environment import Kind, environment
from rlsys.cli import main
from rlsys.config import Config, load_config
from rlsys.engine.client import EngineClient
from rlsys.engine.launch_args import engine_command
from rlsys.planner.memory import budget, describe_memory, model_size
from rlsys.planner.model_preflight import read_model

ROOT = Path(__file__).resolve().parents[3]
ON_CUDA = ROOT / "configs/quickstart_cuda.yaml"
APART = ROOT / "configs/experiments/qwen3-30b-a3b_16gpu_disaggregated.yaml"
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
CACHES = (
    "TRITON_CACHE_DIR",
    "SGLANG_CACHE_DIR",
    "SGLANG_JIT_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TVM_FFI_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
)


def config_of(*overrides: str, path: Path = ON_CUDA) -> Config:
    return load_config(path, overrides)


def command(*overrides: str, path: Path = ON_CUDA) -> tuple[list[str], dict[str, str]]:
    return engine_command(config_of(*overrides, path=path), 0, 30000)


def option(argv: list[str], name: str) -> str | None:
    """The last one counts, as argparse takes it."""
    positions = [i for i, word in enumerate(argv) if word == name]
    return argv[positions[-1] + 1] if positions else None


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALLOCATORS, *CACHES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


# -- attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_deterministic_engine_attends_with_triton(dtype: str, tp: int) -> None:
    """FlashAttention 3 gives a mixture of experts other tokens for one prefix with TP 2, by SGLang's own test."""
    argv, _ = command(f"model.dtype={dtype}", f"engine.tp={tp}", "engine.deterministic=true")
    assert option(argv, "--attention-backend") == "triton"


def test_other_engines_have_sglangs_choice_or_the_users() -> None:
    assert option(command("engine.deterministic=false")[0], "--attention-backend") is None
    argv, _ = command("engine.deterministic=true", "engine.extra_args=[--attention-backend, fa3]")
    assert option(argv, "--attention-backend") == "fa3"


# -- the allocator ------------------------------------------------------------------------------------------------


def allocators(kind: Kind, *overrides: str, path: Path = ON_CUDA) -> dict[str, str]:
    config = config_of(*overrides, path=path)
    engine_variables = engine_command(config, 0, 30000)[1] if kind == "engine" else {}
    variables = {**os.environ, **environment(config, kind, cuda=True), **engine_variables}
    return {name: variables[name] for name in ALLOCATORS if name in variables}


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("kind", ["engine", "trainer"])
def test_expandable_segments_are_disabled_for_memory_shared_with_another_process(
    name: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    (value,) = allocators(kind).values()
    assert "expandable_segments:True" not in value, f"{name} = {value}"
    assert "max_split_size_mb:64" in value, "what else was set stays"


def test_a_trainer_without_shared_memory_keeps_its_allocator_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ALLOCATORS[0], "expandable_segments:True")
    trainer_allocators = allocators("trainer", path=APART)
    assert trainer_allocators == {ALLOCATORS[0]: "expandable_segments:True"}
    assert "True" not in allocators("engine", path=APART)[ALLOCATORS[0]]
    colocated = allocators("trainer", "weights.method=broadcast")
    assert "True" not in colocated[ALLOCATORS[0]], "engines on the trainer's GPUs open its memory"


def test_explain_reports_disabled_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ALLOCATORS[0], "expandable_segments:True")
    assert main.main(["explain", str(ON_CUDA)]) == 0
    odd = capsys.readouterr().out.partition("\nodd\n")[2]
    assert ALLOCATORS[0] in odd and "expandable_segments" in odd


# -- CUDA graphs --------------------------------------------------------------------------------------------------


def test_cuda_graphs_are_released_and_resumed_with_the_kv_cache() -> None:
    assert command()[1].get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == "1"
    assert "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in command("launch.release_memory=false")[1]
    tags: list[list[str]] = []

    async def post(path: str, body: dict[str, Any], *_: Any) -> dict[str, Any]:
        tags.append(body["tags"])
        return {}

    async def rest_and_wake() -> None:
        client = EngineClient.__new__(EngineClient)
        client.post = post  # type: ignore[method-assign, assignment]
        client.limits = type("Limits", (), {"work": 1.0})()  # type: ignore[assignment]
        await client.release_memory()
        await client.resume_memory("weights")
        await client.resume_memory("kv_cache")

    asyncio.run(rest_and_wake())
    released, of_weights, of_cache = tags
    assert "cuda_graph" in released
    assert "cuda_graph" not in of_weights, "the trainer may still need that memory"
    assert sorted(of_weights + of_cache) == sorted(released), "SGLang takes back nothing twice"


def test_graphs_count_in_the_estimate() -> None:
    config = config_of("engine.max_running_requests=64")
    hf = read_model(config)
    facts = dict(describe_memory(config, hf))
    assert "graph" in facts["engine, one rank"]
    b = budget(config, model_size(hf))
    assert b.engine_with_graphs > b.engine_weights + b.kv_pool
    assert "graph" not in dict(describe_memory(config_of("launch.gpus_per_node=0"), hf))["engine, one rank"]


@pytest.mark.parametrize(("longest", "bound"), [(40, 256), (1000, 1024), (30_000, 8192)])
def test_prefill_graphs_are_bounded_by_the_configs_lengths(longest: int, bound: int) -> None:
    """SGLang would make 58 of up to 8,192 tokens: 40 s of a start."""
    wide = ("engine.max_total_tokens=100000", "trainer.token_budget=40000")
    argv, _ = command(f"rollout.max_response_tokens={longest}", *wide)
    assert option(argv, "--cuda-graph-max-bs-prefill") == str(bound)


# -- compilation --------------------------------------------------------------------------------------------------


def test_an_engine_compiles_before_it_is_ready() -> None:
    """SGLang runs a warm-up before its server listens, inside the time that the start may take."""
    argv, _ = command()
    assert option(argv, "--warmups") == "rlsys"


def test_compiled_kernels_are_cached_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for kind in get_args(Kind):
        variables = environment(config_of(), kind, cuda=True)
        if kind == "rollout":
            assert not set(CACHES) & set(variables), "it compiles nothing"
            continue
        folders = {name: variables.get(name) for name in CACHES}
        assert all(
            f and Path(f).is_relative_to(tmp_path / ".cache/rlsys/kernels") for f in folders.values()
        ), folders
        assert len(set(folders.values())) == len(CACHES)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")
    assert {**os.environ, **environment(config_of(), "engine", cuda=True)}[
        "TRITON_CACHE_DIR"
    ] == "/scratch/triton"
    assert not set(CACHES) & set(environment(config_of(), "engine", cuda=False))


# -- what the user chose ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "told"), [("fa3", True), ("triton", False)])
def test_explain_warns_of_attention_backends_that_may_not_be_deterministic(
    chosen: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = f"engine.extra_args=[--attention-backend, {chosen}]"
    assert main.main(["explain", str(ON_CUDA), "engine.deterministic=true", extra]) == 0
    odd = capsys.readouterr().out.partition("\nodd\n")[2]
    assert ("engine.deterministic" in odd and "fa3" in odd) == told
