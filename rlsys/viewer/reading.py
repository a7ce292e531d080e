"""Samples of a run as text, for the terminal and the dashboard.

RunReader's tokens, decoded by the run's tokenizer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlsys.config import load_run_config
from rlsys.core.errors import UserError
from rlsys.core.run_files import CONFIG_FILE
from rlsys.data.tokenizer import Tokenizer
from rlsys.ledger.reader import RunReader
from rlsys.ledger.samples import MAX_PAGE_SAMPLES, SampleQuery, SampleView


@dataclass(frozen=True)
class Part:
    """Response tokens [start, end) of one author: weights of one version, or a tool."""

    start: int
    end: int
    version: int
    trained_steps: int | None
    """Train steps that these weights contain; None if the ledger does not know the version."""
    tool: bool
    interrupted: bool
    """Whether an engine call was interrupted just before it."""


@dataclass(frozen=True)
class Page:
    samples: list[SampleView]
    next_skip: int | None
    """Offset of the next page; None: there is none."""
    searched: int
    """Samples whose text was searched."""


class RunTexts:
    """Texts of one run folder. Raises UserError without a config, or if its tokenizer is not available."""

    def __init__(self, run_dir: Path) -> None:
        self.reader = RunReader(run_dir)
        if not (run_dir / CONFIG_FILE).is_file():
            raise UserError(f"{run_dir}: not a run folder: no {CONFIG_FILE} in it")
        self.config = load_run_config(run_dir)
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.of(self.config)
        return self._tokenizer

    def page(
        self, query: SampleQuery, pattern: re.Pattern[str] | None = None, max_searched: int = 4096
    ) -> Page:
        """Return `query.limit` samples whose response matches `pattern`.

        The search and the page end after `max_searched` samples.
        """
        if pattern is None:
            views = self.reader.samples(query)
            has_more = len(views) == query.limit
            return Page(views, query.skip + len(views) if has_more else None, len(views))
        matches: list[SampleView] = []
        searched, step = 0, min(MAX_PAGE_SAMPLES, max_searched)
        while searched < max_searched:
            batch = self.reader.samples(replace(query, skip=query.skip + searched, limit=step))
            for view in batch:
                searched += 1
                if pattern.search(self.response(view)):
                    matches.append(view)
                    if len(matches) == query.limit:
                        return Page(matches, query.skip + searched, searched)
            if len(batch) < step:
                return Page(matches, None, searched)
        return Page(matches, query.skip + searched, searched)

    def iterate(
        self, query: SampleQuery, pattern: re.Pattern[str] | None, count: int
    ) -> Iterator[SampleView]:
        """Yield up to `count` samples, from as many pages as needed."""
        skip: int | None = 0
        while skip is not None and count > 0:
            page = self.page(replace(query, skip=skip, limit=min(count, MAX_PAGE_SAMPLES)), pattern)
            yield from page.samples
            count -= len(page.samples)
            skip = page.next_skip

    def prompt(self, view: SampleView) -> str:
        return self.tokenizer.decode(view.sample.prompt_ids)

    def response(self, view: SampleView) -> str:
        """Return the response's text; empty if the tokens are not stored any more."""
        return self.tokenizer.decode(view.sample.response_ids)

    def describe(self, view: SampleView) -> dict[str, Any]:
        """Describe a sample for JSON, without its arrays."""
        sample = view.sample
        return {
            "sample": sample.sample_id, "group": sample.group_id, "place": sample.index, "step": view.train_step,
            "state": view.state, "fate": view.outcome, "status": sample.status, "reward": sample.reward,
            "rewards": sample.named_rewards, "answer": sample.answer, "reason": sample.censor_reason,
            "tokens": view.tokens, "kept": view.has_tokens,
            "turns": turns_of(view), "resumes": sample.resumes, "prompt": self.prompt(view),
            "response": self.response(view) if view.has_tokens else None,
            "parts": [asdict(part) for part in parts_of(view)], "interrupts": view.interrupts,
            "branches_off": None if sample.fork is None else {"place": sample.fork.source, "at": sample.fork.at},
            "given": sample.inherited_tokens,
            "discarded": sample.discarded, "sequences": sequences_of(view, self.tokenizer.decode),
        }  # fmt: skip


def parts_of(view: SampleView) -> list[Part]:
    """Split the response by author; also if its tokens are not stored any more."""
    sample = view.sample
    interrupted = {tokens for tokens, _ in view.interrupts}
    cuts = {0, view.tokens} | interrupted
    cuts |= {at for s in sample.spans for at in (s.start, s.end)}
    cuts |= {at for o in sample.observed for at in (o.start, o.end)}
    boundaries = sorted(boundary for boundary in cuts if 0 <= boundary <= view.tokens)
    parts = []
    for start, end in pairwise(boundaries):
        version = next((s.version for s in sample.spans if s.start <= start < s.end), -1)
        tool = any(s.start <= start < s.end for s in sample.observed)
        steps = view.trained_steps.get(version)
        parts.append(Part(start, end, version, steps, tool, start in interrupted))
    return parts


def sequences_of(view: SampleView, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """Describe the conversations after the first one, with their texts as long as these are stored."""
    return [
        {
            "sequence": q.sequence, "parent": q.parent, "aside": q.aside, "tokens": q.tokens,
            "prompt": decode(q.prompt_ids), "response": decode(q.response_ids) if view.has_tokens else None,
        }
        for q in view.sample.extra_sequences
    ]  # fmt: skip


def turns_of(view: SampleView) -> int:
    """Count the ranges of the model's own text."""
    is_model = [not part.tool for part in parts_of(view)]
    return sum(
        current and not previous for previous, current in zip([False, *is_model], is_model, strict=False)
    )


def arrays_of(view: SampleView) -> dict[str, list[float | None]]:
    """Return the engine's log-prob, the trainer's, and the advantage of each token.

    None for NaN, which JSON lacks.
    """
    arrays = {"mu": view.sample.mu, "logp": view.logp, "advantages": view.advantages}
    return {name: [v if math.isfinite(v) else None for v in values] for name, values in arrays.items()}
