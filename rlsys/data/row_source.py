"""Prompt sources whose prompts are rows of a table: `jsonl`, `parquet` and `dataset`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from rlsys.config import Config
from rlsys.config.data import KeysConfig
from rlsys.config.plugins import parse_params
from rlsys.config.section import FilePath, NonNegative, Positive, Section
from rlsys.core.errors import RowError, TooFewPrompts, UserError
from rlsys.core.parallel import map_ranges
from rlsys.core.seeds import stable_hash
from rlsys.core.texts import valid_text
from rlsys.core.types import CensorCause, Prompt
from rlsys.data.hub import read_dataset
from rlsys.data.row_files import of_field
from rlsys.data.rows import QuickKeys, check_texts, read_row
from rlsys.data.source import HELDOUT_ONE_IN, SPLIT_SHIFT, PromptSource, split_hash
from rlsys.data.tables import Table, read_lines, read_parquet
from rlsys.data.tokenizer import TextTooLong, Tokenizer

ROWS_A_PROCESS = 50_000
"""Number of rows for each process of a scan; for fewer, another process would not save time."""


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Paths = Annotated[list[FilePath], BeforeValidator(_as_list), Field(min_length=1)]


class RowParams(Section):
    """Parameters of all sources of rows."""

    shuffle: bool = True
    """Whether to shuffle the rows in each epoch; false: keep the order of the file."""
    shuffle_seed: NonNegative = 0
    """Seed of the order, in addition to data.seed and run.seed."""
    max_prompt_tokens: Positive | None = None
    """Maximum prompt length in tokens, with the chat template. Unset: the context minus the longest response."""
    overlong_prompts: Literal["drop", "left", "right"] = "drop"
    """Treatment of a longer prompt: its samples are omitted and counted (drop), or its tokens are truncated on the
    left or on the right."""
    heldout_keys: KeysConfig | None = None
    """Keys of the held-out rows. Unset: those of data.keys."""

    def fit(self, prompt: Prompt) -> Prompt:
        """Return the prompt; if it is longer than max_prompt_tokens, truncate or refuse it (overlong_prompts)."""
        limit, length = self.max_prompt_tokens, len(prompt.ids)
        if limit is None or length <= limit:
            return prompt
        if self.overlong_prompts == "drop":
            reason = (
                f"the prompt has {length} tokens, data.params.max_prompt_tokens = {limit} ({prompt.location})"
            )
            return replace(prompt, ids=[], refusal=reason, refusal_cause=CensorCause.PROMPT)
        ids = prompt.ids[-limit:] if self.overlong_prompts == "left" else prompt.ids[:limit]
        return replace(prompt, ids=ids)


class FileParams(RowParams):
    path: Paths
    """A file, a folder or glob of files, or a list of these; JSON also as .gz or .zst.
    Rows have `prompt` (a text or a chat) or `messages`, and the keys that the reward needs."""
    heldout_path: Paths | None = None
    """Files of the held-out prompts; the file names determine the format. Unset: one row in eight of `path`, by the
    hash of its prompt."""


class DatasetParams(RowParams):
    name: str
    """Folder of a data set (written by save_to_disk, or with data files), or its id on a hub."""
    subset: str | None = None
    """Configuration (subset) of the data set. Unset: its only or default one."""
    split: str = "train"
    """Split with the training prompts."""
    heldout_split: str | None = None
    """Split with the held-out prompts. Unset: one row in eight of `split`, by the hash of its prompt."""
    revision: str | None = None
    """Commit, tag or branch on the hub. `rlsys train` records the commit, so that a resumed run has the same data."""


class RowSource:
    """Prompts of a table, by default shuffled in each epoch.

    Attributes:
        rows: table of the training prompts.
        held_rows: table of the held-out prompts, which may be the same.
        keys: keys of `rows`.
        heldout_keys: keys of `held_rows`.
        held_keys: `split_hash` of the held-out prompts, [prompts].
        held_is_trained: whether the held-out prompts are also trained (HeldOut.is_trained).
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        rows: Table,
        heldout_table: Table | None,
        params: RowParams,
    ) -> None:
        """Scan the rows, and split them into training and held-out prompts.

        Args:
            rows: table of the training prompts.
            heldout_table: table of the held-out prompts; None: hold out one in eight prompts of `rows`.

        Raises:
            UserError: a row cannot be read, or all prompts are held out.
        """
        self.keys, self.tokenizer = config.data.keys, tokenizer
        self.heldout_keys = self.keys
        if heldout_table is not None and params.heldout_keys is not None:
            self.heldout_keys = params.heldout_keys
        self._seed = (config.data.seed + config.run.seed, params.shuffle_seed)
        self._params = params
        self.rows, self.held_rows = rows, heldout_table if heldout_table is not None else rows
        scan = scan_rows(rows, self.keys)
        self._hashes, self._lengths = scan.hashes, scan.lengths
        split = hold_out(scan, None if heldout_table is None else scan_rows(heldout_table, self.heldout_keys))
        self.held_keys, self.held_is_trained = split.keys, split.is_trained
        self._heldout_numbers = split.rows
        self.data_sources: frozenset[str] | None = scan.data_sources
        """Values of `data_source` in the rows; "" stands for rows without it."""
        self._train = np.arange(len(rows))
        self.leave_out(self.held_keys)

    def leave_out(self, keys: np.ndarray) -> None:
        """Remove the rows of some prompts from the training prompts.

        Args:
            keys: `split_hash` of the prompts, [prompts].

        Raises:
            UserError: no row remains.
        """
        self._train = self._train[~np.isin(self._hashes[self._train], keys)]
        if not len(self._train):
            raise UserError(
                f"data.params: {self.rows.location(0)}: all prompts are held out; expected other training prompts"
            )
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def train(self, index: int) -> Prompt:
        epoch, position = divmod(index, len(self._train))
        number = int(self._train[self._order(epoch)[position]])
        return self._prompt(index, self.rows, number, self.keys)

    def heldout(self, n: int) -> list[Prompt]:
        if n > (count := len(self._heldout_numbers)):
            share = " (about one in eight)" if self.held_rows is self.rows else ""
            rows = f"{len(self.held_rows)} rows ({self.held_rows.location(0)} on)"
            raise TooFewPrompts(
                f"eval.prompts = {n}: of {rows} {count} different prompts are held out{share}; "
                f"expected at most {count}, more rows, or eval.prompts unset",
                count,
            )
        return [
            self._prompt(i, self.held_rows, number, self.heldout_keys)
            for i, number in enumerate(self._heldout_numbers[:n].tolist())
        ]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the order of the training rows in an epoch, [training rows]."""
        if not self._params.shuffle:
            return np.arange(len(self._train))
        # The raw stream of a bit generator is the same in all versions of numpy; permutation() is not.
        generator = np.random.Philox(key=stable_hash(self._seed, epoch, bits=64))
        return np.argsort(generator.random_raw(len(self._train)), kind="stable")

    def _prompt(self, index: int, table: Table, number: int, keys: KeysConfig) -> Prompt:
        return self._params.fit(prompt_of_row(table, number, keys, self.tokenizer, index))

    def longest(self, count: int) -> list[Prompt]:
        """Return the `count` training prompts with the longest texts, longest first.

        The index of each prompt is the number of its row.
        """
        order = np.argsort(-self._lengths[self._train].astype(np.int64), kind="stable")[:count]
        return [self._prompt(i, self.rows, i, self.keys) for i in self._train[order].tolist()]


def prompt_of_row(table: Table, number: int, keys: KeysConfig, tokenizer: Tokenizer, index: int) -> Prompt:
    """Return the prompt of a row; a refused prompt if the row cannot be read or its text is too long.

    Args:
        number: number of the row in the table.
        index: index of the prompt.
    """
    location, row = table.location(number), None
    try:
        row = read_row(table.row(number), keys, location)
        check_texts(row.entry, location)
        text = tokenizer.apply_chat(row.messages, tools=row.tools)
        ids = tokenizer.encode(text)
    except RowError as e:
        reason = str(e) if str(e).startswith(location) else f"{location}: {e}"
        if row is None:
            return Prompt(index, "", [], {}, "", location, reason)
        return Prompt(index, valid_text(row.key), [], row.entry, row.question, location, reason)
    except TextTooLong as e:
        assert row is not None
        reason = f"the prompt is {e} ({location})"
        return Prompt(
            index, "", [], row.entry, row.question, location, reason, refusal_cause=CensorCause.PROMPT
        )
    return Prompt(index, text, ids, row.entry, row.question, location)


@dataclass(frozen=True)
class Scan:
    """Properties of the prompts of a table.

    Attributes:
        hashes: `split_hash` of each row's prompt, [rows].
        lengths: characters of each row's `Row.key`, [rows].
        data_sources: values of `data_source` in the rows; "" stands for rows without it.
    """

    hashes: np.ndarray
    lengths: np.ndarray
    data_sources: frozenset[str]


def scan_rows(table: Table, keys: KeysConfig) -> Scan:
    """Scan all rows of a table, in several processes if it is large.

    Raises:
        RowError: a row has no valid prompt; the message has its location.
    """
    # A wrong key concerns all rows of most tables, so the first row reports it before the scan.
    read_row(table.row(0), keys, table.location(0))
    quick = QuickKeys(keys)

    def scan(start: int, stop: int) -> Scan:
        hashes, lengths = array("Q"), array("I")
        sources: set[str] = set()
        for number, values in enumerate(table.columns(quick.names, start, stop), start):
            key = quick.key(values) if type(values) is tuple else None
            if key is None:
                row = table.row(number)
                key = read_row(row, keys, table.location(number)).key
                sources.add(str(row.get("data_source", "")))
            else:
                sources.add(quick.data_source(values))
            hashes.append(split_hash(key))
            lengths.append(len(key))
        return Scan(np.array(hashes, np.uint64), np.array(lengths, np.uint32), frozenset(sources))

    parts = map_ranges(len(table), scan, ROWS_A_PROCESS)
    return Scan(
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        frozenset().union(*(part.data_sources for part in parts)),
    )


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts of a table.

    Attributes:
        keys: `split_hash` of the prompts that are never trained, [prompts].
        rows: numbers of the rows with the held-out prompts, ascending, [held-out prompts].
        is_trained: whether the held-out prompts are all prompts of the table, and are trained, because a split would
            have left no training or no held-out prompt. `keys` is then empty.
    """

    keys: np.ndarray
    rows: np.ndarray
    is_trained: bool


