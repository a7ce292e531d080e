"""What a model folder says of the language model, whatever other parts the model has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError

TOKENIZER = "tokenizer.json"
_TEXT, _VISION = "text_config", "vision_config"
_VOCABULARIES = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")
"""Files that hold a vocabulary in another form than tokenizer.json."""
WEIGHT_SUFFIXES = frozenset({
    ".bin", ".ckpt", ".distcp", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".ot", ".pt", ".pth", ".safetensors",
    ".tensors",
})  # fmt: skip
"""Suffixes of weight files."""
_OF_WEIGHTS = frozenset({"hf_quant_config.json", "quant_config.json", "quantize_config.json"})
"""Files that say how weights are stored."""
_OF_A_CHECKPOINT = frozenset({"manifest.json", "metadata.json"})
"""Files of a Megatron checkpoint that describe its own files."""


def language_part(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of `text_config` over those of the whole model; `raw` is config.json as read from `where`.

    Whether embeddings are tied is the whole model's to say: transformers' class for the text part says yes where the
    file says nothing. Raises UserError when there is no such part.
    """
    text = raw.get(_TEXT)
    if not isinstance(text, dict):
        raise UserError(f"{where}: {_TEXT} = {text!r:.80}: expected an object")
    own = {name: value for name, value in text.items() if name != "tie_word_embeddings" and value is not None}
    return dict(raw) | own


def read_fields(folder: Path) -> dict[str, Any]:
    """Of any model, also one that nobody here can train. Raises OSError or ValueError when it cannot be read."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return language_part(raw, str(folder)) if isinstance(raw.get(_TEXT), dict) else raw


def side_files(folder: Path) -> list[Path]:
    """Files that go along with a model's weights, relative to `folder` and sorted: all but weight files, what
    describes weight files, and hidden files. Of subfolders those without a weight file in them.
    """
    names = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
    names = [n for n in names if not any(part.startswith(".") for part in n.parts)]
    weights = [n for n in names if n.suffix in WEIGHT_SUFFIXES]
    others = {n.parts[0] for n in weights if len(n.parts) > 1}
    left_out = _OF_WEIGHTS | (_OF_A_CHECKPOINT if (folder / ".metadata").is_file() else frozenset())
    return sorted(
        n
        for n in names
        if n.suffix not in WEIGHT_SUFFIXES
        and not n.name.endswith(".index.json")
        and n.name not in left_out
        and (len(n.parts) == 1 or n.parts[0] not in others)
    )


def vocabulary_files(folder: Path) -> list[Path]:
    """The files with a tokenizer's vocabulary; none in a folder without a tokenizer."""
    if (folder / TOKENIZER).is_file():
        return [folder / TOKENIZER]
    return sorted(file for pattern in _VOCABULARIES for file in folder.glob(pattern))


def read_stop_ids(folder: Path) -> frozenset[int]:
    """`eos_token_id` of config.json, of its text part, and of generation_config.json: an id or a list each. Ids that
    the model cannot draw are left out: published files have -1 for none, or ids of a larger vocabulary.

    Raises UserError when a file is unreadable or a value is neither.
    """
    stop_ids: set[int] = set()
    vocabulary: list[int] = []
    for file in (folder / "config.json", folder / "generation_config.json"):
        if not file.exists():
            continue
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            parts = (raw, raw.get(_TEXT) or {})
            values = [part.get("eos_token_id") for part in parts]
            vocabulary += [n for part in parts if isinstance(n := part.get("vocab_size"), int)]
        except (OSError, ValueError, AttributeError, RecursionError) as e:
            raise UserError(f"{file}: cannot read eos_token_id: {type(e).__name__} {e}") from None
        for value in values:
            ids = value if isinstance(value, list) else [value] if value is not None else []
            if not all(type(i) is int for i in ids):
                raise UserError(f"{file}: eos_token_id = {value!r}: expected an id or a list of ids")
            stop_ids.update(ids)
    return frozenset(i for i in stop_ids if 0 <= i < max(vocabulary, default=i + 1))


def of_language_alone(folder: Path) -> dict[str, Any]:
    """Changes of config.json with which SGLang serves the language part of a model and builds no vision tower, so
    that an engine holds what pushes bring and no more; none for a model without one.

    Text has the same position on all axes of the rotary embedding, which then is a plain one. SGLang's own
    --language-model-only refuses Qwen3-VL in 0.5.23.
    """
    file = folder / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not raw.get(_VISION):
        return {}
    text = language_part(raw, str(file))
    rope = {"rope_type": "default", **(text.get("rope_parameters") or {}), **(text.get("rope_scaling") or {})}
    if "rope_theta" in text:
        rope.setdefault("rope_theta", text["rope_theta"])
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    return {"language_model_only": True, _TEXT: {"rope_parameters": plain}}
