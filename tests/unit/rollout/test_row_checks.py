"""A run's rows: changed data is refused at the next start, and all rows are counted beside the first steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config, dump_config
from rlsys.core.errors import UserError
from rlsys.data import Tokenizer, build_source, row_check
from rlsys.data.row_source import RowSource
from rlsys.engine_requests import Limits
from rlsys.rollout.row_checks import RowChecks, check_same_rows

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"


class Notes:
    """In the place of a ledger."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def note(self, key: str) -> str | None:
        return self.kept.get(key)

    def set_note(self, key: str, value: str) -> None:
        self.kept[key] = value


def config_of(folder: Path, rows: list[dict[str, object]]) -> Config:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config.model_validate(
        {
            "model": {"path": MODEL}, "eval": {"prompts": 1}, "run": {"dir": folder / "run"},
            "data": {"source": "jsonl", "params": {"path": str(data)}, "reward": "exact_answer"},
        }
    )  # fmt: skip
    config.run.dir.mkdir(exist_ok=True)
    (config.run.dir / "config.yaml").write_text(dump_config(config))
    return config


ROWS: list[dict[str, object]] = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]


@pytest.mark.parametrize("change", ["order", "fewer", "an answer", "touched"])
async def test_changed_data_is_refused_at_the_next_start(change: str, tmp_path: Path) -> None:
    notes, tokenizer = Notes(), Tokenizer(MODEL)
    source = build_source(config_of(tmp_path, ROWS), tokenizer)
    await check_same_rows(source, notes)  # type: ignore[arg-type]
    rows = {
        "order": ROWS[::-1],
        "fewer": ROWS[:30],
        "an answer": [{**ROWS[0], "answer": "9"}, *ROWS[1:]],
        "touched": ROWS,
    }[change]
    later = build_source(config_of(tmp_path, rows), tokenizer)
    if change == "touched":
        await check_same_rows(later, notes)  # type: ignore[arg-type]
        return
    with pytest.raises(
        UserError, match=rf"rows\.jsonl changed since this run began: 40 rows then, {len(rows)} now"
    ):
        await check_same_rows(later, notes)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["shards", "shards/*.jsonl"])
async def test_another_shard_is_changed_data(path: str, tmp_path: Path) -> None:
    notes, tokenizer = Notes(), Tokenizer(MODEL)
    config = config_of(tmp_path, ROWS)
    folder = tmp_path / "shards"
    folder.mkdir()
    data = config.data.model_copy(update={"params": {"path": str(tmp_path / path)}})
    config = config.model_copy(update={"data": data})
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "a.jsonl").write_text(lines)
    await check_same_rows(build_source(config, tokenizer), notes)  # type: ignore[arg-type]
    (folder / "b.jsonl").write_text(lines)
    with pytest.raises(UserError, match="changed since this run began: 40 rows then, 80 now"):
        await check_same_rows(build_source(config, tokenizer), notes)  # type: ignore[arg-type]


@pytest.mark.gate  # the check is a process of its own
async def test_all_rows_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [
        *ROWS,
        {"prompt": "1+" * 3000, "answer": "1"},
        {"prompt": "\ud83d", "answer": "1"},
        {"prompt": "7"},
    ]
    config = config_of(tmp_path, rows)
    checks = RowChecks(config, build_source(config, Tokenizer(MODEL)))
    for _ in range(2):  # the second one reads the cache
        checks.metrics = {}
        await checks.run()
        assert checks.metrics == {
            "rows_checked": 43,
            "rows_too_long": 1,
            "rows_unreadable": 1,
            "rows_unanswered": 1,
            "rows_empty_answer": 0,
        }
    assert len(list((tmp_path / "cache/rlsys/rows").iterdir())) == 1


def test_row_counts_are_cached_until_the_data_or_the_checking_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = tmp_path / "check.py"
    code.write_text("a")
    monkeypatch.setattr(row_check, "checking_files", lambda: [code])
    checks: list[int] = []
    check = row_check.check_rows

    def counted(*args: Any) -> row_check.RowCounts:
        checks.append(1)
        return check(*args)

    monkeypatch.setattr(row_check, "check_rows", counted)

    def count(rows: list[dict[str, object]], room: int = 512) -> None:
        source = build_source(config_of(tmp_path, rows), Tokenizer(MODEL))
        assert isinstance(source, RowSource)
        row_check.row_counts(source, Limits(128, room))

    count(ROWS)
    count(ROWS)
    assert len(checks) == 1
    count(ROWS[::-1])
    count(ROWS, 256)
    assert len(checks) == 3
    code.write_text("b")
    count(ROWS)
    assert len(checks) == 4
    monkeypatch.setattr(row_check, "version", lambda package: f"{package} 2")
    count(ROWS)
    assert len(checks) == 5


def test_the_checking_files_include_the_sources_of_the_row_checks() -> None:
    names = {f"{file.parent.name}/{file.name}" for file in row_check.checking_files()}
    assert {"data/rows.py", "data/chat_template.py", "engine_requests/limits.py", "core/texts.py"} <= names