def hold_out(rows: Scan, heldout_rows: Scan | None) -> HeldOut:
    """Select the held-out prompts, each by its first row.

    Args:
        rows: scan of the training table.
        heldout_rows: scan of the held-out table, whose prompts are all held out; None: hold out one in eight prompts
            of `rows`, by the hash of the prompt.
    """
    if heldout_rows is not None:
        keys, firsts = np.unique(heldout_rows.hashes, return_index=True)
        return HeldOut(keys, np.sort(firsts), is_trained=False)
    keys, firsts = np.unique(rows.hashes, return_index=True)
    selected = keys >> np.uint64(SPLIT_SHIFT) & np.uint64(HELDOUT_ONE_IN - 1) == 0
    if not selected.any() or selected.all():  # a few prompts, for example in a test of overfitting
        return HeldOut(keys[:0], np.sort(firsts), is_trained=True)
    return HeldOut(keys[selected], np.sort(firsts[selected]), is_trained=False)


def heldout_count(config: Config) -> int | None:
    """Return the number of held-out prompts of `data.source` jsonl or parquet; None for other sources.

    It needs no tokenizer.

    Raises:
        UserError: a file or a row cannot be read.
    """
    read = FILE_READERS.get(config.data.source)
    if read is None:
        return None
    table, heldout_table, params = _read_files(read, config.data.params)
    rows = scan_rows(table, config.data.keys)
    if heldout_table is None:
        return len(hold_out(rows, None).rows)
    return len(hold_out(rows, scan_rows(heldout_table, params.heldout_keys or config.data.keys)).rows)


