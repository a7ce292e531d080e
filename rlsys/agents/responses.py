"""OpenAI's responses API: parses requests, and encodes answers as JSON or as a stream of events. Pure.

Responses are not stored: each request must contain the whole input, and `previous_response_id` is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlsys.agents.messages import (
    Answer,
    BadRequest,
    TurnRequest,
    check_fields,
    function_tool,
    read_call,
    read_max_tokens,
    read_sampling,
    read_stream,
    read_text,
)

PATH = "/v1/responses"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "previous_response_id": (None,), "conversation": (None,), "background": (None, False), "prompt": (None,),
    "tool_choice": (None, "auto"), "parallel_tool_calls": (None, True), "max_tool_calls": (None,),
    "text": (None, {}, {"format": {"type": "text"}}), "reasoning": (None, {}), "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
}  # fmt: skip
"""Unsupported field -> its values without effect."""
_ACCEPTED = {
    "model", "input", "instructions", "tools", "stream", "stream_options", "max_output_tokens", "metadata", "store",
    "user", "include", "service_tier", "prompt_cache_key", "safety_identifier",
}  # fmt: skip


def read(body: Mapping[str, Any]) -> TurnRequest:
    """Parse a request.

    Raises:
        BadRequest: the request is invalid or not supported.
    """
    check_fields(body, _NEUTRAL, _ACCEPTED)
    content = body.get("input")
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not isinstance(items, list) or not items:
        raise BadRequest(f"input = {content!r:.80}: expected text, or a list with at least one item", "input")
    instructions = read_text(body.get("instructions"), "instructions")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and t.get("type") == "function" for t in tools
    ):
        raise BadRequest(f"tools = {tools!r:.160}: expected a list of tools of type function", "tools")
    return TurnRequest(
        messages,
        [function_tool(tool, "parameters") for tool in tools],
        read_max_tokens(body, "max_output_tokens"),
        (),
        read_stream(body),
        read_sampling(body),
    )


def _add(messages: list[dict[str, Any]], item: Any, param: str) -> None:
    """Append an item to the messages. Items with an assistant's text and calls become one chat message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "reasoning":
        return
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = read_call({"id": item.get("call_id"), "function": function}, param)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = read_text(item.get("output"), f"{param}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "message" and item.get("role") in ("system", "developer", "user", "assistant"):
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": read_text(item.get("content"), f"{param}.content")})
    else:
        expected = "expected a message, a function_call or a function_call_output"
        raise BadRequest(f"{param} = {item!r:.160}: {expected}", param)


def to_json(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Encode an answer as one JSON object."""
    truncated = answer.finish == "length"
    usage = {
        "input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }  # fmt: skip
    return {
        **_head(answer, body),
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": _items(answer),
        "usage": usage,
    }


def _items(answer: Answer) -> list[dict[str, Any]]:
    calls = [
        {
            "type": "function_call", "id": f"fc_{c.id}", "call_id": c.id, "name": c.name, "arguments": c.arguments,
            "status": "completed",
        }
        for c in answer.calls
    ]  # fmt: skip
    if calls and not answer.content:
        return calls
    message = {
        "type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": answer.content, "annotations": []}],
    }  # fmt: skip
    return [message, *calls]


def events(answer: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """Encode the answer of a complete turn as the events of a stream."""
    for number, fields in enumerate(_fields(answer, body)):
        data = json.dumps({**fields, "sequence_number": number})
        yield f"event: {fields['type']}\ndata: {data}\n\n".encode()


def _fields(answer: Answer, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of each event of a stream, without the sequence number."""
    yield {"type": "response.created", "response": _head(answer, body)}
    for i, item in enumerate(_items(answer)):
        position = {"output_index": i, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            empty, part_position = {**item, "content": []}, {**position, "content_index": 0}
            yield {"type": "response.output_item.added", "output_index": i, "item": empty}
            yield {"type": "response.content_part.added", **part_position, "part": {**part, "text": ""}}
            yield {
                "type": "response.output_text.delta",
                **part_position,
                "delta": part["text"],
                "logprobs": [],
            }
            yield {"type": "response.output_text.done", **part_position, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **part_position, "part": part}
        else:
            arguments, kind = item["arguments"], "response.function_call_arguments"
            yield {"type": "response.output_item.added", "output_index": i, "item": {**item, "arguments": ""}}
            yield {"type": f"{kind}.delta", **position, "delta": arguments}
            yield {"type": f"{kind}.done", **position, "name": item["name"], "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    status = "response.incomplete" if answer.finish == "length" else "response.completed"
    yield {"type": status, "response": to_json(answer, body)}


def _head(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response in progress, without output."""
    return {
        "id": f"resp_{answer.id}", "object": "response", "created_at": 0, "status": "in_progress", "error": None,
        "incomplete_details": None, "instructions": body.get("instructions"), "metadata": body.get("metadata") or {},
        "model": str(body.get("model") or "policy"), "output": [], "parallel_tool_calls": True,
        "temperature": body.get("temperature"), "tool_choice": "auto", "tools": body.get("tools") or [],
        "top_p": body.get("top_p"), "usage": None,
    }  # fmt: skip
