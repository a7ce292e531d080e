"""Which stored tensor is the model's: the index, names that several files hold, and stored types."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsys.cli.explain import describe_run
from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.folder import INDEX
from rlsys.convert.hf import HFTensors
from rlsys.convert.table import entries
from rlsys.core.errors import UserError
from rlsys.planner.model_preflight import check_model
from tests.helpers import tiny

NAME = "model.layers.0.self_attn.o_proj.weight"
EXPERTS = "model.layers.1.mlp.experts."
Tensors = dict[str, Tensor]


def write_folder(folder: Path, family: str = "qwen3-moe", **changes: Any) -> Path:
    """A whole model folder of one file."""
    folder.mkdir()
    raw = tiny.raw_config(tiny.TINY[family]) | changes
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text("{}")
    hf = HFConfig.of(raw, "config.json")
    shapes = {name: shape for entry in entries(hf) for name, shape in entry.hf.items()}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def split(folder: Path, parts: int = 2) -> Tensors:
    """Shards and their index in place of the one file; all tensors."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, Any] = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        some = {name: tensors[name] for name in sorted(tensors)[part::parts]}
        save_file(some, folder / file)
        weight_map |= dict.fromkeys(some, file)
    write_index(folder, weight_map)
    return tensors


def write_index(folder: Path, places: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def read_index(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def read(folder: Path) -> HFTensors:
    return HFTensors(folder, HFConfig.read(folder))


def assert_read(folder: Path, expected: Tensors) -> None:
    stored = read(folder)
    assert stored.names == expected.keys()
    wrong = [name for name, tensor in expected.items() if not torch.equal(stored.read(name), tensor)]
    assert not wrong, f"{len(wrong)} of {len(expected)} tensors come from other files"


def zeros(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


# -- the index ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stale",
    ["model.safetensors", "model-00003-of-00003.safetensors", "zzz.safetensors", "pytorch.safetensors"],
)
def test_a_file_that_the_index_does_not_name_is_not_read(folder: Path, stale: str) -> None:
    tensors = split(folder)
    save_file(zeros(tensors), folder / stale)
    assert_read(folder, tensors)


def test_a_stray_file_of_other_names_is_no_part_of_an_indexed_folder(folder: Path) -> None:
    """Mistral's own format, and an adapter, beside the shards."""
    tensors = split(folder)
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")
    save_file({"base_model.lora_A.weight": torch.zeros(4, 4)}, folder / "adapter_model.safetensors")
    (folder / "cut.safetensors").write_bytes(b"\0" * 20)
    assert_read(folder, tensors)


def test_the_index_decides_between_two_of_its_files(folder: Path) -> None:
    """SGLang loads every tensor of both files in the order of their names, so the last copy counts there."""
    tensors = split(folder)
    overlay = {NAME: torch.full_like(tensors[NAME], 7.0)}
    save_file(overlay, folder / "overlay.safetensors")
    write_index(folder, read_index(folder) | {NAME: "overlay.safetensors"})
    assert_read(folder, tensors | overlay)


def test_two_files_of_the_index_that_engines_would_read_otherwise_are_refused(folder: Path) -> None:
    tensors = split(folder)
    where = read_index(folder)[NAME]
    save_file({NAME: torch.full_like(tensors[NAME], 7.0)}, folder / "an-overlay.safetensors")
    write_index(folder, read_index(folder) | {NAME: "an-overlay.safetensors"})
    with pytest.raises(UserError, match=rf"{NAME}.*an-overlay\.safetensors.*{where}.*SGLang"):
        read(folder)


def test_a_wrong_entry_of_the_index_does_not_hide_the_only_copy(folder: Path) -> None:
    """Engines read every tensor of the index's files."""
    tensors = split(folder)
    weight_map = read_index(folder)
    first, last = sorted(set(weight_map.values()))
    swapped = {NAME: last if weight_map[NAME] == first else first}
    write_index(folder, weight_map | swapped | {"model.layers.9.eh_proj.weight": first})
    assert_read(folder, tensors)


@pytest.mark.parametrize("file", ["../other/model.safetensors", "sub/model.safetensors", "model.bin", 3])
def test_an_index_names_safetensors_files_of_its_folder(folder: Path, file: object) -> None:
    split(folder)
    for path in (folder.parent / "other" / "model.safetensors", folder / "sub" / "model.safetensors"):
        path.parent.mkdir()
        save_file({NAME: torch.zeros(3)}, path)
    (folder / "model.bin").touch()
    write_index(folder, read_index(folder) | {NAME: file})
    with pytest.raises(UserError, match=rf"{INDEX}.*{NAME}"):
        read(folder)


# -- without an index ---------------------------------------------------------------------------------------


def test_without_an_index_a_name_in_two_files_is_an_error_that_names_both(folder: Path) -> None:
    save_file({NAME: torch.zeros(64, 96)}, folder / "model-00001-of-00002.safetensors")
    pattern = rf"{NAME} .*model-00001-of-00002\.safetensors.* model\.safetensors"
    with pytest.raises(UserError, match=pattern):
        read(folder)


def test_without_an_index_shards_of_two_counts_are_refused(folder: Path) -> None:
    split(folder)
    (folder / INDEX).unlink()
    for i, name in enumerate(("model-00001-of-00003", "model-00002-of-00003")):
        save_file({f"{EXPERTS}{i}.up_proj.weight": torch.zeros(32, 64)}, folder / f"{name}.safetensors")
    with pytest.raises(UserError, match=r"model-0000\d-of-00002\.safetensors.*model-0000\d-of-00003"):
        read(folder)


def test_mistrals_consolidated_file_is_ignored_next_to_a_complete_model(folder: Path) -> None:
    """As SGLang and transformers leave it."""
    tensors = tensors_of(folder)
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")
    assert_read(folder, tensors)


@pytest.mark.parametrize("indexed", [False, True])
def test_fused_and_per_expert_forms_of_one_tensor_are_refused(folder: Path, indexed: bool) -> None:
    tensors = tensors_of(folder)
    fused = torch.stack([tensors[f"{EXPERTS}{e}.down_proj.weight"] for e in range(8)])
    save_file({EXPERTS + "down_proj": fused}, folder / "fused.safetensors")
    if indexed:
        weight_map = dict.fromkeys(tensors, "model.safetensors") | {
            EXPERTS + "down_proj": "fused.safetensors"
        }
        write_index(folder, weight_map)
    with pytest.raises(UserError, match=r"experts\.\d\.down_proj.*fused\.safetensors.*model\.safetensors"):
        read(folder)


def test_both_forms_in_one_file_are_refused(folder: Path) -> None:
    tensors = tensors_of(folder)
    fused = torch.stack([tensors[f"{EXPERTS}{e}.down_proj.weight"] for e in range(8)])
    save_file(tensors | {EXPERTS + "down_proj": fused}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"experts\.\d\.down_proj.*experts\.down_proj"):
        read(folder)


# -- what is no weight --------------------------------------------------------------------------------------


def test_buffers_of_old_folders_are_skipped_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "llama")
    tensors = tensors_of(folder)
    rotary_buffers = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(12) for layer in range(4)
    }
    save_file(tensors | rotary_buffers, folder / "model.safetensors")
    assert_read(folder, tensors)


