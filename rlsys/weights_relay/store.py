"""Store of a host's weight files in memory. During a push, it contains pieces of the last and of the current version.

A file is a memory file (memfd), which other processes of the engine open by its path under /proc. Linux frees it when
the process ends, so that no files remain on a disk or in /dev/shm.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlsys.weights_relay.pieces import Bytes, FileSpec, Piece, pieces_in


class TooLarge(Exception):
    """The declared files exceed this machine's memory or file descriptors."""


class Undeclared(Exception):
    """The current push does not contain the piece."""


class Store:
    """Weight files. Thread-safe.

    Each piece has its own digest, so a file may contain pieces of two versions. Only `declare` creates files. Their
    total size is at most the machine's memory, and they use at most half of the process's file descriptors.
    """

    def __init__(self) -> None:
        self._max_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._files: dict[int, _File] = {}
        self._declared = 0
        self._lock = threading.Lock()

    @property
    def declared(self) -> int:
        """Number of files that the current push has declared."""
        return self._declared

    def begin(self) -> None:
        """Start a push without files. The files of the last push stay, as the base of differences."""
        with self._lock:
            self._declared = 0

    def declare(self, files: Sequence[FileSpec]) -> None:
        """Add files to the push.

        Raises:
            TooLarge: the machine has too little memory, or the process too few descriptors.
        """
        with self._lock:
            for spec in files:
                file = self._files.get(self._declared)
                if file is None or (file.size, file.width) != (spec.size, spec.width):
                    if file is not None:
                        self._files.pop(self._declared).close()
                    self._check_limits(spec.size)
                    file = self._files[self._declared] = _File(spec.size, spec.width)
                file.declared = spec.digests
                self._declared += 1

    def piece(self, file: int, index: int) -> Piece:
        """Return a declared piece.

        Raises:
            Undeclared: the push has no such piece.
        """
        with self._lock:
            if 0 <= file < self._declared and 0 <= index < len(self._files[file].declared):
                content = self._files[file]
                return Piece(file, content.size, content.width, index, content.declared[index])
        raise Undeclared(f"piece {index} of file {file} is not declared")

    def current_digest(self, piece: Piece) -> str:
        """Return the digest of the content that is stored at the location of `piece`; empty if there is none."""
        with self._lock:
            file = self._files.get(piece.file)
            return "" if file is None or not file.fits(piece) else file.digests[piece.index]

    def content(self, piece: Piece) -> Bytes:
        """Return a view of the content at the location of `piece`.

        Raises:
            Undeclared: the store has no such file of this size, because `piece` is of an earlier push.
        """
        with self._lock:
            file = self._files.get(piece.file)
            if file is None or not file.fits(piece):
                raise Undeclared(f"piece {piece.index} of file {piece.file} belongs to an earlier push")
            return file.bytes[piece.span]

    def write(self, piece: Piece, content: Bytes) -> None:
        """Write the verified content of a piece, unless it is stored. Only one thread at a time may write a piece.

        Raises:
            Undeclared: the store has no such file of this size, because `piece` is of an earlier push.
        """
        target = self.content(piece)
        with self._lock:
            digests = self._files[piece.file].digests
            if digests[piece.index] == piece.digest:
                return
            digests[piece.index] = ""
        target[:] = content
        with self._lock:
            digests[piece.index] = piece.digest

    def _check_limits(self, size: int) -> None:
        """Check that another file of `size` bytes is within the limits. The caller holds the lock.

        Raises:
            TooLarge: the machine has too little memory, or the process too few file descriptors.
        """
        total_bytes = sum(file.size for file in self._files.values()) + size
        if total_bytes > self._max_bytes:
            raise TooLarge(
                f"the declared files have {total_bytes} bytes; expected at most {self._max_bytes}, this machine's "
                "memory"
            )
        max_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if max_descriptors != resource.RLIM_INFINITY and len(self._files) >= max_descriptors // 2:
            raise TooLarge(
                f"the push declares {len(self._files) + 1} files; expected at most {max_descriptors // 2}, half of "
                "this process's limit of file descriptors (ulimit -n)"
            )

    def is_complete(self) -> bool:
        """Return whether all declared pieces are stored."""
        with self._lock:
            files = (self._files[number] for number in range(self._declared))
            return all(tuple(file.digests) == file.declared for file in files)

    def specs(self) -> list[FileSpec]:
        """Return the declared files."""
        with self._lock:
            files = (self._files[number] for number in range(self._declared))
            return [FileSpec(file.size, file.width, file.declared) for file in files]

    def pieces(self) -> list[Piece]:
        """Return the declared pieces that are stored."""
        with self._lock:
            return [
                Piece(number, file.size, file.width, index, digest)
                for number in range(self._declared)
                if (file := self._files[number])
                for index, digest in enumerate(file.declared)
                if file.digests[index] == digest
            ]

    def link(self, folder: Path) -> None:
        """Replace the content of `folder` with symbolic links to the declared files, and close all other files.

        Other processes of this user on this host can read the links.
        """
        for old in folder.iterdir():
            old.unlink()
        with self._lock:
            self._close_undeclared()
            for number, file in self._files.items():
                target = f"/proc/{os.getpid()}/fd/{file.descriptor}"
                (folder / f"model-{number:05d}.safetensors").symlink_to(target)

    def _close_undeclared(self) -> None:
        """Close the files of earlier pushes that the current push does not declare. The caller holds the lock."""
        for number in [number for number in self._files if number >= self._declared]:
            self._files.pop(number).close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._declared = 0


class _File:
    """A memory file of `size` bytes, with elements of `width` bytes."""

    def __init__(self, size: int, width: int) -> None:
        self.size, self.width = size, width
        self.descriptor = os.memfd_create("rlsys-weights")
        os.ftruncate(self.descriptor, size)
        self.bytes: Bytes = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        self.digests = [""] * pieces_in(size)
        """Digest of the stored content of each piece; empty while it is unknown."""
        self.declared: tuple[str, ...] = ()
        """Digest of each piece in the current push."""

    def fits(self, piece: Piece) -> bool:
        """Return whether `piece` belongs to a file of this size."""
        return (self.size, self.width) == (piece.size, piece.width)

    def close(self) -> None:
        """Close the descriptor. The memory is freed with its last view."""
        os.close(self.descriptor)
