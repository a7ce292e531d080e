"""The first half hour on one GPU: `python bench/gpu.py [--part NAME ...] [--json] [--out FILE]`. Offline.

Each part is a process of its own under a time limit, so that none takes the others with it. A part that needs what
this machine lacks says so; the others run on a CPU as well, which shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import ROOT, machine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Lacking(Exception):
    """This machine has not got what the part measures."""


def need_cuda() -> None:
    if DEVICE != "cuda":
        raise Lacking("no CUDA device")


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def versions() -> dict[str, Any]:
    """What is here, and what is patched for it."""
    import importlib.metadata as metadata

    import megatron_patches

    names = ("torch", "sglang", "megatron-core", "transformer-engine", "triton", "nvidia-nccl-cu13")
    found = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"] in names}
    return {**machine(), "packages": found, "patches": [p.name for p in megatron_patches.active()]}


def families() -> dict[str, Any]:
    """Two steps of each family on this device and on a CPU: the largest relative difference of loss and norm."""
    from tests.helpers.te_cases import FAMILIES

    seen: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, hidden in (("cpu", {"CUDA_VISIBLE_DEVICES": ""}), ("here", {})):
            command = [sys.executable, str(ROOT / "tests/helpers/te_cases.py"), "plain", folder]
            environment = {**os.environ, **hidden, "PYTHONPATH": str(ROOT)}
            start = time.monotonic()
            subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
            seen[name] = json.loads((Path(folder) / "plain.json").read_text())["trained"]
            seen[f"seconds_{name}"] = time.monotonic() - start
            subprocess.run(["rm", "-r", f"{folder}/plain"], check=True)
    out: dict[str, Any] = {k: v for k, v in seen.items() if k.startswith("seconds")}
    for family in FAMILIES:
        pairs = zip(seen["cpu"][family]["steps"], seen["here"][family]["steps"], strict=True)
        out[family] = max(abs(a - b) / abs(a) for x, y in pairs for a, b in zip(x[:2], y[:2], strict=True))
    return out


def checksums() -> dict[str, Any]:
    """SGLang's hash of a GPU tensor in plain torch: equal to the golden ones, GB/s, memory beside the tensor."""
    from rlsys.weights.hashes import TileHash
    from tests.unit.test_hashes import GOLDEN, sample

    def of(tensor: torch.Tensor) -> str:
        state = TileHash()
        state.update(tensor)
        return state.digest()

    equal = all(of(sample(n, dtype).to(DEVICE)) == digest for (n, dtype), digest in GOLDEN.items())
    big = torch.zeros(2**29 if DEVICE == "cuda" else 2**24, dtype=torch.bfloat16, device=DEVICE)
    of(big[: 2**20])
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    start = now()
    of(big)
    seconds = now() - start
    extra = torch.cuda.max_memory_allocated() - held if DEVICE == "cuda" else None
    result = {"equal": equal, "gb_per_s": big.nbytes / 1e9 / seconds, "extra_bytes": extra}
    if DEVICE == "cuda":
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

        start = now()
        result["kernel_equal"] = f"{gpu_tensor_hash(big):016x}" == of(big)
    return result


def _receive(queue: Any, answers: Any) -> None:
    """Holds each bucket until the next one comes."""
    handle = queue.get()
    while True:
        answers.put(float(handle[0]))
        handle = queue.get()