# -- types --------------------------------------------------------------------------------------------------


def change(folder: Path, made: Callable[[Tensors], Tensors]) -> None:
    tensors = tensors_of(folder)
    save_file(tensors | made(tensors), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("dtype", "called"),
    [
        (torch.int8, "I8"), (torch.uint8, "U8"), (torch.int32, "I32"), (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", [NAME, "model.norm.weight", EXPERTS + "3.down_proj.weight"])
def test_a_type_that_is_no_weights_is_named(folder: Path, name: str, dtype: torch.dtype, called: str) -> None:
    change(folder, lambda t: {name: (100 * t[name]).to(dtype)})
    with pytest.raises(UserError, match=rf"model\.safetensors: {name} .*{called}.*expected"):
        read(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_types_of_weights_are_read(folder: Path, dtype: torch.dtype) -> None:
    change(folder, lambda t: {NAME: t[NAME].to(dtype)})
    assert read(folder).read(NAME).dtype == dtype


def config_of(folder: Path, **sections: Any) -> Config:
    rollout = {"max_response_tokens": 64}
    return Config.model_validate({"model": {"path": folder}, "rollout": rollout, **sections})


def test_explain_and_every_command_refuse_a_type_before_anything_starts(folder: Path) -> None:
    config = config_of(folder)
    describe_run(config, 80.0)
    check_model(config)
    change(folder, lambda t: {NAME: (100 * t[NAME]).to(torch.int8)})
    for command in (check_model, lambda c: describe_run(c, 80.0)):
        with pytest.raises(UserError, match=rf"{NAME} .*I8"):
            command(config)


def test_explain_refuses_a_teacher_of_such_a_type(folder: Path, tmp_path: Path) -> None:
    teacher = write_folder(tmp_path / "teacher")
    config = config_of(folder, algo={"teacher": {"path": teacher, "top_k": 4}})
    describe_run(config, 80.0)
    change(teacher, lambda t: {NAME: (100 * t[NAME]).to(torch.int8)})
    for command in (check_model, lambda c: describe_run(c, 80.0)):
        with pytest.raises(UserError, match=rf"teacher/model\.safetensors: {NAME} .*I8"):
            command(config)


def test_modelopts_tensors_are_called_quantised(folder: Path) -> None:
    """NVFP4 as ModelOpt writes it: its config.json says nothing of it."""

    def packed(tensors: Tensors) -> Tensors:
        quantised_tensors: Tensors = {}
        for name in [n for n in tensors if ".experts." in n]:
            rows, columns = tensors[name].shape
            quantised_tensors[name] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
            quantised_tensors[name + "_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
            quantised_tensors[name + "_scale_2"] = torch.ones(())
        return quantised_tensors

    change(folder, packed)
    with pytest.raises(UserError, match=r"has type U8"):
        read(folder)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(UserError, match=r"hf_quant_config\.json: the weights are quantised \(NVFP4\)"):
        HFConfig.read(folder)


def test_a_header_with_byte_counts_inconsistent_with_dtypes_is_refused(folder: Path) -> None:
    """As a file that was patched by hand: four bytes a number where the type has two."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = data[8 : 8 + length].replace(b'"F32"', b'"F16"')
    file.write_bytes(data[:8] + header + data[8 + length :])
    with pytest.raises(UserError, match=r"model\.safetensors: .*damaged"):
        read(folder)


# -- eight bits and their scales ----------------------------------------------------------------------------

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WIDE = "model.layers.1.self_attn.o_proj.weight"
SCALE = WIDE + "_scale_inv"


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 384}
    folder = write_folder(tmp_path / "model", "kimi-k2", **sizes, quantization_config=BLOCKS)

    def quantised(tensors: Tensors) -> Tensors:
        quantised_tensors: Tensors = {}
        for name in [n for n in tensors if "_proj.weight" in n]:
            quantised_tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            quantised_tensors[name + "_scale_inv"] = torch.ones(
                [math.ceil(n / 128) for n in tensors[name].shape]
            )
        return quantised_tensors

    change(folder, quantised)
    return folder


def test_a_folder_of_eight_bits_is_read(fp8: Path) -> None:
    assert read(fp8).read(WIDE).dtype == torch.bfloat16


def replace(folder: Path, **tensors: Tensor | None) -> None:
    """`None`: it goes."""
    remaining_tensors = {name: tensor for name, tensor in tensors_of(folder).items() if name not in tensors}
    save_file(
        remaining_tensors | {n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors"
    )


def test_a_missing_scale_is_named(fp8: Path) -> None:
    replace(fp8, **{SCALE: None})
    with pytest.raises(UserError, match=rf"model\.safetensors: {WIDE} .*F8_E4M3.*{SCALE}"):
        read(fp8)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (2,), (), (1, 2, 1)])
def test_a_scale_of_another_shape_is_named(fp8: Path, shape: tuple[int, ...]) -> None:
    rows, columns = tensors_of(fp8)[WIDE].shape
    right = (math.ceil(rows / 128), math.ceil(columns / 128))
    assert right == (2, 1)
    replace(fp8, **{SCALE: torch.ones(shape)})
    with pytest.raises(UserError, match=rf"model\.safetensors: {SCALE} .*expected \(2, 1\)"):
        read(fp8)


def test_a_scale_of_no_numbers_is_named(fp8: Path) -> None:
    replace(fp8, **{SCALE: torch.ones(2, 1, dtype=torch.int32)})
    with pytest.raises(UserError, match=rf"{SCALE} .*I32"):
        read(fp8)


def test_a_scale_of_no_tensor_is_named(fp8: Path) -> None:
    replace(fp8, **{"model.layers.9.nothing.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(UserError, match=r"model\.layers\.9\.nothing\.weight_scale_inv"):
        read(fp8)


def test_a_scale_for_an_unquantised_tensor_is_refused(fp8: Path) -> None:
    replace(fp8, **{WIDE: torch.ones(tensors_of(fp8)[WIDE].shape)})
    with pytest.raises(UserError, match=rf"{WIDE} .*F32.*{SCALE}"):
        read(fp8)


def test_eight_bits_of_no_matrix_are_refused(fp8: Path) -> None:
    """Experts in one tensor: their blocks are another format."""
    tensors = tensors_of(fp8)
    parts = [tensors[f"{EXPERTS}{e}.down_proj.weight"].float() for e in range(8)]
    removed_tensors: dict[str, Tensor | None] = {}
    for e in range(8):
        removed_tensors |= {f"{EXPERTS}{e}.down_proj.weight{end}": None for end in ("", "_scale_inv")}
    fused = torch.stack(parts).to(torch.float8_e4m3fn)
    replace(
        fp8,
        **removed_tensors,
        **{EXPERTS + "down_proj": fused, EXPERTS + "down_proj_scale_inv": torch.ones(8, 2, 1)},
    )
    with pytest.raises(UserError, match=r"experts\.down_proj.*a matrix"):
        read(fp8)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("_scales", None, r"gate_up_proj_blocks .*gate_up_proj_scales"),
        ("_blocks", None, r"gate_up_proj_scales .*gate_up_proj_blocks"),
        ("_blocks", torch.zeros(8, 64, dtype=torch.uint8), r"gate_up_proj_blocks .*expected"),
        ("_blocks", torch.zeros(8, 64, 2, 16), r"gate_up_proj_blocks .*F32.*expected"),
        ("_scales", torch.zeros(8, 64, 1, dtype=torch.uint8), r"gate_up_proj_scales .*expected \(8, 64, 2\)"),
    ],
)
def test_four_bits_and_their_scales_belong_together(
    tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    folder = write_folder(tmp_path / "model", "gpt-oss", quantization_config={"quant_method": "mxfp4"})
    weights = EXPERTS + "gate_up_proj"
    tensors = tensors_of(folder)
    parts = [
        n for n in tensors if n.startswith(EXPERTS) and n.endswith(("gate_proj.weight", "up_proj.weight"))
    ]
    packed = {
        weights + "_blocks": torch.zeros(8, 64, 2, 16, dtype=torch.uint8),
        weights + "_scales": torch.zeros(8, 64, 2, dtype=torch.uint8),
    }
    replace(folder, **dict.fromkeys(parts), **packed)
    read(folder)
    replace(folder, **{weights + name: tensor})
    with pytest.raises(UserError, match=message):
        read(folder)


def test_a_folder_that_is_a_megatron_checkpoint_too_is_refused(folder: Path) -> None:
    """The trainer would load the checkpoint, and engines the safetensors files."""
    (folder / ".metadata").touch()
    for call in (lambda: read(folder), lambda: check_model(config_of(folder))):
        with pytest.raises(UserError, match=r"model: contains both .*\.metadata.* and .*safetensors"):
            call()


# What lies there in place of a file


@pytest.mark.parametrize("instead", ["dangling link", "folder"])
def test_an_unreadable_index_is_refused(folder: Path, instead: str) -> None:
    split(folder)
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir() if instead == "folder" else (folder / INDEX).symlink_to("../blobs/gone")
    with pytest.raises(UserError, match=INDEX):
        read(folder)


def test_a_shard_that_is_no_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe waits for who writes into it."""
    split(folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.unlink()
    os.mkfifo(shard)
    plain_open = Path.open

    def open_(self: Path, *args: Any, **kwargs: Any) -> Any:
        assert self != shard, "it would wait for ever"
        return plain_open(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_)
    with pytest.raises(UserError, match=shard.name):
        read(folder)


@pytest.mark.parametrize("what", ["shape", "data_offsets", "dtype", "__metadata__"])
def test_a_header_of_other_kinds_of_values_is_damaged(folder: Path, what: str) -> None:
    """Equal to the right ones in Python; the library that reads the tensors refuses them, with a traceback."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    if what == "__metadata__":
        header[what] = "pt"
    elif what == "dtype":
        header[NAME][what] = 5
    else:
        header[NAME][what] = [float(n) for n in header[NAME][what]]
    encoded_header = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded_header)) + encoded_header + data[8 + length :])
    with pytest.raises(UserError, match="its header is damaged"):
        read(folder)
