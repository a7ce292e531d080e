"""Interface of prompt sources, the split into training and held-out prompts, and the source `reasoning_gym`.

A prompt source has no state: `train(index)` depends on the seed and the index only. The next index is the ledger's
next group id, so a resumed run continues with the same prompts. A hash of the problem's text assigns a problem to
training or to the held-out prompts, so no held-out prompt is trained, for any seed and number of held-out prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from pydantic import Field

from rlsys.config import Config
from rlsys.config.plugins import parse_params
from rlsys.config.section import Positive, Section
from rlsys.core.errors import TooFewPrompts, UserError
from rlsys.core.seeds import stable_hash
from rlsys.core.types import Prompt
from rlsys.data.tokenizer import Tokenizer

HELDOUT_ONE_IN = 8
"""The hash of its text selects one problem in this many as a held-out one."""
SPLIT_SHIFT = 33
"""Bits of `split_hash` below those that select held-out problems."""
HELDOUT_PROMPTS = 128
"""Maximum number of prompts of an evaluation whose `prompts` is unset."""
ATTEMPTS = 1000
"""Maximum number of draws for a new training or held-out problem."""

_quoted = json.encoder.encode_basestring_ascii
Entry = dict[str, Any]
Render = Callable[[Entry], str]


class PromptSource(Protocol):
    def train(self, index: int) -> Prompt:
        """Return the training prompt of an index >= 0. Calls with the same index return the same prompt."""
        ...

    def heldout(self, n: int) -> list[Prompt]:
        """Return `n` different held-out prompts. The list for a larger `n` starts with the same prompts.

        Raises:
            TooFewPrompts: the source has fewer than `n`.
        """
        ...


def draw_heldout(source: PromptSource, count: int | None) -> list[Prompt]:
    """Return held-out prompts.

    Args:
        count: number of prompts; None: HELDOUT_PROMPTS, or all that the source has if it has fewer.

    Raises:
        UserError: the source has fewer than `count` held-out prompts, or none.
    """
    if count is not None:
        return source.heldout(count)
    count = HELDOUT_PROMPTS
    while True:
        try:
            return source.heldout(count)
        except TooFewPrompts as e:
            if (count := min(e.count, count - 1)) < 1:
                raise


def is_heldout(problem: str) -> bool:
    """Return whether a problem's text is on the held-out side of the split."""
    return split_hash(problem) >> SPLIT_SHIFT & (HELDOUT_ONE_IN - 1) == 0


def split_hash(problem: str) -> int:
    """Return `stable_hash("split", problem, bits=64)`, which identifies a problem, and decides if it is held out."""
    digest = hashlib.blake2b(f'["split", {_quoted(problem)}]'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True)
class Task:
    """One reasoning-gym task.

    Attributes:
        name: name of the task in reasoning-gym.
        share: weight of the task among the tasks of a source.
        args: arguments of the task.
        size: number of items of one reasoning-gym dataset; further prompts come from datasets with other seeds.
    """

    name: str
    share: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)
    size: int = 10_000


class ReasoningGymSource:
    """Prompts from reasoning-gym tasks."""

    data_sources: frozenset[str] | None = frozenset([""])
    """Values of `data_source` in the prompts' entries; "" stands for entries without it."""

    def __init__(
        self, tasks: Sequence[Task], render: Render, tokenizer: Tokenizer, seed: int, eval_seed: int
    ) -> None:
        """Load the tasks.

        Args:
            render: returns the user's message for an entry.
            seed: seed of the training prompts.
            eval_seed: seed of the held-out prompts.

        Raises:
            UserError: a task does not exist, or rejects its arguments.
        """
        self._tasks, self._render, self._tokenizer = list(tasks), render, tokenizer
        self._train_stream, self._heldout_stream = f"train {seed}", f"heldout {eval_seed}"
        self._dataset = lru_cache(maxsize=32)(_dataset)
        for task in self._tasks:
            self._dataset(task.name, json.dumps(task.args), task.size, 0)

    def train(self, index: int) -> Prompt:
        return self._prompt(index, self.entry(index))

    def entry(self, index: int) -> Entry:
        """Return the reasoning-gym entry of `train(index)`."""
        for attempt in range(ATTEMPTS):
            entry = self._draw(self._train_stream, index, attempt)
            if not is_heldout(entry["question"]):
                return entry
        raise UserError(
            f"data.params: {self._names()} returned no training problem in {ATTEMPTS} draws; expected more problems"
        )

    def heldout(self, n: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        questions: set[str] = set()
        index = draws_without_new = 0
        while len(prompts) < n:
            entry = self._draw(self._heldout_stream, index, 0)
            index += 1
            draws_without_new += 1
            if is_heldout(entry["question"]) and entry["question"] not in questions:
                questions.add(entry["question"])
                prompts.append(self._prompt(len(prompts), entry))
                draws_without_new = 0
            if draws_without_new > ATTEMPTS:
                raise TooFewPrompts(
                    f"eval.prompts = {n}: {self._names()} has only {len(prompts)} different held-out problems",
                    len(prompts),
                )
        return prompts

    def _draw(self, stream: str, index: int, attempt: int) -> Entry:
        """Return the entry of (stream, index, attempt)."""
        task = self._draw_task(stream, index, attempt)
        block, item = divmod(index, task.size)
        seed = stable_hash(stream, task.name, block, attempt)
        entry: Entry = self._dataset(task.name, json.dumps(task.args), task.size, seed)[item]
        return entry

    def _draw_task(self, stream: str, index: int, attempt: int) -> Task:
        """Draw a task with a probability proportional to its share."""
        total = sum(task.share for task in self._tasks)
        remainder = stable_hash(stream, "task", index, attempt, bits=53) / 2**53 * total
        for task in self._tasks:
            remainder -= task.share
            if remainder < 0:
                break
        return task

    def _prompt(self, index: int, entry: Entry) -> Prompt:
        question = self._render(entry)
        text = self._tokenizer.apply_chat([{"role": "user", "content": question}])
        return Prompt(index, text, self._tokenizer.encode(text), entry, question)

    def _names(self) -> str:
        return ", ".join(t.name for t in self._tasks)


def _dataset(name: str, args: str, size: int, seed: int) -> Any:
    """Create a reasoning-gym dataset.

    Args:
        args: arguments of the task, as JSON.
        size: number of items.

    Raises:
        UserError: the task does not exist, or rejects its arguments; the message has reasoning-gym's reason.
    """
    import reasoning_gym  # the import takes 1.5 s

    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(args))
    except (AssertionError, TypeError, ValueError) as e:  # raised by tasks for invalid arguments
        raise UserError(f"data.params: reasoning-gym task {name!r} with {args}: {e}") from None


class ReasoningGymParams(Section):
    task: str
    """Name of a reasoning-gym task."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task."""
    instruction: str = "Give the final answer between <answer> and </answer>."
    """Text after the question in the user's message."""
    size: Positive = 10_000
    """Number of items of a generated dataset. Lower it for tasks that generate all items in advance."""


def reasoning_gym(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Build the source of one reasoning-gym task from `params` (ReasoningGymParams)."""
    p = parse_params("data.params", ReasoningGymParams, params)

    def render(entry: Entry) -> str:
        return "\n".join(part for part in (str(entry["question"]), p.instruction) if part)

    task = Task(p.task, args=p.args, size=p.size)
    return ReasoningGymSource([task], render, tokenizer, config.data.seed + config.run.seed, config.eval.seed)
