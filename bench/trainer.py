"""Compare a train step with bare Megatron-Core on the same packed batch, on one rank.

    python bench/trainer.py --json [--repeats 7] [--quick]
    python bench/trainer.py --json --prompts [--quick]

    bare       megatron's schedule over the same micro-batches, its own cross-entropy loss, its optimizer step
    step       an update with the GRPO objective of the quickstart (log-probs, clipped loss, metrics)
    logprobs   a scoring pass, which computes log-probs before a step

All three use the same model and optimizer, and their repeats are interleaved. Responses have the lengths of the
recorded trace.

With CUDA the model is larger and in bfloat16, and the result also has the peak memory and the MFU: the share of the
GPU's peak rate, with 6 operations for each token and each parameter that the token visits, without attention.

`--prompts` measures a train step of the quickstart's model on one group of 8 samples in one micro-batch, with the
prompt computed for every sample and once per group: seconds (without CUDA: CPU seconds) and memory. Prompts have 60,
500 or 4,000 tokens, and responses 4, 200 or 2,000.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from april import TRACE
from measure import machine, say, spread, write_random_moe
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rlsys.algo.objective import Objective
from rlsys.config import Config, load_config
from rlsys.convert.config import HFConfig
from rlsys.core.spans import VersionSpan
from rlsys.core.types import Sample, SampleGroup, Segment, Status, TrainBatch
from rlsys.planner.memory import model_size
from rlsys.trainer.model.attention import PackedSequences
from rlsys.trainer.model.context_parallel import Share
from rlsys.trainer.pack import MicroBatch, PrefixSharing
from rlsys.trainer.step import micro_loss, prepare_batches, sample_table
from rlsys.trainer.trainer import Trainer

GROUPS, GROUP_SIZE, PROMPT_TOKENS, VOCAB = 16, 4, 24, 2048
LR = 1e-5
QUICKSTART = Path(__file__).parents[1] / "configs/quickstart.yaml"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Peak FLOP/s of dense bfloat16 matrix products, by a word of the device's name."""


def synthetic(trace: list[int]) -> TrainBatch:
    """Return the groups of a step with random tokens and alternating rewards.

    Args:
        trace: response lengths in tokens; the first GROUPS * GROUP_SIZE are used.
    """
    rng = random.Random(0)
    groups = []
    for g in range(GROUPS):
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
        samples = []
        for i in range(GROUP_SIZE):
            number = g * GROUP_SIZE + i
            sample, n = Sample(number, g, i, prompt, seed=1), trace[number]
            ids = [rng.randrange(VOCAB) for _ in range(n)]
            sample.append(Segment(ids, [-7.6] * n, [VersionSpan(1, 0, n)]))
            sample.status, sample.reward = Status.FINISHED, float(i % 2)
            samples.append(sample)
        groups.append(SampleGroup(g, g, samples))
    return TrainBatch(1, 1, groups, {})


