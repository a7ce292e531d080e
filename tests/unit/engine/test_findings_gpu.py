"""One strict xfail for each finding about GPUs (P1 to P20, G1 to G7) that shows without one.

CUDA is pretended where a path asks for it. tests/findings.md says which findings need a device.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launch.environment import environment
from launch.keeper import visible_gpus
from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.core.weight_updates import EngineAddress
from rlsys.engine.launch_args import engine_command
from rlsys.obs.doctor import examine
from rlsys.planner.layout import on_cuda
from rlsys.planner.memory import describe_memory
from rlsys.planner.model_preflight import read_model
from rlsys.weights import senders_group, transports
from rlsys.weights.senders_group import SendersGroup
from rlsys.weights.transports import GroupTransport
from tests.helpers import relay_host, servers

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART, ON_CUDA = ROOT / "configs/quickstart.yaml", ROOT / "configs/quickstart_cuda.yaml"


class Stop(Exception):
    """Ends what is tested at the call that is looked at."""


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of bench/ as a module, found as when it is run: its folder is on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module(name)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a driver: nvidia-smi is on PATH."""
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def config_of(path: Path = ON_CUDA, *overrides: str) -> Config:
    return load_config(path, overrides)


# -- P1: environments of children ----------------------------------------------------------------------------


