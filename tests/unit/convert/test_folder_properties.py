"""Model folders as strangers leave them: whatever lies in a folder, and in whatever order, a tensor is the one that
the index names, or the folder is refused in one line that names what is wrong. Strategies: which files hold which
tensors (order, duplication), left-over files, other types, sizes, names, headers that are cut or have other bytes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from rlsys.convert.config import HFConfig
from rlsys.convert.folder import INDEX
from rlsys.convert.hf import HFTensors
from rlsys.convert.table import entries
from rlsys.core.errors import UserError
from tests.helpers import tiny
from tests.helpers.odd_values import mutated, texts, values

pytestmark = pytest.mark.gate
SMALL = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_experts": 2}
RAW = tiny.raw_config(tiny.TINY["qwen3-moe"]) | SMALL
HF = HFConfig.of(RAW, "config.json")
SHAPES = {name: shape for entry in entries(HF) for name, shape in entry.hf.items()}
NAMES = sorted(SHAPES)
TENSORS = {name: torch.full(shape, i + 1.0) for i, (name, shape) in enumerate(sorted(SHAPES.items()))}
FILES = st.sampled_from(
    (
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors",
        "a.safetensors", "z.safetensors",
    )
)  # fmt: skip
FIND = (Phase.explicit, Phase.generate)
"""The first example that fails is shown as it is: to make it smaller takes minutes."""
NO_WEIGHTS = st.sampled_from(
    (torch.int8, torch.int32, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64)
)
WEIGHTS = st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16))


def written(folder: Path, files: dict[str, dict[str, Tensor]], index: dict[str, str] | None) -> Path:
    (folder / "config.json").write_text(json.dumps(RAW))
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def split(data: st.DataObject) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """All tensors over one to three files, and their index."""
    chosen = data.draw(st.lists(FILES, min_size=1, max_size=3, unique=True))
    weight_map = {name: chosen[i % len(chosen)] for i, name in enumerate(data.draw(st.permutations(NAMES)))}
    files: dict[str, dict[str, Tensor]] = {file: {} for file in chosen}
    for name, file in weight_map.items():
        files[file][name] = TENSORS[name]
    return files, weight_map


def read(folder: Path) -> dict[str, Tensor] | str:
    """All tensors, or the refusal."""
    try:
        stored = HFTensors(folder, HFConfig.read(folder))
        return {name: stored.read(name) for name in stored.names}
    except UserError as e:
        return str(e)


def assert_right(found: dict[str, Tensor] | str, folder: Path, *, may_refuse: bool) -> None:
    if isinstance(found, str):
        assert may_refuse, found
        assert "\n" not in found and str(folder) in found
    else:
        assert found.keys() == TENSORS.keys()
        wrong = [name for name in NAMES if not torch.equal(found[name], TENSORS[name])]
        assert not wrong, wrong[:3]


@given(data=st.data())
@settings(max_examples=150, phases=FIND)
def test_leftover_files_have_no_effect_or_are_named_in_the_error(data: st.DataObject) -> None:
    """Duplication: with an index, names that other files hold a second time, with other numbers."""
    files, weight_map = split(data)
    stale_tensors = {
        name: torch.zeros(SHAPES[name]) for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=4))
    }
    file = data.draw(FILES)
    clash = file in files
    if stale_tensors and not clash:
        files[file] = stale_tensors
    indexed = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as name:
        folder = written(Path(name), files, weight_map if indexed else None)
        result = read(folder)
        is_clean = not stale_tensors or clash
        shards_of_two = any("-of-" in f for f in files) and not indexed
        assert_right(result, folder, may_refuse=not (indexed or is_clean) or shards_of_two)
        if isinstance(result, str) and stale_tensors and not clash and not indexed:
            assert file in result or "-of-" in result or "expected" in result


@given(data=st.data(), dtype=st.one_of(NO_WEIGHTS, WEIGHTS))
@settings(max_examples=60, phases=FIND)
def test_a_stored_type_is_a_weights_or_is_named(data: st.DataObject, dtype: torch.dtype) -> None:
    files, weight_map = split(data)
    name = data.draw(st.sampled_from(NAMES))
    files[weight_map[name]][name] = torch.ones(SHAPES[name]).to(dtype)
    with tempfile.TemporaryDirectory() as where:
        folder = written(Path(where), files, weight_map)
        result = read(folder)
        if dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            assert not isinstance(result, str), result
            assert torch.equal(result[name].double(), torch.ones(SHAPES[name]).double())
        else:
            assert isinstance(result, str), dtype
            assert name in result and "\n" not in result


@given(data=st.data(), shape=st.lists(st.integers(0, 5), max_size=3))
@settings(max_examples=60, phases=FIND)
def test_another_size_or_name_is_named(data: st.DataObject, shape: list[int]) -> None:
    files, weight_map = split(data)
    name = data.draw(st.sampled_from(NAMES))
    same_name = data.draw(st.booleans())
    new_name = name if same_name else data.draw(texts(surrogates=False, max_size=4)) + ".weight"
    file = weight_map[name]
    del files[file][name]
    files[file][new_name] = torch.ones(shape)
    index = {**{n: f for n, f in weight_map.items() if n != name}, new_name: file}
    with tempfile.TemporaryDirectory() as where:
        folder = written(Path(where), files, index)
        result = read(folder)
        assert isinstance(result, str) or tuple(shape) == SHAPES[name], (new_name, shape)
        if isinstance(result, str):
            assert name in result or new_name in result or "\\x" in result or not new_name.isprintable()
            assert "\n" not in result


@given(
    index=st.one_of(
        values(2).map(json.dumps),
        mutated({"metadata": {}, "weight_map": dict.fromkeys(NAMES, "model.safetensors")}).map(json.dumps),
        st.dictionaries(texts(surrogates=False, max_size=3), values(1), max_size=3).map(
            lambda m: json.dumps({"weight_map": m})
        ),
        texts(surrogates=False),
    )
)
@settings(max_examples=60, phases=FIND)
def test_any_index_is_read_or_named(index: str) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = written(Path(where), {"model.safetensors": TENSORS}, None)
        (folder / INDEX).write_text(index)
        assert_right(read(folder), folder, may_refuse=True)


@given(at=st.integers(0, 400), bytes_=st.binary(max_size=12), cut=st.booleans())
@settings(max_examples=80, phases=FIND)
def test_any_header_is_read_or_named(at: int, bytes_: bytes, cut: bool) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = written(Path(where), {"model.safetensors": TENSORS}, None)
        file = folder / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:at] + bytes_ + (b"" if cut else content[at + len(bytes_) :]))
        result = read(folder)
        if isinstance(result, str):
            assert "\n" not in result and str(folder) in result
        else:
            assert not cut and result.keys() == TENSORS.keys()


CONFIGS = st.one_of(mutated(RAW), values(2))


@given(raw=CONFIGS)
@settings(max_examples=150, phases=FIND)
def test_any_config_is_read_or_named(raw: Any) -> None:
    with tempfile.TemporaryDirectory() as where:
        (Path(where) / "config.json").write_text(json.dumps(raw))
        try:
            HFConfig.read(Path(where))
        except UserError as e:
            assert "\n" not in str(e) and "config.json" in str(e)