class Bench:
    """A trainer and a packed batch.

    Attributes:
        trainer: the trainer.
        objective: the objective of the config.
        batch: the micro-batches of one update.
        denominator: divisor of the update's loss.
    """

    def __init__(self, config: Config) -> None:
        self.trainer = Trainer(config)
        # Bare megatron shares no prefixes.
        self.trainer.passes.pack = replace(self.trainer.passes.pack, shared="no")
        self.objective = Objective(config.algo)
        batch = synthetic(json.loads(TRACE.read_text())["lengths"])
        plan = self.objective.plan(
            sample_table(batch.groups, batch.train_step, self.objective.requirements.needs)
        )
        (self.batch,) = prepare_batches(self.trainer, self.objective, plan, batch, [plan.rows])
        if self.objective.requirements.prepares:
            self.objective.prepare(self.batch, self.trainer.passes.sum_over_dp)
        self.denominator = plan.denominator

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the batch."""
        return sum(len(m.tokens) for m in self.batch)

    def step(self) -> None:
        """Run an update."""
        loss = partial(micro_loss, self.objective, compare=True)
        self.trainer.update(self.batch, loss, LR, self.denominator)

    def logprobs(self) -> None:
        """Run a scoring pass."""
        self.trainer.passes.score(self.batch)

    def bare(self) -> None:
        """Run a step with megatron's functions, as in pre-training. rlsys only makes the inputs of this rank."""
        # Imported here: rlsys.trainer patches megatron before its first import.
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        t = self.trainer
        t._transformer.finalize_model_grads_func = finalize_model_grads
        for model in t._models:
            model.zero_grad_buffer()
        t._optimizer.zero_grad()
        with self._bare_routers():
            get_forward_backward_func()(
                forward_step_func=self._bare_forward,
                data_iterator=iter(self.batch),
                model=t._models,
                num_microbatches=len(self.batch),
                seq_length=t.config.trainer.token_budget,
                micro_batch_size=1,
                forward_only=False,
            )
        t._optimizer.step()

    @contextmanager
    def _bare_routers(self) -> Iterator[None]:
        """Disable rlsys' replay and counting of experts during the context."""
        routers = [
            m for model in self.trainer._models for m in model.modules() if hasattr(m, "router_replay")
        ]
        replays = [r.router_replay for r in routers]
        for router in routers:
            router.router_replay = None
        yield
        for router, replay in zip(routers, replays, strict=True):
            router.router_replay = replay

    def _bare_forward(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        """Compute the losses of the next micro-batch (megatron's forward_step_func)."""
        rank_share = share_of(next(batches))
        labels = rank_share.following[None]
        losses = model(
            rank_share.tokens[None],
            rank_share.position_ids[None],
            None,
            labels=labels,
            packed_seq_params=PackedSequences.of(rank_share.lengths, DEVICE, rank_share.gathered_index),
        )
        count = torch.tensor(losses.numel(), dtype=torch.int)
        return losses, lambda output: (output.float().sum(), count, {"loss": output.detach().sum()})


def groups_of(groups: int, prompt: int, response: int) -> TrainBatch:
    """Return groups of 8 samples with random tokens.

    Args:
        groups: number of groups.
        prompt: tokens of a prompt.
        response: tokens of a response.
    """
    rng = random.Random(0)
    sample_groups = []
    for g in range(groups):
        ids = [rng.randrange(128) for _ in range(prompt)]
        samples = [Sample(8 * g + i, g, i, ids, seed=1) for i in range(8)]
        for i, sample in enumerate(samples):
            tokens = [rng.randrange(128) for _ in range(response)]
            sample.append(Segment(tokens, [-4.8] * response, [VersionSpan(1, 0, response)]))
            sample.status, sample.reward = Status.FINISHED, float(i % 2)
        sample_groups.append(SampleGroup(g, g, samples))
    return TrainBatch(1, 1, sample_groups, {})


def allocated_bytes(work: Callable[[], object]) -> int:
    """Call `work`. Return the peak of the bytes that it has allocated."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated_before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - allocated_before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def seconds_of(work: Callable[[], object]) -> float:
    """Call `work`. Return its wall-clock seconds with CUDA, else its CPU seconds, which load does not affect."""
    if DEVICE.type == "cuda":
        return timed(work)
    start = time.process_time()
    work()
    return time.process_time() - start


def prompts(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure train steps with and without shared prompts. Return the result of the bench, with a row for each size.

    The first row has 16 groups, like the quickstart's steps.
    """
    sizes = [(16, 60, 4)]
    if not args.quick:
        sizes += [(1, prompt, response) for prompt in (60, 500, 4000) for response in (4, 200, 2000)]
    model = copytree(QUICKSTART.parent / "models/quickstart-moe", folder / "model")
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 8192}))
    overrides = [f"run.dir={folder / 'run'}", f"model.path={model}"]
    overrides += ["trainer.token_budget=65536", "rollout.max_response_tokens=2000"]
    config = load_config(QUICKSTART, overrides)
    trainer, objective = Trainer(config), Objective(config.algo)
    rows = []
    for groups, prompt, response in sizes:
        repeats = 1 if response == 2000 else 3
        row: dict[str, Any] = {"groups": groups, "prompt": prompt, "response": response}
        row |= prompt_figures(trainer, objective, groups_of(groups, prompt, response), repeats)
        say(json.dumps(row))
        rows.append(row)
    return {"bench": "trainer prompts", "machine": machine(), "rows": rows, "summary": rows}


