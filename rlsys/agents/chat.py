"""OpenAI's chat completions: a request to what is asked, an answer to JSON or to the events of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlsys.agents.messages import (
    Answer,
    Asked,
    BadRequest,
    check_fields,
    read_message,
    read_most,
    read_sampling,
    read_stop,
    read_stream,
    read_tools,
)

PATH = "/v1/chat/completions"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logprobs": (None, False), "top_logprobs": (None, 0), "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"), "parallel_tool_calls": (None, True), "modalities": (None, ["text"]),
    "functions": (None,), "function_call": (None,), "audio": (None,), "prediction": (None,),
    "reasoning_effort": (None,), "web_search_options": (None,), "verbosity": (None,),
}  # fmt: skip
"""What is not served, and the values that ask for nothing."""
_NO_MATTER = {
    "model", "messages", "tools", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens", "seed",
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
}  # fmt: skip
"""Read here, or without any say in which tokens are drawn: a sample's seed is the run's."""


def read(body: Mapping[str, Any]) -> Asked:
    """Raises BadRequest."""
    check_fields(body, _NEUTRAL, _NO_MATTER)
    rows = body.get("messages")
    if not isinstance(rows, list) or not rows:
        raise BadRequest("messages: expected a list with at least one message", "messages")
    most = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return Asked(
        [read_message(row, f"messages[{i}]") for i, row in enumerate(rows)],
        read_tools(body.get("tools"), "tools"),
        read_most(body, most),
        read_stop(body, "stop"),
        read_stream(body),
        read_sampling(body),
    )


def whole(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """As one JSON object."""
    said = answer.content or (None if answer.calls else "")
    message = {**answer.message, "content": said, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
    return {**_head(answer, body, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """As the events of a stream: the turn is whole, since an interruption may fall into any other."""
    head = _head(answer, body, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    yield chunk({"role": "assistant", "content": ""})
    if answer.reasoning:
        yield chunk({"reasoning_content": answer.reasoning})
    if answer.content:
        yield chunk({"content": answer.content})
    for i, call in enumerate(answer.message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": i, **call}]})
    yield chunk({}, answer.finish)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _head(answer: Answer, body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": kind,
        "created": 0,
        "model": str(body.get("model") or "policy"),
    }


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.tokens,
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }
