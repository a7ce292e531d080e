"""Reader of a data row: the chat that is the prompt, the right answer, the tools.

Rows have many forms: `prompt` is a text or a chat, and the answer has the key of slime, verl, TRL or a user.
`data.keys` names other keys.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from msgspec import UNSET

from rlsys.config.data import KeysConfig
from rlsys.core.errors import RowError
from rlsys.core.texts import is_valid_text, load_json

Entry = dict[str, Any]
Message = dict[str, Any]

PROMPTS = ("prompt", "messages")
ANSWERS = ("answer", "label", "ground_truth", "reward_model.ground_truth")
"""Keys of the right answer, in the order in which they are tried."""
_FORMS = ("", "s", *(f"_{form}{s}" for form in ("url", "path", "file", "data", "byte") for s in ("", "s")))
MEDIA = (
    *(f"{kind}{form}" for kind in ("image", "video", "audio") for form in _FORMS),
    "media", "multi_modal_data", "multi_modal_inputs", "multimodal_data", "multimodal_inputs", "pixel_values",
)  # fmt: skip
"""Keys of images, sounds and films."""
_LIKELY = ("question", "problem", "input", "instruction", "query", "conversations", "text")
"""Frequent other names of a prompt, proposed in the error message."""
_MAX_LISTED_KEYS = 12
_MISSING = object()
_quoted = json.encoder.encode_basestring_ascii
"""json.dumps of a text."""


@dataclass(frozen=True)
class Row:
    """Parsed row.

    Attributes:
        question: the user's message where the chat has no other one, or empty.
        entry: the row itself, with the right answer as `answer` if it has one.
    """

    messages: list[Message]
    question: str
    entry: Entry
    tools: list[dict[str, Any]] | None = None

    @property
    def key(self) -> str:
        """Key that two rows with the same prompt share."""
        return json.dumps(self.question or self.messages, default=str)


def read_row(row: Any, keys: KeysConfig, location: str) -> Row:
    """Parse a row. `location`: FILE:LINE of the row, for messages.

    Raises:
        RowError: the row has no prompt, or other content than text.
    """
    if not isinstance(row, dict):
        raise RowError(f"{location}: expected an object with prompt or messages, found {describe_type(row)}")
    media = next((name for name in MEDIA if row.get(name)), None)
    if media or (media := next((str(name) for name, value in row.items() if _is_media(value)), None)):
        raise RowError(f"{location}: has {media}; expected text only")
    prompt = _prompt(row, keys.prompt, location)
    if isinstance(prompt, str):
        messages, question = [{"role": "user", "content": prompt}], prompt
    else:
        messages = read_messages(prompt, location)
        question = messages[0]["content"] if [m["role"] for m in messages] == ["user"] else ""
    if not messages or messages[-1]["role"] == "assistant":
        problem = "ends with the assistant's turn" if messages else "is empty"
        raise RowError(f"{location}: the prompt {problem}; expected a chat that ends with the user's turn")
    return Row(
        messages, question, _with_answer(row, keys.answer, location), tools_of(row, keys.tools, location)
    )


class QuickKeys:
    """Reads `Row.key` of rows without media and tools, without parsing the whole row.

    Args:
        keys: the config's data.keys.

    Attributes:
        names: the keys of a row whose values `key` reads; MEDIA, which few rows have, are the last.
    """

    def __init__(self, keys: KeysConfig) -> None:
        configured = (keys.prompt, keys.answer, keys.tools)
        roots = [name for path in configured if path for name in (path, path.partition(".")[0])]
        text = dict.fromkeys(name for name in (*PROMPTS, "tools", "data_source", *roots) if name not in MEDIA)
        self.names = (*text, *MEDIA)
        self._media = len(text)
        self._no_media = (UNSET,) * len(MEDIA)
        self._indices = {name: index for index, name in enumerate(self.names)}
        self._data_source = self._indices["data_source"]
        self._prompts = tuple(self._reader(path) for path in ((keys.prompt,) if keys.prompt else PROMPTS))
        self._tools = self._reader(keys.tools or "tools")
        self._own_tools = keys.tools is not None
        self._answer = self._reader(keys.answer) if keys.answer else None

    def key(self, values: Sequence[Any]) -> str | None:
        """Return the key of a row.

        Args:
            values: the row's values of `names`; UNSET for those that it does not have.

        Returns:
            None for a row that only `read_row` can parse.
        """
        media = values[self._media :]
        if media != self._no_media and any(media):
            return None
        prompt = None
        for read in self._prompts:
            prompt = read(values)
            if prompt is not UNSET and prompt is not None:
                break
        tools = self._tools(values)
        if tools is not None and (tools is not UNSET or self._own_tools):
            return None
        if self._answer is not None and self._answer(values) is UNSET:
            return None
        if type(prompt) is str:
            return _quoted(prompt) if prompt else None
        return _chat_key(prompt) if type(prompt) is list else None

    def data_source(self, values: Sequence[Any]) -> str:
        """Return the row's data_source; empty for none."""
        value = values[self._data_source]
        return "" if value is UNSET else str(value)

    def _reader(self, path: str) -> Callable[[Sequence[Any]], Any]:
        """Return a function that returns the value at `a` or `a.b`; UNSET if there is none."""
        full_path = itemgetter(self._indices[path])
        name = path.partition(".")[0]
        if name == path:
            return full_path
        root = itemgetter(self._indices[name])

        def read(values: Sequence[Any]) -> Any:
            if (value := full_path(values)) is UNSET and (
                value := find({name: root(values)}, path)
            ) is _MISSING:
                return UNSET
            return value

        return read


