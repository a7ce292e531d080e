"""The record of script runs that bench/import_scripts.py keeps."""

from __future__ import annotations

import pickle
from pathlib import Path

import import_scripts
import pytest


def test_a_relative_file_of_records_is_written_where_the_bench_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    with import_scripts.recorded_runs(Path("records.pickle")):
        monkeypatch.chdir(tmp_path / "scripts")
    assert pickle.loads((tmp_path / "records.pickle").read_bytes()) == {}
