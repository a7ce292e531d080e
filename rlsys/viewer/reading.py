"""RunTexts: the samples of a run as text, for the terminal and the dashboard."""

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
    """Response tokens [start, end) that weights of one version, or a tool, have generated.

    Attributes:
        version: weight version; -1: unknown.
        trained_steps: number of train steps that these weights contain; None: the ledger does not know the version.
        tool: whether the tokens are from a tool.
        interrupted: whether an engine call was interrupted at `start`.
    """

    start: int
    end: int
    version: int
    trained_steps: int | None
    tool: bool
    interrupted: bool


@dataclass(frozen=True)
class Page:
    """A page of samples.

    Attributes:
        next_skip: offset of the next page; None: there is none.
        searched: number of samples whose text was searched.
    """

    samples: list[SampleView]
    next_skip: int | None
    searched: int


class RunTexts:
    """The samples of one run folder as text.

    Raises:
        UserError: the folder has no config. Methods raise it if the tokenizer is not available.
    """

    def __init__(self, run_dir: Path) -> None:
        self.reader = RunReader(run_dir)
        if not (run_dir / CONFIG_FILE).is_file():
            raise UserError(f"{run_dir}: not a run folder: contains no {CONFIG_FILE}")
        self.config = load_run_config(run_dir)
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, loaded at the first use."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.of(self.config)
        return self._tokenizer

    def page(
        self, query: SampleQuery, pattern: re.Pattern[str] | None = None, max_searched: int = 4096
    ) -> Page:
        """Return a page of samples.

        Args:
            query: filter, order, offset and size of the page.
            pattern: regular expression that the response must match; None: all responses.
            max_searched: number of searched samples after which the page ends, even if it is not full.
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
        """Yield up to `count` samples of consecutive pages. Arguments as of `page`."""
        skip: int | None = 0
        while skip is not None and count > 0:
            page = self.page(replace(query, skip=skip, limit=min(count, MAX_PAGE_SAMPLES)), pattern)
            yield from page.samples
            count -= len(page.samples)
            skip = page.next_skip

    def prompt(self, view: SampleView) -> str:
        """Return the text of the prompt."""
        return self.tokenizer.decode(view.sample.prompt_ids)

    def response(self, view: SampleView) -> str:
        """Return the text of the response; empty if its tokens are no longer stored."""
        return self.tokenizer.decode(view.sample.response_ids)

    def describe(self, view: SampleView) -> dict[str, Any]:
        """Return the fields of a sample as JSON, without the arrays of `arrays_of`."""
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
    """Split a response into the parts of one weight version or tool, and at interruptions.

    The tokens need not be stored.
    """
    sample = view.sample
    interrupted = {tokens for tokens, _ in view.interrupts}
    cuts = {0, view.tokens} | interrupted
    cuts |= {boundary for s in sample.spans for boundary in (s.start, s.end)}
    cuts |= {boundary for o in sample.observed for boundary in (o.start, o.end)}
    boundaries = sorted(boundary for boundary in cuts if 0 <= boundary <= view.tokens)
    parts = []
    for start, end in pairwise(boundaries):
        version = next((s.version for s in sample.spans if s.start <= start < s.end), -1)
        tool = any(s.start <= start < s.end for s in sample.observed)
        steps = view.trained_steps.get(version)
        parts.append(Part(start, end, version, steps, tool, start in interrupted))
    return parts


def sequences_of(view: SampleView, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """Return the fields of the sequences after the first one as JSON. A response that is no longer stored is None."""
    return [
        {
            "sequence": q.sequence, "parent": q.parent, "aside": q.aside, "tokens": q.tokens,
            "prompt": decode(q.prompt_ids), "response": decode(q.response_ids) if view.has_tokens else None,
        }
        for q in view.sample.extra_sequences
    ]  # fmt: skip


def turns_of(view: SampleView) -> int:
    """Return the number of turns: ranges of tokens of the model that are not interrupted by a tool."""
    is_model = [not part.tool for part in parts_of(view)]
    return sum(
        current and not previous for previous, current in zip([False, *is_model], is_model, strict=False)
    )


def arrays_of(view: SampleView) -> dict[str, list[float | None]]:
    """Return `mu`, `logp` and `advantages` of each response token, with None instead of NaN, which JSON lacks.

    `mu` is the engine's log-prob, `logp` the trainer's.
    """
    arrays = {"mu": view.sample.mu, "logp": view.logp, "advantages": view.advantages}
    return {name: [v if math.isfinite(v) else None for v in values] for name, values in arrays.items()}
