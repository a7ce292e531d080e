"""Prompt sources of rows: `jsonl`, `parquet` and `dataset`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rlsys.config import Config
from rlsys.config.section import FilePath, NonNegative, Section
from rlsys.data.hub import read_dataset
from rlsys.data.rows import Row, check_texts, read_row
from rlsys.data.source import PromptSource, is_heldout, stable_hash
from rlsys.data.tables import Table, read_lines, read_parquet
from rlsys.data.tokenizer import TextTooLong, Tokenizer
from rlsys.errors import RowError, UserError
from rlsys.plugins import parse_params
from rlsys.texts import valid_text
from rlsys.types import CensorCause, Prompt


def _several(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Paths = Annotated[list[FilePath], BeforeValidator(_several), Field(min_length=1)]


class FileParams(Section):
    path: Paths
    """File, or a list of them. Rows have `prompt` (a text or a chat) or `messages`, and what the reward needs."""
    heldout_path: Paths | None = None
    """The same for held-out prompts; without it one row in eight of `path`, by the hash of its prompt."""
    shuffle_seed: NonNegative = 0
    """Further seed of the order; data.seed and run.seed change it too."""


class DatasetParams(Section):
    name: str
    """Folder of a data set (written by save_to_disk, or with data files), or its id on a hub."""
    subset: str | None = None
    """Which of its configurations, where it has several."""
    split: str = "train"
    """Split with the training prompts."""
    heldout_split: str | None = None
    """Split with the held-out prompts; without it one row in eight of `split`, by the hash of its prompt."""
    revision: str | None = None
    """Commit, tag or branch on the hub. `rlsys train` writes the commit down, so a run keeps its data."""
    shuffle_seed: NonNegative = 0
    """Further seed of the order; data.seed and run.seed change it too."""


class RowSource:
    """Prompts of a table, in an order that is shuffled anew in each epoch."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, rows: Table, held: Table | None, shuffle_seed: int
    ) -> None:
        self._keys, self._tokenizer = config.data.keys, tokenizer
        self._seed = (config.data.seed + config.run.seed, shuffle_seed)
        self._rows, self._held_rows = rows, held if held is not None else rows
        self.unreadable: list[str] = []
        """Why rows cannot be read as prompts, each with its place. A chat template may refuse others."""
        self.unanswered: list[str] = []
        """Places of rows without a right answer, where others have one."""
        keys = self._scan(rows)
        if held is None:
            taken = {key: i for i, key in reversed(list(enumerate(keys))) if is_heldout(key)}
        else:
            taken = {key: i for i, key in reversed(list(enumerate(self._scan(held))))}
        self._held = sorted(taken.values())
        self.held_keys = frozenset(taken)
        """Row.key of the prompts that are never trained."""
        self._train = list(range(len(rows)))
        self._all_keys = keys
        self.leave_out(self.held_keys)

    def _scan(self, table: Table) -> list[str]:
        """Row.key of each row. Raises RowError for what is no row."""
        keys, without = [], []
        for number in range(len(table)):
            row, where = self._read(table, number), table.place(number)
            keys.append(row.key)
            if "answer" not in row.entry:
                without.append(where)
            try:
                check_texts(row.entry, where)
            except RowError as e:
                self.unreadable.append(str(e))
        if len(without) < len(keys):
            self.unanswered += without
        return keys

    def leave_out(self, keys: Collection[str]) -> None:
        """Rows with these keys are not trained. Raises UserError when no other is left."""
        self._train = [i for i in self._train if self._all_keys[i] not in keys]
        if not self._train:
            raise UserError(
                f"data.params: {self._rows.place(0)}: no training prompt is left beside the held-out"
            )
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    @property
    def data_sources(self) -> frozenset[str] | None:
        """What its training rows have as `data_source`; "" for none."""
        return frozenset(
            str(self._read(self._rows, number).entry.get("data_source", "")) for number in self._train
        )

    def train(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self._train))
        number = self._train[self._order(epoch)[place]]
        return self._prompt(index, self._read(self._rows, number), self._rows.place(number))

    def heldout(self, n: int) -> list[Prompt]:
        if n > len(self._held):
            held, share = len(self._held), " (about one in eight)" if self._held_rows is self._rows else ""
            raise UserError(
                f"eval.prompts = {n}: of the rows from {self._held_rows.place(0)} on, {held} different prompts are "
                f"held out{share}; expected at most {held}, or more rows"
            )
        return [
            self._prompt(i, self._read(self._held_rows, number), self._held_rows.place(number))
            for i, number in enumerate(self._held[:n])
        ]

    def _read(self, table: Table, number: int) -> Row:
        return read_row(table.row(number), self._keys, table.place(number))

    def _epoch_order(self, epoch: int) -> list[int]:
        return sorted(range(len(self._train)), key=lambda i: stable_hash(self._seed, epoch, i, bits=64))

    def _prompt(self, index: int, row: Row, where: str) -> Prompt:
        """One that is refused where the row cannot be read as a prompt."""
        try:
            check_texts(row.entry, where)
            text = self._tokenizer.apply_chat(row.messages, tools=row.tools)
            ids = self._tokenizer.encode(text)
        except RowError as e:
            told = str(e) if str(e).startswith(where) else f"{where}: {e}"
            return Prompt(index, valid_text(row.key), [], row.entry, row.question, where, told)
        except TextTooLong as e:
            told = f"the prompt is {e} ({where})"
            return Prompt(
                index, "", [], row.entry, row.question, where, told, refusal_cause=CensorCause.PROMPT
            )
        return Prompt(index, text, ids, row.entry, row.question, where)

    def longest(self, count: int) -> list[Prompt]:
        """The training prompts of the rows with the longest texts, the longest first; each has its row's number in
        place of an index."""
        numbers = heapq.nlargest(count, self._train, key=lambda i: len(self._all_keys[i]))
        return [self._prompt(i, self._read(self._rows, i), self._rows.place(i)) for i in numbers]


def jsonl(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Prompts from files of JSON lines."""
    return _of_files(read_lines, config, tokenizer, params)


def parquet(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Prompts from Parquet files, verl's among them."""
    return _of_files(read_parquet, config, tokenizer, params)


def dataset(config: Config, tokenizer: Tokenizer, **params: Any) -> PromptSource:
    """Prompts from a data set of the `datasets` library, on disk or on a hub."""
    p = parse_params("data.params", DatasetParams, params)
    rows = read_dataset(p.name, p.subset, p.split, p.revision)
    held = read_dataset(p.name, p.subset, p.heldout_split, p.revision) if p.heldout_split else None
    return RowSource(config, tokenizer, rows, held, p.shuffle_seed)


def _of_files(
    read: Callable[[list[Path]], Table], config: Config, tokenizer: Tokenizer, params: dict[str, Any]
) -> PromptSource:
    p = parse_params("data.params", FileParams, params)
    held = None if p.heldout_path is None else read(p.heldout_path)
    return RowSource(config, tokenizer, read(p.path), held, p.shuffle_seed)
