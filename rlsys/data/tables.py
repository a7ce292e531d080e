"""Tables of rows: JSON lines, JSON arrays, Parquet, and data sets of the `datasets` library.

A table holds the bytes of its files, or Arrow's buffers, and the position of each row. `row` converts one row to
Python objects; `columns` reads a few keys of all rows, several times as fast.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import itertools
import json
import mmap
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import zstandard
from msgspec.structs import astuple

from rlsys.core.errors import RowError, UserError
from rlsys.core.texts import shorten
from rlsys.data.row_files import PathError, row_files

_PARQUET = b"PAR1"
"""First bytes of a Parquet file."""
_UNICODE = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
"""Byte order marks of other encodings. UTF-32 comes first, because its mark starts with the mark of UTF-16."""
_BOM = codecs.BOM_UTF8
_CHUNK = 2**25
"""Bytes that a scan of a file reads at once."""
_ROWS_AT_ONCE = 10_000
_TOO_DEEP = "the JSON is nested too deeply; expected JSON that Python's parser accepts"
_LONGEST_INTEGER = 4000
"""Maximum number of digits of an integer; Python converts at most 4,300."""

Data = bytes | mmap.mmap


class Table(Protocol):
    @property
    def name(self) -> str:
        """The paths, or the data set and its split, for messages."""
        ...

    def __len__(self) -> int: ...

    def row(self, number: int) -> Any:
        """Return a row.

        Args:
            number: 0-based number of the row.

        Raises:
            RowError: the row cannot be read.
        """
        ...

    def location(self, number: int) -> str:
        """Return the location of a row for messages, "FILE:LINE" or "NAME, row NUMBER"."""
        ...

    def columns(self, names: Collection[str], start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Yield the values of some keys of each row.

        Args:
            names: the keys.
            start: number of the first row.
            stop: number after the last row; None: all further rows.

        Yields:
            the tuple of the row's values of `names`, with UNSET for a missing key; or the whole row, if only `row`
            can read it.
        """
        ...

    @property
    def digest(self) -> str:
        """Digest of the content, in hexadecimal."""
        ...


class Lines:
    """The rows of JSON files, in the order of the files."""

    def __init__(self, files: Sequence[JsonFile], name: str) -> None:
        self._files = files
        self._firsts = np.cumsum([0, *(len(file) for file in files)])
        self.name = name

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _locate(self, number: int) -> tuple[JsonFile, int]:
        """Return the file of row `number`, and the number of the row in the file."""
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._files[file], number - int(self._firsts[file])

    def row(self, number: int) -> Any:
        file, number_in_file = self._locate(number)
        return file.row(number_in_file)

    def location(self, number: int) -> str:
        file, number_in_file = self._locate(number)
        return file.location(number_in_file)

    def columns(self, names: Collection[str], start: int = 0, stop: int | None = None) -> Iterator[Any]:
        fields = [(f"f{i}", Any, msgspec.UNSET) for i in range(len(names))]
        names_of_fields = {f"f{i}": name for i, name in enumerate(names)}
        decode = msgspec.json.Decoder(msgspec.defstruct("Columns", fields, rename=names_of_fields)).decode
        last = len(self) if stop is None else stop
        for file, first in zip(self._files, self._firsts.tolist(), strict=False):
            begin, end = max(start - first, 0), min(last - first, len(file))
            data = file.data
            spans = zip(file.starts[begin:end].tolist(), file.ends[begin:end].tolist(), strict=True)
            for number, (a, b) in enumerate(spans, begin):
                try:
                    yield astuple(decode(data[a:b]))
                except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                    yield file.row(number)  # not an object, or JSON that only Python's json accepts

    @cached_property
    def digest(self) -> str:
        return _digest(file.data for file in self._files)


@dataclass(frozen=True)
class JsonFile:
    """A file of JSON rows.

    Attributes:
        data: the decompressed content.
        starts: offset of the first byte of each row in `data`, [rows].
        ends: offset after the last byte of each row, [rows].
        lines: 1-based line of each row, [rows].
    """

    path: Path
    data: Data
    starts: np.ndarray
    ends: np.ndarray
    lines: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def location(self, number: int) -> str:
        return f"{self.path}:{self.lines[number]}"

    def row(self, number: int) -> Any:
        data = bytes(self.data[self.starts[number] : self.ends[number]])
        try:
            return _DECODER.decode(data.decode())
        except RecursionError:
            raise RowError(f"{self.location(number)}: {_TOO_DEEP}") from None
        except UnicodeDecodeError as e:
            raise RowError(f"{self.location(number)}: not UTF-8 text: {e.reason} at byte {e.start}") from None
        except json.JSONDecodeError as e:
            starts_object = self.lines[number] == 1 and data[:1] in (b"{", b"[")
            if starts_object and _is_json(bytes(self.data)):
                reason = "; the file is one JSON object, expected one a line, or an array"
            else:
                reason = f": {e}"
            raise RowError(f"{self.location(number)}: not JSON{reason}") from None


