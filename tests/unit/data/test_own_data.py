"""Prompts in other people's formats: where a row has what, data sets on disk and of a hub, mixtures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlsys.config import Config, dump_config, load_config
from rlsys.config.data import KeysConfig
from rlsys.core.errors import UserError
from rlsys.data import PromptSource, Tokenizer, build_source
from rlsys.data.mixture import BLOCK, check_teachers, shares
from rlsys.data.quickstart_model import write_model
from rlsys.data.rows import read_row
from tests.helpers.loopback_hub import COMMIT, hub


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


def source_of(model: Path, **data: Any) -> PromptSource:
    config = Config.model_validate({"model": {"path": model}, "data": data})
    return build_source(config, Tokenizer(model))


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def mixed(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"source": "mixture", "params": {"sources": list(parts)}}


def seen(source: PromptSource, n: int) -> set[tuple[str, Any]]:
    return {(p.text, p.entry.get("answer")) for p in (source.train(i) for i in range(n))}


SUMS = {f"{i}+1=": i + 1 for i in range(40)}
TEXTS = {(f"<bos><user>{q}<assistant><think>", str(a)) for q, a in SUMS.items()}
FORMATS: dict[str, list[dict[str, Any]]] = {
    "rlsys": [{"prompt": q, "answer": str(a)} for q, a in SUMS.items()],
    "messages": [{"messages": chat(q), "answer": str(a)} for q, a in SUMS.items()],
    "slime": [{"prompt": chat(q), "label": str(a)} for q, a in SUMS.items()],
    "trl": [{"prompt": chat(q), "ground_truth": str(a)} for q, a in SUMS.items()],
    "verl": [
        {
            "data_source": "sums",
            "prompt": chat(q),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a)},
            "extra_info": {"split": "train", "index": i},
        }
        for i, (q, a) in enumerate(SUMS.items())
    ],
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
def test_a_format_is_read_as_it_is(model: Path, tmp_path: Path, form: str, kind: str) -> None:
    rows = FORMATS[form]
    params: dict[str, Any] = {"path": str(tmp_path / "rows")}
    if kind == "jsonl":
        (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows")
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))
        params = {"name": str(tmp_path / "rows")}
    source = source_of(model, source=kind, params=params)
    heldout_rows = {(p.text, p.entry["answer"]) for p in source.heldout(4)}
    train = seen(source, 80)
    assert len(heldout_rows) == 4
    assert train < TEXTS and heldout_rows < TEXTS and not train & heldout_rows
    assert source.train(5).question in SUMS  # one message of the user: algo.prompt may reword it


def test_data_keys_select_other_and_nested_fields(model: Path, tmp_path: Path) -> None:
    rows = [{"ask": {"text": q}, "gold": [str(a)], "answer": "worked out: ..."} for q, a in SUMS.items()]
    (tmp_path / "a").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"prompt": "ask.text", "answer": "gold"}
    source = source_of(model, source="jsonl", params={"path": str(tmp_path / "a")}, keys=keys)
    assert all(p.entry["answer"] == [str(SUMS[p.question])] for p in (source.train(i) for i in range(40)))


def test_several_files_are_one_table(model: Path, tmp_path: Path) -> None:
    rows = FORMATS["rlsys"]
    for name, part in (("a", rows[:20]), ("b", rows[20:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), tmp_path / name)
    params = {"path": [str(tmp_path / "a"), str(tmp_path / "b")]}
    source = source_of(model, source="parquet", params=params)
    heldout_texts = {p.text for p in source.heldout(1)}
    assert len(heldout_texts | {text for text, _ in seen(source, 40)}) > 30


def test_empty_columns_of_a_table_are_no_part_of_a_message() -> None:
    row = {"prompt": [{"role": "user", "content": "1+1=", "tool_calls": None}], "answer": None, "tools": "[]"}
    parsed_row = read_row(row, KeysConfig(), "here")
    assert parsed_row.messages == chat("1+1=")
    assert "answer" not in parsed_row.entry and parsed_row.tools is None
    parts = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"text": "1="}]}]}
    assert read_row(parts, KeysConfig(), "here").question == "1+1="


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ([1], {}, "here: expected an object with prompt or messages, found a list"),
        ({"question": "x", "id": 3}, {}, "or messages (a chat); did you mean data.keys.prompt=question?"),
        ({"id": 3, "n": 4}, {}, "or messages (a chat); its keys: id, n"),
        ({"prompt": 3}, {}, "here: prompt is a number; expected a text, or a list of messages"),
        ({"prompt": ""}, {}, "here: prompt is empty"),
        ({"prompt": []}, {}, "here: the prompt is empty; expected a chat"),
        ({"prompt": ["hello"]}, {}, "a message is 'hello'; expected"),
        ({"prompt": [{"role": "user", "content": 3}]}, {}, "the content of a message is a number"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]},
            {},
            "here: a message has the part {'type': 'image', 'image': 'x.png'}; "
            'expected {"type": "text", "text": ...}',
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text"}]}]},
            {},
            'here: a message has the part {\'type\': \'text\'}; expected {"type": "text", "text": ...}',
        ),
        (
            {"messages": [*chat("1+1="), {"role": "assistant", "content": "2"}]},
            {},
            "here: the prompt ends with the assistant's turn; expected a chat that ends with the user's",
        ),
        (
            {"prompt": "x", "solution": "y"},
            {"answer": "solutoin"},
            "data.keys.answer = 'solutoin': here has no such key; did you mean solution?",
        ),
        (
            {"ask": "x"},
            {"prompt": "zzz"},
            "data.keys.prompt = 'zzz': here has no such key; its keys: ask",
        ),
        ({"prompt": "x", "tools": "{"}, {}, "here: tools is a text that is not JSON"),
        (
            {"prompt": "x", "tools": {"a": 1}},
            {},
            "here: tools is an object; expected a list of function schemas",
        ),
    ],
)
def test_mistakes_in_a_row_are_one_line(row: Any, keys: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_row(row, KeysConfig.model_validate(keys), "here")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "jsonl", "params": {"path": "p"}}, "p: a Parquet file; expected JSON, or data.source = parquet"),
        ({"source": "parquet", "params": {"path": "j"}}, "j: expected a Parquet file; for JSON lines use"),
        ({"source": "jsonl", "params": {"path": "one"}}, "one:1: not JSON; the file is one JSON object"),
        ({"source": "parquet", "params": {"path": "none"}}, "none: cannot read: No such file or directory; paths"),
        ({"source": "parquet", "params": {"paht": "p"}}, "data.params.path: missing"),
        ({"source": "dataset", "params": {"name": "no/such/folder"}}, "no id of a data set; expected owner/name"),
        ({"source": "dataset", "params": {"name": "d", "split": "trian"}}, "did you mean train?"),
        ({"source": "dataset", "params": {"name": "d", "revision": "x"}}, "expected null, or the id of a hub"),
        ({"source": "dataset", "params": {"name": "me/sums"}}, "the cache has no copy"),
        ({"source": "jsonl", "params": {"path": "j"}, "keys": {"promt": "x"}}, "did you mean"),
        (mixed({"source": "jsonl"}), "data.params.sources[0]: data.params.path: missing"),
        (mixed({"source": "chain_sum_tail"}, {"source": "x", "weight": 0}), "data.params.sources.1.weight = 0"),
    ],
)  # fmt: skip
def test_mistakes_of_sources_are_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = FORMATS["rlsys"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "p")
    Path("j").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("one").write_text(json.dumps(rows[0], indent=1))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk("d")
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"model": {"path": str(model)}, "data": data}))
    with pytest.raises(UserError) as caught:
        build_source(load_config(path), Tokenizer(model))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


FETCH = """
import sys
from pathlib import Path
from rlsys.config import load_config
from rlsys.data import Tokenizer, build_source
from rlsys.data.pin import pin_data
from rlsys.config import dump_config

