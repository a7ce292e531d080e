"""Files as people have them: ends of lines, byte order marks, compression, arrays, shards, long integers."""

from __future__ import annotations

import bz2
import gzip
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.data import Tokenizer, build_source
from rlsys.data.tables import read_lines, read_parquet
from rlsys.rollout.dry_run import dry_run

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
BOM = b"\xef\xbb\xbf"
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "é\u2028\u0085", "answer": "3"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
PRETTY = json.dumps(ROWS, ensure_ascii=False, indent=1).encode()
LONG = 10**6000


def lines_of(*paths: Path) -> tuple[list[Any], list[str]] | str:
    """Rows and their places, or the refusal."""
    try:
        table = read_lines(paths)
        locations = [table.location(i).rpartition("/")[2] for i in range(len(table))]
        return [table.row(i) for i in range(len(table))], locations
    except UserError as refusal:
        return str(refusal)


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("rows.jsonl", LINES, (1, 2)),
        ("rows.jsonl", LINES.replace(b"\n", b"\r\n"), (1, 2)),
        ("rows.jsonl", LINES[:-1], (1, 2)),
        ("rows.jsonl", b"\n \t\n" + LINES.replace(b"\n", b"\n\n"), (3, 5)),
        ("rows.jsonl", BOM + LINES.replace(b"\n", b"\n" + BOM), (1, 2)),
        ("rows.jsonl", LINES.decode().encode("utf-16"), (1, 2)),
        ("rows.jsonl", LINES.decode().encode("utf-32"), (1, 2)),
        ("rows.jsonl.gz", gzip.compress(LINES), (1, 2)),
        ("rows.jsonl.gz", b"".join(gzip.compress(line) for line in LINES.splitlines(keepends=True)), (1, 2)),
        ("rows.jsonl.zst", zstandard.compress(LINES), (1, 2)),
        (
            "rows.jsonl.zst",
            b"".join(zstandard.compress(line) for line in LINES.splitlines(keepends=True)),
            (1, 2),
        ),
        ("rows.jsonl.zst", b"\x50\x2a\x4d\x18\x04\0\0\0size" + zstandard.compress(LINES), (1, 2)),  # as pzstd
        ("rows", gzip.compress(BOM + LINES), (1, 2)),
        ("rows.json", json.dumps(ROWS).encode(), (1, 1)),
        ("rows.json", json.dumps(ROWS).encode() + b"\n", (1, 1)),
        ("rows.json", PRETTY, (2, 6)),
        ("rows.json", BOM + b" \n" + PRETTY, (3, 7)),
        ("rows.json.gz", gzip.compress(PRETTY), (2, 6)),
    ],
    ids=(
        "lines",
        "CRLF",
        "no last line feed",
        "blank lines",
        "marks at each line",
        "UTF-16",
        "UTF-32",
        "gzip",
        "gzip, two members",
        "zstd",
        "zstd, two frames",
        "zstd, a skippable frame",
        "gzip without an ending",
        "array",
        "array and line feed",
        "indented array",
        "array with a mark",
        "array, gzip",
    ),
)
def test_the_form_of_a_file_leaves_its_rows(
    name: str, content: bytes, lines: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert lines_of(path) == (ROWS, [f"{name}:{line}" for line in lines])


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (str(2**63), 2**63),
        (str(-(10**40)), -(10**40)),
        ("1" + "0" * 6000, "1" + "0" * 6000),
        ("-1" + "0" * 6000, "-1" + "0" * 6000),
    ],
    ids=["64 bits", "40 digits", "6,000 digits", "6,000 digits, negative"],
)
def test_a_long_integer_costs_no_file(array: bool, number: str, expected: object, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = f'{{"prompt": "1+1=", "answer": {number}, "info": {{"n": [{number}]}}}}'
    path.write_text(f"[{row}]" if array else f"{row}\n")
    assert lines_of(path) == (
        [{"prompt": "1+1=", "answer": expected, "info": {"n": [expected]}}],
        ["rows.jsonl:1"],
    )


def test_an_array_with_nan_is_read_as_lines_with_nan_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n{"prompt": "é", "x": NaN},\n\n {"prompt": "b", "x": -Infinity}\n]\n')
    result = lines_of(path)
    assert repr(result) == repr(
        (
            [{"prompt": "é", "x": float("nan")}, {"prompt": "b", "x": float("-inf")}],
            ["rows.json:2", "rows.json:4"],
        )
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl.gz", gzip.compress(LINES)[:-9], "broken compressed data"),
        ("rows.jsonl.zst", zstandard.compress(LINES * 9)[:-9], "broken compressed data"),
        ("rows.jsonl.bz2", bz2.compress(LINES), "expected plain, .gz or .zst"),
        ("rows.jsonl", LINES + b'{"prompt": "\xff"}\n', "rows.jsonl:3: cannot read: not UTF-8 text"),
        ("rows.json", b'[\n{"prompt": "a"},\n{"prompt": }]', "rows.json:3: not JSON"),
        ("rows.json", b'[{"prompt": "a"}\n{"prompt": "b"}]', "rows.json:2: not JSON"),
        ("rows.json", b"[]", "no rows; expected at least one"),
        ("rows.json", b"", "no rows; expected at least one"),
        ("rows.json", b'{\n "prompt": "a"}', "rows.json:1: not JSON; the file is one JSON object"),
    ],
    ids=(
        "cut gzip",
        "cut zstd",
        "bzip2",
        "a byte that is no text",
        "array without a value",
        "array without a comma",
        "empty array",
        "empty",
        "one object",
    ),
)
def test_a_broken_file_is_named_in_one_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    result = lines_of(path)
    assert isinstance(result, str) and message in result and name in result and "\n" not in result


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize(
    "path", ["shards", "shards/**", "shards/*/train-*", "shar[d]s", "shards/a/train-?.*"]
)
def test_a_folder_or_a_glob_of_shards_is_one_table(kind: str, path: str, tmp_path: Path) -> None:
    for stem, row in zip(("a/train-0", "a/train-1", "b/train-0"), (*ROWS, ROWS[0]), strict=True):
        file = tmp_path / f"shards/{stem}.{kind}"
        file.parent.mkdir(parents=True, exist_ok=True)
        if kind == "parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist([row]), file)
        else:
            content = (json.dumps(row) + "\n").encode()
            file.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    (tmp_path / "shards/README.md").write_text("# rows\n")
    (tmp_path / "shards/.cache").mkdir()
    (tmp_path / f"shards/.cache/x.{kind}").write_text("no rows")
    expected = [*ROWS, ROWS[0]][: 2 if path == "shards/a/train-?.*" else 3]
    try:
        shard_path = tmp_path / path
        table = read_parquet([shard_path]) if kind == "parquet" else read_lines([shard_path])
        rows = [table.row(i) for i in range(len(table))]
    except UserError as refusal:
        raise AssertionError(str(refusal)) from None
    assert rows == expected