def _integer(digits: str) -> int | str:
    """Return the integer, or its digits as text if Python cannot convert that many."""
    return int(digits) if len(digits) <= _LONGEST_INTEGER else digits


_DECODER = json.JSONDecoder(parse_int=_integer)
_SEPARATOR = re.compile(r"[\s,]*")


def read_lines(paths: Sequence[Path]) -> Lines:
    """Read JSON files: each has one row a line, or is one array of rows, plain or compressed by gzip or zstd.

    Args:
        paths: files, and folders and globs of files.

    Raises:
        UserError: a file cannot be read, or there are no rows; the message has the path.
    """
    files = [_read_json(path) for path in row_files(paths, "jsonl")]
    table = Lines([file for file in files if len(file)], ", ".join(map(str, paths)))
    if not len(table):
        raise UserError(f"{table.name}: no rows; expected at least one")
    return table


def _read_json(path: Path) -> JsonFile:
    data = _content(path)
    if data[:4] == _PARQUET:
        raise UserError(f"{path}: a Parquet file; expected JSON, or data.source = parquet")
    data = _to_utf8(path, data)
    newlines = _newlines(path, data)
    if bytes(data[:_CHUNK]).removeprefix(_BOM).lstrip()[:1] == b"[":
        array = _array(path, data, newlines)
        if array is not None:
            return array
    return _json_lines(path, data, newlines)


def _to_utf8(path: Path, data: Data) -> Data:
    """Convert a text with the byte order mark of UTF-16 or UTF-32 to UTF-8; return other data unchanged.

    Raises:
        UserError: the text does not have the encoding of its mark.
    """
    for mark, encoding in _UNICODE.items():
        if data[: len(mark)] == mark:
            try:
                return data[:].decode(encoding).encode()
            except UnicodeError as e:
                raise UserError(f"{path}: cannot read: not {encoding.upper()} text: {e}") from None
    return data


def _json_lines(path: Path, data: Data, newlines: np.ndarray) -> JsonFile:
    """Locate the rows of JSON lines: all lines that are not blank, without a byte order mark."""
    starts = np.concatenate([[0], newlines + 1])
    ends = np.concatenate([newlines, [len(data)]])
    lines = np.arange(1, len(starts) + 1)
    is_row = starts < ends
    first = np.zeros(len(starts), np.uint8)
    first[is_row] = np.frombuffer(data, np.uint8)[starts[is_row]] if len(data) else 0
    for i in np.flatnonzero(is_row & (first != ord("{"))).tolist():
        line = data[starts[i] : ends[i]]
        if line.startswith(_BOM):  # concatenated files have marks in the middle, too
            starts[i] += len(_BOM)
            line = line[len(_BOM) :]
        is_row[i] = bool(line.strip())
    return JsonFile(path, data, starts[is_row], ends[is_row], lines[is_row])


def _array(path: Path, data: Data, newlines: np.ndarray) -> JsonFile | None:
    """Locate the rows of a file that is one JSON array. Return None if each line is an array.

    Raises:
        UserError: the file is not JSON; the message has path and line.
    """
    body: Data = data
    try:
        if data[: len(_BOM)] == _BOM:
            body = data[len(_BOM) :]
        spans = []
        start = len(data) - len(body)
        for raw in msgspec.json.decode(body, type=list[msgspec.Raw]):
            row = bytes(raw)
            start = data.find(row, start)
            spans.append((start, start + len(row)))
            start += len(row)
    except (msgspec.MsgspecError, RecursionError):
        end = int(newlines[0]) if len(newlines) else len(data)
        if end < len(data) and _is_json(bytes(data[:end]).removeprefix(_BOM)):
            return None
        return _parse_array(path, data)
    extents = np.array(spans, np.int64).reshape(-1, 2)
    lines = np.searchsorted(newlines, extents[:, 0]) + 1
    return JsonFile(path, data, extents[:, 0], extents[:, 1], lines)


