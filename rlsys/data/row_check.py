"""Check of all rows of a run's data: `python -m rlsys.data.row_check --config RUN/config.yaml ...`.

The check reads, renders and encodes each row as the run does. It caches the counts by a fingerprint of the data and
of the code that reads it, so each table is checked once. The rollout process runs the command during the first steps
(rlsys/rollout/row_checks.py); `rlsys explain` checks small tables itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from rlsys.config import load_config
from rlsys.config.data import KeysConfig
from rlsys.core.cache import cache_folder
from rlsys.core.errors import UserError, disk_errors
from rlsys.core.parallel import map_ranges
from rlsys.core.tokenizer_files import files_digest
from rlsys.data import build_source
from rlsys.data.mixture import row_sources
from rlsys.data.row_source import RowSource, prompt_of_row
from rlsys.data.tables import Table
from rlsys.data.tokenizer import Tokenizer
from rlsys.engine_requests import Limits, RefusedPrompt

_READERS = ("datasets", "jinja2", "msgspec", "pyarrow", "tokenizers")
"""Packages that read, render and encode rows."""
MAX_LISTED_ROWS = 3
"""Maximum number of rows of each kind that a message lists."""
ROWS_PER_PROCESS = 2000
KINDS = {
    "too_long": "rows are too long, and are left out",
    "unreadable": "rows cannot be read, and are left out",
    "unanswered": "rows have no right answer",
    "empty_answer": "rows have an empty right answer",
}


@dataclass
class RowCounts:
    """Number of rows with a defect.

    Attributes:
        rows: number of checked rows.
        counts: number of rows of each kind of defect (KINDS).
        first: locations, or messages, of the first MAX_LISTED_ROWS rows of each kind.
    """

    rows: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    first: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def add(self, kind: str, row: str) -> None:
        self.counts[kind] += 1
        if len(self.first[kind]) < MAX_LISTED_ROWS:
            self.first[kind].append(row)

    def join(self, counts: RowCounts) -> None:
        self.rows += counts.rows
        for kind in KINDS:
            self.counts[kind] += counts.counts[kind]
            self.first[kind] = (self.first[kind] + counts.first[kind])[:MAX_LISTED_ROWS]

    def lines(self) -> Iterator[str]:
        """Yield one message for each kind that occurs, but none about answers if no row has an answer."""
        for kind, text in KINDS.items():
            count = self.counts[kind]
            if count and not (kind == "unanswered" and count == self.rows):
                suffix = f"; and {count - MAX_LISTED_ROWS:,} more" if count > MAX_LISTED_ROWS else ""
                yield f"{count:,} {text}: {'; '.join(self.first[kind])}{suffix}"


def check_rows(table: Table, keys: KeysConfig, tokenizer: Tokenizer, limits: Limits) -> RowCounts:
    """Read, render and encode all rows of a table, on all CPUs, and count those with a defect."""

    def check(start: int, stop: int) -> RowCounts:
        counts = RowCounts(stop - start)
        for number in range(start, stop):
            prompt = prompt_of_row(table, number, keys, tokenizer, number)
            if prompt.refusal:
                counts.add("unreadable", prompt.refusal)
                continue
            if "answer" not in prompt.entry:
                counts.add("unanswered", prompt.location)
            elif not str(prompt.entry["answer"]).strip():
                counts.add("empty_answer", prompt.location)
            try:
                limits.check_prompt(prompt.ids)
            except RefusedPrompt as e:
                kind = "too_long" if len(prompt.ids) >= limits.max_tokens else "unreadable"
                counts.add(kind, f"{prompt.location}: {e}")
        return counts

    totals = RowCounts()
    for part in map_ranges(len(table), check, ROWS_PER_PROCESS):
        totals.join(part)
    return totals


def row_counts(source: RowSource, limits: Limits, *, max_rows: int | None = None) -> RowCounts | None:
    """Return the counts of the source's training and held-out rows, from the cache, or else from a check.

    Args:
        max_rows: maximum number of rows to check; None: no limit.

    Returns:
        None if the cache has no counts and there are more than `max_rows` rows.
    """
    keyed_tables = [(source.rows, source.keys)]
    if source.held_rows is not source.rows:
        keyed_tables.append((source.held_rows, source.heldout_keys))
    tables = [table for table, _ in keyed_tables]
    file = cache_folder("rows") / f"{_fingerprint(tables, source, limits)}.json"
    if file.is_file():
        with disk_errors(file, UserError):
            return RowCounts(**json.loads(file.read_text(encoding="utf-8")))
    if max_rows is not None and sum(map(len, tables)) > max_rows:
        return None
    counts = RowCounts()
    for table, keys in keyed_tables:
        counts.join(check_rows(table, keys, source.tokenizer, limits))
    with (
        disk_errors(file, UserError),
        tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as partial,
    ):
        partial.write(json.dumps(asdict(counts)))
        partial.close()
        Path(partial.name).replace(file)
    return counts


def checking_files() -> list[Path]:
    """Return the source files on which the counts depend: the code that reads and checks rows."""
    rlsys = Path(__file__).parents[1]
    packages = (rlsys / "data", rlsys / "engine_requests")
    return [*(file for package in packages for file in sorted(package.glob("*.py"))), rlsys / "core/texts.py"]


def _fingerprint(tables: Sequence[Table], source: RowSource, limits: Limits) -> str:
    tokenizer = source.tokenizer
    parts = [
        [hashlib.sha256(file.read_bytes()).hexdigest() for file in checking_files()],
        [version(package) for package in _READERS],
        [(table.name, table.digest) for table in tables],
        source.keys.model_dump(),
        source.heldout_keys.model_dump(),
        files_digest(tokenizer.path),
        tokenizer.chat_args,
        asdict(limits),
    ]
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=16).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Check all rows of a run's data; started by the rollout process."
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved config of the run")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of ids of the model")
    parser.add_argument(
        "--context-length", type=int, required=True, help="maximum tokens of prompt and response"
    )
    args = parser.parse_args()
    os.nice(19)
    config = load_config(args.config)
    limits = Limits(args.vocab_size, args.context_length)
    counts = RowCounts()
    try:
        for source in row_sources(build_source(config, Tokenizer.of(config))):
            counts.join(row_counts(source, limits) or RowCounts())
    except UserError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    print(json.dumps(asdict(counts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
