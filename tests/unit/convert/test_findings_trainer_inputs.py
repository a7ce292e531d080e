"""One strict xfail for each finding on what the trainer reads that needs no layer of megatron-core.

The others are in tests/integration/test_findings_trainer_inputs.py; tests/findings.md lists all.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlsys.cli.explain import describe_run
from rlsys.config import Config, load_config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_layout
from rlsys.convert.hf import HFTensors
from rlsys.convert.table import entries
from rlsys.core.errors import UserError
from rlsys.core.types import Sample
from tests.helpers import scripted_engine, tiny
from tests.helpers.router_rig import routing, sample

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs/quickstart.yaml"


def raw_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**tiny.raw_config(tiny.TINY[family]), **changes}


def folder_of(path: Path, raw: dict[str, Any], more: dict[str, Tensor]) -> Path:
    """A whole model folder of small random weights, with further tensors in it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    g = torch.Generator().manual_seed(0)
    shapes = {n: s for entry in entries(HFConfig.of(raw, "config.json")) for n, s in entry.hf.items()}
    save_file({n: torch.randn(s, generator=g) for n, s in shapes.items()} | more, path / "model.safetensors")
    return path


def refusal_of(raw: dict[str, Any]) -> str:
    try:
        HFConfig.of(raw, "config.json")
    except UserError as refusal:
        return str(refusal)
    return ""


# -- S3: two forms of one field --------------------------------------------------------------------------------

