"""Request and answer of an agent's turn, in one form for all APIs: OpenAI's chat messages. Pure.

TurnRequest  messages, tools, limits of the turn    parsed by chat.py, responses.py or anthropic.py
Answer       the model's turn: content, tool calls  encoded by the same file
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.core.texts import load_json
from rlsys.engine_requests import ALIASES, ANY_ENGINE, RefusedPrompt, check_stop, short
from rlsys.engine_requests import SAMPLING as ENGINE_SAMPLING

Message = Mapping[str, Any]
"""{"role", "content": text}; of an assistant also "tool_calls", of a tool "tool_call_id"."""


class BadRequest(Exception):
    """Request of an agent that cannot be answered. `param`: the field of the request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True)
class TurnRequest:
    """Request for a turn.

    Attributes:
        max_tokens: tokens of the turn.
        stop: texts that end it, and are not part of the answer.
        sampling: the parameters of the request that change the sampling distribution, by SGLang's names.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Key of the request, independent of the other fields of its body."""
        messages = [_plain(m) for m in self.messages]
        return json.dumps([messages, list(self.tools), self.max_tokens, self.stop], sort_keys=True)


@dataclass(frozen=True)
class Answer:
    """`finish`: stop, length or tool_calls."""

    id: str
    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish: str
    prompt_tokens: int
    tokens: int

    @property
    def message(self) -> Message:
        """The answer as the message that the agent will send back."""
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.calls
        ]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})


def new_messages(history: Sequence[Message], messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages that come after `history`; None if they do not begin with it, or add nothing.

    Surrounding white space and the order of keys in arguments are ignored: frameworks change these, and the sampled
    tokens stay the same.
    """
    if len(messages) <= len(history) or common_prefix(history, messages) < len(history):
        return None
    return list(messages[len(history) :])


def common_prefix(history: Sequence[Message], messages: Sequence[Message]) -> int:
    """Return the number of messages that both begin with, compared as in `new_messages`."""
    pairs = enumerate(zip(history, messages, strict=False))
    shorter = min(len(history), len(messages))
    return next((i for i, (a, b) in pairs if _plain(a) != _plain(b)), shorter)


def _plain(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that are compared."""
    calls = [
        (c.get("id"), c["function"]["name"], _arguments(c["function"]["arguments"]))
        for c in message.get("tool_calls") or ()
    ]
    content = (message.get("content") or "").strip()
    return message["role"], content, calls, message.get("tool_call_id"), message.get("name")


def _arguments(text: str) -> str:
    try:
        return json.dumps(load_json(text), sort_keys=True)
    except ValueError:
        return text


def read_text(content: Any, param: str) -> str:
    """The text of a message's content: a text, or parts of type text. Raises BadRequest for others."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{param} is a {type(content).__name__}, expected text", param)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in ("text", "input_text", "output_text", "str") or not isinstance(text, str):
            raise BadRequest(f"{param} has a part of type {kind!r}; the model reads text only", param)
        texts.append(text)
    return "".join(texts)


ROLES = ("system", "developer", "user", "assistant", "tool")


def read_message(row: Any, param: str) -> Message:
    """One message of a chat, whoever says it: an agent or an environment. Raises BadRequest."""
    role = row.get("role") if isinstance(row, dict) else None
    if role not in ROLES:
        raise BadRequest(f"{param}.role = {role!r:.80}: expected system, user, assistant or tool", param)
    message = {"role": "system" if role == "developer" else role}
    message["content"] = read_text(row.get("content"), f"{param}.content")
    for name in ("tool_call_id", "name"):
        if row.get(name):
            message[name] = row[name]
    calls = row.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise BadRequest(f"{param}.tool_calls = {calls!r:.80}: expected a list", param)
    if calls:
        message["tool_calls"] = [read_call(call, f"{param}.tool_calls") for call in calls]
    return message


def read_call(call: Any, param: str) -> Mapping[str, Any]:
    """A call of a tool in a message. Arguments that are an object are taken for their JSON. Raises BadRequest."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments)
    if not isinstance(name, str) or not isinstance(arguments, str) or "id" not in call:
        raise BadRequest(f"{param}: expected id and function with name and arguments, which are texts", param)
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def read_tools(tools: Any, param: str) -> list[Mapping[str, Any]]:
    """Schemas of functions in chat's form. Raises BadRequest."""
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise BadRequest(f"{param} = {tools!r:.80}: expected a list of functions", param)
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or tool.get("type", "function") != "function"
        ):
            raise BadRequest(
                f'{param}[{i}]: expected {{"type": "function", "function": {{"name": ...}}}}', f"{param}[{i}]"
            )
    return list(tools)


def read_stream(body: Mapping[str, Any]) -> bool:
    """Whether the answer is to come as a stream. Raises BadRequest for options of it that are none."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise BadRequest(f"stream_options = {json.dumps(options)[:80]}: expected an object", "stream_options")
    return bool(body.get("stream"))


SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "n", "min_tokens",
)  # fmt: skip
"""Parameters that change the sampling distribution, by SGLang's names."""


def check_fields(
    body: Mapping[str, Any], neutral: Mapping[str, Sequence[object]], no_matter: Collection[str]
) -> None:
    """Check that all fields of a request are served. Raises BadRequest.

    Args:
        neutral: fields and their values without effect.
        no_matter: fields that are read, or do not change the sampling distribution.
    """
    for name, value in body.items():
        if name in neutral:
            if value not in neutral[name]:
                raise BadRequest(f"{name} = {json.dumps(value)[:80]}: not served", name)
        elif name not in no_matter and name not in SAMPLING:
            accepted = ", ".join(sorted({*neutral, *no_matter, *SAMPLING}))
            raise BadRequest(f"{short(name)[1:-1]}: not known; accepted: {accepted}", name)


def read_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Read sampling parameters. Raises BadRequest for a value out of range, also of the unused `seed`."""
    params = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    for name, value in {**params, "seed": body.get("seed")}.items():
        if value is not None:
            _check_parameter(name, value)
    return params


def read_max_tokens(body: Mapping[str, Any], name: str) -> int | None:
    """Read the maximum tokens of the turn. Raises BadRequest."""
    max_tokens: int | None = body.get(name)
    if max_tokens is not None:
        _check_parameter("max_new_tokens", max_tokens, name)
        if max_tokens < 1:
            raise BadRequest(f"{name} = {max_tokens!r}: expected 1 or more", name)
    return max_tokens


def read_stop(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Read the texts that end the turn. Raises BadRequest."""
    try:
        return check_stop(body.get(name), name)
    except RefusedPrompt as e:
        raise BadRequest(str(e), name) from None


def _check_parameter(parameter: str, value: Any, name: str | None = None) -> None:
    """Check a parameter by the rules of engine requests. `name`: of the field, if it differs."""
    name = name or parameter
    try:
        ENGINE_SAMPLING[ALIASES.get(parameter, parameter)](ANY_ENGINE, name, value)
    except RefusedPrompt as e:
        raise BadRequest(str(e), name) from None


def function_tool(tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    """A tool in chat's form, of one that has its function's fields itself; `parameters`: where their schema is.

    Raises BadRequest for one without a name.
    """
    if not isinstance(tool.get("name"), str):
        raise BadRequest(f"tools: name = {tool.get('name')!r:.80}, expected a text", "tools")
    function = {"name": tool["name"], "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool.get(parameters) or {}}}
