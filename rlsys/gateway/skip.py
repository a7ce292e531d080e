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


class TextSkipper:
    """By the text of each choice: OpenAI's chunks have no token ids."""

    def __init__(self, sent: Sequence[bytes]) -> None:
        self._sent: dict[int, str] = {}
        for chunk in _chunks(sent):
            for index, text in _texts(chunk):
                self._sent[index] = self._sent.get(index, "") + text
        self._again: dict[int, str] = {}

    def skip(self, event: bytes) -> bytes:
        if not event.startswith(_CHUNK):
            return event
        chunk, new = parse(event), False
        if not chunk.get("choices"):
            return event  # usage
        for choice in chunk["choices"]:
            index, (holder, name) = choice.get("index", 0), _place(choice)
            text = holder.get(name) or ""
            had, seen = self._sent.get(index, ""), self._again.get(index, "")
            whole = seen + text
            if not had.startswith(whole[: len(had)]):
                raise Broken(_DIFFERS)
            self._again[index] = whole
            fresh = whole[max(len(had), len(seen)) :]
            if fresh != text and choice.get("logprobs"):
                choice["logprobs"] = None
            holder[name] = fresh
            new = new or bool(fresh) or choice.get("finish_reason") is not None
        return b"data: " + msgspec.json.encode(chunk) if new else b""


def _place(choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Where a chunk's choice has its text. Raises Broken for what is no text."""
    if "text" in choice:
        return choice, "text"
    delta = choice.get("delta") or {}
    if delta.get("tool_calls") or delta.get("reasoning_content"):
        raise Broken("interrupted in the middle of a tool call or of reasoning")
    choice["delta"] = delta
    return delta, "content"


def _texts(chunk: dict[str, Any]) -> list[tuple[int, str]]:
    out = []
    for choice in chunk.get("choices") or []:
        holder, name = _place(choice)
        out.append((choice.get("index", 0), holder.get(name) or ""))
    return out
