"""Learning from answers that are there: `torchrun ... -m rlsys.trainer.sft --config RUN/config.yaml`, or
`rlsys sft CONFIG`.

The mean cross entropy of the answers' trained tokens, or a loss that compares answers (rlsys/trainer/preference.py),
with the trainer of the RL loop; the learning rate rises for trainer.warmup_steps and falls linearly to sft.lr_end of
its peak. Ends with a Hugging Face folder, RUN/model. Goes on from its checkpoints, with the same numbers as a run
that was never interrupted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rlsys.algo.preferences import Preference
from rlsys.algo.registry import make
from rlsys.config import Config, load_config
from rlsys.data.tokenizer import Tokenizer
from rlsys.data.trace import Trace
from rlsys.data.traces import trace_batches
from rlsys.errors import UserError
from rlsys.obs.metrics import MetricsWriter
from rlsys.obs.role import run_role
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.preference import preference_step
from rlsys.trainer.reward_model import RewardTrainer
from rlsys.trainer.setup import leave_job
from rlsys.trainer.trainer import Trainer, learning_rate


def sft(config: Config) -> None:
    config = at_temperature_one(config)
    compare: Preference | None = None
    if config.sft.loss is not None:
        compare = make("sft.loss", "preference", config.sft.loss)
    trainer = trainer_for(config, compare)
    done = trainer.load_checkpoint()
    metrics = MetricsWriter(config.run.dir, resume_step=done) if trainer.is_main else None

    def write(kind: str, step: int, **values: object) -> None:
        if metrics is not None:
            metrics.write(kind, step, **values)

    write("run", done, event="resume" if done else "start")
    batches = trace_batches(config, Tokenizer(config.model.path, config.data.chat_template_args), done)
    for step, traces in enumerate(batches, done + 1):
        start = time.monotonic()
        lr = learning_rate(config.trainer, step, "linear", config.sft.lr_end)
        if compare is None:
            figures = imitate(trainer, traces, lr)
        else:
            figures = preference_step(trainer, compare, traces, lr)
        seconds, tokens = time.monotonic() - start, sum(len(t.response_ids) for t in traces)
        times = {"tokens_per_s": tokens / seconds, "time_train": seconds, "time_step": seconds}
        write("step", step, **figures, lr=lr, tokens=tokens, **times)
        if step % config.trainer.checkpoint_every == 0 or step == config.trainer.steps:
            trainer.finish_checkpoint()
            trainer.save_checkpoint(step)
    trainer.finish_checkpoint()
    trainer.export_hf(config.run.dir / "model")
    if config.trainer.lora is not None:
        trainer.export_adapter(config.run.dir / "adapter")
    write("run", config.trainer.steps, event="end")
    trainer.close()


def trainer_for(config: Config, compare: Preference | None) -> Trainer:
    needs = compare.needs() if compare is not None else frozenset()
    if "values" in needs and config.trainer.lora is not None:
        raise UserError(
            "trainer.lora trains nothing but adapters: sft.loss = reward_model trains a value layer; use one"
        )
    return RewardTrainer(config) if "values" in needs else Trainer(config, needs)


def imitate(trainer: Trainer, traces: Sequence[Trace], lr: float) -> dict[str, object]:
    """An update with the cross entropy; its figures."""
    done = trainer.update(trainer.passes.pack([as_sample(t) for t in traces]), cross_entropy, lr)
    return {"loss": done.loss, "grad_norm": done.grad_norm, "padding_share": done.padding_share}


def at_temperature_one(config: Config) -> Config:
    """Traces are imitated as they stand, whatever temperature a later rollout samples with."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 1.0})})


def as_sample(trace: Trace) -> TrainSample:
    n = len(trace.response_ids)
    return TrainSample(trace.prompt_ids, trace.response_ids, [0.0] * n, [0] * n, trained=trace.trained)


def cross_entropy(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum of logp over response tokens; `[T]` -> scalar."""
    return -(scores.logp * micro.mask).sum(), {}


def _main(config: Config) -> None:
    sft(config)
    leave_job()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    args = parser.parse_args()
    run_role(lambda: _main(load_config(args.config)))


if __name__ == "__main__":
    main()
