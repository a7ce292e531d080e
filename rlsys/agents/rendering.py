"""Between an agent's messages and the model's tokens.

    first question   ->  prompt                the chat template over all messages
    next question    ->  what comes behind     the chat template over the new messages alone
    the model's ids  ->  text                  decoded, never encoded again

The messages that were said before are never rendered again: their tokens are those that the model has read and
sampled. What comes behind a turn is taken from a conversation of marks, so a template that shows old turns otherwise
(Qwen3 leaves out their thinking) changes nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.agents.messages import BadRequest, Message
from rlsys.core.errors import UserError
from rlsys.core.texts import load_json
from rlsys.data import Tokenizer

_QUESTION, _TURN = "RLSYS-QUESTION", "RLSYS-TURN"


class Rendering:
    """Rendering of an agent's messages for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shows_tools: dict[str, bool] = {}  # tools -> whether the template shows them

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        chat_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a first question. `chat_args`: further variables of the chat template. Raises BadRequest for
        messages that the template refuses, or tools that it does not show."""
        text = self._render(messages, tools, chat_args)
        if tools:
            key = json.dumps(list(tools), sort_keys=True)
            if key not in self._shows_tools:
                self._shows_tools[key] = text != self._render(messages, (), chat_args)
            if not self._shows_tools[key]:
                raise BadRequest(
                    f"the chat template of {self._tokenizer.path} shows no tools, so the model would not know of "
                    "them; describe them in a message",
                    "tools",
                )
        return self._tokenizer.encode(text)

    def continuation(
        self, new: Sequence[Message], tools: Sequence[Mapping[str, Any]], last: str
    ) -> list[int]:
        """Return the ids between the end of a turn and the next one: `new` messages, and the opening of the turn.

        Args:
            last: the text of the token that ended the turn, which is not repeated; empty if the turn was truncated.
        """
        marked_turn = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _TURN}]
        _, turn, following = self._render([*marked_turn, *new], tools).partition(_TURN)
        if not turn:
            raise BadRequest("the chat template does not show what an assistant said", "messages")
        return self._tokenizer.encode(following.removeprefix(last))

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        chat_args: Mapping[str, Any] | None = None,
    ) -> str:
        rows = [_for_template(m) for m in messages]
        try:
            return self._tokenizer.apply_chat(rows, tools=list(tools) or None, chat_args=chat_args)
        except UserError as e:
            raise BadRequest(str(e), "messages") from None

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def _for_template(message: Message) -> dict[str, Any]:
    """Templates take arguments as objects, as transformers documents it."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    with contextlib.suppress(ValueError):  # no JSON: shown as it was written
        function["arguments"] = load_json(function["arguments"])
    return {**call, "function": function}
