"""Which tokens end a response: what a model folder says, read as SGLang reads it."""

from __future__ import annotations

import json
from pathlib import Path

from rlsys.errors import UserError


def read_stop_ids(folder: Path) -> frozenset[int]:
    """`eos_token_id` of config.json and generation_config.json, an id or a list. Raises UserError when unreadable."""
    found: set[int] = set()
    for file in (folder / "config.json", folder / "generation_config.json"):
        if not file.exists():
            continue
        try:
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as e:
            raise UserError(f"{file}: cannot read eos_token_id: {type(e).__name__} {e}") from None
        ids = value if isinstance(value, list) else [value] if value is not None else []
        if not all(isinstance(i, int) for i in ids):
            raise UserError(f"{file}: eos_token_id = {value!r}: expected an id or a list of ids")
        found.update(ids)
    return frozenset(found)