def handles() -> dict[str, Any]:
    """Buckets to another process by handle (CUDA IPC, else shared memory), which is then killed with the last one.
    What the sender's allocator keeps at the end is lost: torch waits for a receiver that is gone to give it back.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
    spawn = torch.multiprocessing.get_context("spawn")
    queue, answers = spawn.Queue(), spawn.Queue()
    receiver = spawn.Process(target=_receive, args=(queue, answers))
    receiver.start()
    size, count = (2**27, 200) if DEVICE == "cuda" else (2**20, 20)
    times = []
    for i in range(count):
        start, bucket = now(), torch.full((size,), float(i), dtype=torch.bfloat16, device=DEVICE)
        queue.put(bucket)
        assert answers.get() == float(torch.tensor(float(i), dtype=torch.bfloat16))
        times.append(now() - start)
    result = {
        "bucket_bytes": bucket.nbytes, "first_s": times[0], "median_s": sorted(times)[len(times) // 2],
    }  # fmt: skip
    del bucket
    os.kill(receiver.pid, signal.SIGKILL)
    receiver.join()
    if DEVICE == "cuda":
        torch.cuda.ipc_collect()
        result["lost_bytes"] = torch.cuda.memory_allocated()
    return result


def _rank(rank: int, world: int, port: int, backend: str, limit: float, wait: float, told: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(seconds=limit))
        if wait:
            from rlsys.trainer.control import Control

            control = Control()
            time.sleep(wait if rank == 0 else 0)
            told.put(f"rank {rank}: {control.on_main(lambda: 'a step')}")
        else:
            torch.cuda.set_device(0)
            dist.all_reduce(torch.ones(1, device="cuda"))
            torch.cuda.synchronize()
            told.put(f"rank {rank}: went through")
    except Exception as e:  # noqa: BLE001 - its words are the result
        told.put(f"rank {rank}: {type(e).__name__}: {e}"[:600])


def _two_ranks(backend: str, limit: float, wait: float) -> list[str]:
    from launch.ports import free_ports

    spawn = multiprocessing.get_context("spawn")
    told, (port,) = spawn.Queue(), free_ports("127.0.0.1", 1)
    ranks = [spawn.Process(target=_rank, args=(r, 2, port, backend, limit, wait, told)) for r in range(2)]
    for process in ranks:
        process.start()
    said = sorted(told.get(timeout=90) for _ in ranks)
    for process in ranks:
        process.kill()
    return said


def two_ranks_on_one_gpu() -> dict[str, Any]:
    """The literal words with which NCCL refuses a group of a trainer and an engine rank of one GPU."""
    need_cuda()
    return {"said": _two_ranks("nccl", 60.0, 0.0)}


def waiting() -> dict[str, Any]:
    """A take that lasts longer than the data group's limit: the ranks that wait must get it."""
    from rlsys.trainer.setup import backends

    return {"said": _two_ranks(backends(DEVICE == "cuda"), 20.0, 30.0)}


def _spin(stop: Any) -> None:
    while not stop.is_set():
        torch.cuda._sleep(10**8)
        torch.cuda.synchronize()


def spinning() -> dict[str, Any]:
    """GEMMs a second beside another process whose kernel only waits, as NCCL's does: what engines would lose."""
    need_cuda()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def rate() -> float:
        start = now()
        for _ in range(500):
            a @ a
        return 500 / (now() - start)

    rate()
    alone, spawn = rate(), multiprocessing.get_context("spawn")
    stop = spawn.Event()
    other = spawn.Process(target=_spin, args=(stop,))
    other.start()
    time.sleep(10)
    beside = rate()
    stop.set()
    other.join(30)
    return {"gemms_per_s_alone": alone, "beside_a_spinning_kernel": beside}


def cache() -> dict[str, Any]:
    """What torch keeps after a step and gives back before engines wake."""
    need_cuda()
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    with tempfile.TemporaryDirectory() as folder:
        model = cases.write_model(Path(folder) / "model")
        trainer = Trainer(cases.config_of(model, Path(folder) / "run", model={"dtype": "bfloat16"}))
        cases.steps(trainer, 2)
        before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        trainer.empty_cache()
        after = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return {"kept_bytes": before, "kept_after_empty_cache": after}


def offload() -> dict[str, Any]:
    """The optimizer's state in host memory: step, save, load, and the step after it."""
    need_cuda()
    from rlsys.errors import UserError
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    with tempfile.TemporaryDirectory() as folder:
        model = cases.write_model(Path(folder) / "model")
        sections = {"model": {"dtype": "bfloat16"}, "trainer": {"offload_optimizer": 1.0}}
        config = cases.config_of(model, Path(folder) / "run", **sections)
        try:
            trainer = Trainer(config)
        except UserError as e:
            raise Lacking(str(e)) from None
        cases.steps(trainer, 2)
        cases.save(trainer, 2)
        whole = cases.steps(trainer, 1)
        trainer.close()
        again = Trainer(config)
        return {"loaded": again.load_checkpoint(), "whole": whole, "resumed": cases.steps(again, 1)}


def checkpoint() -> dict[str, Any]:
    """Device memory at the worst moment of a save, beside what is held without one."""
    need_cuda()
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512}
        model = cases.write_model(Path(folder) / "model", **sizes)
        trainer = Trainer(cases.config_of(model, Path(folder) / "run", model={"dtype": "bfloat16"}))
        cases.steps(trainer, 1)
        trainer.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        cases.save(trainer, 1)
        return {"held_bytes": held, "peak_bytes": torch.cuda.max_memory_allocated()}


