"""Parts of the drill that compare the device with the CPU, or measure NCCL, CUDA IPC and torch's allocator.

Each part is a function that writes its figures to a `Figures`. The parts run in processes of their own (gpu.py), so
they may end the process or leave the device in any state.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_figures import Figures
from gpu_node import CUDA, DEVICE, need_cuda, seconds_of, synchronize
from measure import ROOT, machine

ANSWER_SECONDS = 60.0
"""Seconds that a process may take to answer, for the ranks of a group of two beyond the group's timeout."""
HASHED_BYTES = 2**30 if CUDA else 2**25
"""Size of the tensor that `checksums` hashes for its GB/s."""
BUCKET_BYTES, BUCKETS = (2**28, 200) if CUDA else (2**21, 20)
"""Size and number of the buckets that `handles` sends."""
PACKAGES = ("torch", "sglang", "megatron-core", "transformer-engine", "triton", "nvidia-nccl-cu13")
"""Packages whose versions `versions` records."""


def versions(figures: Figures) -> None:
    """Record the machine, the versions of PACKAGES, and the names of the active patches."""
    import megatron_patches

    installed_versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    figures(
        **machine(),
        packages={name: installed_versions[name] for name in PACKAGES if name in installed_versions},
        patches=[patch.name for patch in megatron_patches.active()],
    )


def families(figures: Figures) -> None:
    """Train two steps of each family on the device and on the CPU.

    Records the largest relative difference of loss or gradient norm of each family.
    """
    from tests.helpers.te_cases import FAMILIES

    steps: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, hidden in (("cpu", {"CUDA_VISIBLE_DEVICES": ""}), ("here", {})):
            command = [sys.executable, str(ROOT / "tests/helpers/te_cases.py"), "plain", folder]
            start = time.monotonic()
            subprocess.run(
                command, cwd=ROOT, env={**os.environ, **hidden}, check=True, stdout=subprocess.DEVNULL
            )
            steps[name] = json.loads((Path(folder) / "plain.json").read_text())["trained"]
            figures(**{f"seconds_{name}": time.monotonic() - start})
            subprocess.run(["rm", "-r", f"{folder}/plain"], check=True)
    for family in FAMILIES:
        pairs = zip(steps["cpu"][family]["steps"], steps["here"][family]["steps"], strict=True)
        gaps = [abs(a - b) / abs(a) for x, y in pairs for a, b in zip(x[:2], y[:2], strict=True)]
        figures(**{family: max(gaps)})


