"""A run's rows: changed data is refused at the next start, and all rows are counted beside the first steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.config import Config, dump_config
from rlsys.core.errors import UserError
from rlsys.data import Tokenizer, build_source
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
        }
    assert len(list((tmp_path / "cache/rlsys/rows").iterdir())) == 1