def rehearsed() -> dict[str, Any]:
    """Bytes of each phase of an update as a rehearsal foretells them, and as a real one has them on this device."""
    import rlsys.trainer  # noqa: F401 - patches megatron-core before anything below imports it
    from rlsys.config import load_config
    from rlsys.rehearse.command import run_rank
    from rlsys.rehearse.kinds import Request, node_of
    from rlsys.rehearse.stand_ins import install
    from rlsys.rehearse.step import Rehearsal

    config, overrides = ROOT / "configs/quickstart.yaml", ["trainer.token_budget=8192"]
    if DEVICE == "cuda":
        overrides += ["model.dtype=bfloat16", "launch.gpus_per_node=1"]
    foretold = run_rank(config, overrides, Request(0, micro_batches=2))
    read = load_config(config, overrides)
    real = Rehearsal(read, node_of(read), None, lambda text: None)
    install({"always"}, real.setting(1.0))
    real.build()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    real.step(2)
    return {
        "rehearsed": {phase.name: phase.total for phase in foretold.phases},
        "real": {phase.name: phase.total for phase in real.meter.phases},
        "allocator": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None,
    }


def objective() -> dict[str, Any]:
    """Every shipped recipe on this device against the CPU, in float64: the largest difference of loss or gradient."""
    from rlsys.config import read_layers
    from rlsys.config.algo import AlgoSection
    from tests.helpers.algo_world import World, run

    gaps = {}
    for path in sorted((ROOT / "configs/algorithms").glob("*.yaml")):
        algo, graded = (
            AlgoSection.model_validate(read_layers(path).get("algo", {})),
            path.stem == "grpo_passk",
        )
        here, there = (
            run(World(graded=graded, device=d), algo, lambda rows: [rows]) for d in (DEVICE, "cpu")
        )
        far = [abs(here.loss - there.loss)]
        far += [float((here.gradients[row] - g).abs().max()) for row, g in there.gradients.items()]
        gaps[path.stem] = max(far)
    return {"recipes": len(gaps), "largest": max(gaps.values()), "of": max(gaps, key=lambda name: gaps[name])}


def fp8() -> dict[str, Any]:
    """Blocks of 128 x 128: the error of our quantiser, and on a GPU that has it, of a GEMM with such weights."""
    from rlsys.weights.fp8 import quantise, restore

    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    values, scale = quantise(weight)
    gap = (restore(values, scale) - weight.float()).abs().max() / weight.float().abs().max()
    result: dict[str, Any] = {"restored_error": float(gap)}
    if DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0):  # Blackwell takes other blocks
        x = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16)
        exact = x.float() @ weight.float().t()
        result["gemm_error"] = float((block_gemm(x, values, scale).float() - exact).norm() / exact.norm())
    return result


def block_gemm(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`[tokens, columns]` by a quantised weight `[rows, columns]`: `[tokens, rows]` bfloat16. A token has a scale for
    each 128 columns; cuBLAS wants those of all tokens side by side in memory."""
    blocks = x.float().unflatten(1, (-1, 128))
    by_token = blocks.abs().amax(2) / torch.finfo(torch.float8_e4m3fn).max
    eight = (blocks / by_token[..., None]).flatten(1).to(torch.float8_e4m3fn)
    side_by_side = by_token.t().contiguous().t()
    return torch._scaled_mm(eight, values.t(), side_by_side, scale.t(), out_dtype=torch.bfloat16)


def trainer_speed() -> dict[str, Any]:
    """bench/trainer.py."""
    command = [sys.executable, str(ROOT / "bench/trainer.py"), "--json", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {"result": json.loads(done.stdout)}


PARTS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    part.__name__: (part, seconds)
    for part, seconds in (
        (versions, 120), (checksums, 120), (fp8, 120), (handles, 180), (waiting, 180), (two_ranks_on_one_gpu, 120),
        (spinning, 120), (cache, 180), (offload, 240), (checkpoint, 180), (objective, 240), (rehearsed, 240),
        (families, 600), (trainer_speed, 400),
    )
}  # fmt: skip
"""With the seconds that each may take."""


def bounded(name: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--run", name]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {seconds:g} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        return {"failed": (done.stderr or done.stdout)[-1500:]}
    return {**json.loads(answers[-1]), "seconds": time.monotonic() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, help="keeps each result as soon as it is there")
    parser.add_argument("--json", action="store_true", help="print nothing but the result")
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        try:
            print(json.dumps(PARTS[args.run][0](), default=str), flush=True)
        except Lacking as e:
            print(json.dumps({"not_run": str(e)}), flush=True)
        return
    results: dict[str, Any] = {}
    for name in args.part:
        results[name] = bounded(name, PARTS[name][1])
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
        if not args.json:
            print(f"{name}: {json.dumps(results[name])[:400]}", file=sys.stderr, flush=True)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
