"""What a model folder says of the language model, whatever other parts the model has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsys.errors import UserError

_TEXT, _VISION = "text_config", "vision_config"


def language_part(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of `text_config`, under those of the whole model; `raw` is config.json as read from `where`.

    Whether embeddings are tied is the whole model's to say: transformers' class for the text part says yes where the
    file says nothing. Raises UserError when there is no such part.
    """
    text = raw.get(_TEXT)
    if not isinstance(text, dict):
        raise UserError(f"{where}: {_TEXT} = {text!r:.80}: expected an object")
    return {name: value for name, value in text.items() if name != "tie_word_embeddings"} | dict(raw)


def read_fields(folder: Path) -> dict[str, Any]:
    """Of any model, also one that nobody here can train. Raises OSError or ValueError when it cannot be read."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return language_part(raw, str(folder)) if isinstance(raw.get(_TEXT), dict) else raw


def read_stop_ids(folder: Path) -> frozenset[int]:
    """`eos_token_id` of config.json, of its text part, and of generation_config.json: an id or a list each.

    Raises UserError when a file is unreadable or a value is neither.
    """
    stop_ids: set[int] = set()
    for file in (folder / "config.json", folder / "generation_config.json"):
        if not file.exists():
            continue
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            values = [part.get("eos_token_id") for part in (raw, raw.get(_TEXT) or {})]
        except (OSError, ValueError, AttributeError) as e:
            raise UserError(f"{file}: cannot read eos_token_id: {type(e).__name__} {e}") from None
        for value in values:
            ids = value if isinstance(value, list) else [value] if value is not None else []
            if not all(isinstance(i, int) for i in ids):
                raise UserError(f"{file}: eos_token_id = {value!r}: expected an id or a list of ids")
            stop_ids.update(ids)
    return frozenset(stop_ids)


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
    rope = {"rope_type": "default", **(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    if "rope_theta" in text:
        rope.setdefault("rope_theta", text["rope_theta"])
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    return {"language_model_only": True, _TEXT: {"rope_parameters": plain}}