def _chat_key(messages: list[Any]) -> str | None:
    """Return `json.dumps(messages)`, or that of the only user's text; None if only `read_row` can parse them."""
    parts = []
    role = content = None
    for message in messages:
        if type(message) is not dict:
            return None
        role, content = message.get("role"), message.get("content")
        if type(role) is not str or type(content) is not str:
            return None
        if len(message) == 2 and next(iter(message)) == "role":
            parts.append(f'{{"role": {_quoted(role)}, "content": {_quoted(content)}}}')
        elif None in message.values():
            return None
        else:
            parts.append(json.dumps(message))
    if role is None or role == "assistant":
        return None
    if len(messages) == 1 and role == "user" and content:
        return _quoted(content)
    return f"[{', '.join(parts)}]"


def check_texts(value: Any, location: str) -> None:
    """Check that no text of a row has a lone surrogate, which no tokenizer or file can encode.

    Raises:
        RowError: a text has one.
    """
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if not is_valid_text(item):
                raise RowError(
                    f"{location}: the text contains a lone UTF-16 surrogate: {item!a:.80}; expected valid Unicode"
                )
        elif isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item


def json_row(row: Entry, location: str) -> Entry:
    """Return a row as JSON values for another program: keys become texts, numpy's values Python's.

    Values of other types, such as dates, are sent as texts.

    Raises:
        RowError: JSON would lose a value or a key; the message names it.
    """

    def convert(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            out: Entry = {}
            for key, item in value.items():
                name = key if isinstance(key, str) else json.dumps(key, default=str)
                item_path = f"{path}.{name}" if path else name
                if name in out:
                    raise RowError(f"{location}: {item_path:.80} is the name of two keys in JSON; rename one")
                out[name] = convert(item, item_path)
            return out
        if isinstance(value, list | tuple):
            return [convert(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, bytes | bytearray | memoryview):
            raise RowError(
                f"{location}: {path:.80} is bytes, which JSON cannot hold; expected a text, as base64"
            )
        return convert(value.tolist(), path) if hasattr(value, "tolist") else value

    converted: Entry = convert(row, "")
    return converted


def _is_media(value: Any) -> bool:
    """Return whether a value is an image, a sound or a film as `datasets` stores or decodes it, or a list of them."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict):
        return first.keys() == {"bytes", "path"} and any(first.values())
    return type(first).__module__.partition(".")[0] in ("PIL", "datasets", "torchcodec")


def find(row: Entry, path: str) -> Any:
    """Return the value at `a` or `a.b`; _MISSING if there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _prompt(row: Entry, key: str | None, location: str) -> str | list[Any]:
    for path in (key,) if key else PROMPTS:
        value = find(row, path)
        if value is _MISSING or value is None:
            continue
        if not isinstance(value, str | list):
            raise RowError(
                f"{location}: {path} is {describe_type(value)}; expected a text, or a list of messages"
            )
        if value == "":
            raise RowError(f"{location}: {path} is empty")
        return value
    if key:
        raise RowError(_no_key("prompt", key, row, location))
    similar = next((name for name in _LIKELY if name in row), None)
    hint = f"; did you mean data.keys.prompt={similar}?" if similar else f"; its keys: {_names(row)}"
    raise RowError(f"{location}: expected prompt (a text or a chat) or messages (a chat){hint}")


def read_messages(messages: list[Any], location: str) -> list[Message]:
    """Parse a chat.

    Raises:
        RowError: an item is not a message.
    """
    return [_message(m, location) for m in messages]


def _message(message: Any, location: str) -> Message:
    """Parse a message, without keys that have no value: in a table every message has the keys of all messages."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError(
            f'{location}: a message is {str(message)[:80]!r}; expected {{"role": ..., "content": ...}}'
        )
    fields = {k: v for k, v in message.items() if v is not None}
    content = fields.get("content", "")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else describe_type(part)
                raise RowError(f"{location}: a message has a part of type {kind}; expected text only")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RowError(f"{location}: the content of a message is {describe_type(content)}; expected a text")
    return {**fields, "content": content}


def _with_answer(row: Entry, key: str | None, location: str) -> Entry:
    for path in (key,) if key else ANSWERS:
        answer = find(row, path)
        if answer is not _MISSING and answer is not None:
            return {**row, "answer": answer}
    if key and find(row, key) is _MISSING:
        raise RowError(_no_key("answer", key, row, location))
    return {k: v for k, v in row.items() if k != "answer"} if "answer" in row else dict(row)


def tools_of(row: Entry, key: str | None, location: str) -> list[dict[str, Any]] | None:
    """Return the schemas of a row's functions; None without any.

    Raises:
        RowError: the value is not a list of schemas.
    """
    tools = find(row, key or "tools")
    if tools is _MISSING and key:
        raise RowError(_no_key("tools", key, row, location))
    if tools is _MISSING or tools is None:  # null in the rows of a table whose other rows have some
        return None
    if isinstance(tools, str):  # tables keep schemas as texts: columns have one type
        try:
            tools = load_json(tools)
        except ValueError as e:
            raise RowError(f"{location}: {key or 'tools'} is a text that is not JSON: {e}") from None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise RowError(
            f"{location}: {key or 'tools'}: expected a list of function schemas, found {describe_type(tools)}"
        )
    return tools or None


def _no_key(kind: str, key: str, row: Entry, location: str) -> str:
    matches = difflib.get_close_matches(key, list(_paths(row)), n=1, cutoff=0.5)
    hint = f"did you mean {matches[0]}?" if matches else f"its keys: {_names(row)}"
    return f"data.keys.{kind} = {key!r}: {location} has no such key; {hint}"


def _paths(row: Entry, prefix: str = "") -> Iterator[str]:
    for name, value in row.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{name}.")


def _names(row: Entry) -> str:
    names = list(row)
    return (
        ", ".join(names[:_MAX_LISTED_KEYS]) + (", ..." if len(names) > _MAX_LISTED_KEYS else "")
        if names
        else "none"
    )


def describe_type(value: Any) -> str:
    """Describe the type of a row's value for messages."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        int: "a number",
        float: "a number",
        bool: "a boolean",
    }
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")
