"""One fault at one call: first every call that a piece of code makes to the disk is counted, then each fails once.

Python's own calls are those of `os` and what files opened by `open` do. SQLite's are those of its virtual file
system: a copy of the system's one (sqlite3_vfs, sqlite3_io_methods: https://www.sqlite.org/c3ref/vfs.html) whose
functions fail as SQLite's own tests let them fail, below the pager and above the kernel.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import io
import os
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any

KINDS: dict[str, tuple[str, ...]] = {
    "open": ("EIO", "ENOSPC", "EMFILE"),
    "write": ("EIO", "ENOSPC", "torn"),
    **dict.fromkeys(("fsync", "rename", "mkdir", "unlink", "truncate"), ("EIO", "ENOSPC")),
}
"""How a call of each sort can fail. torn: half of it is written, then EIO."""


@dataclass
class Sites:
    """Calls in the order in which they come. `fail`: which of them fails, and how; None: only count."""

    fail: tuple[int, str] | None = None
    seen: list[str] = field(default_factory=list)

    def next(self, sort: str) -> str | None:
        """Count a call; the kind of fault that it meets."""
        index = len(self.seen)
        self.seen.append(sort)
        return self.fail[1] if self.fail is not None and self.fail[0] == index else None

    def faults(self) -> list[tuple[int, str]]:
        """Every call, with every way in which it can fail."""
        return [(i, kind) for i, sort in enumerate(self.seen) for kind in KINDS[sort]]


def failure(kind: str) -> OSError:
    number = getattr(errno, kind, errno.EIO)
    return OSError(number, os.strerror(number))


# -- Python --------------------------------------------------------------------------------------------------

_OS = {
    "open": "open", "mkdir": "mkdir", "rename": "rename", "replace": "rename", "unlink": "unlink", "remove": "unlink",
    "rmdir": "unlink", "fsync": "fsync", "fdatasync": "fsync", "ftruncate": "truncate", "truncate": "truncate",
    "write": "write", "pwrite": "write",
}  # fmt: skip


class _File:
    """A file open for writing, unbuffered as far as faults go: each write meets its own."""

    def __init__(self, file: Any, sites: Sites) -> None:
        self._file, self._sites = file, sites

    def write(self, data: Any) -> int:
        if kind := self._sites.next("write"):
            if kind == "torn":
                self._file.write(data[: len(data) // 2])
                self._file.flush()
            raise failure(kind)
        return int(self._file.write(data))

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def python_calls(sites: Sites) -> Iterator[None]:
    """Calls of this process through `os` and `open` are counted, and the one of `sites` fails."""
    plain_open, plain = io.open, {name: getattr(os, name) for name in _OS}

    def faulty(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind := sites.next(_OS[name]):
                if kind == "torn":
                    fd, data, *rest = args
                    plain[name](fd, data[: len(data) // 2], *rest)
                raise failure(kind)
            return plain[name](*args, **kwargs)

        return call

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int):  # a descriptor that is open already
            opened = plain_open(file, mode, *args, **kwargs)
        elif kind := sites.next("open"):
            raise failure(kind)
        else:
            opened = plain_open(file, mode, *args, **kwargs)
        return opened if set(mode) <= set("rbt") else _File(opened, sites)

    io.open = builtins.open = open_  # type: ignore[assignment]
    for name in _OS:
        setattr(os, name, faulty(name))
    try:
        yield
    finally:
        io.open = builtins.open = plain_open
        for name, function in plain.items():
            setattr(os, name, function)


# -- SQLite --------------------------------------------------------------------------------------------------

_OK, _IOERR, _FULL, _CANTOPEN = 0, 10, 13, 14
_NAME = b"rlsys-faults"
_OPEN = ctypes.CFUNCTYPE(
    c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int)
)  # the name is kept: no copy
_DELETE = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
_WRITE = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = ctypes.CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = ctypes.CFUNCTYPE(c_int, c_void_p, c_int)


class _VFS(Structure):
    _fields_ = [
        ("iVersion", c_int), ("szOsFile", c_int), ("mxPathname", c_int), ("pNext", c_void_p), ("zName", c_char_p),
        ("pAppData", c_void_p), ("xOpen", c_void_p), ("xDelete", c_void_p), *[(f"x{i}", c_void_p) for i in range(13)],
    ]  # fmt: skip


class _Methods(Structure):
    _fields_ = [
        ("iVersion", c_int), ("xClose", c_void_p), ("xRead", c_void_p), ("xWrite", c_void_p), ("xTruncate", c_void_p),
        ("xSync", c_void_p), *[(f"x{i}", c_void_p) for i in range(13)],
    ]  # fmt: skip


def sqlite_library() -> ctypes.CDLL | None:
    """The one that Python's sqlite3 uses; None where that is built into it, out of our reach."""
    import _sqlite3

    with open("/proc/self/maps") as maps:
        library_path = next((line.split()[-1] for line in maps if "libsqlite3" in line), None)
    return ctypes.CDLL(library_path) if library_path and _sqlite3 else None


