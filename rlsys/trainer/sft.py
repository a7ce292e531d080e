"""Supervised fine-tuning: `torchrun ... -m rlsys.trainer.sft --config RUN/config.yaml`, or `rlsys sft CONFIG`.

The mean cross entropy of the traces' response tokens, with the trainer of the RL loop; the learning rate rises
for trainer.warmup_steps and falls linearly to sft.lr_end of its peak. Ends with a Hugging Face folder,
RUN/model. Goes on from its checkpoints, with the same numbers as a run that was never interrupted.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from torch import Tensor

from rlsys.config import Config, load_config
from rlsys.data.tokenizer import Tokenizer
from rlsys.data.traces import Trace, trace_batches
from rlsys.obs.metrics import MetricsWriter
from rlsys.obs.role import run_role
from rlsys.trainer.learning_rate import learning_rate
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.trainer import Trainer


def sft(config: Config) -> None:
    config = at_temperature_one(config)
    trainer = Trainer(config)
    done = trainer.load_checkpoint()
    metrics = MetricsWriter(config.run.dir, resume_step=done) if trainer.is_main else None

    def write(kind: str, step: int, **values: object) -> None:
        if metrics is not None:
            metrics.write(kind, step, **values)

    write("run", done, event="resume" if done else "start")
    batches = trace_batches(config, Tokenizer(config.model.path, config.data.chat_template_args), done)
    for step, traces in enumerate(batches, done + 1):
        start = time.monotonic()
        rows = [as_sample(trace) for trace in traces]
        batch = trainer.passes.pack(rows)
        lr = learning_rate(config.trainer, step, "linear", config.sft.lr_end)
        result = trainer.update(batch, cross_entropy, lr)
        seconds, tokens = time.monotonic() - start, sum(len(r.response_ids) for r in rows)
        write(
            "step", step, loss=result.loss, grad_norm=result.grad_norm, lr=lr, tokens=tokens,
            padding_share=result.padding_share, tokens_per_s=tokens / seconds, time_train=seconds, time_step=seconds,
        )  # fmt: skip
        if step % config.trainer.checkpoint_every == 0 or step == config.trainer.steps:
            trainer.finish_checkpoint()
            trainer.save_checkpoint(step)
    trainer.finish_checkpoint()
    trainer.export_hf(config.run.dir / "model")
    write("run", config.trainer.steps, event="end")
    trainer.close()


def at_temperature_one(config: Config) -> Config:
    """Traces are imitated as they stand, whatever temperature a later rollout samples with."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 1.0})})


def as_sample(trace: Trace) -> TrainSample:
    n = len(trace.response_ids)
    return TrainSample(trace.prompt_ids, trace.response_ids, [0.0] * n, [0] * n)


def cross_entropy(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum of logp over response tokens; `[T]` -> scalar."""
    return -(scores.logp * micro.mask).sum(), {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    args = parser.parse_args()
    run_role(lambda: sft(load_config(args.config)))


if __name__ == "__main__":
    main()
