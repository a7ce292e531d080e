"""Prompt sources: random access to training prompts, and a held-out set that is never trained.

`train(index)` depends only on (seed, index), so a source has no state: the ledger's next group id is the data
position, and a resumed run continues with the same prompts. A hash of the problem's text assigns it to training or
held-out prompts, so both are disjoint for any seeds, number of held-out prompts and run.
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
"""One in this many problems, by the hash of its text, is held out."""
SPLIT_SHIFT = 33
"""The upper 31 bits of `split_hash` determine the side."""
HELDOUT_PROMPTS = 128
"""Held-out prompts of an evaluation whose `prompts` is unset, if the source has as many."""
ATTEMPTS = 1000
"""Number of draws for a prompt after which a source counts as having no more problems on the required side."""

_quoted = json.encoder.encode_basestring_ascii
Entry = dict[str, Any]
Render = Callable[[Entry], str]


class PromptSource(Protocol):
    def train(self, index: int) -> Prompt:
        """Return the training prompt of an index >= 0; it is always the same."""
        ...

    def heldout(self, n: int) -> list[Prompt]:
        """Return the first `n` different held-out prompts. They are always the same, and a prefix of a longer
        list."""
        ...


def draw_heldout(source: PromptSource, count: int | None) -> list[Prompt]:
    """Return `count` held-out prompts; None: HELDOUT_PROMPTS, or as many as the source has if these are fewer.

    Raises:
        UserError: The source has fewer than `count`, or none.
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
    """Return `stable_hash("split", problem, bits=64)`, which identifies a text and determines its side."""
    digest = hashlib.blake2b(f'["split", {_quoted(problem)}]'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True)
class Task:
    """One reasoning-gym task: its name, its arguments and its share of the prompts."""

    name: str
    share: float = 1.0
    args: dict[str, Any] = field(default_factory=dict)
    size: int = 10_000
    """Items of one reasoning-gym dataset; prompts beyond it come from a dataset of another seed."""


class ReasoningGymSource:
    """Prompts from reasoning-gym tasks. `render`: function from an entry to the user's message."""

    data_sources: frozenset[str] | None = frozenset([""])
    """Values of `data_source` in its prompts' entries: none."""

    def __init__(
        self, tasks: Sequence[Task], render: Render, tokenizer: Tokenizer, seed: int, eval_seed: int
    ) -> None:
        self._tasks, self._render, self._tokenizer = list(tasks), render, tokenizer
        self._train_stream, self._heldout_stream = f"train {seed}", f"heldout {eval_seed}"
        self._dataset = lru_cache(maxsize=32)(_dataset)
        for task in self._tasks:  # reports a wrong name or argument before the start
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
        """Return the entry of (stream, index, attempt); tasks are chosen in proportion to their shares."""
        pick = (
            stable_hash(stream, "task", index, attempt, bits=53) / 2**53 * sum(t.share for t in self._tasks)
        )
        for task in self._tasks:
            pick -= task.share
            if pick < 0:
                break
        block, item = divmod(index, task.size)
        seed = stable_hash(stream, task.name, block, attempt)
        entry: Entry = self._dataset(task.name, json.dumps(task.args), task.size, seed)[item]
        return entry

    def _prompt(self, index: int, entry: Entry) -> Prompt:
        question = self._render(entry)
        text = self._tokenizer.apply_chat([{"role": "user", "content": question}])
        return Prompt(index, text, self._tokenizer.encode(text), entry, question)

    def _names(self) -> str:
        return ", ".join(t.name for t in self._tasks)


def _dataset(name: str, args: str, size: int, seed: int) -> Any:
    """Return a reasoning-gym dataset.

    Raises:
        UserError: the task rejects its arguments; the message has the task's reason.
    """
    import reasoning_gym  # 1.5 s to import; only where a source needs it

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
    """Items per generated dataset; lower it for tasks that prepare all their items beforehand."""


def reasoning_gym(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Return the prompt source of a reasoning-gym task."""
    p = parse_params("data.params", ReasoningGymParams, params)

    def render(entry: Entry) -> str:
        return "\n".join(part for part in (str(entry["question"]), p.instruction) if part)

    task = Task(p.task, args=p.args, size=p.size)
    return ReasoningGymSource([task], render, tokenizer, config.data.seed + config.run.seed, config.eval.seed)