def jsonl(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Build the source of JSON files from `params` (FileParams)."""
    return _file_source(read_lines, config, tokenizer, params)


def parquet(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Build the source of Parquet files, such as verl's, from `params` (FileParams)."""
    return _file_source(read_parquet, config, tokenizer, params)


def dataset(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Build the source of a data set of the `datasets` library from `params` (DatasetParams)."""
    p = parse_params("data.params", DatasetParams, params)
    rows = read_dataset(p.name, p.subset, p.split, p.revision)
    heldout_rows = read_dataset(p.name, p.subset, p.heldout_split, p.revision) if p.heldout_split else None
    return RowSource(config, tokenizer, rows, heldout_rows, p)


def _reader_of(
    paths: Sequence[Path], default: Callable[[list[Path]], Table]
) -> Callable[[list[Path]], Table]:
    """Return the reader for the endings of `paths`; `default` if they are unknown or differ in format."""
    if all(path.suffix == ".parquet" for path in paths):
        return read_parquet
    return read_lines if all(path.suffix in (".json", ".jsonl") for path in paths) else default


def _file_source(
    read: Callable[[list[Path]], Table], config: Config, tokenizer: Tokenizer, params: dict[str, Any]
) -> PromptSource:
    rows, heldout_rows, p = _read_files(read, params)
    return RowSource(config, tokenizer, rows, heldout_rows, p)


def _read_files(
    read: Callable[[list[Path]], Table], params: dict[str, Any]
) -> tuple[Table, Table | None, FileParams]:
    """Return the training table, the held-out table (None: data.params names none), and the parsed parameters."""
    p = parse_params("data.params", FileParams, params)
    with of_field("data.params"):
        heldout_rows = None if p.heldout_path is None else _reader_of(p.heldout_path, read)(p.heldout_path)
        return read(p.path), heldout_rows, p


FILE_READERS: dict[str, Callable[[list[Path]], Table]] = {"jsonl": read_lines, "parquet": read_parquet}