def test_a_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    """Else the test set would be trained on."""
    for split in ("train", "test"):
        (tmp_path / f"{split}-00000-of-00001.jsonl").write_bytes(LINES)
    result = lines_of(tmp_path)
    assert isinstance(result, str) and "splits test, train" in result


@pytest.mark.parametrize(
    ("first", "second"),
    [("a.jsonl", "a.jsonl.gz"), ("a.jsonl.gz", "a.jsonl.zst"), ("b/a.json", "b/a.json.gzip")],
)
@pytest.mark.parametrize("path", [".", "**", "[ab]*", "**/a.*"])
def test_a_file_together_with_its_compressed_copy_is_refused(
    first: str, second: str, path: str, tmp_path: Path
) -> None:
    """Else its rows would count twice."""
    for name in (first, second, "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(LINES) if name.endswith(("gz", "gzip")) else LINES)
    result = lines_of(tmp_path / path)
    assert isinstance(result, str) and "\n" not in result, result
    assert f"{tmp_path / first} and {tmp_path / second}: " in result


INT, TEXT, BIG = pa.int64(), pa.string(), pa.large_string()
MESSAGE = {"role": "user", "content": "1+1="}
EMPTY = pa.array([[]], pa.list_(pa.null()))
EQUAL_COLUMNS: dict[str, list[Any]] = {
    "texts": [pa.array(["a"], TEXT), pa.array(["b"], BIG), pa.array(["c"], pa.string_view())],
    "a category": [pa.array(["a"]).dictionary_encode(), pa.array(["b"], TEXT), pa.array(["c"]).dictionary_encode()],
    "integers": [pa.array([1], pa.int32()), pa.array([2], INT), pa.array([3], pa.uint8())],
    "floats": [pa.array([0.5], pa.float32()), pa.array([0.25], pa.float64())],
    "no value in one": [pa.nulls(1), pa.array(["b"], BIG), pa.array(["c"], TEXT)],
    "no value in the last": [pa.array([[1]]), pa.nulls(1)],
    "lists of texts": [pa.array([["a"]], pa.list_(TEXT)), pa.array([["b"]], pa.large_list(BIG))],
    "an empty list": [EMPTY, pa.array([[MESSAGE]]), EMPTY],
    "messages": [
        pa.array([[MESSAGE]]),
        pa.array([[MESSAGE]], pa.large_list(pa.struct([("role", BIG), ("content", BIG)]))),
    ],
    "no value within": [
        pa.array([{"role": None, "n": 1}], pa.struct([("role", pa.null()), ("n", INT)])),
        pa.array([{"role": "a", "n": 2}], pa.struct([("role", BIG), ("n", pa.int32())])),
    ],
    "the same keys in another order": [pa.array([{"a": 1, "b": 2}]), pa.array([{"b": 4, "a": 3}])],
    "JSON": [pa.array(['{"a": 1}'], pa.json_()), pa.array(['{"a": 2}'], TEXT)],
}  # fmt: skip


def write_shards(folder: Path, columns: Sequence[Any]) -> list[Path]:
    files = [folder / f"{i}.parquet" for i in range(len(columns))]
    for file, column in zip(files, columns, strict=True):
        pyarrow.parquet.write_table(pa.table({"prompt": ["1+1="], "x": column}), file)
    return files


@pytest.mark.parametrize("columns", EQUAL_COLUMNS.values(), ids=EQUAL_COLUMNS)
def test_shards_with_equal_values_are_one_table(columns: list[Any], tmp_path: Path) -> None:
    write_shards(tmp_path, columns)
    try:
        table = read_parquet([tmp_path])
    except UserError as refusal:
        raise AssertionError(str(refusal)) from None
    expected = [value for column in columns for value in column.to_pylist()]
    assert [table.row(i)["x"] for i in range(len(table))] == expected
    assert [x for (x,) in table.columns(["x"])] == expected


DIFFERENT_COLUMNS: dict[str, tuple[Any, Any, str, str, str]] = {
    "text and number": (pa.array(["1"], BIG), pa.array([1]), "x", "large_string", "int64"),
    "integer and float": (pa.array([1]), pa.array([1.0]), "x", "int64", "double"),
    "text and list": (pa.array(["a"]), pa.array([["a"]]), "x", "string", "list<"),
    "items": (pa.array([["a"]]), pa.array([[1]]), "x", "string", "int64"),
    "within": (pa.array([[{"a": {"b": 1}}]]), pa.array([[{"a": {"b": "1"}}]]), "x.a.b", "int64", "string"),
}


@pytest.mark.parametrize("case", DIFFERENT_COLUMNS.values(), ids=DIFFERENT_COLUMNS)
def test_shards_with_different_columns_are_refused_by_name(
    case: tuple[Any, Any, str, str, str], tmp_path: Path
) -> None:
    first, second, name, type_of_first, type_of_second = case
    files = write_shards(tmp_path, [pa.nulls(1), first, first, second])
    with pytest.raises(UserError) as exc_info:
        read_parquet([tmp_path])
    line = str(exc_info.value)
    assert "\n" not in line and line.startswith(f"{files[3]}: column {name} is {type_of_second}"), line
    assert f"in {files[1]} it is {type_of_first}" in line


def config_of(path: Path, **data: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": MODEL}, "eval": {"prompts": 2},
            "data": {"source": "jsonl", "params": {"path": str(path)}, "reward": "exact_answer", **data},
        }
    )  # fmt: skip


