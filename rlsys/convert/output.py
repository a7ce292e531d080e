"""Output folder of a conversion: new, with enough disk space."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rlsys.core.errors import UserError


def partial_of(folder: Path) -> Path:
    """Return the path of `folder` until it is complete."""
    return folder.with_name(folder.name + ".partial")


@contextmanager
def guard_output(folder: Path, size: int) -> Iterator[None]:
    """Check that `folder` is new and that the disk has `size` bytes free, then run the context.

    The context writes to partial_of(folder) and publishes it. If the context fails, the partial folder is deleted.

    Raises:
        UserError: the folder exists, cannot be written, or the disk is or becomes full.
    """
    if folder.exists():
        raise UserError(f"--out {folder}: exists already; expected a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
    except OSError as e:
        raise UserError(f"--out {folder}: cannot write there: {e.strerror}") from None
    if free < size:
        raise UserError(f"--out {folder}: needs {size / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB left")
    try:
        yield
    except (OSError, SafetensorError) as e:
        shutil.rmtree(partial_of(folder), ignore_errors=True)
        full = isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(e):
            raise UserError(f"--out {folder}: the disk is full; nothing was left behind") from None
        raise UserError(f"--out {folder}: cannot be written: {e}") from None
    except BaseException:
        shutil.rmtree(partial_of(folder), ignore_errors=True)
        raise
