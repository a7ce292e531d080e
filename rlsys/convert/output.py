"""Checks and clean-up of the output folder of a conversion."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rlsys.core.errors import UserError


def partial_of(folder: Path) -> Path:
    """Return the path at which `folder` is written until it is complete."""
    return folder.with_name(folder.name + ".partial")


@contextmanager
def guard_output(folder: Path, size: int) -> Iterator[None]:
    """Check that `folder` is new and that the disk has `size` bytes free, then run the context.

    The context writes to partial_of(folder) and publishes it. If the context fails, the partial folder is deleted.

    Raises:
        UserError: The folder exists or cannot be written, or the disk lacks space.
    """
    if folder.exists():
        raise UserError(f"--out {folder}: exists already; expected a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
    except OSError as e:
        raise UserError(f"--out {folder}: {folder.parent} cannot be written: {e.strerror}") from None
    if free < size:
        raise UserError(
            f"--out {folder}: the disk has {free / 1e9:.2f} GB free; expected at least {size / 1e9:.2f} GB"
        )
    try:
        yield
    except (OSError, SafetensorError) as e:
        shutil.rmtree(partial_of(folder), ignore_errors=True)
        full = isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(e):
            raise UserError(f"--out {folder}: the disk is full; the partial output was deleted") from None
        raise UserError(f"--out {folder}: cannot be written: {e}") from None
    except BaseException:
        shutil.rmtree(partial_of(folder), ignore_errors=True)
        raise
