"""ServedModel: the tokenizer, the stop ids and the parsers of the engines' model.

The engines report their model's folder. If the router cannot read the folder, it serves requests with token ids, and
refuses requests that need the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsys.agents.rendering import Rendering
from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.model_folder import read_fields, read_sampling_defaults, read_stop_ids
from rlsys.data import Tokenizer
from rlsys.engine_requests import RefusedPrompt
from rlsys.generators.parser_client import TurnReader


class ServedModel:
    """The model of the engines, as far as the router can read it.

    Args:
        folder: folder with the tokenizer and the configuration.
        server_info: the /server_info of an engine.

    Attributes:
        stop_ids: token ids that end a response.
        sampling_defaults: default sampling parameters of OpenAI requests, by SGLang's names.
        incremental: whether an event of a /generate stream contains only the new tokens, instead of all tokens so
            far. The same as for the engines.
        rendering: renders chats; not set without a tokenizer.
        reader: parses reasoning and tool calls; None if the engines have no such parser.
        parses_calls: whether the reader parses tool calls.
        parses_reasoning: whether the reader parses reasoning.
        experts_per_token: number of experts that a token is routed to in all layers together; 0: unknown.
    """

    def __init__(self, folder: Path, server_info: Mapping[str, Any]) -> None:
        self._tokenizer: Tokenizer | None = None
        self._missing = ""
        self.stop_ids: frozenset[int] = frozenset()
        self.sampling_defaults: Mapping[str, float] = {}
        self.incremental = bool(server_info.get("incremental_streaming_output"))
        parsers = {name: server_info.get(name) for name in ("tool_call_parser", "reasoning_parser")}
        self.parses_calls, self.parses_reasoning = (bool(name) for name in parsers.values())
        self.reader: TurnReader | None = None
        self.experts_per_token = _experts_per_token(folder)
        try:
            self.stop_ids = read_stop_ids(folder)
            self._tokenizer = Tokenizer(folder)
            self.stop_ids |= {self._tokenizer.eos_id}
        except UserError as e:
            self._missing = f"the router cannot read the model's tokenizer: {e}; set --model-path"
            return
        self.rendering = Rendering(self._tokenizer)
        if server_info.get("sampling_defaults", "model") == "model":
            self.sampling_defaults = read_sampling_defaults(folder)
        if self.parses_calls or self.parses_reasoning:
            self.reader = TurnReader(Config.model_validate({"model": {"path": folder}, "engine": parsers}))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the router cannot read it."""
        return self._tokenizer

    def require_tokenizer(self, field: str) -> Tokenizer:
        """Return the tokenizer.

        Args:
            field: the field of a request that requires it.

        Raises:
            RefusedPrompt: the router has no tokenizer.
        """
        if self._tokenizer is None:
            raise RefusedPrompt(f"{field}: {self._missing}", field)
        return self._tokenizer

    def encode(self, text: str, field: str) -> list[int]:
        """Return the token ids of a prompt. Like an engine, add the tokenizer's special tokens.

        Args:
            text: text of the prompt.
            field: field of the request, for errors.

        Raises:
            RefusedPrompt: the text cannot be encoded.
        """
        try:
            return self.require_tokenizer(field).encode(text, special=True)
        except RefusedPrompt:
            raise
        except ValueError as e:
            raise RefusedPrompt(f"{field}: {e}", field) from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ids; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special=skip_special)

    async def close(self) -> None:
        """End the process that runs the parsers."""
        if self.reader is not None:
            await self.reader.close()


def _experts_per_token(folder: Path) -> int:
    """Return the number of experts that a token is routed to in all layers; 0 if config.json does not say it."""
    try:
        fields = read_fields(folder)
        return int(fields["num_hidden_layers"]) * int(fields["num_experts_per_tok"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
