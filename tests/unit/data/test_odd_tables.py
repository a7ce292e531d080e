"""Tables whose values Python cannot hold, and data sets on disk that are damaged: one line that names the place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.data import Tokenizer, build_source

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"
PROMPTS = [f"{i}+1=" for i in range(40)]
OFFSETS = np.arange(0, 2 * len(PROMPTS) + 1, 2, dtype=np.int32)
NO_TEXT = pa.StringArray.from_buffers(
    len(PROMPTS), pa.py_buffer(OFFSETS), pa.py_buffer(b"a\xff" * len(PROMPTS))
)
"""A column that says it is text, with a byte that is none."""


def source_of(source: str, **params: Any) -> Any:
    data = {"source": source, "params": params, "reward": "exact_answer"}
    return build_source(Config.model_validate({"model": {"path": MODEL}, "data": data}), Tokenizer(MODEL))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("prompt", NO_TEXT),
        ("answer", NO_TEXT),
        ("when", pa.array([2**62] * len(PROMPTS), pa.timestamp("us"))),
        ("when", pa.array([1] * len(PROMPTS), pa.timestamp("us", tz="Mars/Base"))),
        ("day", pa.array([2**30] * len(PROMPTS), pa.date32())),
    ],
    ids=[
        "a prompt that is no text",
        "an answer that is no text",
        "a far year",
        "a time zone of nowhere",
        "a far day",
    ],
)
def test_a_value_that_python_cannot_hold_names_its_row(name: str, values: Any, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.table({"prompt": PROMPTS} | {name: values}), file)
    with pytest.raises(UserError, match=r"rows\.parquet, row 0: cannot be read: "):
        source_of("parquet", path=str(file))


def test_one_such_value_costs_its_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    when = pa.array([*range(len(PROMPTS) - 1), 2**62], pa.timestamp("us"))
    pyarrow.parquet.write_table(pa.table({"prompt": PROMPTS, "when": when}), file)
    source = source_of("parquet", path=str(file), shuffle=False)
    refused = {p.location: p.refusal for p in map(source.train, range(len(PROMPTS))) if p.refusal}
    assert list(refused) == [f"{file}, row 39"] and "cannot be read" in refused[f"{file}, row 39"]


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "half a description": lambda folder: (folder / "state.json").write_text("{"),
    "a description that is a list": lambda folder: (folder / "state.json").write_text("[]"),
    "no description": lambda folder: (folder / "dataset_info.json").unlink(),
    "no rows": lambda folder: next(folder.glob("*.arrow")).unlink(),
    "half of the rows": lambda folder: _cut(next(folder.glob("*.arrow"))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_data_set_is_one_line(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"prompt": PROMPTS}).save_to_disk(folder)
    DAMAGES[damage](folder)
    with pytest.raises(UserError, match=r"^data\.params\.name = .*saved'?: cannot read it: "):
        source_of("dataset", name=str(folder))


def test_a_data_set_with_a_script_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text("")
    with pytest.raises(UserError, match=r"^data\.params\.name = .*own'?: cannot read it: "):
        source_of("dataset", name=str(folder))


def test_the_format_of_a_saved_data_set_leaves_its_rows(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"prompt": PROMPTS, "answer": PROMPTS})
    rows.with_format("numpy").save_to_disk(tmp_path / "saved")
    prompt = source_of("dataset", name=str(tmp_path / "saved")).train(0)
    assert (type(prompt.question), type(prompt.entry["answer"])) == (str, str)
