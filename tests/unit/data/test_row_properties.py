"""Rows as strangers write them: what is a row is read as it was written, whatever the form of its file; what is no
prompt is one line that names file and line. Strategies: tests/helpers/odd_values.py."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from rlsys.config import Config
from rlsys.config.data import KeysConfig
from rlsys.core.errors import RowError, UserError
from rlsys.data import Tokenizer
from rlsys.data.chats import chats, labels, pairs
from rlsys.data.row_source import RowParams, RowSource, prompt_of_row, scan_rows
from rlsys.data.rows import QuickKeys, read_row
from rlsys.data.tables import Arrow, read_lines, read_parquet
from tests.helpers.odd_values import ATOMS, mutated, texts, values

pytestmark = pytest.mark.gate
MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
CONFIG = Config.model_validate({"model": {"path": MODEL}, "data": {"reward": "exact_answer"}})
TOKENIZER = Tokenizer(MODEL)
KEYS = KeysConfig()
QUICK = QuickKeys(KEYS)
HALF = "\ud83d"
FIRST = {"prompt": "1+1="}
"""A file that begins with a list is one list of all rows."""

MESSAGE = {"role": "user", "content": "1+1="}
CHAT = {"prompt": [MESSAGE], "answer": "2", "data_source": "sums", "tools": None}
CONTENTS = st.one_of(
    texts(), st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts()}), max_size=2)
)
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("system", "user", "assistant", "tool")), "content": CONTENTS}
    ),
    mutated(MESSAGE),
    values(1),
)
PROMPTS = st.one_of(texts(), st.lists(MESSAGES, max_size=3), values(2))
ROWS = st.one_of(
    st.fixed_dictionaries(
        {"prompt": PROMPTS}, optional={"answer": values(1), "data_source": ATOMS, "note": values()}
    ),
    st.fixed_dictionaries(
        {"messages": PROMPTS, "reward_model": mutated({"ground_truth": "2", "style": "rule"})}
    ),
    st.fixed_dictionaries({"prompt": texts()}, optional={"images": values(1), "tools": values(2)}),
    mutated(CHAT),
    st.dictionaries(texts(max_size=2), ATOMS, min_size=1, max_size=3),
    st.dictionaries(st.sampled_from(QUICK.names), values(1), max_size=2).map(lambda more: CHAT | more),
    values(2),
)


def same(a: Any, b: Any) -> bool:
    """Equal, with NaN equal to itself, and 1 other than 1.0 and True."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def packed(form: str, content: bytes) -> bytes:
    return {"plain": bytes, "gz": gzip.compress, "zst": zstandard.compress}[form](content)


@given(
    rows=st.lists(st.dictionaries(texts(max_size=3), values(), max_size=3), min_size=1, max_size=4),
    ascii_only=st.booleans(),
    end=st.sampled_from(("\n", "\r\n", "\n\n", " \t\n")),
    last=st.booleans(),
    mark=st.booleans(),
    form=st.sampled_from(("plain", "gz", "zst")),
    kind=st.sampled_from(("lines", "array", "pretty array")),
)
def test_rows_are_read_as_they_were_written(
    rows: list[dict[str, Any]], ascii_only: bool, end: str, last: bool, mark: bool, form: str, kind: str
) -> None:
    """Halves of characters stand in files as escapes alone."""
    encoded_rows = [json.dumps(row) for row in rows]
    if not ascii_only:
        unicode_rows = [json.dumps(row, ensure_ascii=False) for row in rows]
        encoded_rows = [a if HALF in b else b for a, b in zip(encoded_rows, unicode_rows, strict=True)]
    if kind == "lines":
        content = end.join(encoded_rows) + end * last
        lines = [1 + i * end.count("\n") for i in range(len(rows))]
    else:
        between = ",\n" if kind == "pretty array" else ", "
        content = f"[{between.join(encoded_rows)}]"
        lines = [1 + i * between.count("\n") for i in range(len(rows))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_bytes(packed(form, b"\xef\xbb\xbf" * mark + content.encode()))
        table = read_lines([file])
        assert len(table) == len(rows)
        for i, row in enumerate(rows):
            assert same(table.row(i), row)
            assert table.location(i) == f"{file}:{lines[i]}"


@given(rows=st.lists(ROWS, min_size=1, max_size=5))
def test_a_row_yields_a_prompt_or_an_error_with_its_location(rows: list[Any]) -> None:
    rows = [FIRST, *rows]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = read_lines([file])
        assert len(table) == len(rows)
        for i in range(len(rows)):
            prompt = prompt_of_row(table, i, KEYS, TOKENIZER, i)
            assert prompt.location == f"{file}:{i + 1}"
            if prompt.refusal:
                assert f"{file}:{i + 1}" in prompt.refusal
                assert prompt.refusal.splitlines() == [prompt.refusal]
                assert not prompt.ids
            else:
                assert prompt.ids == TOKENIZER.encode(prompt.text)


@given(rows=st.lists(ROWS, min_size=1, max_size=5))
def test_quick_keys_agree_with_reading_the_full_row(rows: list[Any]) -> None:
    """All rows are looked at by a few of their keys."""
    rows = [FIRST, *rows]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        table = read_lines([file])
        for i, few in enumerate(table.columns(QUICK.names)):
            if type(few) is tuple and (key := QUICK.key(few)) is not None:
                assert key == read_row(table.row(i), KEYS, table.location(i)).key
        try:
            hashes = scan_rows(table, KEYS).hashes.tolist()
        except UserError as e:
            assert str(e).startswith(f"{file}:") and str(e).splitlines() == [str(e)]
        else:
            row_hashes = [
                scan_rows(Arrow([table.row(i)], "one"), KEYS).hashes.tolist() for i in range(len(rows))
            ]
            assert hashes == [h for hash_list in row_hashes for h in hash_list]


TABLES = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(
                st.fixed_dictionaries({"content": texts(surrogates=False), "role": st.just("user")}),
                min_size=1,
                max_size=2,
            ),
            "reward_model": st.fixed_dictionaries(
                {"ground_truth": texts(surrogates=False), "style": st.just("rule")}
            ),
            "extra": st.one_of(st.none(), st.integers(-9, 9)),
        }
    ),
    min_size=1,
    max_size=4,
)


