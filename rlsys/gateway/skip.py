"""A stream that is made again, less what its client has. Pure: bytes of events in, bytes of events out.

A client must not see a token twice, nor the end of another answer after the beginning of the first. So what comes
again is compared with what was sent, and Broken is raised where they differ: new weights say something else, and an
engine that is not deterministic may, whatever the seed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rlsys.gateway.stitch import PER_TOKEN

_DIFFERS = (
    "interrupted, and made again it is not the same: new weights say something else, or the engine draws anew"
)
_CHUNK = b"data: {"


class Broken(Exception):
    """A stream that cannot be continued as if nothing had happened."""


class Skipper(Protocol):
    def skip(self, event: bytes) -> bytes:
        """The event, or what of it is new; empty when nothing is. Raises Broken."""
        ...


def skipper(path: str, sent: Sequence[bytes], *, incremental: bool) -> Skipper:
    """For the stream of `path` that follows the events `sent`. incremental: /generate's chunks bring only new tokens;
    OpenAI's always do."""
    return TokenSkipper(sent, incremental) if path == "/generate" else TextSkipper(sent)


def parse(event: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return parsed


def _chunks(sent: Sequence[bytes]) -> list[dict[str, Any]]:
    return [parse(e) for e in sent if e.startswith(_CHUNK)]


# -- /generate --------------------------------------------------------------------------------------------------


@dataclass
class _Said:
    """Of one response; `again` counts tokens and characters that came a second time."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    id: Any = None
    again: tuple[int, int] = (0, 0)


class TokenSkipper:
    """By token ids and text of each response of the request."""

    def __init__(self, sent: Sequence[bytes], incremental: bool) -> None:
        self._incremental = incremental
        self._said: dict[int, _Said] = {}
        for chunk in _chunks(sent):
            if "output_ids" in chunk:
                said = self._said.setdefault(chunk.get("index", 0), _Said(id=chunk["meta_info"].get("id")))
                if not incremental:
                    said.ids, said.text = [], ""
                said.ids += chunk["output_ids"]
                said.text += chunk.get("text") or ""

    def skip(self, event: bytes) -> bytes:
        if not event.startswith(_CHUNK):
            return event
        chunk = parse(event)
        said = self._said.get(chunk.get("index", 0))
        if said is None or "output_ids" not in chunk:
            return event
        ids, text, meta = chunk["output_ids"], chunk.get("text") or "", chunk["meta_info"]
        tokens, letters = said.again if self._incremental else (0, 0)
        said.again = tokens + len(ids), letters + len(text)
        had_ids, had_text = said.ids[tokens : said.again[0]], said.text[letters : said.again[1]]
        ended = meta.get("finish_reason") is not None
        if (
            ids[: len(had_ids)] != had_ids
            or not text.startswith(had_text)
            or (ended and said.again[0] < len(said.ids))
        ):
            raise Broken(_DIFFERS)
        if not ended and len(had_ids) == len(ids) and len(had_text) == len(text):
            return b""
        meta["id"] = said.id
        if self._incremental:
            chunk |= {"output_ids": ids[len(had_ids) :], "text": text[len(had_text) :]}
            meta |= {k: meta[k][len(had_ids) :] for k in PER_TOKEN if meta.get(k)}
        return b"data: " + msgspec.json.encode(chunk)


# -- OpenAI's ---------------------------------------------------------------------------------------------------


_Place = tuple[int, str]
"""A choice, and what of it is written: its text, its reasoning, the name or the arguments of one of its calls."""


class TextSkipper:
    """By the texts of each choice: OpenAI's chunks have no token ids. The engine reads tool calls and reasoning from
    the model's text, so the same text gives the same ones. Only a call's id is made anew: its client has the first.
    """

    def __init__(self, sent: Sequence[bytes]) -> None:
        self._sent: dict[_Place, str] = {}
        for chunk in _chunks(sent):
            for choice in chunk.get("choices") or []:
                for place, holder, name in _texts(choice):
                    self._sent[place] = self._sent.get(place, "") + (holder.get(name) or "")
        self._again: dict[_Place, str] = {}

    def skip(self, event: bytes) -> bytes:
        if not event.startswith(_CHUNK):
            return event
        chunk = parse(event)
        if not chunk.get("choices"):
            return event  # usage
        new = [self._skip_choice(choice) for choice in chunk["choices"]]
        return b"data: " + msgspec.json.encode(chunk) if any(new) else b""

    def _skip_choice(self, choice: dict[str, Any]) -> bool:
        """Leaves of it what the client has not; whether that is anything."""
        index, ended = choice.get("index", 0), choice.get("finish_reason") is not None
        cut = new = False
        for place, holder, name in _texts(choice):
            text = holder.get(name) or ""
            had, seen = self._sent.get(place, ""), self._again.get(place, "")
            whole = seen + text
            if not had.startswith(whole[: len(had)]):
                raise Broken(_DIFFERS)
            self._again[place] = whole
            fresh = whole[max(len(had), len(seen)) :]
            if fresh != text:
                holder[name], cut = fresh, True
            new = new or bool(fresh)
        sent = {place: had for place, had in self._sent.items() if place[0] == index}
        # Whether blanks before a call are told depends on where the engine's chunks end.
        if ended and any(len(self._again.get(p, "")) < len(had.rstrip()) for p, had in sent.items()):
            raise Broken(_DIFFERS)
        if cut:
            _drop_empty_calls(choice)
            if choice.get("logprobs"):
                choice["logprobs"] = None
        return new or ended


def _texts(choice: dict[str, Any]) -> list[tuple[_Place, dict[str, Any], str]]:
    """Where a chunk's choice has text: the place, the object that holds it, its name there."""
    index, delta = choice.get("index", 0), choice.get("delta") or {}
    if "text" in choice:
        return [((index, "text"), choice, "text")]
    found = [((index, name), delta, name) for name in ("reasoning_content", "content")]
    for call in delta.get("tool_calls") or []:
        found += [
            ((index, f"{name} of call {call.get('index', 0)}"), call.get("function") or {}, name)
            for name in ("name", "arguments")
        ]
    return found


def _drop_empty_calls(choice: dict[str, Any]) -> None:
    """A client takes a chunk with an id or a name for the beginning of a call."""
    delta = choice.get("delta") or {}
    left = []
    for call in delta.get("tool_calls") or []:
        function = call.get("function") or {}
        if function.get("name"):
            left.append(call)
        elif function.get("arguments"):
            left.append({**call, "id": None, "function": {**function, "name": None}})
    if delta.get("tool_calls"):
        delta["tool_calls"] = left or None
