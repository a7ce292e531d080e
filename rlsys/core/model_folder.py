"""Files of a model folder, and the config fields of its language model, also for a model with a vision tower."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError

TOKENIZER = "tokenizer.json"
_TEXT, _VISION = "text_config", "vision_config"
_VOCABULARIES = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "tekken.json")
"""Vocabulary files in other formats than tokenizer.json."""
WEIGHT_SUFFIXES = frozenset({
    ".bin", ".ckpt", ".distcp", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".ot", ".pt", ".pth", ".safetensors",
    ".tensors",
})  # fmt: skip
"""Suffixes of weight files."""
_QUANTIZATION_FILES = frozenset({"hf_quant_config.json", "quant_config.json", "quantize_config.json"})
"""Files that describe how weights are quantized."""
_CHECKPOINT_FILES = frozenset({"manifest.json", "metadata.json"})
"""Metadata files of a Megatron checkpoint."""


def language_part(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of config.json, overridden by those of `text_config` that are set.

    Args:
        raw: content of config.json.
        source: path of config.json, for the error.

    Raises:
        UserError: there is no `text_config`.
    """
    text = raw.get(_TEXT)
    if not isinstance(text, dict):
        raise UserError(f"{source}: {_TEXT} = {text!r:.80}: expected an object")
    # tie_word_embeddings is the whole model's: transformers writes its default, True, into text_config.
    text_fields = {
        name: value for name, value in text.items() if name != "tie_word_embeddings" and value is not None
    }
    return dict(raw) | text_fields


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the language model's fields of config.json, also of a model that rlsys does not support.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a JSON object.
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return language_part(raw, str(folder)) if isinstance(raw.get(_TEXT), dict) else raw


def side_files(folder: Path) -> list[Path]:
    """Return the files that accompany a model's weights, such as configs and the tokenizer, sorted.

    Weight files, files that describe them, hidden files, and subfolders with weight files are excluded.

    Returns:
        paths relative to `folder`.
    """
    names = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
    names = [n for n in names if not any(part.startswith(".") for part in n.parts)]
    weights = [n for n in names if n.suffix in WEIGHT_SUFFIXES]
    weight_folders = {n.parts[0] for n in weights if len(n.parts) > 1}
    excluded = _QUANTIZATION_FILES | (_CHECKPOINT_FILES if (folder / ".metadata").is_file() else frozenset())
    return sorted(
        n
        for n in names
        if n.suffix not in WEIGHT_SUFFIXES
        and not n.name.endswith(".index.json")
        and n.name not in excluded
        and (len(n.parts) == 1 or n.parts[0] not in weight_folders)
    )


def check_files(folder: Path) -> None:
    """Check that symbolic links in a model folder do not lead to private files, which an export would copy.

    A link may lead to a file in the folder or to a blob of a hub's cache. A link with the suffix of a weight file may
    lead anywhere.

    Raises:
        UserError: another link leads out of the folder, or a file is a device or a pipe.
    """
    if not os.path.lexists(folder / "config.json"):  # not a model folder; it may have many files
        return
    root = folder.resolve()
    for file in sorted(folder.rglob("*")):
        if not os.path.exists(file):
            continue  # readers report a missing file
        target = Path(os.path.realpath(file))
        if not (target.is_file() or target.is_dir()):
            raise UserError(f"{file}: a device or a pipe; expected a file")
        is_blob = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
        if not (target.is_relative_to(root) or is_blob or file.suffix in WEIGHT_SUFFIXES):
            raise UserError(
                f"{file}: a link to {target}, outside of the model folder; expected a file; if the target belongs to "
                "the model, copy it"
            )


def vocabulary_files(folder: Path) -> list[Path]:
    """Return tokenizer.json, or else the other vocabulary files; empty for a folder without a tokenizer."""
    if (folder / TOKENIZER).is_file():
        return [folder / TOKENIZER]
    return sorted(file for pattern in _VOCABULARIES for file in folder.glob(pattern))


def read_stop_ids(folder: Path) -> frozenset[int]:
    """Return the ids in `eos_token_id` of config.json, its `text_config`, and generation_config.json.

    Ids outside the vocabulary are omitted; published files have, for example, -1 for none.

    Raises:
        UserError: a file is unreadable, or a value is neither an id nor a list of ids.
    """
    stop_ids: set[int] = set()
    vocabulary: list[int] = []
    for file in (folder / "config.json", folder / "generation_config.json"):
        if not file.exists():
            continue
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(raw, dict):
                raise UserError(f"{file}: expected a JSON object, found {type(raw).__name__}")
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


_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters in generation_config.json, which SGLang's OpenAI server uses as defaults.

    Returns:
        values by SGLang's names; empty if there is no such file.

    Raises:
        UserError: the file is unreadable, or a value is not a number.
    """
    file = folder / "generation_config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        defaults = {name: raw[name] for name in _SAMPLING_DEFAULTS if raw.get(name) is not None}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as e:
        raise UserError(f"{file}: cannot read the sampling parameters: {type(e).__name__} {e}") from None
    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{file}: {name} = {value!r}: expected a number")
    if defaults.get("top_k") == 0:  # transformers' value for no limit
        defaults["top_k"] = -1
    return defaults


def language_model_overrides(folder: Path) -> dict[str, Any]:
    """Return the overrides of config.json with which SGLang serves only the language model of a vision model.

    The engine then holds exactly the tensors that weight updates send.

    Returns:
        field -> value; empty for a model without a vision tower.
    """
    # SGLang's --language-model-only fails for Qwen3-VL in 0.5.23.
    file = folder / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not raw.get(_VISION):
        return {}
    text = language_part(raw, str(file))
    rope = {"rope_type": "default", **(text.get("rope_parameters") or {}), **(text.get("rope_scaling") or {})}
    if "rope_theta" in text:
        rope.setdefault("rope_theta", text["rope_theta"])
    # A text token has the same position on all axes of the multi-axis rotary embedding, so a plain one is equal.
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    return {"language_model_only": True, _TEXT: {"rope_parameters": plain}}
