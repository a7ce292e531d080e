"""Supervised fine-tuning on given answers: `rlsys sft CONFIG`.

It runs on every trainer rank: `python -m launch.ranks ... -m rlsys.trainer.sft.sft --config RUN/config.yaml`.

The loss is a mean over the answers' trained tokens (rlsys/algo/sft/imitation.py), or compares answers
(rlsys/trainer/sft/preference.py). The learning rate rises for trainer.warmup_steps steps and then falls to sft.lr_end
times its peak. The result is the Hugging Face folder RUN/model. A run that resumes from a checkpoint gives the same
numbers as a run without interruption.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rlsys.algo.registry import TABLE, hint, load, make
from rlsys.algo.sft.imitation import Imitation, Tokens
from rlsys.algo.sft.preferences import Preference
from rlsys.config import Config, load_config
from rlsys.config.algo import Spec
from rlsys.core.errors import UserError
from rlsys.data.tokenizer import Tokenizer
from rlsys.data.trace import Trace
from rlsys.data.traces import trace_batches
from rlsys.obs.metrics import MetricsWriter
from rlsys.obs.role import run_role
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.setup import leave_job
from rlsys.trainer.sft.preference import preference_step
from rlsys.trainer.sft.reward_model import RewardTrainer
from rlsys.trainer.trainer import Trainer, learning_rate


def sft(config: Config) -> None:
    """Train from the newest checkpoint, if there is one, to trainer.steps, and export the model. Collective."""
    config = at_temperature_one(config)
    loss = build_loss(config.sft.loss)
    trainer = trainer_for(config, loss)
    steps_done = trainer.load_checkpoint()
    metrics = MetricsWriter(config.run.dir, resume_step=steps_done) if trainer.is_main else None

    def write(kind: str, step: int, **values: object) -> None:
        if metrics is not None:
            metrics.write(kind, step, **values)

    write("run", steps_done, event="resume" if steps_done else "start")
    batches = trace_batches(config, Tokenizer.of(config), steps_done)
    for step, traces in enumerate(batches, steps_done + 1):
        start = time.monotonic()
        lr = learning_rate(config.trainer, step, config.sft.schedule, config.sft.lr_end)
        if isinstance(loss, Imitation):
            figures = imitate(trainer, loss, traces, lr)
        else:
            figures = preference_step(trainer, loss, traces, lr)
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


def build_loss(spec: Spec) -> Imitation | Preference:
    """Return the loss that sft.loss names: a built-in, or a subclass or function of a plug-in.

    Raises:
        UserError: There is no such loss.
    """
    kinds = {name: kind for kind in ("imitation", "preference") for name in TABLE[kind]}
    kind = kinds.get(spec.name)
    if kind is None and ":" not in spec.name:
        raise UserError(f"sft.loss = {spec.name!r}: unknown loss; {hint(spec.name, kinds)}")
    if kind is None:
        target = load("sft.loss", spec.name)
        kind = "imitation" if isinstance(target, type) and issubclass(target, Imitation) else "preference"
    loss: Imitation | Preference = make("sft.loss", kind, spec)
    return loss


def trainer_for(config: Config, loss: Imitation | Preference) -> Trainer:
    """Return the trainer of the loss: a RewardTrainer if the loss needs values.

    Raises:
        UserError: The config sets a field that reward models do not support.
    """
    if "values" not in loss.needs():
        return Trainer(
            config, loss.needs(), candidates=loss.candidates if isinstance(loss, Imitation) else None
        )
    if config.trainer.mtp_loss:
        raise UserError(
            f"trainer.mtp_loss = {config.trainer.mtp_loss:g} with sft.loss = reward_model: a reward model predicts "
            "no tokens; expected 0"
        )
    if config.trainer.lora is not None:
        raise UserError(
            "trainer.lora is set with sft.loss = reward_model: expected none, because a reward model trains a value "
            "layer, which adapters do not include"
        )
    return RewardTrainer(config)


def imitate(trainer: Trainer, loss: Imitation, traces: Sequence[Trace], lr: float) -> dict[str, object]:
    """Run an update with the mean loss of all trained tokens and return its metrics."""

    def loss_sum(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        losses = loss(Tokens(scores.logp, scores.chance, scores.expected))
        return micro.masked(losses).sum(), {}

    result = trainer.update(trainer.passes.pack([as_sample(t) for t in traces]), loss_sum, lr)
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "padding_share": result.padding_share,
        "shared_share": result.shared_share,
        **result.prediction,
    }


def at_temperature_one(config: Config) -> Config:
    """Return the config with rollout.temperature = 1, because the loss must not depend on the rollout's sampling."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 1.0})})


def as_sample(trace: Trace) -> TrainSample:
    """Return the train sample of a trace; mu is 0, because no engine sampled the answer."""
    n = len(trace.response_ids)
    return TrainSample(trace.prompt_ids, trace.response_ids, [0.0] * n, [0] * n, trained=trace.trained)


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
