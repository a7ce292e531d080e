"""The files of weights that a host holds, in memory: as they were pushed last, or, during a push, partly so.

Each is a memory file (memfd). An engine's own processes open it by its name under /proc, and it goes with the process
that made it, however that ends: nothing is left on a disk or in /dev/shm.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import threading
from pathlib import Path

import numpy as np

from rlsys.weights_relay.pieces import Bytes, Piece, pieces_in


class TooLarge(Exception):
    """Files for which this machine has no room."""


class Store:
    """Each piece has a digest of its own, so a store between two versions is as good as any other.

    The files together are no larger than the machine's memory, and hold no more than a part of the descriptors: who
    brings pieces says how large their files are.
    """

    def __init__(self) -> None:
        self._most_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._files: dict[int, _File] = {}
        self._lock = threading.Lock()

    def held(self, piece: Piece) -> str:
        """Digest of what is there; empty: nothing."""
        with self._lock:
            file = self._files.get(piece.file)
            return "" if file is None or not file.fits(piece) else file.digests[piece.place]

    def content(self, piece: Piece) -> Bytes:
        """A view of what is there; a file is made when there is none of this size. Raises TooLarge."""
        with self._lock:
            file = self._files.get(piece.file)
            if file is None or not file.fits(piece):
                if file is not None:
                    self._files.pop(piece.file).close()
                self._check_room(piece.size)
                file = self._files[piece.file] = _File(piece.size, piece.width)
            return file.bytes[piece.span]

    def write(self, piece: Piece, content: Bytes) -> None:
        """`content` has been compared with the digest of the piece."""
        target = self.content(piece)
        with self._lock:
            self._files[piece.file].digests[piece.place] = ""
        target[:] = content
        with self._lock:
            self._files[piece.file].digests[piece.place] = piece.after

    def _check_room(self, size: int) -> None:
        held = sum(file.size for file in self._files.values())
        if held + size > self._most_bytes:
            raise TooLarge(f"files of {held + size} bytes, of {self._most_bytes} of this machine's memory")
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and len(self._files) >= most // 2:
            raise TooLarge(f"{len(self._files) + 1} files, of {most} file descriptors")

    def root(self, files: int) -> str:
        """Digest of the first so many files; empty while a piece is missing."""
        found = hashlib.blake2b(digest_size=16)
        with self._lock:
            for number in range(files):
                file = self._files.get(number)
                if file is None or not all(file.digests):
                    return ""
                found.update(f"{file.size} {file.width} {' '.join(file.digests)}\n".encode())
        return found.hexdigest()

    def pieces(self, files: int) -> list[Piece]:
        """All that is there of the first so many files."""
        with self._lock:
            return [
                Piece(number, file.size, file.width, place, digest)
                for number in range(files)
                if (file := self._files.get(number)) is not None
                for place, digest in enumerate(file.digests)
                if digest
            ]

    def link(self, folder: Path, files: int) -> None:
        """Make `folder` name the first so many files, for other processes of this user on this host."""
        for old in folder.iterdir():
            old.unlink()
        with self._lock:
            for number in [n for n in self._files if n >= files]:  # of an earlier push, or of nobody's
                self._files.pop(number).close()
            for number in range(files):
                target = f"/proc/{os.getpid()}/fd/{self._files[number].descriptor}"
                (folder / f"model-{number:05d}.safetensors").symlink_to(target)

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()


class _File:
    def __init__(self, size: int, width: int) -> None:
        self.size, self.width = size, width
        self.descriptor = os.memfd_create("rlsys-weights")
        os.ftruncate(self.descriptor, size)
        self.bytes: Bytes = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        self.digests = [""] * pieces_in(size)

    def fits(self, piece: Piece) -> bool:
        return (self.size, self.width) == (piece.size, piece.width)

    def close(self) -> None:
        """The memory itself goes with the last view of it."""
        os.close(self.descriptor)
