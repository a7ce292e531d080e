"""Rewards for the shape of a response: `regex`, `json_schema`, `length` and `format`. Often one of several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.types import Prompt, Response
from rlsys.data.tokenizer import Tokenizer
from rlsys.rewards.answer import final_answer

Score = Callable[[Prompt, Response], float]
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def regex(config: Config, pattern: str | None = None, key: str = "pattern", whole: bool = False) -> Score:
    """1 when the response matches `pattern`, or the pattern that the prompt's row has under `key`.

    `whole`: all of it has to match. The response is its text without special tokens; `.` is any character, new lines
    too. Raises UserError for a pattern that is none.
    """
    tokenizer = Tokenizer.of(config)
    if pattern is not None:
        _compiled(pattern)

    def score(prompt: Prompt, text: str) -> float:
        found = _compiled(prompt.entry[key] if pattern is None else pattern)
        plain = tokenizer.without_special(text)
        return float((found.fullmatch(plain) if whole else found.search(plain)) is not None)

    return score


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as e:
        raise UserError(f"data.reward: regex: pattern = {pattern!r}: not a regular expression: {e}") from None


def json_schema(config: Config, schema: Any = None, key: str = "schema") -> Score:
    """1 when the response is JSON that keeps to `schema`: an object, a file, or the row's `key`. A `$ref` to another
    document is never fetched.

    The JSON is the last fenced block of the response, else what <answer> holds, else all of it. Raises UserError for
    a schema that is none.
    """
    import jsonschema
    import jsonschema_specifications  # type: ignore[import-untyped]
    import referencing.exceptions

    tokenizer = Tokenizer.of(config)
    if isinstance(schema, str):
        try:
            schema = json.loads(Path(schema).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise UserError(f"data.reward: json_schema: schema = {schema!r}: cannot read: {e}") from None
    if schema is not None:
        try:
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except jsonschema.SchemaError as e:
            raise UserError(f"data.reward: json_schema: not a schema: {e.message}") from None

    def score(prompt: Prompt, text: Response) -> float:
        wanted = schema
        if wanted is None:
            wanted = prompt.entry[key]
            wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        plain = tokenizer.without_special(text)
        blocks = _FENCED.findall(plain)
        inner = blocks[-1] if blocks else final_answer(text)
        try:
            value = json.loads(inner if inner is not None else plain.rpartition("</think>")[2])
        except ValueError:
            return 0.0
        try:
            # The registry has the schemas of JSON Schema itself, and fetches none.
            known = jsonschema_specifications.REGISTRY
            return float(jsonschema.validators.validator_for(wanted)(wanted, registry=known).is_valid(value))
        except referencing.exceptions.Unresolvable as e:
            raise ValueError(
                f"json_schema: $ref = {e.ref[:200]!r}: not in the schema; none is fetched"
            ) from None

    return score


def length(config: Config, limit: int | None = None, buffer: int | None = None) -> Score:
    """0 up to `limit` - `buffer` sampled tokens, then falling in a straight line to -1 at `limit`, and -1 beyond.

    DAPO's soft punishment (Yu et al. 2025, equation 13). `limit`: unset, rollout.max_response_tokens; `buffer`:
    unset, a fifth of it.
    """
    most = config.rollout.max_response_tokens if limit is None else limit
    room = max(1, most // 5) if buffer is None else buffer
    if not 0 < room <= most:
        raise UserError(f"data.reward: length: buffer = {room}, limit = {most}: expected 0 < buffer <= limit")

    def score(prompt: Prompt, response: Response) -> float:
        return -min(1.0, max(0.0, (sum(response.mask) - (most - room)) / room))

    return score


def format_(config: Config, marks: list[str] | None = None) -> Score:
    """The share of `marks` that the response has exactly once and in this order, if it ended by itself; else 0.

    `marks`: unset, `</think>`, `<answer>`, `</answer>`. Many chat templates open `<think>` themselves.
    """
    wanted = ["</think>", "<answer>", "</answer>"] if marks is None else marks
    if not wanted:
        raise UserError("data.reward: format: marks = []: expected at least one")

    def score(prompt: Prompt, text: Response) -> float:
        if not text.finished:
            return 0.0
        at, kept = -1, 0
        for mark in wanted:
            place = text.find(mark)
            if text.count(mark) == 1 and place > at:
                at, kept = place, kept + 1
        return kept / len(wanted)

    return score