@given(rows=TABLES)
def test_parquet_and_json_lines_give_the_same_prompts(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines, parquet = Path(folder) / "rows.jsonl", Path(folder) / "rows.parquet"
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), parquet)
        tables = read_lines([lines]), read_parquet([parquet])
        for i in range(len(rows)):
            json_prompt, parquet_prompt = (prompt_of_row(table, i, KEYS, TOKENIZER, i) for table in tables)
            assert (json_prompt.ids, json_prompt.entry, bool(json_prompt.refusal)) == (
                parquet_prompt.ids,
                parquet_prompt.entry,
                bool(parquet_prompt.refusal),
            )


def source(rows: Sequence[Any], **params: Any) -> RowSource:
    return RowSource(CONFIG, TOKENIZER, Arrow(list(rows), "rows"), None, RowParams(**params))


def test_an_epoch_without_shuffling_has_the_order_of_the_rows() -> None:
    rows = [{"prompt": f"{i}+1="} for i in range(30)]
    row_source = source(rows, shuffle=False)
    locations = [row_source.train(i).location for i in range(60)]
    lines = [int(location.split()[-1]) for location in locations]
    count = len(set(lines))
    assert lines[:count] == sorted(lines[:count]) == lines[count : 2 * count]


@pytest.mark.parametrize("cut", ["drop", "left", "right"])
def test_an_overlong_prompt_is_dropped_or_truncated(cut: str) -> None:
    rows = [{"prompt": f"{i} + {'9' * 40} ="} for i in range(9)]
    full_prompt = source(rows, shuffle=False).train(0)
    limit = len(full_prompt.ids) - 3
    prompt = source(rows, shuffle=False, max_prompt_tokens=limit, overlong_prompts=cut).train(0)
    expected = {"drop": [], "left": full_prompt.ids[3:], "right": full_prompt.ids[:limit]}[cut]
    assert prompt.ids == expected
    assert bool(prompt.refusal) == (cut == "drop")
    assert source(rows, shuffle=False, max_prompt_tokens=limit + 3).train(0) == full_prompt


@given(data=st.data(), count=st.integers(1, 60), copies=st.integers(0, 3))
@settings(max_examples=40)
def test_a_prompt_is_on_one_side_whatever_the_order_and_its_copies(
    data: st.DataObject, count: int, copies: int
) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i)} for i in range(count)]
    duplicates = data.draw(st.lists(st.sampled_from(rows), min_size=copies, max_size=copies))
    mixed = source(data.draw(st.permutations([*rows, *duplicates])))
    plain = source(rows)
    assert set(mixed.held_keys.tolist()) == set(plain.held_keys.tolist())
    heldout_questions = (
        {p.question for p in mixed.heldout(len(mixed.held_keys))} if len(mixed.held_keys) else set()
    )
    trained = [mixed.train(i).question for i in range(len(mixed._train))]
    assert heldout_questions.isdisjoint(trained)
    assert len(trained) == sum(row["prompt"] not in heldout_questions for row in [*rows, *duplicates])
    assert set(trained) | heldout_questions == {row["prompt"] for row in rows}


