"""Rendering: converts an agent's messages to the model's tokens.

    first question   ->  prompt                the chat template over all messages
    next question    ->  continuation          the chat template over the new messages alone
    the model's ids  ->  text                  decoded, never encoded again

Earlier messages are never rendered again, so their tokens stay those that the model has read and sampled. The text
after a turn comes from a rendered conversation of placeholders, which does not depend on how the template renders old
turns (Qwen3 omits their thinking).
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
    """Renders agents' messages for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shows_tools: dict[str, bool] = {}  # tools -> whether the template renders them

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        chat_args: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt of a conversation.

        Args:
            messages: all messages of the conversation.
            tools: schemas of the tools.
            chat_args: additional variables of the chat template.

        Raises:
            BadRequest: the template refuses the messages, or does not render the tools.
        """
        text = self._render(messages, tools, chat_args)
        if tools:
            key = json.dumps(list(tools), sort_keys=True)
            if key not in self._shows_tools:
                self._shows_tools[key] = text != self._render(messages, (), chat_args)
            if not self._shows_tools[key]:
                raise BadRequest(
                    f"the chat template of {self._tokenizer.path} does not render tools; describe them in a "
                    "message instead",
                    "tools",
                )
        return self._tokenizer.encode(text)

    def continuation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], end_text: str
    ) -> list[int]:
        """Return the token ids that follow a turn of the model: the new messages, and the header of the next turn.

        Args:
            messages: messages after the turn.
            tools: schemas of the tools.
            end_text: text of the token that ended the turn, which is not repeated; empty if the turn was truncated.

        Raises:
            BadRequest: the template refuses the messages.
        """
        marked_turn = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _TURN}]
        _, turn, following = self._render([*marked_turn, *messages], tools).partition(_TURN)
        if not turn:
            raise BadRequest(
                f"the chat template of {self._tokenizer.path} does not render messages of the assistant",
                "messages",
            )
        return self._tokenizer.encode(following.removeprefix(end_text))

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
        """Decode token ids."""
        return self._tokenizer.decode(ids)


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message whose tool calls have objects as arguments, as chat templates expect (transformers' docs)."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    return {**message, "tool_calls": [_parse_arguments(call) for call in calls]}


def _parse_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    with contextlib.suppress(ValueError):  # not JSON: rendered as generated
        function["arguments"] = load_json(function["arguments"])
    return {**call, "function": function}
