"""Rows that are more than text are refused: models and prompts are text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from rlsys.config import Config, load_config
from rlsys.core.errors import UserError
from rlsys.data import Tokenizer, build_source

MODEL = Path(__file__).resolve().parents[3] / "configs/models/quickstart-moe"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("images", [{"bytes": b"x", "path": None}]),
        ("image", {"bytes": b"x", "path": None}),
        ("video", "clip.mp4"),
        ("videos", ["clip.mp4"]),
        ("audio", {"array": [0.5], "sampling_rate": 16000}),
    ],
)
@pytest.mark.parametrize("first", [0, 20], ids=["all", "half"])
def test_field_05_rows_with_other_media(key: str, value: Any, first: int, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"<image>{i}+1="}],
            "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
            key: value if i >= first else None,
        }
        for i in range(40)
    ]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    overrides = ["data.source=parquet", f"data.params={{path: {file}}}", "data.reward=math", "eval.prompts=2"]
    config = load_config(Path("quickstart"), overrides)
    message = "read as text"
    try:
        build_source(config, Tokenizer(config.model.path))
    except UserError as e:
        message = str(e)
    assert f"row {first}: has {key}" in message


def test_an_empty_column_of_images_is_no_image(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}", "images": []}}\n' for i in range(60))
    )
    overrides = ["data.source=jsonl", f"data.params={{path: {file}}}", "data.reward=math", "eval.prompts=2"]
    config = load_config(Path("quickstart"), overrides)
    build_source(config, Tokenizer(config.model.path))


@pytest.mark.parametrize("column", ["picture", "frames"])
def test_media_of_a_column_of_any_name_are_refused(column: str, tmp_path: Path) -> None:
    media: dict[str, Any] = {"bytes": b"x", "path": None}
    value = media if column == "picture" else [media]
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), column: value} for i in range(40)]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    config = Config.model_validate(
        {
            "model": {"path": MODEL},
            "data": {"source": "parquet", "params": {"path": str(file)}, "reward": "math"},
        }
    )
    with pytest.raises(UserError, match=rf"rows\.parquet, row 0: has {column}"):
        build_source(config, Tokenizer(MODEL))
