"""Train with TRL's GRPOTrainer on the prompts, the reward and the model of an rlsys config, for bench/race.py.

    PYTHONPATH=.venv/parity python bench/race_trl.py CONFIG OUT.jsonl --target 0.9 [KEY=VALUE ...]

The program writes a line to OUT.jsonl at the start of training, and at the end of each step and of each evaluation.
It ends at the target. The config sets batch, learning rate, temperature and longest response. Gradient checkpointing
is off, because the model is small, and the learning rate is constant, as in rlsys. All other settings are TRL's
defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlsys.engine.cpu.platform import declare_torchvision_ops

if not torch.cuda.is_available():
    declare_torchvision_ops()  # without these, transformers cannot import a torchvision that is built for CUDA

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from trl import GRPOConfig, GRPOTrainer

from rlsys.config import Config, load_config
from rlsys.core.types import Prompt, Response
from rlsys.data import Tokenizer, build_source
from rlsys.data.source import PromptSource, draw_heldout
from rlsys.rewards import make_score
from rlsys.rewards.results import parse_reward


class Lines:
    """Owns the output file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, kind: str, **fields: Any) -> None:
        """Write a line with the current time."""
        print(json.dumps({"kind": kind, "time": time.time(), **fields}), file=self._file, flush=True)


class Task:
    """Tokenizer, prompts and reward of a config."""

    def __init__(self, config: Config) -> None:
        self.tokenizer = Tokenizer(config.model.path)
        self.source: PromptSource = build_source(config, self.tokenizer)
        self._score = make_score(config)

    def text(self, prompt: Prompt) -> str:
        """Return the rendered prompt as text."""
        return self.tokenizer.decode(prompt.ids)

    def reward(self, prompt: Prompt, response: list[int]) -> float:
        """Return the reward of a response, given as token ids including the stop id."""
        finished = bool(response) and response[-1] in self.tokenizer.stop_ids
        text = self.tokenizer.decode(response[:-1] if finished else response)
        return parse_reward(self._score(prompt, Response(text, finished=finished, ids=response))).reward


class Evaluation(TrainerCallback):
    """Trainer callback that evaluates greedily on the held-out prompts after each step, and ends at the target."""

    def __init__(self, task: Task, config: Config, lines: Lines, target: float) -> None:
        self._task, self._lines, self._target = task, lines, target
        self._longest = config.rollout.max_response_tokens
        self._prompts = draw_heldout(task.source, config.eval.prompts)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        self._lines.write("start")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        self._lines.write("step", step=state.global_step)
        accuracy = self._accuracy(rest["model"], rest["processing_class"])
        self._lines.write("eval", step=state.global_step, accuracy=accuracy)
        control.should_training_stop = accuracy >= self._target

    @torch.no_grad()
    def _accuracy(self, model: Any, tokenizer: Any) -> float:
        texts = [self._task.text(p) for p in self._prompts]
        inputs = tokenizer(
            texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        width = inputs["input_ids"].shape[1]
        model.eval()
        answers = model.generate(**inputs, max_new_tokens=self._longest, do_sample=False)[:, width:].tolist()
        model.train()
        end = tokenizer.eos_token_id
        responses = [ids[: ids.index(end) + 1] if end in ids else ids for ids in answers]
        right = [self._task.reward(p, ids) >= 1.0 for p, ids in zip(self._prompts, responses, strict=True)]
        return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path, help="config of rlsys")
    parser.add_argument("out", type=Path, help="file of JSON lines to write")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="fields of the config to set")
    parser.add_argument(
        "--target", type=float, required=True, help="held-out accuracy at which training ends"
    )
    args = parser.parse_intermixed_args()
    config, lines = load_config(args.config, args.overrides), Lines(args.out)
    torch.set_num_threads(os.cpu_count() or 1)
    task = Task(config)
    groups, size = config.rollout.groups_per_step, config.rollout.group_size
    prompts = [task.source.train(i) for i in range(groups * config.trainer.steps)]
    by_text = {task.text(p): p for p in prompts}
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    if tokenizer(task.text(prompts[0]))["input_ids"] != prompts[0].ids:
        sys.exit(
            f"{config.model.path}: transformers' tokenizer and rlsys encode the first prompt with different ids; "
            "expected equal ids"
        )

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [task.reward(by_text[text], ids) for text, ids in zip(prompts, completion_ids, strict=True)]

    settings = GRPOConfig(
        output_dir=str(args.out.parent / "trl"), use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        seed=config.run.seed, shuffle_dataset=False, max_steps=config.trainer.steps,
        per_device_train_batch_size=groups * size, num_generations=size, logging_steps=1, disable_tqdm=True,
        learning_rate=config.trainer.lr, lr_scheduler_type="constant", gradient_checkpointing=False,
        temperature=config.rollout.temperature, max_completion_length=config.rollout.max_response_tokens,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": task.text(p)} for p in prompts]),
        processing_class=tokenizer,
        callbacks=[Evaluation(task, config, lines, args.target)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