NEW_FORM = {"rope_type": "default", "rope_theta": 10000.0}
"""As transformers 5 writes it."""
ADDED = {
    "yarn of a model card": (
        "qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "linear": ("llama", {"type": "linear", "factor": 4.0}),
    "llama3": (
        "llama",
        {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
    ),
    "dynamic": ("qwen3-moe", {"rope_type": "dynamic", "factor": 2.0}),
}  # fmt: skip


def rope_of(raw: dict[str, Any]) -> object:
    """What is computed, or "refused"."""
    return "refused" if refusal_of(raw) else HFConfig.of(raw, "config.json").rope


@pytest.mark.parametrize(("family", "scaling"), ADDED.values(), ids=ADDED)
def test_trainer_inputs_s3_rope_scaling_overrides_rope_parameters_or_is_refused(
    family: str, scaling: dict[str, Any]
) -> None:
    """transformers 5: rope_scaling takes the place of rope_parameters. SGLang reads it, too."""
    scaling_rope = rope_of(raw_of(family, rope_theta=10000.0, rope_scaling=scaling))
    combined_rope = rope_of(
        raw_of(family, rope_theta=10000.0, rope_scaling=scaling, rope_parameters=NEW_FORM)
    )
    assert combined_rope in ("refused", scaling_rope), f"computes {combined_rope}, the engine {scaling_rope}"


def test_trainer_inputs_s3_control_both_forms_may_agree() -> None:
    yarn = tiny.TINY["deepseek-v3"].sizes["rope_parameters"]
    raw = raw_of("deepseek-v3", rope_theta=10000.0, rope_scaling=yarn, rope_parameters=yarn)
    assert rope_of(raw) == rope_of(raw_of("deepseek-v3"))


TWICE = {
    "two names of a number of experts": ("deepseek-v3", {"n_routed_experts": 8, "num_experts": 16}, "num_experts"),
    "kinds of layers and the first dense ones": (
        "glm-4.7-flash", {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, "first_k_dense_replace",
    ),
    "kinds of layers, the first dense ones and their interval": (
        "glm-4.7-flash",
        {"mlp_layer_types": ["sparse"] * 4, "first_k_dense_replace": 0, "decoder_sparse_step": 2},
        "first_k_dense_replace = 0, decoder_sparse_step = 2: expected the same layers, or only mlp_layer_types",
    ),
    "kinds of layers and their interval": (
        "qwen3-next", {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, "full_attention_interval",
    ),
    "rope_scaling without the other base": (
        "llama",
        {"rope_scaling": {**ADDED["llama3"][1]}, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "rope_theta",
    ),
    "rope by kind of layer": (
        "gpt-oss",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}},
        "full_attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "named"), TWICE.values(), ids=TWICE)
def test_trainer_inputs_s3_fields_that_contradict_each_other_are_refused(
    family: str, changes: dict[str, Any], named: str
) -> None:
    """transformers, SGLang and the trainer read different ones of them."""
    assert named in refusal_of(raw_of(family, **changes)), "read without a word"


def test_trainer_inputs_s3_the_language_parts_own_sizes_are_the_models() -> None:
    """transformers and SGLang build the language part of a model with a tower from text_config alone."""
    raw = raw_of("qwen3-vl-moe", num_hidden_layers=9, rope_theta=3.0, quantization_config=None)
    assert HFConfig.of(raw, "config.json").layers == tiny.BASE["num_hidden_layers"]


# -- S6: what an engine says is stored unread --------------------------------------------------------------------


async def generated(monkeypatch: pytest.MonkeyPatch, wrong: int) -> Sample:
    """A response of an engine that names `wrong` instead of its third token."""
    honest = scripted_engine.token

    def token(seed: int, position: int, weights: int) -> int:
        return wrong if position == 6 else honest(seed, position, weights)

    monkeypatch.setattr(scripted_engine, "token", token)
    generated_sample = sample()
    async with routing() as rig:
        await rig.push()
        try:
            await rig.router.generate(generated_sample, max_response_tokens=8, temperature=1.0)
        except Exception as fault:  # noqa: BLE001 - any refusal will do
            generated_sample.censor_reason = str(fault)
    return generated_sample


@pytest.mark.virtual_clock
@pytest.mark.parametrize("wrong", [128, 5000, -1])
async def test_trainer_inputs_s6_an_engines_id_outside_the_vocabulary_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """No xfail: the review says that ids of responses are stored unread, but the router refuses these."""
    generated_sample = await generated(monkeypatch, wrong)
    assert wrong not in list(generated_sample.response_ids)
    assert (
        generated_sample.censor_reason is not None
        and "outside the vocabulary of 128" in generated_sample.censor_reason
    )


@pytest.mark.virtual_clock
async def test_trainer_inputs_s6_control_the_largest_id_of_the_vocabulary_is_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list((await generated(monkeypatch, 127)).response_ids)[2] == 127


# -- M1, M3: folders of listed families ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("ernie-4.5", "moe_num_shared_experts"),
        ("deepseek-v3", "n_shared_experts"),
        ("glm-4.5", "n_shared_experts"),
        ("hy-v3", "num_shared_experts"),
        ("qwen2-moe", "shared_expert_intermediate_size"),
        ("qwen3-next", "shared_expert_intermediate_size"),
    ],
)
def test_trainer_inputs_m1_a_model_without_shared_experts_has_no_tensors_of_them(
    family: str, field: str
) -> None:
    """ERNIE-4.5-300B-A47B is published so."""
    for none in (0, None) if field != "shared_expert_intermediate_size" else (0,):
        config = HFConfig.of(raw_of(family, **{field: none}), "config.json")
        assert [n for entry in entries(config) for n in entry.hf if "shared" in n] == []


def test_trainer_inputs_m3_buffers_of_rotary_embedding_are_ignored(tmp_path: Path) -> None:
    """transformers ignores them by name; many folders of Llama 2's time hold them."""
    raw = raw_of("llama")
    folder = folder_of(
        tmp_path / "model", raw, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}
    )
    refusal = ""
    try:
        HFTensors(folder, HFConfig.read(folder))
    except UserError as e:
        refusal = str(e)
    assert refusal == ""


# -- M4: what explain reads ----------------------------------------------------------------------------------------


def test_trainer_inputs_m4_explain_names_a_folder_that_modelopt_quantised(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "configs/models/quickstart-moe", folder)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    try:
        explanation = "\n".join(
            describe_run(load_config(QUICKSTART, [f"model.path={folder}"]), 80.0)[0].warnings
        )
    except UserError as refusal:
        explanation = str(refusal)
    assert "quantis" in explanation or "NVFP4" in explanation, (
        f"explain says of hf_quant_config.json only: {explanation!r}"
    )


# -- M7, M8 --------------------------------------------------------------------------------------------------------


def test_trainer_inputs_m7_fp8_conversion_requires_disk_space_for_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with more room than the source takes and less than the outcome does."""
    from rlsys.trainer import setup
    from rlsys.trainer.checkpoints import conversion

    class CheckPassed(Exception):
        pass

    def begins(_: Config) -> None:
        raise CheckPassed

    raw = raw_of("deepseek-v3", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    folder = folder_of(tmp_path / "model", raw_of("deepseek-v3"), {})
    (folder / "config.json").write_text(json.dumps(raw))
    written_bytes, stored = store_in_fp8(folder)
    free = (written_bytes + stored) // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=free, used=0, free=free))
    monkeypatch.setattr(setup, "init_distributed", begins)
    try:
        conversion.hf_to_megatron(folder, tmp_path / "out", {}, lambda *_: None)
        outcome = "converted"
    except CheckPassed:
        outcome = "the check passed"
    except UserError as refusal:
        outcome = str(refusal)
    assert "the disk has" in outcome, f"{outcome} with {free} bytes free; {written_bytes} will be written"


def store_in_fp8(folder: Path) -> tuple[int, int]:
    """(bytes of the model in bfloat16, bytes of the folder in FP8 with its scales)."""
    tensors, out = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "_proj" in name:
            out[name] = tensor.to(torch.float8_e4m3fn)
            out[f"{name}_scale_inv"] = torch.ones([-(-n // 128) for n in tensor.shape])
        else:
            out[name] = tensor.bfloat16()
    save_file(out, folder / "model.safetensors")
    return 2 * sum(t.numel() for t in tensors.values()), (folder / "model.safetensors").stat().st_size


def test_trainer_inputs_m8_a_vocabulary_with_one_added_token_can_be_cut_over_tp(tmp_path: Path) -> None:
    hf = HFConfig.of(raw_of("llama", vocab_size=97), "config.json")
    config = Config.model_validate({"model": {"path": tmp_path}, "parallel": {"tp": 2}})
    refusal = ""
    try:
        check_layout(config, hf)
    except UserError as e:
        refusal = str(e)
    assert refusal == ""
