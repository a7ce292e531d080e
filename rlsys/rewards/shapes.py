"""Rewards for the form of a response: `regex`, `json_schema`, `length` and `format`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.texts import load_json
from rlsys.core.types import Prompt, Response
from rlsys.data.tokenizer import Tokenizer
from rlsys.rewards.answer import final_answer

Score = Callable[[Prompt, Response], float]
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def regex(
    config: Config, pattern: str | None = None, key: str = "pattern", full_match: bool = False
) -> Score:
    """Score 1 if the response matches a regular expression, otherwise 0.

    The response is matched without its special tokens. `.` also matches newlines.

    Args:
        config: config of the run.
        pattern: regular expression; None: each row has its own.
        key: column of the rows' regular expressions.
        full_match: whether the whole response must match.

    Raises:
        UserError: `pattern` is not a regular expression.
    """
    tokenizer = Tokenizer.of(config)
    if pattern is not None:
        _compile(pattern)

    def score(prompt: Prompt, text: str) -> float:
        expression = _compile(prompt.entry[key] if pattern is None else pattern)
        plain = tokenizer.without_special(text)
        return float((expression.fullmatch(plain) if full_match else expression.search(plain)) is not None)

    return score


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as e:
        raise UserError(f"data.reward: regex: pattern = {pattern!r}: not a regular expression: {e}") from None


def json_schema(config: Config, schema: Any = None, key: str = "schema") -> Score:
    """Score 1 if the response is JSON that matches a JSON schema, otherwise 0.

    The JSON is the last fenced block of the response, otherwise the content of <answer>, otherwise the text after
    </think>. A `$ref` to another document is never fetched.

    Args:
        config: config of the run.
        schema: the schema, or the path of a file with it; None: each row has its own.
        key: column of the rows' schemas.

    Raises:
        UserError: `schema` is not a JSON schema, or its file cannot be read.
    """
    import jsonschema
    import jsonschema_specifications  # type: ignore[import-untyped]
    import referencing.exceptions

    tokenizer = Tokenizer.of(config)
    if isinstance(schema, str):
        schema = _read_schema(schema)
    if schema is not None:
        try:
            jsonschema.validators.validator_for(schema).check_schema(schema)
        except jsonschema.SchemaError as e:
            raise UserError(
                f"data.reward: json_schema: schema = {schema!r:.200}: not a JSON schema: {e.message}"
            ) from None

    def score(prompt: Prompt, response: Response) -> float:
        row_schema = schema
        if row_schema is None:
            row_schema = prompt.entry[key]
            row_schema = json.loads(row_schema) if isinstance(row_schema, str) else row_schema
        try:
            value = json.loads(_json_text(response, tokenizer.without_special(response)))
        except ValueError:
            return 0.0
        try:
            # The registry has the schemas of JSON Schema itself, and fetches no others.
            registry = jsonschema_specifications.REGISTRY
            return float(
                jsonschema.validators.validator_for(row_schema)(row_schema, registry=registry).is_valid(value)
            )
        except referencing.exceptions.Unresolvable as e:
            raise ValueError(
                f"json_schema: $ref = {e.ref[:200]!r}: expected a reference within the schema, because other "
                "documents are not fetched"
            ) from None

    return score


def _read_schema(file: str) -> Any:
    """Read the JSON of a file.

    Raises:
        UserError: the file cannot be read, or is not JSON.
    """
    try:
        return load_json(Path(file).read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(
            f"data.reward: json_schema: schema = {file!r}: cannot read the file: {e.strerror}"
        ) from None
    except ValueError as e:
        raise UserError(
            f"data.reward: json_schema: schema = {file!r}: {e}; expected a JSON Schema in UTF-8"
        ) from None


def _json_text(response: Response, plain: str) -> str:
    """Return the part of a response that must be JSON (json_schema). `plain`: its text without special tokens."""
    blocks = _FENCED.findall(plain)
    if blocks:
        return str(blocks[-1])
    answer = final_answer(response)
    return plain.rpartition("</think>")[2] if answer is None else answer


def length(config: Config, limit: int | None = None, buffer: int | None = None) -> Score:
    """Punish long responses: DAPO's soft overlong punishment (Yu et al. 2025, equation 13).

    The score is 0 up to `limit` - `buffer` sampled tokens, -1 for `limit` tokens and more, and linear in between.

    Args:
        config: config of the run.
        limit: number of tokens; None: rollout.max_response_tokens.
        buffer: number of tokens; None: a fifth of the limit.

    Raises:
        UserError: `buffer` is not positive, or larger than the limit.
    """
    max_tokens = config.rollout.max_response_tokens if limit is None else limit
    buffer_tokens = max(1, max_tokens // 5) if buffer is None else buffer
    if not 0 < buffer_tokens <= max_tokens:
        raise UserError(
            f"data.reward: length: buffer = {buffer_tokens}, limit = {max_tokens}: expected 0 < buffer <= limit"
        )

    def score(prompt: Prompt, response: Response) -> float:
        return -min(1.0, max(0.0, (sum(response.mask) - (max_tokens - buffer_tokens)) / buffer_tokens))

    return score


def format_(config: Config, marks: list[str] | None = None) -> Score:
    """Score the share of `marks` that the response has exactly once and in this order. A truncated response scores 0.

    Args:
        config: config of the run.
        marks: texts; None: `</think>`, `<answer>` and `</answer>`. `<think>` is not among them, because many chat
            templates end the prompt with it.

    Raises:
        UserError: `marks` is empty.
    """
    expected_marks = ["</think>", "<answer>", "</answer>"] if marks is None else marks
    if not expected_marks:
        raise UserError("data.reward: format: marks = []: expected at least one text")

    def score(prompt: Prompt, text: Response) -> float:
        if not text.finished:
            return 0.0
        last_position, marks_in_order = -1, 0
        for mark in expected_marks:
            position = text.find(mark)
            if text.count(mark) == 1 and position > last_position:
                last_position = position
                marks_in_order += 1
        return marks_in_order / len(expected_marks)

    return score