def checksums(figures: Figures) -> None:
    """Compare rlsys' implementation of SGLang's hash with golden values, and on a GPU with SGLang's kernel.

    Records its GB/s, and on a GPU the memory that it allocates.
    """
    from rlsys.weights.hashes import PartDigests, final_hash
    from tests.helpers.golden_hashes import GOLDEN, sample

    def digest(tensor: torch.Tensor) -> str:
        digests = PartDigests()
        digests.add(tensor, 0, -(-tensor.nbytes // 4))
        return str(final_hash(digests.results()))

    figures(equal=all(digest(sample(n, dtype).to(DEVICE)) == golden for (n, dtype), golden in GOLDEN.items()))
    big = torch.zeros(HASHED_BYTES // 2, dtype=torch.bfloat16, device=DEVICE)
    digest(big[: 2**20])
    allocated = 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    seconds = seconds_of(lambda: digest(big))
    figures(gb_per_s=big.nbytes / 1e9 / seconds)
    if CUDA:
        figures(extra_bytes=torch.cuda.max_memory_allocated() - allocated)
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

        figures(kernel_equal=f"{gpu_tensor_hash(big):016x}" == digest(big))


def _receive(buckets: Any, answers: Any) -> None:
    """Receive buckets forever, hold each until the next one arrives, and answer with its first number."""
    bucket = buckets.get()
    while True:
        answers.put(float(bucket[0]))
        bucket = buckets.get()


def handles(figures: Figures) -> None:
    """Send buckets by handle (CUDA IPC, else shared memory) to a process that is killed while it holds the last one.

    Records the seconds of a round trip, and `lost_bytes`: the bytes that the sender's allocator still holds after the
    kill, because torch waits until the receiver releases them.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
    spawn = torch.multiprocessing.get_context("spawn")
    buckets, answers = spawn.Queue(), spawn.Queue()
    receiver = spawn.Process(target=_receive, args=(buckets, answers))
    receiver.start()
    assert receiver.pid is not None
    times, bucket = [], torch.empty(0)
    for i in range(BUCKETS):
        synchronize()
        start = time.monotonic()
        bucket = torch.full((BUCKET_BYTES // 2,), float(i), dtype=torch.bfloat16, device=DEVICE)
        buckets.put(bucket)
        assert answers.get(timeout=ANSWER_SECONDS) == float(torch.tensor(float(i), dtype=torch.bfloat16))
        times.append(time.monotonic() - start)
    figures(bucket_bytes=bucket.nbytes, first_s=times[0], median_s=sorted(times)[len(times) // 2])
    del bucket
    os.kill(receiver.pid, signal.SIGKILL)
    receiver.join()
    if CUDA:
        torch.cuda.ipc_collect()
        figures(lost_bytes=torch.cuda.memory_allocated())


def _rank(rank: int, port: int, backend: str, limit: float, pause: float, answers: Any) -> None:
    """Run a rank of a group of two, and answer with its result or its error in one line.

    Args:
        rank: 0 or 1.
        port: port of the rendezvous.
        backend: backend of the group.
        limit: timeout of the group in seconds.
        pause: seconds that rank 0 sleeps while rank 1 waits for it; 0 for an all-reduce on GPU 0.
        answers: queue of the results.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        dist.init_process_group(backend, rank=rank, world_size=2, timeout=timedelta(seconds=limit))
        if pause:
            from rlsys.trainer.control import Control

            control = Control()
            time.sleep(pause if rank == 0 else 0)
            answers.put(f"rank {rank}: {control.on_main(lambda: 'a step')}")
        else:
            torch.cuda.set_device(0)
            dist.all_reduce(torch.ones(1, device=DEVICE))
            torch.cuda.synchronize()
            answers.put(f"rank {rank}: went through")
    except Exception as e:  # noqa: BLE001 - its message is the result
        answers.put(f"rank {rank}: {type(e).__name__}: {e}"[:600])


def _two_ranks(figures: Figures, backend: str, limit: float, pause: float) -> None:
    """Run two ranks (see _rank), and record their messages.

    Raises:
        SystemExit: a rank sent no message.
    """
    from launch.ports import free_ports

    spawn = multiprocessing.get_context("spawn")
    answers, (port,) = spawn.Queue(), free_ports("127.0.0.1", 1)
    ranks = [spawn.Process(target=_rank, args=(r, port, backend, limit, pause, answers)) for r in range(2)]
    for process in ranks:
        process.start()
    messages: list[str] = []
    deadline = time.monotonic() + limit + pause + ANSWER_SECONDS
    try:
        while len(messages) < len(ranks) and (remaining := deadline - time.monotonic()) > 0:
            try:
                messages.append(answers.get(timeout=remaining))
            except queue.Empty:
                break
            figures(messages=sorted(messages))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if len(messages) < len(ranks):
        raise SystemExit(f"{len(messages)} of 2 ranks sent a result; expected a result of each rank")


def two_ranks_on_one_gpu(figures: Figures) -> None:
    """Record NCCL's error for a group of a trainer rank and an engine rank on the same GPU."""
    need_cuda()
    _two_ranks(figures, "nccl", 30.0, 0.0)


def waiting(figures: Figures) -> None:
    """Record the results of two ranks when rank 0 takes longer than the data group's timeout.

    Both ranks must get the result of rank 0, because ranks wait for a take through another group.
    """
    from rlsys.trainer.setup import backends

    _two_ranks(figures, backends(CUDA), 10.0, 15.0)


def nccl(figures: Figures) -> None:
    """Measure NCCL in a group of one process: seconds of its initialization, and of an all-reduce of 256 MB."""
    need_cuda()
    from launch.ports import free_ports

    (port,) = free_ports("127.0.0.1", 1)
    start = time.monotonic()
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    tensor = torch.ones(2**27, dtype=torch.bfloat16, device=DEVICE)
    dist.all_reduce(tensor)
    synchronize()
    figures(start_s=time.monotonic() - start, version=torch.cuda.nccl.version())
    figures(all_reduce_s=seconds_of(lambda: dist.all_reduce(tensor)))


def _spin(stop: Any) -> None:
    """Keep a kernel running on the GPU until `stop` is set."""
    while not stop.is_set():
        torch.cuda._sleep(10**8)
        torch.cuda.synchronize()


def spinning(figures: Figures) -> None:
    """Measure GEMMs per second alone, and beside a spinning kernel of another process.

    The difference is what an engine would lose while a trainer rank waits in NCCL, whose kernels spin.
    """
    need_cuda()
    a = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(500):
            a @ a

    products()
    figures(gemms_per_s_alone=500 / seconds_of(products))
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    spinner = spawn.Process(target=_spin, args=(stop,))
    spinner.start()
    time.sleep(10)  # until the process has started and has a CUDA context
    figures(beside_a_spinning_kernel=500 / seconds_of(products))
    stop.set()
    spinner.join(30)


def cache(figures: Figures) -> None:
    """Measure the unused bytes in torch's allocator after a step, and after the trainer has emptied the cache."""
    need_cuda()
    _cache(figures)


def _cache(figures: Figures) -> None:
    """Measure `cache` on any device, so that a CPU test can run it."""
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    def reserved_bytes() -> int:
        return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    with tempfile.TemporaryDirectory() as folder:
        model = cases.write_model(Path(folder) / "model")
        sections: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "launch": {"release_memory": True}}
        trainer = Trainer(cases.config_of(model, Path(folder) / "run", **sections))
        cases.steps(trainer, 2)
        figures(kept_bytes=reserved_bytes())
        trainer.release_unused_memory()
        figures(kept_after_make_room=reserved_bytes())
        trainer.close()


def offload(figures: Figures) -> None:
    """Resume a run whose optimizer state is in host memory.

    Records the result of the load, and the next step of the original and of the resumed trainer, which must be equal.
    Without Transformer Engine the part fails with the trainer's UserError.
    """
    need_cuda()
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    with tempfile.TemporaryDirectory() as folder:
        model = cases.write_model(Path(folder) / "model")
        sections: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "trainer": {"offload_optimizer": 1.0}}
        config = cases.config_of(model, Path(folder) / "run", **sections)
        trainer = Trainer(config)
        cases.steps(trainer, 2)
        cases.save(trainer, 2)
        expected = cases.steps(trainer, 1)
        trainer.close()
        again = Trainer(config)
        figures(loaded=again.load_checkpoint(), whole=expected, resumed=cases.steps(again, 1))


def checkpoint(figures: Figures) -> None:
    """Measure the allocated device memory before a save, and its peak during the save."""
    need_cuda()
    _checkpoint(figures)


def _checkpoint(figures: Figures) -> None:
    """Measure `checkpoint` on any device, so that a CPU test can run it."""
    from rlsys.trainer.trainer import Trainer
    from tests.helpers import trainer_cases as cases

    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512}
        model = cases.write_model(Path(folder) / "model", **(sizes if CUDA else {}))
        sections: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "launch": {"release_memory": True}}
        trainer = Trainer(cases.config_of(model, Path(folder) / "run", **sections))
        cases.steps(trainer, 1)
        trainer.release_unused_memory()
        torch.cuda.reset_peak_memory_stats()
        figures(held_bytes=torch.cuda.memory_allocated())
        cases.save(trainer, 1)
        figures(peak_bytes=torch.cuda.max_memory_allocated())
        trainer.close()


