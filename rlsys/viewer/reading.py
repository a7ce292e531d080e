"""A run's samples as text, for the terminal and the dashboard: RunReader's tokens, decoded by the run's tokenizer."""

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
    """Train steps that these weights contain; None where the ledger does not know the version."""
    tool: bool
    interrupted: bool
    """An engine call was interrupted just before it."""


@dataclass(frozen=True)
class Page:
    samples: list[SampleView]
    next_skip: int | None
    """For the next page; None: there is none."""
    looked: int
    """Samples whose text was searched."""


class RunTexts:
    """Of one run folder. Raises UserError where it has no config, or its tokenizer is not here."""

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

    def page(self, query: SampleQuery, pattern: re.Pattern[str] | None = None, look: int = 4096) -> Page:
        """`query.limit` samples of which the response's text has the `pattern`; after `look` samples the search rests
        and the page ends."""
        if pattern is None:
            found = self.reader.samples(query)
            more = len(found) == query.limit
            return Page(found, query.skip + len(found) if more else None, len(found))
        matches: list[SampleView] = []
        looked, step = 0, min(MAX_PAGE_SAMPLES, look)
        while looked < look:
            batch = self.reader.samples(replace(query, skip=query.skip + looked, limit=step))
            for seen in batch:
                looked += 1
                if pattern.search(self.response(seen)):
                    matches.append(seen)
                    if len(matches) == query.limit:
                        return Page(matches, query.skip + looked, looked)
            if len(batch) < step:
                return Page(matches, None, looked)
        return Page(matches, query.skip + looked, looked)

    def every(self, query: SampleQuery, pattern: re.Pattern[str] | None, most: int) -> Iterator[SampleView]:
        """Up to `most` of them, however many pages that takes."""
        skip: int | None = 0
        while skip is not None and most > 0:
            page = self.page(replace(query, skip=skip, limit=min(most, MAX_PAGE_SAMPLES)), pattern)
            yield from page.samples
            most -= len(page.samples)
            skip = page.next_skip

    def prompt(self, seen: SampleView) -> str:
        return self.tokenizer.decode(seen.sample.prompt_ids)

    def response(self, seen: SampleView) -> str:
        """Empty where the tokens are no longer kept."""
        return self.tokenizer.decode(seen.sample.response_ids)

    def described(self, seen: SampleView) -> dict[str, Any]:
        """As JSON has it, without its arrays."""
        sample = seen.sample
        return {
            "sample": sample.sample_id, "group": sample.group_id, "place": sample.index, "step": seen.train_step,
            "state": seen.state, "fate": seen.outcome, "status": sample.status, "reward": sample.reward,
            "rewards": sample.named_rewards, "answer": sample.answer, "reason": sample.censor_reason,
            "tokens": seen.tokens, "kept": seen.has_tokens,
            "turns": turns_of(seen), "resumes": sample.resumes, "prompt": self.prompt(seen),
            "response": self.response(seen) if seen.has_tokens else None,
            "parts": [asdict(part) for part in parts_of(seen)], "interrupts": seen.interrupts,
            "branches_off": None if sample.fork is None else {"place": sample.fork.source, "at": sample.fork.at},
            "given": sample.inherited_tokens,
            "discarded": sample.discarded, "sequences": sequences_of(seen, self.tokenizer.decode),
        }  # fmt: skip


def parts_of(seen: SampleView) -> list[Part]:
    """Who wrote which response tokens; also where these are no longer kept."""
    sample = seen.sample
    interrupted = {tokens for tokens, _ in seen.interrupts}
    cuts = {0, seen.tokens} | interrupted
    cuts |= {at for s in sample.spans for at in (s.start, s.end)}
    cuts |= {at for o in sample.observed for at in (o.start, o.end)}
    ordered = sorted(cut for cut in cuts if 0 <= cut <= seen.tokens)
    parts = []
    for start, end in pairwise(ordered):
        version = next((s.version for s in sample.spans if s.start <= start < s.end), -1)
        tool = any(s.start <= start < s.end for s in sample.observed)
        steps = seen.trained_steps.get(version)
        parts.append(Part(start, end, version, steps, tool, start in interrupted))
    return parts


def sequences_of(seen: SampleView, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """The conversations after the first one; their texts as long as these are kept."""
    return [
        {
            "sequence": q.sequence, "parent": q.parent, "aside": q.aside, "tokens": q.tokens,
            "prompt": decode(q.prompt_ids), "response": decode(q.response_ids) if seen.has_tokens else None,
        }
        for q in seen.sample.extra_sequences
    ]  # fmt: skip


def turns_of(seen: SampleView) -> int:
    """Stretches of the model's own text."""
    own = [not part.tool for part in parts_of(seen)]
    return sum(mine and not before for before, mine in zip([False, *own], own, strict=False))


def arrays_of(seen: SampleView) -> dict[str, list[float | None]]:
    """Of each response token: the engine's log-prob, the trainer's, the advantage; as JSON, which has no NaN."""
    arrays = {"mu": seen.sample.mu, "logp": seen.logp, "advantages": seen.advantages}
    return {name: [v if math.isfinite(v) else None for v in values] for name, values in arrays.items()}
