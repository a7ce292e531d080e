"""Anthropic's messages API: parses requests, and encodes answers as JSON or as a stream of events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlsys.agents.messages import (
    Answer,
    BadRequest,
    Message,
    TurnRequest,
    check_fields,
    function_tool,
    read_call,
    read_max_tokens,
    read_sampling,
    read_stop,
    read_stream,
    read_text,
)
from rlsys.core.texts import load_json

PATH = "/v1/messages"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "tool_choice": (None, {"type": "auto"}), "thinking": (None, {"type": "disabled"}), "mcp_servers": (None, []),
    "container": (None,), "context_management": (None,), "output_config": (None,), "output_format": (None,),
}  # fmt: skip
"""Unsupported field -> its values without effect."""
_ACCEPTED = {
    "model", "messages", "system", "tools", "stream", "stop_sequences", "max_tokens", "metadata", "service_tier",
    "betas",
}  # fmt: skip
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: Mapping[str, Any]) -> TurnRequest:
    """Parse a request.

    Raises:
        BadRequest: the request is invalid or not supported.
    """
    check_fields(body, _NEUTRAL, _ACCEPTED)
    rows = body.get("messages")
    if not isinstance(rows, list) or not rows:
        raise BadRequest(f"messages = {rows!r:.80}: expected a list with at least one message", "messages")
    system = read_text(body.get("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for i, row in enumerate(rows):
        messages += _messages(row, f"messages[{i}]")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(t, dict) and "input_schema" in t for t in tools):
        raise BadRequest(f"tools = {tools!r:.160}: expected a list of tools with an input_schema", "tools")
    return TurnRequest(
        messages,
        [function_tool(tool, "input_schema") for tool in tools],
        read_max_tokens(body, "max_tokens"),
        read_stop(body, "stop_sequences"),
        read_stream(body),
        read_sampling(body),
    )


def _messages(row: Any, param: str) -> list[Message]:
    """Convert a message to chat messages. Each tool result in it becomes a separate message."""
    role = row.get("role") if isinstance(row, dict) else None
    if role not in ("user", "assistant"):
        raise BadRequest(f"{param}.role = {role!r:.80}: expected user or assistant", param)
    content = row.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": read_text(content, f"{param}.content")}]
    calls: list[Mapping[str, Any]] = []
    results: list[Message] = []
    texts: list[Any] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append(read_call({"id": block.get("id"), "function": function}, f"{param}.content"))
        elif kind == "tool_result" and role == "user":
            result = read_text(block.get("content"), f"{param}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    text = read_text(texts, f"{param}.content")
    if role == "assistant":
        return [{"role": role, "content": text} | ({"tool_calls": calls} if calls else {})]
    return [*results, {"role": role, "content": text}] if text or not results else results


def to_json(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Encode an answer as one JSON object."""
    return {
        **_head(answer, body),
        "content": _blocks(answer),
        "stop_reason": _STOP_REASONS[answer.finish],
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens},
    }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.content}] if answer.content else []
    calls = [
        {"type": "tool_use", "id": c.id, "name": c.name, "input": _input(c.arguments)} for c in answer.calls
    ]
    return [*text, *calls]


def _input(arguments: str) -> Any:
    """Parse the arguments of a call. Return an empty object if they are not a JSON object."""
    try:
        value = load_json(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def events(answer: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """Encode the answer of a complete turn as the events of a stream."""
    start_usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    yield _event("message_start", message={**_head(answer, body), "content": [], "usage": start_usage})
    for i, block in enumerate(_blocks(answer)):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=i, content_block=empty)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    final_delta = {"stop_reason": _STOP_REASONS[answer.finish], "stop_sequence": None}
    yield _event("message_delta", delta=final_delta, usage={"output_tokens": answer.tokens})
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _head(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": str(body.get("model") or "policy"),
        "stop_reason": None, "stop_sequence": None,
    }  # fmt: skip
