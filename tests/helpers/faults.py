"""Fault injection into file operations: a first pass records all calls, then each further pass fails one of them.

The recorded calls of Python are functions of `os` and methods of files that `open` returns. Those of SQLite are the
functions of its virtual file system: a copy of the default one (sqlite3_vfs, sqlite3_io_methods:
https://www.sqlite.org/c3ref/vfs.html) fails below the pager and above the kernel, as in SQLite's own tests.
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

FAULT_KINDS: dict[str, tuple[str, ...]] = {
    "open": ("EIO", "ENOSPC", "EMFILE"),
    "write": ("EIO", "ENOSPC", "torn"),
    **dict.fromkeys(("fsync", "rename", "mkdir", "unlink", "truncate"), ("EIO", "ENOSPC")),
}
"""Operation -> errnos with which it can fail. torn: half of the data is written, then EIO."""


@dataclass
class Sites:
    """A record of calls, and the fault to inject."""

    fault: tuple[int, str] | None = None
    """Index of the call that fails and the kind of fault; None: no call fails."""
    calls: list[str] = field(default_factory=list)
    """Operations of the calls, in order."""

    def record(self, operation: str) -> str | None:
        """Record a call. Return the kind of fault to inject, or None."""
        index = len(self.calls)
        self.calls.append(operation)
        return self.fault[1] if self.fault is not None and self.fault[0] == index else None

    def faults(self) -> list[tuple[int, str]]:
        """Return all possible faults of the recorded calls, as values of `fault`."""
        return [(i, kind) for i, operation in enumerate(self.calls) for kind in FAULT_KINDS[operation]]


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
    """A file that is open for writing. Each `write` is a recorded call."""

    def __init__(self, file: Any, sites: Sites) -> None:
        self._file, self._sites = file, sites

    def write(self, data: Any) -> int:
        if kind := self._sites.record("write"):
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
    """Record the calls of this process to `os` and `open`, and inject the fault of `sites`."""
    original_open, originals = io.open, {name: getattr(os, name) for name in _OS}

    def faulty(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind := sites.record(_OS[name]):
                if kind == "torn":
                    fd, data, *rest = args
                    originals[name](fd, data[: len(data) // 2], *rest)
                raise failure(kind)
            return originals[name](*args, **kwargs)

        return call

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int):  # an open descriptor
            opened = original_open(file, mode, *args, **kwargs)
        elif kind := sites.record("open"):
            raise failure(kind)
        else:
            opened = original_open(file, mode, *args, **kwargs)
        return opened if set(mode) <= set("rbt") else _File(opened, sites)

    io.open = builtins.open = open_  # type: ignore[assignment]
    for name in _OS:
        setattr(os, name, faulty(name))
    try:
        yield
    finally:
        io.open = builtins.open = original_open
        for name, function in originals.items():
            setattr(os, name, function)


# -- SQLite --------------------------------------------------------------------------------------------------

_OK, _IOERR, _FULL, _CANTOPEN = 0, 10, 13, 14
_NAME = b"rlsys-faults"
_OPEN = ctypes.CFUNCTYPE(
    c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int)
)  # c_void_p: SQLite keeps the name, so it must not be a copy
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
    """Return the SQLite library of Python's sqlite3, or None if it is linked statically."""
    import _sqlite3

    with open("/proc/self/maps") as maps:
        library_path = next((line.split()[-1] for line in maps if "libsqlite3" in line), None)
    return ctypes.CDLL(library_path) if library_path and _sqlite3 else None


def _code(kind: str) -> int:
    return {"ENOSPC": _FULL, "EMFILE": _CANTOPEN}.get(kind, _IOERR)


@contextlib.contextmanager
def sqlite_calls(sites: Sites, library: ctypes.CDLL) -> Iterator[None]:
    """Record the calls of SQLite to files that it opens in the body, and inject the fault of `sites`.

    Close all connections before the end of the body.
    """
    library.sqlite3_vfs_find.restype = c_void_p
    library.sqlite3_vfs_find.argtypes = [c_char_p]
    library.sqlite3_vfs_register.argtypes = library.sqlite3_vfs_unregister.argtypes = [c_void_p]
    system = library.sqlite3_vfs_find(None)
    faulty_vfs = _VFS.from_buffer_copy(ctypes.string_at(system, ctypes.sizeof(_VFS)))
    tables: dict[int, _Methods] = {}
    kept_callbacks: list[Any] = []  # SQLite may call them until the end

    def faulty_methods(address: int) -> int:
        """Return the address of a copy of a file's method table that injects faults."""
        if address not in tables:
            table = _Methods.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(_Methods)))
            write, truncate, sync = _WRITE(table.xWrite), _TRUNCATE(table.xTruncate), _SYNC(table.xSync)

            def on_write(file: int, data: int, size: int, offset: int) -> int:
                if kind := sites.record("write"):
                    if kind == "torn":
                        write(file, data, size // 2, offset)
                    return _code(kind)
                return int(write(file, data, size, offset))

            def on_truncate(file: int, size: int) -> int:
                return _code(kind) if (kind := sites.record("truncate")) else int(truncate(file, size))

            def on_sync(file: int, flags: int) -> int:
                return _code(kind) if (kind := sites.record("fsync")) else int(sync(file, flags))

            callbacks = _WRITE(on_write), _TRUNCATE(on_truncate), _SYNC(on_sync)
            kept_callbacks.extend((*callbacks, write, truncate, sync))
            table.xWrite, table.xTruncate, table.xSync = (ctypes.cast(c, c_void_p).value for c in callbacks)
            tables[address] = table
        return ctypes.addressof(tables[address])

    original_open, original_delete = _OPEN(faulty_vfs.xOpen), _DELETE(faulty_vfs.xDelete)

    def on_open(_: int, name: int, file: int, flags: int, out: Any) -> int:
        if kind := sites.record("open"):
            c_void_p.from_address(file).value = None  # "no methods": nothing to close
            return _code(kind) if kind != "ENOSPC" else _CANTOPEN
        result = int(original_open(system, name, file, flags, out))
        methods = c_void_p.from_address(file)
        if methods.value:
            methods.value = faulty_methods(methods.value)
        return result

    def on_delete(_: int, name: bytes, sync: int) -> int:
        return _code(kind) if (kind := sites.record("unlink")) else int(original_delete(system, name, sync))

    callbacks = _OPEN(on_open), _DELETE(on_delete)
    kept_callbacks.extend(callbacks)
    faulty_vfs.xOpen, faulty_vfs.xDelete = (ctypes.cast(c, c_void_p).value for c in callbacks)
    faulty_vfs.zName, faulty_vfs.pNext = _NAME, None
    library.sqlite3_vfs_register(ctypes.byref(faulty_vfs), 1)
    try:
        yield
    finally:
        library.sqlite3_vfs_unregister(ctypes.byref(faulty_vfs))
        library.sqlite3_vfs_register(c_void_p(system), 1)