def children(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Commands and environments of processes; none starts."""
    launches: list[tuple[list[str], dict[str, str]]] = []

    def start(command: list[str], **options: Any) -> Any:
        launches.append((command, options["env"] or dict(os.environ)))
        raise Stop

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(subprocess, "Popen", start)
    return launches


def of_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(samples=1, steps=1, workers=1, history=0)
    script("scale", monkeypatch).rollout(ROOT, [], arguments)


def of_the_step_path(monkeypatch: pytest.MonkeyPatch) -> None:
    script("step_path", monkeypatch).walks(ROOT)


def of_relay_hosts(_: pytest.MonkeyPatch) -> None:
    with relay_host.hosts(1):
        pass


STARTS = [of_the_scale, of_the_step_path, of_relay_hosts]


@pytest.mark.parametrize("begin", STARTS, ids=lambda f: f.__name__)
def test_gpu_p1_child_processes_keep_existing_pythonpath_entries(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/kit/site")
    launches = children(monkeypatch)
    with contextlib.suppress(Stop):
        begin(monkeypatch)
    (_, child_environment) = launches[0]
    assert "/kit/site" in child_environment["PYTHONPATH"].split(os.pathsep), (
        f"PYTHONPATH = {child_environment['PYTHONPATH']}"
    )


# -- P5, P6: engines of tests and benches --------------------------------------------------------------------


def of_tests(config: Config, folder: Path) -> Any:
    return servers.running_engine(config, folder)


def of_benches(config: Config, folder: Path) -> Any:
    return bench_measure().running_engine(config, folder)


def bench_measure() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        return script("measure", patch)


@pytest.mark.usefixtures("smi")
@pytest.mark.parametrize("engine", [of_tests, of_benches], ids=lambda f: f.__name__)
def test_gpu_p5_a_tests_engine_has_the_environment_of_a_runs_engine(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHDYNAMO_DISABLE", "NCCL_CUMEM_ENABLE", "TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    config = config_of()
    launches = children(monkeypatch)
    with contextlib.suppress(Stop), engine(config, tmp_path):
        pass
    expected = environment(config, "engine", cuda=True)
    names = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "OMP_NUM_THREADS", "NCCL_CUMEM_ENABLE")
    assert {n: launches[0][1].get(n) for n in names} == {n: expected.get(n) for n in names}


@pytest.mark.usefixtures("smi")
def test_gpu_p6_an_engine_without_flash_attention_3_uses_another_backend() -> None:
    """SGLang's own choice on Hopper under determinism; it is a file of sgl_kernel, which is not installed here."""
    if importlib.util.find_spec("sgl_kernel") is not None:
        pytest.skip("sgl_kernel is here: the backend may be SGLang's own choice")
    argv, _ = engine_command(config_of(), 0, 30000)
    assert "--attention-backend" in argv, "no backend is given"


# -- P7, P8, P9 ----------------------------------------------------------------------------------------------


def test_gpu_p7_make_room_collects_the_buckets_that_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.ipc_collect before empty_cache, which cannot give back what a handle still holds."""
    from rlsys.trainer.trainer import Trainer

    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    control = SimpleNamespace(wait_for_all=lambda: None)
    launch = SimpleNamespace(release_memory=True)
    Trainer.release_unused_memory(SimpleNamespace(config=SimpleNamespace(launch=launch), control=control))  # type: ignore[arg-type]
    assert "ipc_collect" in calls, f"make_room calls {calls}"


@pytest.mark.usefixtures("smi")
@pytest.mark.parametrize("given", ["", "-1"])
def test_gpu_p8_an_engine_uses_no_gpu_that_is_hidden(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    try:
        argv, env = engine_command(config_of(QUICKSTART), 0, 30000)
    except UserError:
        return
    assert "cpu" in argv, f"no --device cpu; CUDA_VISIBLE_DEVICES = {env.get('CUDA_VISIBLE_DEVICES')!r}"


@pytest.mark.usefixtures("smi")
def test_gpu_p8_a_run_with_hidden_gpus_is_no_run_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not on_cuda(config_of(QUICKSTART)), "environment(): a CUDA host, though torch sees no device"


def test_gpu_p8_a_keeper_shows_no_gpu_that_the_scheduler_hid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    try:
        visible_devices = visible_gpus("0")
    except UserError:
        return
    assert visible_devices == "", f"CUDA_VISIBLE_DEVICES = {visible_devices!r}"


class BlockingNccl:
    """The first collective of a communicator: it returns once every rank has come, or the group is aborted. In
    non-blocking mode it returns at once, and its work never completes."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def broadcast(self, *_: Any, **__: Any) -> Any:
        if os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING", "0") == "0":
            self.left.wait(10)
            raise RuntimeError("ncclCommInitRank failed")
        return SimpleNamespace(is_completed=lambda: False, exception=lambda: None)


def test_gpu_p9_engine_death_before_the_first_bucket_does_not_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = BlockingNccl()
    monkeypatch.setattr(transports.dist, "broadcast", nccl.broadcast)
    monkeypatch.setattr(transports, "abort", lambda _: nccl.left.set())
    engine = EngineAddress("http://a", 1, 0)
    transport = GroupTransport(0.2, 0.2)
    transport._group, transport._members = "nccl", [engine]  # type: ignore[assignment]
    answers = {engine.url: Future[None]()}
    answers[engine.url].set_exception(RuntimeError("connection reset"))
    results: list[bool] = []

    def send() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(transport._broadcast(torch.zeros(1), answers))

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(1.0)
    hangs = thread.is_alive()
    nccl.left.set()
    thread.join()
    assert not hangs, "the trainer hangs in the first broadcast, five times as long as an engine may take"
    assert results == [False]


def ends_in_time(work: Callable[[], Any], nccl: BlockingNccl) -> list[Any]:
    """What `work` returns within a second, though NCCL blocks; empty where it does not return."""
    results: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(1.0)
    in_time = list(results)
    nccl.left.set()
    thread.join()
    return in_time


def test_gpu_p9_engines_that_hang_before_the_first_bucket_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of them answers, and none refuses: the limit of a bucket counts."""
    nccl = BlockingNccl()
    monkeypatch.setattr(transports.dist, "broadcast", nccl.broadcast)
    engine = EngineAddress("http://a", 1, 0)
    transport = GroupTransport(0.2, 0.2)
    transport._group, transport._members = "nccl", [engine]  # type: ignore[assignment]
    answers = {engine.url: Future[None]()}
    assert ends_in_time(lambda: transport._broadcast(torch.zeros(1), answers), nccl) == [False]


def test_gpu_p9_senders_time_out_when_engines_do_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharded push: all trainer ranks and all engines make one communicator."""
    nccl, zeros = BlockingNccl(), torch.zeros
    monkeypatch.setattr(senders_group.dist, "all_reduce", nccl.broadcast)
    monkeypatch.setattr(senders_group.dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(torch, "zeros", lambda *size, device="cpu", **options: zeros(*size, **options))
    group = SendersGroup(SimpleNamespace(), 0, 1, 0.2, 0.2)  # type: ignore[arg-type]
    group._group = "nccl"  # type: ignore[assignment]
    group.members = [EngineAddress("http://a", 1, 0)]
    assert ends_in_time(group.connect, nccl) == [
        {"http://a": "NCCL could not create a communicator within 0.2 s"}
    ]


# -- P10, P20: what doctor says ------------------------------------------------------------------------------


def doctors_words() -> str:
    return "\n".join(f"{f.name} {f.value} {f.note}" for f in examine())


@pytest.mark.usefixtures("smi")
def test_gpu_p10_doctor_checks_for_the_compiler_of_jit_kernels() -> None:
    """SGLang 0.5.23 compiles kernels at first use; it needs nvcc, ninja and CUDA_HOME."""
    assert "nvcc" in doctors_words(), "no line of doctor names nvcc"


def test_gpu_p10_the_set_up_names_the_compiler() -> None:
    text = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    needed = text.partition("## Set-up")[2].partition("```")[0]
    assert "nvcc" in needed, f"docs/gpu.md asks for: {needed.strip()}"


def test_gpu_p20_doctor_reports_a_torch_version_other_than_sglangs_pin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's compiled prefix tree dies on the first request on another torch."""
    versions = {"torch": "2.11.0", "sglang": "0.5.23"}
    original_version, original_requires = importlib.metadata.version, importlib.metadata.requires
    monkeypatch.setattr(importlib.metadata, "version", lambda n: versions.get(n) or original_version(n))
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda n: ["torch==2.14.1"] if n == "sglang" else original_requires(n)
    )
    assert "2.14.1" in doctors_words(), "no line of doctor names the torch that SGLang pins"


# -- P12, P13: the host waits for the device -----------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Operations for which the host waits for a CUDA device, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        by_mask = name == "aten.index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or name in (
            "aten._local_scalar_dense",
            "aten.nonzero",
            "aten.bincount",
            "aten.masked_select",
        ):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_gpu_p12_counting_tokens_does_not_wait_for_the_device() -> None:
    from rlsys.trainer.model.routing import LayerReplay

    router = SimpleNamespace(
        router_replay=None, layer_number=1, num_experts=8, training=True, get_aux_loss_coeff=lambda _: 0.0,
        enable_expert_bias=False,
    )  # fmt: skip
    replay = LayerReplay(router)  # type: ignore[arg-type]
    scores = torch.rand(16, 8, generator=torch.Generator().manual_seed(0))
    replay.token_counts = torch.ones(16, dtype=torch.int64)
    replay.target = torch.tensor([[0, 1]] * 16)
    with HostReads() as reads:
        replay.get_replay_topk(scores, 2, None, None, lambda s, k, **_: s.topk(k, dim=1))
    assert reads.seen == []


