"""Parser of a data row: prompt, right answer and tools.

The prompt of a row is a text or a chat. The keys of prompt, answer and tools are those of `data.keys`; by default,
the keys of slime, verl and TRL are tried.
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
"""Default keys of the prompt, in the order in which they are tried."""
ANSWERS = ("answer", "label", "ground_truth", "reward_model.ground_truth")
"""Default keys of the right answer, in the order in which they are tried."""
_FORMS = ("", "s", *(f"_{form}{s}" for form in ("url", "path", "file", "data", "byte") for s in ("", "s")))
MEDIA = (
    *(f"{kind}{form}" for kind in ("image", "video", "audio") for form in _FORMS),
    "media", "multi_modal_data", "multi_modal_inputs", "multimodal_data", "multimodal_inputs", "pixel_values",
)  # fmt: skip
"""Keys of images, audio and video."""
_LIKELY = ("question", "problem", "input", "instruction", "query", "conversations", "text")
"""Other keys that data sets use for the prompt; the error about a missing prompt proposes them."""
_MAX_LISTED_KEYS = 12
_MISSING = object()
_quoted = json.encoder.encode_basestring_ascii
"""json.dumps of a text."""


@dataclass(frozen=True)
class Row:
    """Parsed row.

    Attributes:
        messages: the prompt as a chat.
        question: text of the prompt if it is a single user message, or else empty.
        entry: the row, with the right answer as `answer` if it has one.
        tools: function schemas; None: none.
    """

    messages: list[Message]
    question: str
    entry: Entry
    tools: list[dict[str, Any]] | None = None

    @property
    def key(self) -> str:
        """Text that identifies the prompt: rows with the same prompt have the same key."""
        return json.dumps(self.question or self.messages, default=str)


def read_row(row: Any, keys: KeysConfig, location: str) -> Row:
    """Parse a row.

    Args:
        location: location of the row for messages, such as FILE:LINE.

    Raises:
        RowError: the row has no prompt, its chat is malformed, or it has media.
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
    """Computes `Row.key` of rows without media and tools, without parsing the whole row.

    Args:
        keys: the config's data.keys.

    Attributes:
        names: the keys whose values `key` and `data_source` need; MEDIA come last.
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
        """Return `Row.key` of a row; None if `read_row` must parse it.

        Args:
            values: the row's values of `names`, with UNSET for a missing key.
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
        """Return the row's data_source; empty if it has none.

        Args:
            values: the same values as for `key`.
        """
        value = values[self._data_source]
        return "" if value is UNSET else str(value)

    def _reader(self, path: str) -> Callable[[Sequence[Any]], Any]:
        """Return a function from the values of `names` to the value at `path`, such as `a` or `a.b`.

        It returns UNSET if the row has no such value.
        """
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
    """Return `Row.key` of a chat; None if `read_row` must parse it.

    The key is `json.dumps(messages)`, or `json.dumps` of the text of a single user message.
    """
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
    """Check that no text in a row has a lone surrogate, which tokenizers and files cannot encode.

    Args:
        value: the row, or a value in it.

    Raises:
        RowError: a text has a lone surrogate.
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
    """Convert a row so that JSON can represent it, for another program.

    Keys become texts, and values of numpy become values of Python. Values of other types, such as dates, remain; the
    JSON encoder must convert them to texts.

    Raises:
        RowError: two keys have the same text, or a value is bytes; the message has the path of the value.
    """

    def convert(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            converted: Entry = {}
            for key, item in value.items():
                name = key if isinstance(key, str) else json.dumps(key, default=str)
                item_path = f"{path}.{name}" if path else name
                if name in converted:
                    raise RowError(f"{location}: {item_path:.80} is the name of two keys in JSON; rename one")
                converted[name] = convert(item, item_path)
            return converted
        if isinstance(value, list | tuple):
            return [convert(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, bytes | bytearray | memoryview):
            raise RowError(
                f"{location}: {path:.80} is bytes, which JSON cannot represent; expected a text, for example base64"
            )
        return convert(value.tolist(), path) if hasattr(value, "tolist") else value

    json_entry: Entry = convert(row, "")
    return json_entry


def _is_media(value: Any) -> bool:
    """Return whether a value is media, or a list of media: an image, audio or video that `datasets` stored or
    decoded."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict):
        return first.keys() == {"bytes", "path"} and any(first.values())
    return type(first).__module__.partition(".")[0] in ("PIL", "datasets", "torchcodec")


def find(row: Entry, path: str) -> Any:
    """Return the row's value at a path, such as `a` or `a.b`; _MISSING if the row has no such value."""
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
    """Parse a chat: join the text parts of each message, and remove the keys that are null.

    Raises:
        RowError: an item is not a message, or a message has other content than text.
    """
    return [_parse_message(m, location) for m in messages]


def _parse_message(message: Any, location: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError(
            f'{location}: a message is {str(message)[:80]!r}; expected {{"role": ..., "content": ...}}'
        )
    # In a table, each message has the keys of all messages.
    fields = {k: v for k, v in message.items() if v is not None}
    content = fields.get("content", "")
    if isinstance(content, list):
        content = _join_text(content, location)
    if not isinstance(content, str):
        raise RowError(f"{location}: the content of a message is {describe_type(content)}; expected a text")
    return {**fields, "content": content}


def _join_text(parts: list[Any], location: str) -> str:
    """Join the text parts of a message's content.

    Raises:
        RowError: a part has no text.
    """
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RowError(
                f'{location}: a message has the part {part!r:.80}; expected {{"type": "text", "text": ...}}'
            )
    return "".join(part["text"] for part in parts)


def _with_answer(row: Entry, key: str | None, location: str) -> Entry:
    """Return a copy of the row with the right answer as `answer`, or without `answer` if it has none.

    Args:
        key: data.keys.answer; None: ANSWERS.
    """
    for path in (key,) if key else ANSWERS:
        answer = find(row, path)
        if answer is not _MISSING and answer is not None:
            return {**row, "answer": answer}
    if key and find(row, key) is _MISSING:
        raise RowError(_no_key("answer", key, row, location))
    return {k: v for k, v in row.items() if k != "answer"} if "answer" in row else dict(row)


def tools_of(row: Entry, key: str | None, location: str) -> list[dict[str, Any]] | None:
    """Return a row's function schemas; None if it has none.

    Args:
        key: data.keys.tools; None: "tools".

    Raises:
        RowError: the row lacks `key`, or the value is not a list of schemas, or JSON of one.
    """
    tools = find(row, key or "tools")
    if tools is _MISSING and key:
        raise RowError(_no_key("tools", key, row, location))
    if tools is _MISSING or tools is None:
        return None
    if isinstance(tools, str):  # schemas differ in type, so tables store them as JSON
        try:
            tools = load_json(tools)
        except ValueError as e:
            raise RowError(f"{location}: {key or 'tools'} is a text that is not JSON: {e}") from None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise RowError(
            f"{location}: {key or 'tools'} is {describe_type(tools)}; expected a list of function schemas"
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
    """Return the type of a value for messages, with its article: "a list"."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        int: "a number",
        float: "a number",
        bool: "a boolean",
    }
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")
