"""Parts of the drill that measure the trainer (gpu.py).

They measure the card's peak rates, a step compared with bare Megatron-Core, the cost of a weight update before
tensors are sent, memory compared with a rehearsal, and log-probs compared with transformers.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_figures import Figures
from gpu_node import CUDA, DEVICE, gap, layer_config, need_cuda, seconds_of, synchronize

LAYERS = 4 if CUDA else 2
COPIED_BYTES, SIDE = (2**31, 8192) if CUDA else (2**24, 256)
"""Bytes of the copied tensor, and rows and columns of the multiplied matrices, of `ceilings`."""
HASHED = ((2**30, 3), (3 * 2**20, 300)) if CUDA else ((2**20, 2),)
"""(bytes of a tensor, number of tensors) of each measurement of hashing."""
REPEATS = 5 if CUDA else 1
SEQUENCE = [9 + (7 * i) % 400 for i in range(256)]
"""Token ids whose log-probs are compared."""


def ceilings(figures: Figures) -> None:
    """Measure the copy bandwidth and the bfloat16 GEMM rate of this card, the upper bounds of other rates."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    a, b = (torch.randn(SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def median_seconds(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
        return statistics.median(seconds_of(work) for _ in range(10))

    copy_seconds = median_seconds(lambda: target.copy_(source))
    gemm_seconds = median_seconds(lambda: a @ b)
    figures(
        device=torch.cuda.get_device_name() if CUDA else "cpu",
        torch=torch.__version__,
        copy_gb_per_s=2 * COPIED_BYTES / 1e9 / copy_seconds,
        gemm_tflop_per_s=2 * SIDE**3 / 1e12 / gemm_seconds,
    )


def speed(figures: Figures) -> None:
    """Measure a step, bare Megatron and a scoring pass, without Transformer Engine."""
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    _speed(figures)


def speed_with_transformer_engine(figures: Figures) -> None:
    """Measure a step, bare Megatron and a scoring pass, with Transformer Engine.

    Raises:
        SystemExit: Transformer Engine is not installed.
    """
    need_cuda()
    from megatron_patches import have_transformer_engine

    if not have_transformer_engine():
        raise SystemExit(
            "transformer_engine is not installed; expected its package, or --transformer-engine FOLDER"
        )
    import transformer_engine

    figures(transformer_engine=getattr(transformer_engine, "__version__", "unknown"))
    _speed(figures)


def _speed(figures: Figures) -> None:
    """Record seconds, tokens/s, FLOPs utilisation, and profiles of a step and of bare Megatron (trainer.py)."""
    import trainer as bench

    if not CUDA:
        bench.GROUPS, bench.GROUP_SIZE = 2, 2
    bench.VOCAB = 512
    with tempfile.TemporaryDirectory() as run:
        config = layer_config(Path(run), LAYERS)
        trainer_bench = bench.Bench(config)
        figures(tokens=trainer_bench.tokens, micro_batches=len(trainer_bench.batch))
        passes = {"bare": trainer_bench.bare, "step": trainer_bench.step, "logprobs": trainer_bench.logprobs}
        for work in passes.values():
            work()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        seconds: dict[str, list[float]] = {name: [] for name in passes}
        for repeat in range(REPEATS):
            for name in passes if repeat % 2 else reversed(passes):
                seconds[name].append(seconds_of(passes[name]))
            figures(seconds=seconds)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        rates = {name: trainer_bench.tokens / s for name, s in medians.items()}
        figures(
            tokens_per_s=rates,
            step_of_bare=medians["bare"] / medians["step"],
            gpu={name: bench.gpu_figures(config.model.path, rate) for name, rate in rates.items()}
            if CUDA
            else None,
            held_bytes=torch.cuda.memory_allocated() if CUDA else None,
        )
        for name in ("step", "bare"):
            figures(**{f"profile_{name}": profile(passes[name])})


