"""Answers in files, for `rlsys sft`: which ids are trained, and what is said about rows that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.config.shipped import find_model
from rlsys.core.errors import UserError
from rlsys.data.quickstart_model import write_model
from rlsys.data.tokenizer import Tokenizer
from rlsys.data.trace import Trace
from rlsys.data.traces import trace_batches

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = TEMPLATE.replace(
    "m['content'] }}", "m['content'] if loop.last or m['role'] == 'user' else 'x' }}"
)
"""It shortens what lies behind, as templates do that drop earlier thoughts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "model"
    write_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def config_of(model: Path, path: Path | None, traces: str, rows: list[Any], **params: Any) -> Config:
    if path is not None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config.model_validate(
        {
            "model": {"path": model},
            "trainer": {"steps": 4},
            "sft": {"traces": traces, "params": {"path": str(path), "batch": len(rows), **params}},
        }
    )


def first(model: Path, path: Path, traces: str, rows: list[Any], **params: Any) -> list[Trace]:
    return next(trace_batches(config_of(model, path, traces, rows, **params), Tokenizer(model)))


def trained(tokenizer: Tokenizer, trace: Trace) -> str:
    """What is imitated, with a bar between pieces that do not touch."""
    mask = trace.trained or [True] * len(trace.response_ids)
    pieces: list[list[int]] = [[]]
    for token, is_trained in zip(trace.response_ids, mask, strict=True):
        if is_trained:
            pieces[-1].append(token)
        elif pieces[-1]:
            pieces.append([])
    return "|".join(tokenizer.decode(p) for p in pieces if p)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHAT = [user("1+1="), assistant("2"), user("2+2="), assistant("4")]


@pytest.mark.parametrize(
    ("train", "prompt", "imitated"),
    [
        ("all", "<user>1+1=<assistant>", "2<eos>|4<eos>"),
        ("last", "<user>1+1=<assistant>2<eos>\n<user>2+2=<assistant>", "4<eos>"),
    ],
)  # fmt: skip
def test_turns_of_the_assistant_are_imitated_to_their_end(
    train: str, prompt: str, imitated: str, model: Path, tmp_path: Path
) -> None:
    (trace,) = first(model, tmp_path / "a.jsonl", "chats", [{"messages": CHAT}], train=train)
    tokenizer = Tokenizer(model)
    assert tokenizer.decode(trace.prompt_ids) == prompt
    assert trained(tokenizer, trace) == imitated
    transcript = tokenizer.decode([*trace.prompt_ids, *trace.response_ids])
    assert transcript == tokenizer.apply_chat(CHAT, generate=False).removesuffix("\n")


def test_a_text_completion_becomes_a_response_with_an_end_token(model: Path, tmp_path: Path) -> None:
    (trace,) = first(model, tmp_path / "a.jsonl", "chats", [{"prompt": "1+1=", "completion": "2"}])
    tokenizer = Tokenizer(model)
    assert tokenizer.decode(trace.prompt_ids) == "<user>1+1=<assistant>"
    assert tokenizer.decode(trace.response_ids) == "2<eos>" and trace.trained is None


def test_pairs_and_labels(model: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": [user("1+1=")], "chosen": [assistant("2")], "rejected": "3", "margin": 0.5},
        {"chosen": [*CHAT[:3], assistant("4")], "rejected": [*CHAT[:3], assistant("5")]},
    ]
    traces = first(model, tmp_path / "a.jsonl", "pairs", rows)
    tokenizer = Tokenizer(model)
    preferences = {(trained(tokenizer, t), t.liked, t.margin) for t in traces}
    assert preferences == {
        ("2<eos>", True, 0.5),
        ("3<eos>", False, 0.5),
        ("4<eos>", True, 0.0),
        ("5<eos>", False, 0.0),
    }
    assert sorted(t.pair for t in traces) == [0, 0, 1, 1]
    assert all(a.prompt_ids == b.prompt_ids for a in traces for b in traces if a.pair == b.pair)
    marked = [{"prompt": "1+1=", "completion": str(n), "label": n == 2} for n in (2, 3)]
    label_traces = first(model, tmp_path / "b.jsonl", "labels", marked)
    assert {(trained(tokenizer, t), t.liked) for t in label_traces} == {("2<eos>", True), ("3<eos>", False)}