def _parse_array(path: Path, data: Data) -> JsonFile:
    """Locate the rows of a JSON array with Python's json, which accepts more input than msgspec, for example NaN.

    Raises:
        UserError: the file is not JSON; the message has path and line.
    """
    text = bytes(data).decode().removeprefix("\ufeff")
    try:
        count = len(_DECODER.decode(text))
    except json.JSONDecodeError as e:
        raise UserError(f"{path}:{e.lineno}: not JSON: {e.msg} at column {e.colno}") from None
    except RecursionError:
        raise UserError(f"{path}: {_TOO_DEEP}") from None
    rows: list[bytes] = []
    lines: list[int] = []
    line = 1  # of the last row's start
    start, end = 0, text.index("[") + 1  # of the last row
    for _ in range(count):
        next_start = _SEPARATOR.match(text, end).end()  # type: ignore[union-attr]
        line += text.count("\n", start, next_start)
        start = next_start
        _, end = _DECODER.raw_decode(text, start)
        rows.append(text[start:end].encode())
        lines.append(line)
    sizes = np.array([len(row) for row in rows], np.int64)
    ends = np.cumsum(sizes)
    return JsonFile(path, b"".join(rows), ends - sizes, ends, np.array(lines, np.int64))


def _newlines(path: Path, data: Data) -> np.ndarray:
    """Return the offsets of the line feeds in `data`, [line feeds].

    Raises:
        UserError: the text is not UTF-8; the message has path and line.
    """
    if not _is_utf8(data):
        raise UserError(_not_utf8(path, data))
    positions = []
    for start in range(0, len(data), _CHUNK):
        part = np.frombuffer(data, np.uint8, min(_CHUNK, len(data) - start), start)  # no copy
        positions.append(np.flatnonzero(part == ord("\n")) + start)
    return np.concatenate(positions) if positions else np.zeros(0, np.int64)


def _is_utf8(data: Data) -> bool:
    """Return whether `data` is UTF-8."""
    if len(data) <= _CHUNK:
        try:
            data[:].decode()
        except UnicodeDecodeError:
            return False
        return True
    import pyarrow

    # Arrow is ten times as fast as Python's decoder, and makes no copy.
    ends = pyarrow.py_buffer(np.array([0, len(data)], np.int64))
    text = pyarrow.Array.from_buffers(pyarrow.large_binary(), 1, [None, ends, pyarrow.py_buffer(data)])
    try:
        text.cast(pyarrow.large_utf8())
    except pyarrow.ArrowInvalid:
        return False
    return True