# -- P15, P16 ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("smi")
def test_gpu_p15_an_engine_does_not_inherit_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv(name, "expandable_segments:True")
    config = config_of()
    try:
        set_by_us = {**environment(config, "engine", cuda=True), **engine_command(config, 0, 30000)[1]}
    except UserError:
        return
    of_engine = {**os.environ, **set_by_us}
    assert "expandable_segments:True" not in of_engine[name], f"{name} = {of_engine[name]}"


@pytest.mark.usefixtures("smi")
def test_gpu_p16_cuda_graphs_are_released_or_counted() -> None:
    config = config_of()
    assert config.launch.release_memory
    _, env = engine_command(config, 0, 30000)
    facts = " ".join(text for _, text in describe_memory(config, read_model(config)))
    assert env.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == "1" or "graph" in facts, "neither"


# -- G3 ----------------------------------------------------------------------------------------------


class OneTrainer:
    """Counts how many are open; megatron-core takes one layout a process."""

    opened = 0

    def __init__(self, *_: Any) -> None:
        type(self).opened += 1
        assert type(self).opened == 1, "data parallel group is already initialized"

    def close(self, **_: Any) -> None:
        type(self).opened -= 1


@pytest.fixture
def fp8_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """tests/gpu/test_fp8.py with a machine that can all, and an engine that does not start."""
    module = importlib.import_module("tests.gpu.test_fp8")
    monkeypatch.setattr(module, "Trainer", OneTrainer)
    monkeypatch.setattr(module, "tiny_moe_model", mock.Mock())
    monkeypatch.setattr(module, "check_device", lambda *_: None)
    monkeypatch.setattr(module, "have_transformer_engine", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(module, "running_engine", mock.Mock(side_effect=Stop))
    OneTrainer.opened = 0
    yield module


def test_gpu_g3_a_gpu_test_that_fails_closes_its_trainer(fp8_tests: ModuleType, tmp_path: Path) -> None:
    for fp8 in ("rollout", "both"):
        with contextlib.suppress(Stop):
            fp8_tests.test_a_push_in_fp8_is_attested_and_its_mismatch_bounded(fp8, tmp_path / fp8)
    assert OneTrainer.opened == 0
