"""OpenAI's chat completions API: parses requests, and encodes answers as JSON or as a stream of events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsys.agents.messages import (
    Answer,
    BadRequest,
    Message,
    TurnRequest,
    check_fields,
    read_max_tokens,
    read_message,
    read_sampling,
    read_stop,
    read_stream,
    read_tools,
)

PATH = "/v1/chat/completions"
COMPLETION, CHUNK = "chat.completion", "chat.completion.chunk"
OPENING: Mapping[str, Any] = {"role": "assistant", "content": ""}
"""First delta of a stream."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logprobs": (None, False), "top_logprobs": (None, 0), "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"), "parallel_tool_calls": (None, True), "modalities": (None, ["text"]),
    "functions": (None,), "function_call": (None,), "audio": (None,), "prediction": (None,),
    "reasoning_effort": (None,), "web_search_options": (None,), "verbosity": (None,),
}  # fmt: skip
"""Unsupported field -> its values without effect."""
_ACCEPTED = {
    "model", "messages", "tools", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens", "seed",
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
}  # fmt: skip
"""Fields that this module reads, or that do not change the sampling. `seed` is ignored: the run sets it."""


def read(body: Mapping[str, Any]) -> TurnRequest:
    """Parse a request.

    Raises:
        BadRequest: the request is invalid or not supported.
    """
    check_fields(body, _NEUTRAL, _ACCEPTED)
    messages, tools = read_conversation(body)
    field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return TurnRequest(
        messages,
        tools,
        read_max_tokens(body, field),
        read_stop(body, "stop"),
        read_stream(body),
        read_sampling(body),
    )


def read_conversation(body: Mapping[str, Any]) -> tuple[list[Message], list[Mapping[str, Any]]]:
    """Return the messages and the tools of a request.

    Raises:
        BadRequest: a message or a tool is invalid.
    """
    rows = body.get("messages")
    if not isinstance(rows, list) or not rows:
        raise BadRequest(f"messages = {rows!r:.80}: expected a list with at least one message", "messages")
    messages = [read_message(row, f"messages[{i}]") for i, row in enumerate(rows)]
    return messages, read_tools(body.get("tools"), "tools")


def to_json(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Encode an answer as one JSON object."""
    return {**head(answer.id, body, COMPLETION), "choices": [choice(answer)], "usage": usage([answer])}


def choice(answer: Answer, index: int = 0, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return an answer as one of the `choices` of a completion.

    Args:
        answer: the answer.
        index: index in `choices`.
        logprobs: log-probs in the API's format; None: not requested.
    """
    content = answer.content or (None if answer.calls else "")
    message = {**answer.message, "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return {"index": index, "message": message, "finish_reason": answer.finish, "logprobs": logprobs}


def deltas(answer: Answer) -> Iterator[Mapping[str, Any]]:
    """Yield the deltas of a stream: reasoning, content, and one delta for each tool call."""
    if answer.reasoning:
        yield {"reasoning_content": answer.reasoning}
    if answer.content:
        yield {"content": answer.content}
    for i, call in enumerate(answer.message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": i, **call}]}


def events(answer: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """Encode the answer of a complete turn as the events of a stream."""
    common = head(answer.id, body, CHUNK)

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        return event({**common, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    yield chunk(OPENING)
    for delta in deltas(answer):
        yield chunk(delta)
    yield chunk({}, answer.finish)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event({**common, "choices": [], "usage": usage([answer])})
    yield b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON value as a server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def head(answer_id: str, body: Mapping[str, Any], kind: str, created: int = 0) -> dict[str, Any]:
    """Return the fields that a completion and all events of its stream have in common.

    Args:
        answer_id: id of the answer, without prefix.
        body: the request, for the name of the model.
        kind: COMPLETION or CHUNK.
        created: Unix time in seconds.
    """
    model = str(body.get("model") or "policy")
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": created, "model": model}


def usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Return the token counts of answers to one prompt. The prompt counts once."""
    prompt, completion = answers[0].prompt_tokens, sum(answer.tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