def _code(kind: str) -> int:
    return {"ENOSPC": _FULL, "EMFILE": _CANTOPEN}.get(kind, _IOERR)


@contextlib.contextmanager
def sqlite_calls(sites: Sites, library: ctypes.CDLL) -> Iterator[None]:
    """Calls for files that SQLite opens meanwhile are counted; one fails. Connections close before the end."""
    library.sqlite3_vfs_find.restype = c_void_p
    library.sqlite3_vfs_find.argtypes = [c_char_p]
    library.sqlite3_vfs_register.argtypes = library.sqlite3_vfs_unregister.argtypes = [c_void_p]
    system = library.sqlite3_vfs_find(None)
    faulty_vfs = _VFS.from_buffer_copy(ctypes.string_at(system, ctypes.sizeof(_VFS)))
    tables: dict[int, _Methods] = {}
    references: list[Any] = []  # callbacks live as long as SQLite may call them

    def patched(address: int) -> int:
        """A copy of a file's methods that meets the faults."""
        if address not in tables:
            table = _Methods.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(_Methods)))
            write, truncate, sync = _WRITE(table.xWrite), _TRUNCATE(table.xTruncate), _SYNC(table.xSync)

            def on_write(file: int, data: int, size: int, at: int) -> int:
                if kind := sites.next("write"):
                    if kind == "torn":
                        write(file, data, size // 2, at)
                    return _code(kind)
                return int(write(file, data, size, at))

            def on_truncate(file: int, size: int) -> int:
                return _code(kind) if (kind := sites.next("truncate")) else int(truncate(file, size))

            def on_sync(file: int, flags: int) -> int:
                return _code(kind) if (kind := sites.next("fsync")) else int(sync(file, flags))

            callbacks = _WRITE(on_write), _TRUNCATE(on_truncate), _SYNC(on_sync)
            references.extend((*callbacks, write, truncate, sync))
            table.xWrite, table.xTruncate, table.xSync = (ctypes.cast(c, c_void_p).value for c in callbacks)
            tables[address] = table
        return ctypes.addressof(tables[address])

    plain_open, plain_delete = _OPEN(faulty_vfs.xOpen), _DELETE(faulty_vfs.xDelete)

    def on_open(_: int, name: int, file: int, flags: int, out: Any) -> int:
        if kind := sites.next("open"):
            c_void_p.from_address(file).value = None  # "no methods": nothing to close
            return _code(kind) if kind != "ENOSPC" else _CANTOPEN
        result = int(plain_open(system, name, file, flags, out))
        methods = c_void_p.from_address(file)
        if methods.value:
            methods.value = patched(methods.value)
        return result

    def on_delete(_: int, name: bytes, sync: int) -> int:
        return _code(kind) if (kind := sites.next("unlink")) else int(plain_delete(system, name, sync))

    callbacks = _OPEN(on_open), _DELETE(on_delete)
    references.extend(callbacks)
    faulty_vfs.xOpen, faulty_vfs.xDelete = (ctypes.cast(c, c_void_p).value for c in callbacks)
    faulty_vfs.zName, faulty_vfs.pNext = _NAME, None
    library.sqlite3_vfs_register(ctypes.byref(faulty_vfs), 1)
    try:
        yield
    finally:
        library.sqlite3_vfs_unregister(ctypes.byref(faulty_vfs))
        library.sqlite3_vfs_register(c_void_p(system), 1)