config = pin_data(load_config(Path("config.yaml")))
Path("pinned.yaml").write_text(dump_config(config))
source = build_source(config, Tokenizer(config.model.path))
print(source.train(0).text, len(source.heldout(1)), "torch" in sys.modules)
"""


@pytest.mark.full
def test_a_hub_dataset_is_fetched_once_pinned_and_then_read_offline(model: Path, tmp_path: Path) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in FORMATS["slime"]).encode()
    card = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: a.jsonl}\n---\n"
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    env |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def fetch(name: str, **more: str) -> subprocess.CompletedProcess[str]:
        data = {"source": "dataset", "params": {"name": name}}
        config = {"model": {"path": str(model)}, "data": data, "run": {"dir": "run"}}
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-c", FETCH]
        return subprocess.run(command, cwd=tmp_path, env=env | more, capture_output=True, text=True)

    with hub("me/sums", {"README.md": card, "a.jsonl": rows}) as (url, requested_paths):
        online = fetch("me/sums", HF_ENDPOINT=url)
        assert online.returncode == 0, online.stderr[-2000:]
        assert any(path.endswith("/a.jsonl") for path in requested_paths)
        missing = fetch("me/smus", HF_ENDPOINT=url)
        assert (
            f"data.params.name = 'me/smus': no such folder, and the download of this data set from {url} failed"
            in missing.stderr
        )
        (tmp_path / "run").mkdir()
        fetch("me/sums", HF_ENDPOINT=url)
        (tmp_path / "pinned.yaml").rename(tmp_path / "run" / "config.yaml")
        request_count = len(requested_paths)
        again = fetch("me/sums", HF_ENDPOINT=url, HF_HUB_OFFLINE="1")
        assert len(requested_paths) == request_count
    pinned = load_config(tmp_path / "pinned.yaml")
    assert pinned.data.params == {"name": "me/sums", "revision": COMMIT}
    assert online.stdout == again.stdout
    assert online.stdout.split()[-2:] == ["1", "False"]
    assert dump_config(pinned) == (tmp_path / "run" / "config.yaml").read_text()


# --- mixtures ---


def two(tmp_path: Path, weights: tuple[float, float] = (3, 1)) -> dict[str, Any]:
    """Forty sums and ten others, of which some are also among the sums."""
    first, second = (
        FORMATS["rlsys"],
        [*FORMATS["slime"][:20], *({"prompt": f"{i}-1=", "label": "x"} for i in range(40))],
    )
    for name, rows in (("a", first), ("b", second)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = [
        {"source": "jsonl", "weight": weight, "params": {"path": str(tmp_path / name)}, "name": name}
        for name, weight in zip("ab", weights, strict=True)
    ]
    return mixed(*parts)


def test_a_mixture_keeps_its_weights_and_resumes_deterministically(model: Path, tmp_path: Path) -> None:
    data = two(tmp_path)
    source = source_of(model, **data)
    prompts = [source.train(i) for i in range(BLOCK)]
    assert Counter(p.entry["data_source"] for p in prompts) == {"a": 750, "b": 250}
    assert [p.index for p in prompts] == list(range(BLOCK))
    resumed = source_of(model, **data)
    assert [resumed.train(i) for i in (999, 1500, 3)] == [source.train(i) for i in (999, 1500, 3)]
    source_texts = [p.text for p in prompts if p.entry["data_source"] == "a"]
    size = len(set(source_texts))
    assert len(set(source_texts[:size])) == size, (
        "each source goes through its own rows before it begins anew"
    )
    early = Counter(p.entry["data_source"] for p in prompts[:100])
    assert 10 < early["b"] < 45, "the order in a block is mixed"


def test_held_out_prompts_of_a_mixture_cover_all_sources_without_overlap(model: Path, tmp_path: Path) -> None:
    source = source_of(model, **two(tmp_path, (1, 1)))
    heldout_prompts = source.heldout(8)
    assert len({p.text for p in heldout_prompts}) == 8
    assert [p.index for p in heldout_prompts] == list(range(8))
    assert source.heldout(5) == heldout_prompts[:5]
    assert {p.question[-3] for p in heldout_prompts} == {"+", "-"}
    assert not {p.text for p in heldout_prompts} & {source.train(i).text for i in range(400)}


def test_fewer_held_out_prompts_of_a_mixture_are_a_prefix_if_sources_share_prompts(
    model: Path, tmp_path: Path
) -> None:
    data = two(tmp_path, (1, 1))
    parts = data["params"]["sources"]
    parts[1]["params"] = parts[0]["params"]
    source = source_of(model, **data)
    texts = [p.text for p in source.heldout(5)]
    for n in range(1, 5):
        assert [p.text for p in source.heldout(n)] == texts[:n]


def test_a_prompt_that_one_file_holds_out_is_not_trained_from_another(model: Path, tmp_path: Path) -> None:
    data = two(tmp_path)
    (tmp_path / "held").write_text(json.dumps({"prompt": "3+1=", "answer": "4"}) + "\n")
    data["params"]["sources"][0]["params"]["heldout_path"] = str(tmp_path / "held")
    source = source_of(model, **data)
    assert "3+1=" in {row["prompt"][0]["content"] for row in FORMATS["slime"][:20]}
    assert not any("<user>3+1=" in source.train(i).text for i in range(BLOCK))


def test_shares_are_largest_remainders() -> None:
    assert shares([1, 1, 1]) == [334, 333, 333]
    assert shares([2, 0.5]) == [800, 200]
    with pytest.raises(UserError, match=r"sources\[1\].weight = 0.0001: less than one prompt in 1000"):
        shares([1, 1e-4])


@pytest.mark.parametrize(
    ("rows", "mixes", "name", "told"),
    [
        ([{}], True, "sumz", "expected some of gym, sums; did you mean sums?"),
        ([{"data_source": "code"}, {}], True, "sums", None),
        ([{"data_source": "code"}], True, "code", None),
        ([{"data_source": "code"}], True, "sums", "expected some of code, gym"),
        ([{}], False, "sums", "no prompt has one"),
    ],
)
def test_a_teacher_for_an_unused_data_source_is_refused(
    model: Path, tmp_path: Path, rows: list[dict[str, Any]], mixes: bool, name: str, told: str | None
) -> None:
    path = tmp_path / "rows.jsonl"
    prompt_rows = [{"prompt": q, "answer": str(a), **rows[a % len(rows)]} for q, a in SUMS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows))
    jsonl_source = {"source": "jsonl", "params": {"path": str(path)}}
    data = (
        mixed({**jsonl_source, "name": "sums"}, {"source": "chain_sum_tail", "name": "gym"})
        if mixes
        else jsonl_source
    )
    teacher = {"path": model, "by_source": {name: model}}
    config = Config.model_validate(
        {"model": {"path": model}, "data": data, "algo": {"loss": ["distill"], "teacher": teacher}}
    )
    source = build_source(config, Tokenizer(model))
    if told is None:
        check_teachers(config, source)
        return
    with pytest.raises(UserError) as caught:
        check_teachers(config, source)
    assert str(caught.value) == f"algo.teacher.by_source names the data_source {name!r}: {told}"
