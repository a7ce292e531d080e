"""THE LOOP. Runs on every trainer rank: `torchrun ... -m rlsys.train --config RUN/config.yaml --rollout URL`.

    take      the first groups_per_step groups that finished; what is still in flight is interrupted and parked
    train     advantages -> packed micro-batches -> clipped policy loss -> optimizer (megatron-core)
    push      the new weights to every engine, attested; generation goes on, interrupted samples first

Rank 0 talks to the rollout process; what it hears is broadcast, so that all ranks do the same thing.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlsys.algo.advantages import ESTIMATORS
from rlsys.algo.losses import clipped_policy_loss, truncated_importance_weight
from rlsys.config import Config, load_config
from rlsys.obs.metrics import MISMATCH_EDGES, MetricsWriter, mismatch_summary
from rlsys.obs.role import run_role
from rlsys.rollout.client import RolloutClient
from rlsys.trainer.pack import MicroBatch, TrainSample, pack
from rlsys.trainer.trainer import Trainer
from rlsys.types import Taken
from rlsys.weights.sync import WeightSync


def train(config: Config, rollout: RolloutClient) -> None:
    trainer = Trainer(config)
    sync = WeightSync(config, trainer.is_main)
    step, on_main = trainer.load_checkpoint(), trainer.on_main
    metrics = MetricsWriter(config.run.dir, resume_step=step) if trainer.is_main else None

    def push() -> float:
        """Every engine gets this model's weights under a new version; the rollout resumes. Seconds."""
        start = time.monotonic()
        ticket = on_main(rollout.begin_push)
        sync.push(trainer.named_hf_tensors(), ticket)
        canaries = trainer.canaries(ticket.canaries)
        on_main(lambda: rollout.end_push(ticket, canaries))
        return time.monotonic() - start

    def take() -> Taken:
        """The groups of this step; an engine that came back without weights gets them first."""
        while (taken := on_main(lambda: rollout.take(step))) is None:
            push()
        return taken

    def write(kind: str, **values: object) -> None:
        if metrics is not None:
            metrics.write(kind, step, **values)

    def evaluate() -> None:
        result = on_main(rollout.evaluate)
        write(
            "eval",
            accuracy=result.accuracy,
            mean_length=result.mean_length,
            prompts=result.prompts,
            truncated=result.truncated,
        )

    def save() -> None:
        trainer.save_checkpoint(step)
        on_main(lambda: rollout.commit(step))

    on_main(lambda: rollout.wait_ready(config.engine.start_timeout))
    on_main(lambda: rollout.restore(step))
    write("run", event="resume" if step else "start")
    push()
    if step == 0:
        evaluate()
    while step < config.trainer.steps:
        step += 1
        start = time.monotonic()
        taken = take()
        rollout_done = time.monotonic()
        stats = update(config, trainer, taken)
        train_done = time.monotonic()
        time_sync = push()
        end = time.monotonic()
        write(
            "step", **taken.metrics, **stats, weight_version=taken.weight_version,
            time_rollout=rollout_done - start, time_train=train_done - rollout_done, time_sync=time_sync,
            time_step=end - start, tokens_per_s=taken.metrics["tokens"] / (end - start),
        )  # fmt: skip
        if step % config.eval.every == 0 or step == config.trainer.steps:
            evaluate()
        if step % config.trainer.checkpoint_every == 0 or step == config.trainer.steps:
            save()
    write("run", event="end")


def update(config: Config, trainer: Trainer, taken: Taken) -> dict[str, object]:
    """One train step on the groups taken: `algo.minibatches` optimizer updates. Returns its metrics."""
    algo = config.algo
    samples = [s for group in taken.groups for s in group.samples]
    rewards = torch.tensor([s.reward for s in samples])
    groups = torch.tensor([s.group_id for s in samples])
    advantages = ESTIMATORS[algo.advantage](rewards, groups)
    # A group of equal rewards has no gradient: leaving it out saves its forward pass and its share of the mean.
    rows = [TrainSample.of(s, float(a)) for s, a in zip(samples, advantages, strict=True) if a != 0]
    stats: dict[str, object] = {"effective_groups": len({r.group_id for r in rows})}
    generator = torch.Generator().manual_seed(config.run.seed * 1_000_003 + taken.train_step)
    order = torch.randperm(len(rows), generator=generator).tolist()
    lr = config.trainer.lr * min(1.0, taken.train_step / max(1, config.trainer.warmup_steps))
    sums: dict[str, Tensor] = {}
    parts = [[rows[i] for i in order[k :: algo.minibatches]] for k in range(algo.minibatches)]
    batches = [pack(p, config.trainer.token_budget, trainer.dp_rank, trainer.dp_size) for p in parts if p]
    if algo.anchor == "old":  # before the first update: later ones would score their own past
        for batch in batches:
            for micro, old in zip(batch, trainer.logprobs(batch), strict=True):
                micro.old = old
    for batch in batches:
        result = trainer.train_step(batch, partial(micro_loss, config, taken.weight_version), lr)
        stats.update(loss=result.loss, grad_norm=result.grad_norm, lr=lr)
        for name, value in result.sums.items():
            sums[name] = sums[name] + value if name in sums else value
    stats["clip_share"] = float(sums["clipped"] / sums["tokens"]) if sums else 0.0
    stats.update(mismatch_summary(sums["mismatch_counts"].tolist(), float(sums["mismatch"])) if sums else {})
    return stats


def micro_loss(
    config: Config, version: int, logp: Tensor, micro: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss sum of one packed micro-batch `[T]`, and sums for the metrics."""
    algo = config.algo
    anchor, weight = micro.mu, None
    if algo.anchor == "old":
        anchor = micro.old
        weight = truncated_importance_weight(micro.old, micro.mu, micro.mask, algo.tis_cap)
    loss, sums = clipped_policy_loss(
        logp,
        anchor,
        micro.advantages,
        micro.mask,
        clip_low=algo.clip_low,
        clip_high=algo.clip_high,
        weight=weight,
    )
    # Only tokens of the current version can agree exactly; older ones differ because the weights did.
    gap = (logp.detach() - micro.mu).abs()[(micro.mask > 0) & (micro.versions == version)]
    sums["tokens"] = micro.mask.sum()
    sums["mismatch"] = gap.sum()
    sums["mismatch_counts"] = torch.histc(gap.clamp(min=1e-12).log10(), len(MISMATCH_EDGES) - 1, -12, 2)
    return loss, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rollout", required=True, help="URL of the rollout process")
    args = parser.parse_args()
    run_role(lambda: train(load_config(args.config), RolloutClient(args.rollout)))


if __name__ == "__main__":
    main()