def objective(figures: Figures) -> None:
    """Compute every shipped recipe's objective on the device and on the CPU, in float64.

    Records the largest difference of a loss or a gradient, and its recipe.
    """
    from rlsys.config import read_layers
    from rlsys.config.algo import AlgoSection
    from tests.helpers.algo_world import World, run

    gaps = {}
    for path in sorted((ROOT / "configs/algorithms").glob("*.yaml")):
        algo = AlgoSection.model_validate(read_layers(path).get("algo", {}))
        graded = path.stem == "grpo_passk"
        device_result, cpu_result = (
            run(World(graded=graded, device=device), algo, lambda rows: [rows]) for device in (DEVICE, "cpu")
        )
        gradients = [
            float((device_result.gradients[row] - g).abs().max()) for row, g in cpu_result.gradients.items()
        ]
        gaps[path.stem] = max([abs(device_result.loss - cpu_result.loss), *gradients])
    figures(recipes=len(gaps), largest=max(gaps.values()), of=max(gaps, key=lambda name: gaps[name]))


def fp8(figures: Figures) -> None:
    """Measure the relative errors of FP8 in blocks of 128 x 128.

    Records the largest error of a restored weight, and on Hopper the error of a block GEMM.
    """
    from rlsys.weights.fp8 import dequantise, quantise

    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    values, scale = quantise(weight)
    error = (dequantise(values, scale) - weight.float()).abs().max() / weight.float().abs().max()
    figures(restored_error=float(error))
    if CUDA and torch.cuda.get_device_capability() == (9, 0):  # Blackwell's GEMM has other blocks
        x = torch.randn(256, 2048, device=DEVICE, dtype=torch.bfloat16)
        exact = x.float() @ weight.float().t()
        figures(gemm_error=float((block_gemm(x, values, scale).float() - exact).norm() / exact.norm()))


def block_gemm(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply activations, quantised with a scale for each token and 128 columns, by a quantised weight.

    Args:
        x: activations `[tokens, columns]`.
        values: weight `[rows, columns]` in FP8.
        scale: scales of the weight's blocks `[rows / 128, columns / 128]`.

    Returns:
        `[tokens, rows]` in bfloat16.
    """
    blocks = x.float().unflatten(1, (-1, 128))
    x_scale = blocks.abs().amax(2) / torch.finfo(torch.float8_e4m3fn).max
    x_values = (blocks / x_scale[..., None]).flatten(1).to(torch.float8_e4m3fn)
    x_scale = x_scale.t().contiguous().t()  # cuBLAS requires that the scales of all tokens are adjacent
    return torch._scaled_mm(x_values, values.t(), x_scale, scale.t(), out_dtype=torch.bfloat16)