def test_each_epoch_has_every_row_once_and_restarts_are_reproducible(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "completion": str(n)} for n in range(6)]
    config = config_of(model, tmp_path / "a.jsonl", "chats", rows, batch=4)
    tokenizer = Tokenizer(model)
    batches = [[trained(tokenizer, t) for t in batch] for batch in trace_batches(config, tokenizer)]
    flat = [text for batch in batches for text in batch]
    assert sorted(flat[:6]) == sorted(flat[6:12]) == [f"{n}<eos>" for n in range(6)]
    assert flat[:6] != flat[6:12]
    assert [[trained(tokenizer, t) for t in b] for b in trace_batches(config, tokenizer, 2)] == batches[2:]


@pytest.mark.parametrize(
    ("traces", "row", "message"),
    [
        ("chats", {"text": "hello"}, "a.jsonl:1: expected completion or messages, found text"),
        ("chats", "hello", "a.jsonl:1: expected completion or messages, found a text"),
        ("chats", {"messages": [user("1")]}, "no prompt, and messages has no message with the role assistant"),
        ("chats", {"messages": [*CHAT, user("1")]}, "a.jsonl:1: the answer ends with the turn of user; expected the"),
        ("chats", {"messages": ["hi"]}, "a.jsonl:1: a message is 'hi'; expected"),
        ("chats", {"prompt": "1", "completion": 2}, "a.jsonl:1: completion is a number; expected a text or messages"),
        ("chats", {"prompt": "1" * 9000, "completion": "2"}, "tokens; expected at most trainer.token_budget = 8192"),
        ("pairs", {"prompt": "1", "chosen": "2"}, "a.jsonl:1: rejected is nothing; expected a text or messages"),
        ("pairs", {"prompt": "1", "chosen": "2", "rejected": "3", "margin": "x"}, "margin is a text; expected"),
        ("labels", {"prompt": "1", "completion": "2"}, "a.jsonl:1: label is None; expected true or false"),
    ],
)  # fmt: skip
def test_wrong_rows_are_one_line(traces: str, row: Any, message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as e:
        first(model, tmp_path / "a.jsonl", traces, [row])
    assert message in str(e.value) and "\n" not in str(e.value)


def test_a_template_that_opens_a_thought_names_it_and_the_remedy(tmp_path: Path) -> None:
    """The shipped model's: it opens <think> for an answer, and writes none into a chat."""
    model = find_model(Path("configs/models/quickstart-moe"))
    answer = "</think><answer>2</answer>"
    chat = {"messages": [user("1+1="), {"role": "assistant", "content": answer}]}
    with pytest.raises(UserError, match=r"when turn 2 is added, .*=<assistant><think>'; use the") as e:
        first(model, tmp_path / "a.jsonl", "chats", [chat])
    assert "imitate" not in str(e.value)  # it is the last turn
    as_text = {"prompt": chat["messages"][:1], "completion": answer}
    (trace,) = first(model, tmp_path / "a.jsonl", "chats", [as_text])
    assert trained(Tokenizer(model), trace).startswith(answer)


def test_a_template_that_rewrites_the_past_is_refused_for_all_turns_but_not_the_last(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(FORGETFUL)
    with pytest.raises(UserError, match="changes earlier text when turn 3 is added"):
        first(tmp_path / "model", tmp_path / "a.jsonl", "chats", [{"messages": CHAT}])
    (trace,) = first(tmp_path / "model", tmp_path / "a.jsonl", "chats", [{"messages": CHAT}], train="last")
    assert trained(Tokenizer(tmp_path / "model"), trace) == "4<eos>"
