"""`rlsys samples --rows`: a run's samples become rows that `rlsys sft` learns id by id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.cli import main
from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import VersionSpan
from rlsys.core.types import GroupState, Sample, Segment, Status
from rlsys.data.tokenizer import Tokenizer
from rlsys.data.traces import trace_batches
from rlsys.ledger.samples import SampleView
from rlsys.viewer.answers import AnswerRows
from tests.helpers.seen_run import MODEL, PROMPT, write_run

TOKENIZER = Tokenizer(MODEL)


def rows(run: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main.main(["samples", str(run), "--rows", kind]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def traces(path: Path, kind: str, found: list[dict[str, Any]]) -> list[Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    sft = {"traces": kind, "params": {"path": str(path), "batch": len(found)}}
    config = Config.model_validate({"model": {"path": MODEL}, "sft": sft})
    return next(trace_batches(config, TOKENIZER))


@pytest.mark.parametrize("kind", ["pairs", "labels", "chats"])
def test_exported_rows_train_on_exactly_the_sampled_tokens(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported_rows = rows(write_run(tmp_path), kind, capsys)
    prompt = TOKENIZER.encode(PROMPT)
    right, wrong = [TOKENIZER.encode(f"{step} = 42") for step in (1, 2)], TOKENIZER.encode("17")
    assert all((row["prompt"], row["prompt_ids"]) == (PROMPT, prompt) for row in exported_rows)
    learned = traces(tmp_path / "rows.jsonl", kind, exported_rows)
    assert all(trace.prompt_ids == prompt for trace in learned)
    liked = sorted(t.response_ids for t in learned if t.liked)
    disliked_ids = [t.response_ids for t in learned if not t.liked]
    assert (liked, disliked_ids) == (right, [] if kind == "chats" else [wrong, wrong])
    if kind == "pairs":
        assert [row["margin"] for row in exported_rows] == [1.0, 1.0]
        assert [(row["chosen"], row["rejected"]) for row in exported_rows] == [
            ("1 = 42", "17"),
            ("2 = 42", "17"),
        ]


def test_samples_that_cannot_become_rows_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    assert main.main(["samples", str(run), "--rows", "pairs", "--group", "2"]) == 0
    assert capsys.readouterr().out == "", "its samples have no reward yet"

    def seen(i: int, reward: float, status: Status = Status.FINISHED, **fields: Any) -> SampleView:
        sample = Sample(i, 0, i, [5], 0, status=status, reward=reward, **fields)
        if i != 3:
            sample.append(Segment([i + 1], [0.0], [VersionSpan(1, 0, 1)]))
        return SampleView(sample, 1, 0, GroupState.READY, None)

    answer_rows = AnswerRows(lambda ids: str(list(ids)))
    several = seen(2, 1.0)
    several.sample.extra_sequences = [several.sample]
    group = [
        seen(0, 0.5, named_rewards={"exact": 1.0, "short": -0.5}), seen(1, 2.0, Status.TRUNCATED), several,
        seen(3, 0.0), seen(4, -1.0, Status.CENSORED), seen(5, 0.25, plain_reward=1.5),
    ]  # fmt: skip
    labels = [(row["completion_ids"], row["label"]) for row in answer_rows.convert("labels", group)]
    assert labels == [([1], True), ([2], True), ([6], True)]
    assert answer_rows.excluded == 2, "of several sequences; tokens that are gone"
    (pair,) = answer_rows.convert("pairs", group)
    assert (pair["chosen_ids"], pair["rejected_ids"], pair["margin"]) == ([2], [1], 1.5)
    assert list(answer_rows.convert("chats", group)) == [], "the best one was cut off"


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 10**6], r"completion_ids has token id 1000000; expected 0 to \d+"),
        ([-1, 5], r"completion_ids has token id -1; expected 0 to \d+"),
        ([], "completion_ids is .*; expected a list of token ids"),
        ("abc", "completion_ids is .*; expected a list of token ids"),
    ],
)
def test_ids_of_another_model_are_refused(ids: Any, words: str, tmp_path: Path) -> None:
    row = {"prompt": "x", "completion": "y", "prompt_ids": [1], "completion_ids": ids}
    with pytest.raises(UserError, match=words):
        traces(tmp_path / "rows.jsonl", "chats", [row])
