"""A conversion writes a new folder whole or not at all, and says in one line why it could not."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from rlsys.convert.output import guard_output, partial_of
from rlsys.core.errors import UserError


def write_until(folder: Path, error: BaseException) -> None:
    with guard_output(folder, 10):
        partial_of(folder).mkdir()
        (partial_of(folder) / "half").write_text("a")
        raise error


def test_output_is_kept_on_success(tmp_path: Path) -> None:
    with guard_output(tmp_path / "above" / "model", 10):
        partial_of(tmp_path / "above" / "model").mkdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["above", "model.partial"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "the disk is full; the partial output was deleted",
        ),
        (
            OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
            "the disk is full; the partial output was deleted",
        ),
        (
            SafetensorError("I/O error: No space left on device"),
            "the disk is full; the partial output was deleted",
        ),
        (OSError(errno.EIO, os.strerror(errno.EIO)), r"cannot be written: .*Input/output error"),
        (SafetensorError("no such dtype"), "cannot be written: no such dtype"),
    ],
    ids=str,
)
def test_an_error_while_writing_is_reported_and_leaves_no_output(
    error: Exception, told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"^--out {tmp_path / 'model'}: {told}$"):
        write_until(tmp_path / "model", error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug of ours")], ids=repr)
def test_errors_unrelated_to_the_disk_propagate_and_leave_no_output(
    error: BaseException, tmp_path: Path
) -> None:
    with pytest.raises(type(error)):
        write_until(tmp_path / "model", error)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_modified(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="exists already; expected a new folder"):
        write_until(tmp_path / "model", AssertionError("not reached"))
    assert [path.name for path in tmp_path.rglob("*")] == ["model"]


def test_an_output_path_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"file/model: .*/file cannot be written: (Not a directory|File exists)$"
    ):
        write_until(tmp_path / "file" / "model", AssertionError("not reached"))


@pytest.mark.parametrize(("free", "fits"), [(9_999_999, False), (10_000_000, True)])
def test_insufficient_disk_space_is_reported_before_writing(
    free: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    if fits:
        with guard_output(tmp_path / "model", 10_000_000):
            return
    with (
        pytest.raises(UserError, match=r"the disk has 0\.01 GB free; expected at least 0\.01 GB$"),
        guard_output(tmp_path / "model", 10_000_000),
    ):
        raise AssertionError("not reached")
