"""Language-model fields and files of a model folder, also of a model with a vision tower."""

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
    """Return config.json with the fields of `text_config` in place of the whole model's.

    `tie_word_embeddings` is taken from the whole model: transformers' class for the text part defaults to
    True if the file has no value.

    Args:
        raw: content of config.json.
        source: its path, for error messages.

    Raises:
        UserError: there is no `text_config`.
    """
    text = raw.get(_TEXT)
    if not isinstance(text, dict):
        raise UserError(f"{source}: {_TEXT} = {text!r:.80}: expected an object")
    text_fields = {
        name: value for name, value in text.items() if name != "tie_word_embeddings" and value is not None
    }
    return dict(raw) | text_fields


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the language-model fields of config.json. The model family need not be supported.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return language_part(raw, str(folder)) if isinstance(raw.get(_TEXT), dict) else raw


def side_files(folder: Path) -> list[Path]:
    """Return the files that accompany a model's weights, relative to `folder` and sorted.

    Excluded are weight files, files that describe them, hidden files, and subfolders that contain weight files.
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
    """Check that a model folder of unknown origin exposes no files from outside: exports copy what links point to.

    A link may point to a file of the folder or to a blob of a hub's cache; a link to weights may point anywhere.

    Raises:
        UserError: another link points out of the folder, or a file is a device or a pipe.
    """
    if not os.path.lexists(folder / "config.json"):  # not a model folder, and possibly a large one
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
                f"{file}: a link to {target}, outside of the model folder; expected a file: copy it if it belongs "
                "to the model"
            )


def vocabulary_files(folder: Path) -> list[Path]:
    """Return the files with a tokenizer's vocabulary; empty for a folder without a tokenizer."""
    if (folder / TOKENIZER).is_file():
        return [folder / TOKENIZER]
    return sorted(file for pattern in _VOCABULARIES for file in folder.glob(pattern))


def read_stop_ids(folder: Path) -> frozenset[int]:
    """Return all `eos_token_id` of config.json, its text part and generation_config.json, each an id or a list.

    Ids outside the vocabulary are dropped: published files have -1 for none, or ids of a larger vocabulary.

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
    """Return the sampling parameters of generation_config.json, by SGLang's names; empty if there is no such file.

    SGLang's OpenAI server uses them as defaults for requests.

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
    return defaults | ({"top_k": -1} if defaults.get("top_k") == 0 else {})


def language_model_overrides(folder: Path) -> dict[str, Any]:
    """Return the overrides of config.json with which SGLang serves a vision model's language part alone.

    The engine then holds exactly the tensors that weight updates send. The multi-axis rotary embedding becomes a
    plain one, because a text token has the same position on all axes. SGLang's --language-model-only fails for
    Qwen3-VL in 0.5.23.

    Returns:
        Field -> value; empty for a model without a vision tower.
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
