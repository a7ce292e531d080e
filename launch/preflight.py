"""What can be known to be wrong before a process starts: the model folder, and layouts that do not fit it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.errors import UserError


def check_model(config: Config) -> None:
    """Raises UserError when model.path is no Hugging Face folder, or a layout or a length does not fit it."""
    hf = read_hf_config(config.model.path)
    for needed, what in ((("*.safetensors", ".metadata"), "weights"), (("tokenizer.json",), "tokenizer")):
        if not any(any(config.model.path.glob(pattern)) for pattern in needed):
            raise UserError(f"model.path = {config.model.path}: no {what} in it ({' or '.join(needed)})")
    _check_layout(config, hf)
    context = hf.get("max_position_embeddings")
    longest = config.rollout.max_response_tokens
    if isinstance(context, int) and longest >= context:
        raise UserError(
            f"rollout.max_response_tokens = {longest} leaves no room for a prompt in the model's context of "
            f"{context} tokens"
        )


def read_hf_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    if not path.exists():
        raise UserError(f"model.path = {path}: no such folder")
    if not path.is_dir():
        raise UserError(f"model.path = {path}: not a folder; expected a Hugging Face model folder")
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"model.path = {path}: not a Hugging Face model folder: no config.json in it")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{file}: not JSON: {e}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(found).__name__}")
    return found


def _check_layout(config: Config, hf: dict[str, Any]) -> None:
    p = config.parallel
    experts = hf.get("num_experts") or hf.get("n_routed_experts") or hf.get("num_local_experts")
    if p.ep > 1 and not experts:
        raise UserError(f"parallel.ep = {p.ep}: the model at {config.model.path} has no experts")
    for size, field, count, what in (
        (p.ep, "parallel.ep", experts, "experts"),
        (p.pp * p.vpp, "parallel.pp * vpp", hf.get("num_hidden_layers"), "layers"),
        (p.tp, "parallel.tp", hf.get("num_attention_heads"), "attention heads"),
        (p.tp, "parallel.tp", hf.get("num_key_value_heads"), "key-value heads"),
        (p.tp, "parallel.tp", hf.get("vocab_size"), "vocabulary entries"),
        (p.expert_tp, "parallel.etp", hf.get("moe_intermediate_size"), "feed-forward units of an expert"),
        (config.engine.tp, "engine.tp", hf.get("num_attention_heads"), "attention heads"),
    ):
        if isinstance(count, int) and count % size:
            raise UserError(f"{field} = {size} does not divide the model's {count} {what}")