def profile(work: Callable[[], object]) -> dict[str, Any]:
    """Call `work` under torch's profiler.

    Returns:
        numbers of kernel launches, synchronisations and host operations, and the twelve operations with the most
        time on the device and on the host: name, number of calls, milliseconds.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if CUDA else []
    with torch.profiler.profile(activities=activities) as recorded:
        work()
        synchronize()
    events = recorded.key_averages()

    def largest(field: str) -> list[tuple[str, int, float]]:
        chosen = sorted(events, key=lambda event: -getattr(event, field, 0.0))[:12]
        return [(event.key[:80], event.count, round(getattr(event, field, 0.0) / 1e3, 2)) for event in chosen]

    return {
        "launches": sum(event.count for event in events if "LaunchKernel" in event.key),
        "synchronisations": sum(event.count for event in events if "Synchronize" in event.key),
        "host_operations": sum(event.count for event in events if event.key.startswith("aten::")),
        "device_ms": largest("self_device_time_total"),
        "host_ms": largest("self_cpu_time_total"),
    }


def weight_layout(figures: Figures) -> None:
    """Measure the cost of a weight update without sending.

    Records bytes and seconds of gathering the weights under their Hugging Face names and copying them into buckets,
    without and with hashing, and the rates of `hash_rates`.
    """
    from rlsys.trainer.trainer import Trainer
    from rlsys.weights.buckets import StagingBuffers, send_in_buckets
    from rlsys.weights.checksums import EngineChecksums

    with tempfile.TemporaryDirectory() as run:
        config = layer_config(Path(run), LAYERS)
        trainer = Trainer(config)
        bucket = int(config.weights.bucket_mb * 2**20)
        sent = 0

        def fill_buckets(hashed: bool) -> None:
            nonlocal sent
            checksums = EngineChecksums(trainer.hf, 1)
            tensors = checksums.watch(trainer.served_tensors()) if hashed else trainer.served_tensors()
            sent = send_in_buckets(tensors, bucket, StagingBuffers(shared=True), lambda _: None)
            if hashed:
                checksums.digests()

        for name, hashed in (("gather", False), ("gather_and_hash", True)):
            fill_buckets(hashed)  # the first call compiles kernels
            seconds = seconds_of(partial(fill_buckets, hashed))
            figures(**{name: {"bytes": sent, "seconds": seconds, "gb_per_s": sent / 1e9 / seconds}})
    hash_rates(figures)


def hash_rates(figures: Figures) -> None:
    """Record GB/s, and milliseconds per tensor, of hashing the tensors of HASHED."""
    from rlsys.weights.hashes import PartDigests

    for size, count in HASHED:
        tensors = [
            torch.empty(size // 2, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(count)
        ]

        def digest(tensors: list[torch.Tensor] = tensors) -> None:
            digests = PartDigests()
            for tensor in tensors:
                digests.add(tensor, 0, tensor.nbytes // 4)
            digests.results()

        digest()
        seconds = seconds_of(digest)
        rate = {"gb_per_s": size * count / 1e9 / seconds, "ms": 1e3 * seconds / count}
        figures(**{f"digest_of_{size}_bytes": rate})


def memory(figures: Figures) -> None:
    """Record the memory of each phase of an update, as rehearsed with fake tensors and as measured with real ones."""
    from rlsys.cli.rehearse import run_rank
    from rlsys.config import load_config
    from rlsys.rehearse.kinds import Request, node_of
    from rlsys.rehearse.stand_ins import installed
    from rlsys.rehearse.step import Rehearsal

    with tempfile.TemporaryDirectory() as run:
        config = layer_config(Path(run), LAYERS)
        path = Path(run) / "config.yaml"
        import yaml

        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        rehearsed = run_rank(path, [], Request(0, micro_batches=2))
        figures(rehearsed={phase.name: phase.total for phase in rehearsed.phases})
        loaded_config = load_config(path, [])
        real = Rehearsal(loaded_config, node_of(loaded_config), None, lambda text: None)
        with installed({"always"}, real.setting(1.0)):
            real.build()
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            real.step(2)
        figures(real={phase.name: phase.total for phase in real.meter.phases})
        if CUDA:
            figures(allocator=torch.cuda.max_memory_allocated())


def parity(figures: Figures) -> None:
    """Compare the log-probs of SEQUENCE by the trainer in bfloat16 with those by transformers.

    Records the differences of the trainer and of transformers in bfloat16 to transformers in float32, and of the
    trainer to transformers in bfloat16.
    """
    from transformers import AutoModelForCausalLM

    from rlsys.trainer.trainer import Trainer

    with tempfile.TemporaryDirectory() as run:
        config = layer_config(Path(run), 2)
        trainer_logp = torch.tensor(Trainer(config).canaries([SEQUENCE])[0].logp)

        def reference_logp(dtype: torch.dtype) -> torch.Tensor:
            model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype).to(DEVICE).eval()
            with torch.no_grad():
                logits = model(torch.tensor([SEQUENCE], device=DEVICE)).logits[0, :-1].float()
            index = torch.tensor(SEQUENCE[1:], device=DEVICE)[:, None]
            return logits.log_softmax(-1).gather(1, index)[:, 0].cpu()

        exact, half = reference_logp(torch.float32), reference_logp(torch.bfloat16)
        figures(
            trainer_of_float32=gap(trainer_logp, exact),
            transformers_of_float32=gap(half, exact),
            trainer_of_transformers=gap(trainer_logp, half),
        )