def write(path: Path, count: int, change: Callable[[int], dict[str, Any]]) -> Path:
    rows = ({"prompt": f"{i}+1=", "answer": str(i + 1), **change(i)} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "media",
    [
        {"image_url": "http://a/b.png"},
        {"images": ["a.png"]},
        {"multi_modal_data": {"image": ["a.png"]}},
        {"audio_path": "a.wav"},
        {"video_url": "a.mp4"},
        {"image_bytes": "aGk="},
        {"media": [{"type": "image", "url": "a.png"}]},
        {"pixel_values": [[0.5]]},
    ],
    ids=lambda v: next(iter(v)),
)
def test_rows_with_media_are_refused(media: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 40, lambda i: media if i == 30 else {})
    message = "read as text"
    try:
        build_source(config_of(path), Tokenizer(MODEL))
    except UserError as refusal:
        message = str(refusal)
    assert f"rows.jsonl:31: has {next(iter(media))}" in message


def test_columns_about_text_are_no_media(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 40, lambda i: {"image_count": 0, "images": [], "media": None})
    build_source(config_of(path), Tokenizer(MODEL))


def test_all_rows_are_counted_that_cannot_be_used(tmp_path: Path) -> None:
    """400 rows: of the training rows, more than are looked at one by one."""
    kinds: list[dict[str, Any]] = [
        {"prompt": "1+" * 3000}, {"prompt": "\ud83d"}, {"answer": None}, {"answer": " "}
    ]  # fmt: skip
    path = write(
        tmp_path / "rows.jsonl",
        400,
        lambda i: {"prompt": f"{i}+1=", **kinds[i % 4]} if i > 99 else {},
    )
    notes = " ".join(dry_run(config_of(path)).notes)
    assert "75 rows have no right answer" in notes
    assert f"75 rows have an empty right answer: {path}:104; " in notes
    assert "75 rows are too long" in notes
    assert "75 rows cannot be read" in notes or "75 rows contain a lone UTF-16 surrogate" in notes


def test_a_shard_that_is_a_dangling_link_is_named(tmp_path: Path) -> None:
    """A part of the data that cannot be read is not left out silently."""
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl").symlink_to(tmp_path / "nothing")
    for path in (folder, folder / "*.jsonl"):
        words = lines_of(path)
        assert isinstance(words, str) and "b.jsonl" in words and "link" in words
    (folder / "b.jsonl").rename(folder / "b.md")
    assert len(lines_of(folder)[0]) == 2


def test_many_rows_are_opened_in_little_time(tmp_path: Path) -> None:
    """1.8 million rows in 10 s are 5.5 us a row; the bound leaves room for a slow machine (CPU time)."""
    path = write(tmp_path / "rows.jsonl", 50_000, lambda i: {"note": "x" * 400})
    config, tokenizer = config_of(path), Tokenizer(MODEL)
    start = time.process_time()
    source = build_source(config, tokenizer)
    source.train(0), source.heldout(2)
    assert time.process_time() - start < 50_000 * 12e-6