@pytest.mark.parametrize("key", ["prompt", "note", "tools", "answer"])
def test_deep_nesting_is_a_row_like_others_or_one_line(key: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    deep = "[" * 3000 + "]" * 3000
    file.write_text(f'{{"prompt": "1+1=", "answer": "2", "{key}": {deep}}}\n{{"prompt": "1+2="}}\n')
    table = read_lines([file])
    prompt = prompt_of_row(table, 0, KEYS, TOKENIZER, 0)
    assert not prompt.refusal or (f"{file}:1" in prompt.refusal and "\n" not in prompt.refusal)
    assert not prompt_of_row(table, 1, KEYS, TOKENIZER, 1).refusal


FIND = (Phase.explicit, Phase.generate)
"""Without the search for the smallest case, which takes minutes on a busy host."""
KEY_PATHS = st.sampled_from(
    (None, "prompt", "note", "reward_model.ground_truth", "reward_model", "a.b", "answer")
)
OWN_KEYS = st.builds(KeysConfig, prompt=KEY_PATHS, answer=KEY_PATHS, tools=KEY_PATHS)


@given(row=ROWS, keys=OWN_KEYS)
@settings(max_examples=200, phases=FIND)
def test_a_row_error_names_its_location_for_any_keys(row: Any, keys: KeysConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text(json.dumps(FIRST) + "\n" + json.dumps(row) + "\n")
        table, quick = read_lines([file]), QuickKeys(keys)
        prompt = prompt_of_row(table, 1, keys, TOKENIZER, 1)
        if prompt.refusal:
            assert f"{file}:2" in prompt.refusal
            assert prompt.refusal.splitlines() == [prompt.refusal]
        try:
            scan_rows(table, keys)
        except UserError as e:
            assert f"{file}:" in str(e) and str(e).splitlines() == [str(e)]
        (few,) = table.columns(quick.names, 1)
        if type(few) is tuple and (key := quick.key(few)) is not None:
            assert key == read_row(row, keys, "").key


TURNS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(("system", "user", "assistant", "tool")), "content": CONTENTS}
        ),
        MESSAGES,
    ),
    max_size=3,
)
ANSWERED = {
    "prompt": "1+1=", "messages": [MESSAGE, {"role": "assistant", "content": "2"}], "completion": "2",
    "chosen": "2", "rejected": "3", "margin": 0.5, "label": True, "tools": None, "prompt_ids": [4],
    "completion_ids": [5], "chosen_ids": [5], "rejected_ids": [6],
}  # fmt: skip
WHOLE = {
    "chat": {"messages": ANSWERED["messages"], "tools": None},
    "pair": {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5},
    "label": {"prompt": "1+1=", "completion": "2", "label": True},
}
ANSWERED_ROWS = st.one_of(
    *map(mutated, WHOLE.values()),
    st.builds(
        lambda names, changed: {n: ANSWERED[n] for n in names} | changed,
        st.lists(st.sampled_from(sorted(ANSWERED)), min_size=1, max_size=6, unique=True),
        st.dictionaries(st.sampled_from(sorted(ANSWERED)), st.one_of(values(2), TURNS, texts()), max_size=2),
    ),
    values(2),
)


@pytest.mark.parametrize(("form", "whole"), [(chats, "chat"), (pairs, "pair"), (labels, "label")])
@given(row=ANSWERED_ROWS)
@example(row=WHOLE["pair"] | {"margin": math.nan})
@example(row=WHOLE["pair"] | {"margin": 10**400})
@example(row=WHOLE["pair"] | {"prompt_ids": [True], "chosen_ids": [True], "rejected_ids": [True]})
@settings(max_examples=200, phases=FIND)
def test_an_sft_row_yields_traces_or_an_error_with_its_location(form: Any, whole: str, row: Any) -> None:
    first = {"prompt": "1+1=", "completion": "2"} if whole == "chat" else WHOLE[whole]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text(json.dumps(first) + "\n" + json.dumps(row) + "\n")
        try:
            traces = form(CONFIG, TOKENIZER, path=[file], batch=2)(0)
        except UserError as e:
            assert f"{file}:2" in str(e) and str(e).splitlines() == [str(e)]
            return
        assert len(traces) == (4 if whole == "pair" else 2)
        for trace in traces:
            assert trace.response_ids and math.isfinite(trace.margin)
            assert all(0 <= i < TOKENIZER.vocab_size for i in (*trace.prompt_ids, *trace.response_ids))


def test_null_tools_of_a_configured_key_are_no_tools() -> None:
    """Tables have null where only other rows have schemas."""
    keys = KeysConfig(tools="functions.schemas")
    row = {"prompt": "1+1=", "answer": "2", "functions": {"schemas": None}}
    assert read_row(row, keys, "rows.parquet:1").tools is None
    with pytest.raises(RowError, match="has no such key"):
        read_row({"prompt": "1+1=", "answer": "2"}, keys, "rows.parquet:1")
