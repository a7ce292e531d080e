"""`rlsys new` and what `rlsys try` says of what it found."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlsys.cli.main import main
from rlsys.cli.preflight import check_start
from rlsys.cli.project import MAX_CHARACTERS, advice, create_try_folder, show
from rlsys.cli.project_template import write_starter
from rlsys.config import load_config
from rlsys.core.errors import UserError
from rlsys.data import Tokenizer, build_source


def entry(*rewards: Any, status: str = "finished", text: str = "4") -> dict[str, Any]:
    samples = [
        {
            "text": text,
            "tokens": 1,
            "status": status,
            "reward": r,
            "reason": None if r is not None else "it raised",
            "right": r is not None and (next(iter(r.values())) if isinstance(r, dict) else r) >= 1,
        }
        for r in rewards
    ]
    return {"prompt": "2+2=[1]", "tokens": 5, "samples": samples}


def test_new_writes_a_folder_that_would_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    assert "rlsys try mine/config.yaml" in capsys.readouterr().out
    check_start(load_config(Path("mine/config.yaml")))
    assert main(["new", "mine"]) == 2
    assert "mine: already exists" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["it's mine #1", "yes", "a {b}, c", "-2", "größer", "1e3", "deep/er"])
def test_new_writes_a_valid_config_for_any_folder_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_starter(Path(name))
    config = load_config(Path(name, "config.yaml"))
    assert config.run.dir == Path("runs", Path(name).name)
    assert config.data.params == {"path": f"{name}/data.jsonl"}
    assert config.data.reward_name == f"{name}/reward.py:reward"
    source = build_source(config, Tokenizer(config.model.path))
    assert source.train(0).entry["answer"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a:b", "'a:b': expected a name without colons"),
        ("a\nb", "'a\\nb': expected a name without colons and line breaks"),
        ("file/mine", "file/mine: Not a directory"),
    ],
)
def test_a_name_that_cannot_be_is_refused_in_one_line(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["new", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_new_reports_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="mine: No space left on device"):
        write_starter(tmp_path / "mine")


@pytest.mark.parametrize("name", ["a, b} #1", "deep/er"])
def test_the_test_that_new_writes_passes_anywhere_and_tries_the_data_that_the_config_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name
    write_starter(Path(name))
    (folder / "data.jsonl").rename(folder / "rows.jsonl")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("data.jsonl", "rows.jsonl"))
    spec = importlib.util.spec_from_file_location("written", folder / "test_reward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir("/")
    module.test_the_right_answer_is_rewarded(monkeypatch)


def test_a_try_creates_a_new_folder_and_keeps_existing_ones(tmp_path: Path) -> None:
    """Before: RUN-try was deleted first, whosever it was."""
    (tmp_path / "mine-try").mkdir()
    (tmp_path / "mine-try-1").mkdir()
    existing_files = [tmp_path / "mine-try" / "model", tmp_path / "mine-try-1" / "rollouts.sqlite"]
    for path in existing_files:
        path.write_text("somebody's")
    try_folders = [create_try_folder(tmp_path / "mine") for _ in range(2)]
    assert try_folders == [tmp_path / "mine-try-2", tmp_path / "mine-try-3"]
    assert all(folder.is_dir() and not any(folder.iterdir()) for folder in try_folders)
    assert all(path.read_text() == "somebody's" for path in existing_files)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/mine-try-1: Not a directory"):
        create_try_folder(tmp_path / "file" / "mine")


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([entry(0.0, 1.0)], ["mean reward 0.500 of 2 samples"]),
        (
            [entry(0.0, 0.0), entry(1.0, 1.0)],
            ["mean reward 0.500", "All samples of each prompt have the same"],
        ),
        ([entry(None, 1.0)], ["mean reward 1.000", "1 of 2 samples have no reward", "All samples"]),
        ([entry(None)], ["No sample has a reward"]),
        (
            [entry({"a": 0.5, "b": 0.5}, 0.0, status="truncated")],
            ["mean reward 0.500", "No sample counts as correct", "2 of 2 samples were trunc"],
        ),
        (
            [entry(0.98, -0.01)],
            [
                "mean reward 0.485",
                "No sample counts as correct in an evaluation, which requires a reward (or first named part) of "
                "at least 1 (docs/own-task.md); the highest reward here is 0.98.",
            ],
        ),
        ([entry({"right": 1.0, "brief": -0.02}, {"right": 0.0, "brief": -0.01})], ["mean reward 0.485"]),
    ],
)
def test_advice_reports_problems_before_a_run(found: list[dict[str, Any]], told: list[str]) -> None:
    lines = list(advice(found))
    assert len(lines) == len(told)
    assert all(line.startswith(start) for line, start in zip(lines, told, strict=True))


def test_texts_are_shown_as_they_are_and_long_ones_shortened() -> None:
    out = StringIO()
    show([entry(1.0, None, text="[b]" + "x" * MAX_CHARACTERS)], Console(file=out, width=200))
    printed = out.getvalue()
    assert "2+2=[1]" in printed
    assert "[b]xxx" in printed
    assert "3 characters" in printed
    assert "NO REWARD: it raised" in printed


@pytest.mark.parametrize(("word", "unread"), [("für “a”", "ü “ ”"), ("for a", None)])
def test_characters_without_a_token_are_reported_before_a_run(
    word: str, unread: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_starter(Path("mine"))
    rows = [json.dumps({"prompt": f"{word} {i}", "answer": i}, ensure_ascii=False) for i in range(300)]
    Path("mine/data.jsonl").write_text("\n".join(rows), encoding="utf-8")
    notes = [note for note in check_start(load_config(Path("mine/config.yaml"))) if "no token for" in note]
    assert len(notes) == (unread is not None)
    assert all(f"no token for {unread}, so it cannot read" in t and "mine/data.jsonl:" in t for t in notes)


def test_a_shipped_model_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "big", "--model", "configs/models/Qwen3-30B-A3B", "--gpus", "8"]) == 0
    assert load_config(Path("big/config.yaml")).model.path.is_dir()


def test_fine_tuning_refuses_a_row_before_the_trainer_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chat = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "</think><answer>2</answer>"},
    ]
    Path("chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    Path("own.yaml").write_text("base: quickstart\nsft: {traces: chats, params: {path: chats.jsonl}}\n")
    assert main(["sft", "own.yaml", "run.dir=run"]) == 2
    assert (
        "chats.jsonl:1: the chat template changes earlier text when turn 2 is added"
        in capsys.readouterr().err
    )
    assert [p.name for p in Path("run/logs").iterdir()] == ["supervisor.log"]