def _not_utf8(path: Path, data: Data) -> str:
    """Return the message for the first byte at which `data` is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), _CHUNK):
        try:
            decoder.decode(data[start : start + _CHUNK], final=start + _CHUNK >= len(data))
        except UnicodeDecodeError as e:
            offset = max(start + e.start - len(decoder.getstate()[0]), 0)
            line = 1 + sum(data[i : min(i + _CHUNK, offset)].count(b"\n") for i in range(0, offset, _CHUNK))
            return f"{path}:{line}: cannot read: not UTF-8 text: {e.reason}"
    raise AssertionError("unreachable")


def _content(path: Path) -> Data:
    """Return the decompressed content of a file.

    Raises:
        UserError: the file cannot be read or decompressed; the message has its path.
    """
    head = _head(path, 6)
    if head[:3] == b"BZh" or head[:6] == b"\xfd7zXZ\x00" or head[:4] == b"PK\x03\x04":
        raise UserError(f"{path}: compressed by bzip2, xz or zip; expected plain, .gz or .zst")
    try:
        with path.open("rb") as file:
            if head[:2] == b"\x1f\x8b":
                return gzip.GzipFile(fileobj=file).read()
            if head[:4] == b"\x28\xb5\x2f\xfd" or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
                return _unzstd(file.read())
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if head else b""
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as e:
        raise UserError(f"{path}: cannot read: broken compressed data: {e}") from None
    except (OSError, ValueError) as e:  # ValueError: a pipe cannot be mapped
        raise UserError(f"{path}: cannot read: {e}") from None


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as e:
        raise PathError(
            f"{path}: cannot read: {e.strerror or e}; paths are relative to the current directory of rlsys"
        ) from None


def read_parquet(paths: Sequence[Path]) -> Arrow:
    """Read Parquet files. Columns that some files lack are null in the rows of these files.

    Args:
        paths: files, and folders and globs of files.

    Raises:
        UserError: a file cannot be read, a column has incompatible types in two files, or there are no rows; the
            message has the path.
    """
    import pyarrow

    tables = []
    columns: dict[str, tuple[Any, Path]] = {}
    for path in row_files(paths, "parquet"):
        table = _parquet_table(path)
        _merge_types(columns, table.schema, path)
        tables.append(table)
    try:
        table = pyarrow.concat_tables([_cast(t, columns) for t in tables], promote_options="default")
    except pyarrow.ArrowException as e:
        raise PathError(f"path: files with different columns: {' '.join(str(e).split())}") from None
    if not len(table):
        raise UserError(f"{', '.join(map(str, paths))}: no rows; expected at least one")
    return Arrow(table, ", ".join(map(str, paths)))


def _parquet_table(path: Path) -> Any:
    """Read one Parquet file as a pyarrow.Table."""
    import pyarrow
    import pyarrow.parquet

    if _head(path, len(_PARQUET)) != _PARQUET:
        raise UserError(f"{path}: expected a Parquet file; for JSON lines use data.source = jsonl")
    try:
        return pyarrow.parquet.read_table(path, partitioning=None)
    except (pyarrow.ArrowException, OSError) as e:
        raise UserError(f"{path}: cannot read: {' '.join(str(e).split())}") from None


def _merge_types(columns: dict[str, tuple[Any, Path]], schema: Any, path: Path) -> None:
    """Extend the types of the columns, in place, so that they also represent those of the file `path`.

    Args:
        columns: type of each column, and the first file that has values in it.
        schema: pyarrow.Schema of the file.

    Raises:
        UserError: no type represents a column of all files.
    """
    import pyarrow

    for field in schema:
        common, origin = columns.get(field.name, (pyarrow.null(), path))
        try:
            merged = _common_type(field.name, common, field.type)
        except _DifferentTypes as e:
            name, first, second = e.args
            raise UserError(
                f"{path}: column {name} is {shorten(str(second), 200)}; "
                f"in {origin} it is {shorten(str(first), 200)}; expected one type"
            ) from None
        columns[field.name] = merged, path if common == pyarrow.null() else origin


class _DifferentTypes(Exception):
    """No type represents the values of both types. The arguments are the column and the two types."""


def _common_type(name: str, a: Any, b: Any) -> Any:
    """Return a pyarrow type that represents the values of both types without loss.

    Args:
        name: path of the column, for the error.

    Raises:
        _DifferentTypes: no such type exists.
    """
    import pyarrow
    import pyarrow.types as kinds

    if a == b or kinds.is_null(b):
        return a
    if kinds.is_null(a):
        return b
    a, b = _stored_type(a), _stored_type(b)
    if a == b:
        return a

    def both(*tests: Any) -> bool:
        return all(any(test(t) for test in tests) for t in (a, b))

    if both(kinds.is_string, kinds.is_large_string, kinds.is_string_view):
        return pyarrow.large_string()
    if both(kinds.is_binary, kinds.is_large_binary, kinds.is_binary_view):
        return pyarrow.large_binary()
    if both(kinds.is_floating):
        return pyarrow.float64()
    if both(kinds.is_integer) and (both(kinds.is_unsigned_integer) or pyarrow.uint64() not in (a, b)):
        return pyarrow.uint64() if both(kinds.is_unsigned_integer) else pyarrow.int64()
    if both(kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list):
        return pyarrow.large_list(_common_type(name, a.value_type, b.value_type))
    if both(kinds.is_struct):
        types = {field.name: field.type for field in a}
        for field in b:
            first_type = types.get(field.name, pyarrow.null())
            types[field.name] = _common_type(f"{name}.{field.name}", first_type, field.type)
        return pyarrow.struct(list(types.items()))
    raise _DifferentTypes(name, a, b)


def _stored_type(kind: Any) -> Any:
    """Return the type under which Arrow stores the values.

    This is the storage type of an extension type, the value type of a dictionary type, and any other type itself.
    """
    import pyarrow

    if isinstance(kind, pyarrow.BaseExtensionType):
        return kind.storage_type
    return kind.value_type if isinstance(kind, pyarrow.DictionaryType) else kind


def _cast(table: Any, columns: dict[str, tuple[Any, Path]]) -> Any:
    """Return the table with the types in `columns` (_merge_types)."""
    for number, field in enumerate(table.schema):
        kind, _ = columns[field.name]
        if field.type != kind:
            table = table.set_column(number, field.name, table.column(number).cast(kind))
    return table


def read_rows(paths: Sequence[Path]) -> Table:
    """Read files, all JSON or all Parquet. The content of the first file determines the format.

    Raises:
        UserError: a file cannot be read, or there are no rows.
    """
    try:
        first = row_files(paths, "parquet")[0]
    except UserError:  # folders without Parquet files
        return read_lines(paths)
    return read_parquet(paths) if _head(first, len(_PARQUET)) == _PARQUET else read_lines(paths)


@dataclass(frozen=True)
class Arrow:
    """The rows of a `pyarrow.Table`, a `datasets.Dataset` or a list, and their name for messages."""

    rows: Any
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> Any:
        try:
            if hasattr(self.rows, "to_pylist"):
                return self.rows.slice(number, 1).to_pylist()[0]
            return self.rows[number]
        except Exception as e:  # noqa: BLE001  (codecs, time zones and images raise exceptions of any class)
            reason = shorten(f"{type(e).__name__}: {e}", 500)
            raise RowError(f"{self.location(number)}: cannot be read: {reason}") from None

    def location(self, number: int) -> str:
        return f"{self.name}, row {number}"

    def columns(self, names: Collection[str], start: int = 0, stop: int | None = None) -> Iterator[Any]:
        import pyarrow

        last = len(self) if stop is None else stop
        for first in range(start, last, _ROWS_AT_ONCE):
            table = self._part(first, min(first + _ROWS_AT_ONCE, last))
            if isinstance(table, list):
                yield from table
                continue
            present, absent = set(table.column_names), [msgspec.UNSET] * len(table)
            try:
                columns = [
                    _values(table.column(n).combine_chunks()) if n in present else absent for n in names
                ]
            except (ArithmeticError, LookupError, OSError, ValueError, pyarrow.ArrowException):
                # The caller gets the whole rows; the row with the defective value raises an error with its location.
                yield from map(self.row, range(first, first + len(table)))
            else:
                yield from zip(*columns, strict=True)

    def _part(self, first: int, last: int) -> Any:
        if hasattr(self.rows, "to_pylist"):
            return self.rows.slice(first, last - first)
        if hasattr(self.rows, "with_format"):
            return self.rows.with_format("arrow")[first:last]
        return self.rows[first:last]

    @cached_property
    def digest(self) -> str:
        if isinstance(self.rows, list):
            return _digest(json.dumps(row, default=str).encode() for row in self.rows)

        def parts() -> Iterator[Any]:
            import pyarrow

            for first in range(0, len(self), _ROWS_AT_ONCE):
                table = self._part(first, min(first + _ROWS_AT_ONCE, len(self))).combine_chunks()
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, table.schema.remove_metadata()) as writer:
                    writer.write_table(table.replace_schema_metadata())
                yield sink.getvalue()

        return _digest(parts())


def _values(array: Any) -> Any:
    """Return the result of `array.to_pylist()`, but faster for texts, and for lists and structs of texts."""
    import pyarrow
    import pyarrow.types as kinds

    if isinstance(array, pyarrow.ChunkedArray):  # combine_chunks returns one for an empty column
        return array.to_pylist()
    if kinds.is_string(array.type) or kinds.is_large_string(array.type):
        return array.to_numpy(zero_copy_only=False).tolist()
    present = None if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False).tolist()
    if kinds.is_struct(array.type):
        names = [field.name for field in array.type]
        children = [_values(child) for child in array.flatten()]
        values: list[Any] = [dict(zip(names, v, strict=True)) for v in zip(*children, strict=True)]
        if not children:
            return array.to_pylist()
    elif kinds.is_list(array.type) or kinds.is_large_list(array.type):
        items, offsets = _values(array.values), array.offsets.tolist()
        values = [items[a:b] for a, b in itertools.pairwise(offsets)]
    else:
        return array.to_pylist()
    if present is None:
        return values
    return [value if is_present else None for value, is_present in zip(values, present, strict=True)]


def _unzstd(data: bytes) -> bytes:
    """Decompress all frames of a zstd file, without its skippable frames, which have no content.

    Raises:
        ZstdError: a frame is damaged or truncated.
    """
    frames = []
    while data:
        if data[1:4] == b"\x2a\x4d\x18" and data[0] >> 4 == 5:
            data = data[8 + int.from_bytes(data[4:8], "little") :]
            continue
        frame = zstandard.ZstdDecompressor().decompressobj()
        frames.append(frame.decompress(data))
        if not frame.eof:
            raise zstandard.ZstdError("it is truncated")
        data = frame.unused_data
    return b"".join(frames)


def _digest(parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        view = memoryview(part)
        digest.update(len(view).to_bytes(8, "big"))
        digest.update(view)
    return digest.hexdigest()


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True