def prompt_figures(
    trainer: Trainer, objective: Objective, train_batch: TrainBatch, repeats: int
) -> dict[str, Any]:
    """Measure a step with the prompt computed for every sample (`before`) and once per group (`after`).

    Returns:
        computed tokens, seconds of the fastest repeat and allocated bytes of both, and their ratios.
    """
    plan = objective.plan(
        sample_table(train_batch.groups, train_batch.train_step, objective.requirements.needs)
    )
    modes: dict[str, PrefixSharing] = {"before": "no", "after": "yes"}
    figures: dict[str, Any] = {}
    for name, shared in modes.items():
        trainer.passes.pack = replace(trainer.passes.pack, shared=shared)
        (batch,) = prepare_batches(trainer, objective, plan, train_batch, [plan.rows])
        loss = partial(micro_loss, objective, compare=True)
        step = partial(trainer.update, batch, loss, LR, plan.denominator)
        allocated = allocated_bytes(step)  # this call also warms up
        seconds = [seconds_of(step) for _ in range(repeats)]
        figures[name] = {
            "tokens": sum(sum(micro.computed_lengths) for micro in batch),
            "seconds": min(seconds),
            "bytes": allocated,
        }
    figures["times_faster"] = figures["before"]["seconds"] / figures["after"]["seconds"]
    figures["times_less_memory"] = figures["before"]["bytes"] / figures["after"]["bytes"]
    return figures


def timed(work: Callable[[], object]) -> float:
    """Call `work`. Return the wall-clock seconds until the device has finished it."""
    start = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def gpu_figures(model: Path, tokens_per_s: float) -> dict[str, float | None]:
    """Return the peak memory of this process, and its MFU.

    Args:
        model: Hugging Face folder.
        tokens_per_s: trained tokens per second.

    Returns:
        peak_memory_gb, and mfu; mfu is None for a GPU that PEAK_FLOPS lacks.
    """
    hf = HFConfig.read(model)
    size = model_size(hf)
    visited = size.dense - hf.vocab_size * hf.hidden_size + hf.layers * 3 * hf.hidden_size * size.active_width
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    return {
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        "mfu": 6 * visited * tokens_per_s / peak if peak else None,
    }


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the three passes with a random model. Return the result of the bench."""
    sizes: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    if args.quick:
        sizes = {"hidden_size": 64}
    elif DEVICE.type == "cuda":
        sizes = {
            "hidden_size": 2048,
            "moe_intermediate_size": 1024,
            "head_dim": 128,
            "num_attention_heads": 16,
        }
    model = write_random_moe(folder / "model", vocab_size=VOCAB, num_hidden_layers=4, num_experts=8, **sizes)
    config = Config.model_validate(
        {
            "model": {"path": model, "dtype": "bfloat16" if DEVICE.type == "cuda" else "float32"},
            "run": {"dir": folder / "run"},
            "trainer": {"token_budget": 2048 if DEVICE.type == "cpu" else 16384},
            "rollout": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_response_tokens": 512},
        }
    )
    bench = Bench(config)
    seconds: dict[str, list[float]] = {"bare": [], "step": [], "logprobs": []}
    for work in (bench.bare, bench.step, bench.logprobs):  # warm up
        work()
    for repeat in range(args.repeats):
        for name in seconds if repeat % 2 else reversed(seconds):
            seconds[name].append(timed(getattr(bench, name)))
        say(
            f"repeat {repeat + 1}/{args.repeats}: "
            + ", ".join(f"{n} {s[-1]:.2f} s" for n, s in seconds.items())
        )
    medians = {name: spread(values)["median"] for name, values in seconds.items()}
    tokens_per_s = {name: bench.tokens / s for name, s in medians.items()}
    padded = sum(len(share_of(micro).tokens) for micro in bench.batch)
    return {
        "bench": "trainer", "tokens": bench.tokens, "micro_batches": len(bench.batch), "repeats": args.repeats,
        "machine": machine(), "seconds": {name: spread(values) for name, values in seconds.items()},
        "tokens_per_s": tokens_per_s,
        "gpu": gpu_figures(model, tokens_per_s["step"]) if DEVICE.type == "cuda" else None,
        "summary": {
            "ratio_to_bare_megatron": medians["bare"] / medians["step"],
            "real_token_share": bench.tokens / padded,
            "logprob_share": medians["logprobs"] / (medians["logprobs"] + medians["step"]),
        },
    }  # fmt: skip


def share_of(micro: MicroBatch) -> Share:
    """Return the part of a micro-batch that one rank computes."""
    from megatron.core import parallel_state

    return Share.of(micro, 1, parallel_state.get_context_parallel_group(), DEVICE, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the whole result as JSON")
    parser.add_argument("--repeats", type=int, default=7, help="number of interleaved repeats")
    parser.add_argument(
        "--prompts", action="store_true", help="measure prompts that are computed once per group"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, once: checks only that the bench runs"
    )
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    with tempfile.TemporaryDirectory() as name:
        result = (prompts if args.prompts else run)(args, Path(name))
    print(json.dumps(result if args.json else result["summary"], indent=2))


if __name__ == "__main__":
    main()
