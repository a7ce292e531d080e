"""Remove the code of all GPU architectures but one from a CUDA library.

    python bench/fatbin.py LIBRARY ARCHITECTURE     rewrites LIBRARY in place; ARCHITECTURE is a number, such as 90

The section `.nv_fatbin` of a CUDA library is a sequence of containers, each with one entry for every architecture
that the library was built for. The entries of the requested architecture move to the front of their container, the
container's declared size becomes their size, and the other bytes become zeros. So no address changes, and a
compressed archive of the file contains little more than the remaining code.

Format:
    container   magic u32, version u16, header size u16, size of its entries u64
    entry       kind u16 (1 PTX, 2 machine code), version u16, header size u32, payload size u64, ...,
                architecture u32 at byte 28
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
MACHINE_CODE = 2
SECTION = ".nv_fatbin"
_CONTAINER, _ENTRY, _ARCHITECTURE = struct.Struct("<IHHQ"), struct.Struct("<HHIQ"), struct.Struct("<I")
_ARCHITECTURE_AT = 28


def section(library: Path) -> tuple[int, int]:
    """Return offset and size of the section `.nv_fatbin` in the file, in bytes.

    Raises:
        ValueError: the file has no such section.
    """
    table = subprocess.run(
        ["readelf", "--section-headers", "--wide", library], capture_output=True, text=True, check=True
    ).stdout
    for line in table.splitlines():
        words = line.partition("]")[2].split()
        if words[:1] == [SECTION]:
            return int(words[3], 16), int(words[4], 16)
    raise ValueError(f"{library}: expected a CUDA library with a section {SECTION}")


def entries(image: bytes | bytearray, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, architecture, offset and size of each entry of a container; the size includes its header."""
    while start < end:
        kind, _, header, payload = _ENTRY.unpack_from(image, start)
        (architecture,) = _ARCHITECTURE.unpack_from(image, start + _ARCHITECTURE_AT)
        yield kind, architecture, start, header + payload
        start += header + payload


def keep(image: bytearray, start: int, size: int, architecture: int) -> int:
    """Remove all code but the machine code of `architecture` from `image[start : start + size]`, in place.

    A container without machine code for the architecture does not change.

    Args:
        image: content of the library.
        start: offset of the section.
        size: size of the section in bytes.
        architecture: compute capability times 10, such as 90.

    Returns:
        number of bytes of the remaining machine code.
    """
    kept_bytes, position = 0, start
    while position + _CONTAINER.size <= start + size:
        magic, version, header, length = _CONTAINER.unpack_from(image, position)
        if magic != MAGIC:
            position += 8  # between two containers
            continue
        body, end = position + header, position + header + length
        matching = [
            bytes(image[offset : offset + count])
            for kind, built_for, offset, count in entries(image, body, end)
            if (kind, built_for) == (MACHINE_CODE, architecture)
        ]
        if matching:
            code = b"".join(matching)
            image[body:end] = code.ljust(length, b"\0")
            _CONTAINER.pack_into(image, position, magic, version, header, len(code))
            kept_bytes += len(code)
        position = end + (-end) % 8
    return kept_bytes


def keep_architecture(library: Path, architecture: int) -> int:
    """Rewrite the library with machine code for `architecture` only. Return the number of bytes of this code.

    Raises:
        ValueError: the library has no section `.nv_fatbin`, or no machine code for `architecture`.
    """
    image = bytearray(library.read_bytes())
    kept_bytes = keep(image, *section(library), architecture)
    if not kept_bytes:
        raise ValueError(f"{library}: expected machine code for sm_{architecture}, found none")
    library.write_bytes(image)
    return kept_bytes


if __name__ == "__main__":
    print(keep_architecture(Path(sys.argv[1]), int(sys.argv[2])))
