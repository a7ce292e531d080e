"""Tokenizer and chat template of a Hugging Face model folder, without torch and transformers.

The tokenizer is AutoTokenizer's, converted to a tokenizer.json (rlsys/core/tokenizer_files.py), and jinja2 renders
templates (rlsys/data/chat_template.py). Tests compare both with transformers, which would import torch into the
rollout process.

A response is decoded for its reward only; decoded text is never encoded again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as FastTokenizer

from rlsys.config import Config
from rlsys.core.errors import RowError, UserError, error_text
from rlsys.core.model_folder import TOKENIZER, read_fields, read_stop_ids
from rlsys.core.texts import is_valid_text, shorten
from rlsys.core.tokenizer_files import chat_templates, read_config, token_text, tokenizer_folder
from rlsys.data.chat_template import TEMPLATE_ERRORS, ChatTemplate

LONGEST_CHARACTER = 4
"""Maximum number of bytes of a character in UTF-8, and so of ids that form one character."""
ALWAYS_READ = 1_000_000
"""Number of characters up to which a text is always encoded. A longer text takes seconds in the event loop that all
samples share, and is encoded only if it may fit the model's context."""
_ANY_CONTEXT = 2**20
"""Context in tokens if config.json has no `max_position_embeddings`."""
_QUESTION, _ANSWER = "RLSYS-QUESTION", "RLSYS-ANSWER"


class TextTooLong(ValueError):
    """The text is longer than the model's context allows."""


class Tokenizer:
    """The tokenizer and the chat template of a model folder."""

    def __init__(
        self,
        path: Path | str,
        chat_args: Mapping[str, Any] | None = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the tokenizer.

        Args:
            path: model folder.
            chat_args: variables of the chat template in addition to the messages (data.chat_template_args).
            trust_remote_code: whether the folder's own code may run, to convert a tokenizer without tokenizer.json.

        Raises:
            UserError: a file is missing or cannot be read; the message has its path.
        """
        self.path = Path(path)
        self.chat_args = dict(chat_args or {})
        source = tokenizer_folder(self.path, trust_remote_code)
        file = source / TOKENIZER
        try:
            self._fast = FastTokenizer.from_file(str(file))
        except Exception as e:  # noqa: BLE001  (the Rust library raises bare Exception)
            raise UserError(f"{file}: expected a file of the tokenizers library: {e}") from None
        # Some folders set padding and truncation, which would change the ids of a prompt.
        self._fast.no_padding()
        self._fast.no_truncation()
        config = read_config(source)
        self._names = {
            k: t
            for k in config
            if k.endswith("_token") and isinstance(t := token_text(config.get(k)), str) and t
        }
        self.eos_token, self.eos_id = self._eos()
        self.special_ids = frozenset(i for i, t in self._fast.get_added_tokens_decoder().items() if t.special)
        """Ids of special tokens, for example the end of a turn."""
        special = {t.content for t in self._fast.get_added_tokens_decoder().values() if t.special}
        self._special = re.compile(
            "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) or r"(?!)"
        )
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        self._template_text = chat_templates(source, config)
        if self._template_text is None and source != self.path:
            # AutoTokenizer does not read the files of processors, which may contain the template.
            self._template_text = chat_templates(self.path, {})
        self._template: dict[str, ChatTemplate] | None = None

    def _eos(self) -> tuple[str, int]:
        """Return the text and id of the tokenizer's eos token, or of the model's smallest stop id if it has none.

        Raises:
            UserError: tokenizer.json does not contain the eos token, or the folder names no stop id.
        """
        if (token := self._names.get("eos_token")) is not None:
            if (number := self._fast.token_to_id(token)) is None:
                raise UserError(
                    f"{self.path}/tokenizer_config.json: eos_token = {token!r} is not in tokenizer.json"
                )
            return token, number
        for number in sorted(read_stop_ids(self.path)):
            if (text := self._fast.id_to_token(number)) is not None:
                return text, number
        raise UserError(
            f"{self.path}: expected an eos_token in tokenizer_config.json or special_tokens_map.json, or an "
            "eos_token_id in config.json that tokenizer.json contains"
        )

    @classmethod
    def of(cls, config: Config) -> Tokenizer:
        """Load the tokenizer of model.path, with data.chat_template_args."""
        chat_args = config.data.chat_template_args
        return cls(config.model.path, chat_args, trust_remote_code=config.model.trust_remote_code)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids with which the model ends a response.

        They are the stop ids of the folder's config files, the tokenizer's eos, and `turn_end_id`.

        Raises:
            UserError: the folder's config files cannot be read.
        """
        return read_stop_ids(self.path) | {self.eos_id, self.turn_end_id}

    @cached_property
    def turn_end_id(self) -> int:
        """Id of the special token that the chat template writes directly after an answer; eos if there is none."""
        try:
            chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
            text_before, _, text_after = self.apply_chat(chat, generate=False).partition(_ANSWER)
        except UserError:  # no template, or none for such a chat
            return self.eos_id
        ids = self.encode(text_after.lstrip())
        # Some templates open another turn of the assistant even with add_generation_prompt = false.
        opens_a_turn = text_before.endswith(text_after)
        return ids[0] if ids and ids[0] in self.special_ids and not opens_a_turn else self.eos_id

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`.

        Args:
            special: whether to add the special tokens that the tokenizer adds to a text, such as bos.

        Raises:
            ValueError: the text has a lone surrogate.
            TextTooLong: the text cannot fit the model's context.
        """
        if len(text) > ALWAYS_READ and len(text) > self._max_characters:
            raise TextTooLong(
                f"a text of {len(text):,} characters; expected at most {self._max_characters:,}"
            )
        if not is_valid_text(text):
            raise ValueError(
                f"the text contains a lone UTF-16 surrogate: {text!a:.80}; expected valid Unicode"
            )
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    @cached_property
    def _max_characters(self) -> int:
        """Number of characters of a context full of the longest token, and at least ALWAYS_READ."""
        try:
            context = read_fields(self.path).get("max_position_embeddings")
        except (OSError, ValueError, RecursionError):
            context = None
        tokens = context if isinstance(context, int) else _ANY_CONTEXT
        return max(ALWAYS_READ, tokens * max(map(len, self._fast.get_vocab()), default=1))

    def unread(self, text: str) -> list[str]:
        """Return the characters of `text` that are encoded as <unk>, or as no id; sorted, without whitespace."""
        unknown = self._fast.token_to_id(self._names.get("unk_token", ""))
        ids_of = {c: self.encode(c) for c in sorted(set(text)) if not c.isspace()}
        return [c for c, ids in ids_of.items() if not ids or unknown in ids]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`, with special tokens unless `skip_special`. Ids without a token are skipped."""
        return self._fast.decode(list(ids), skip_special_tokens=skip_special)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id, [len(ids)]. The concatenated texts are `decode(ids)`.

        If several ids form one character, the last of them gets the character, and the others an empty text.
        """
        pieces: list[str] = []
        # The text of an id depends on the ids before it, so each id is decoded after those of the previous text.
        previous_start = 0  # first id of the previous text
        start = 0  # first id without a text
        for end in range(1, len(ids) + 1):
            previous_text = self.decode(ids[previous_start:start])
            text = self.decode(ids[previous_start:end])
            is_partial = text.endswith("\N{REPLACEMENT CHARACTER}") and end - start < LONGEST_CHARACTER
            if is_partial and end < len(ids):
                pieces.append("")
                continue
            pieces.append(text[len(previous_text) :])
            previous_start, start = start, end
        return pieces

    def without_special(self, text: str) -> str:
        """Remove special tokens from decoded text."""
        return self._special.sub("", text)

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generate: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_args: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the chat template.

        Args:
            messages: turns, with the keys "role" and "content" and further keys that the template reads.
            generate: whether to open the assistant's turn after the messages.
            tools: function schemas; None: the chat argument `tools`, if there is one.
            chat_args: chat arguments for this chat, which take precedence over the tokenizer's.

        Raises:
            UserError: the folder has no template, or no template uses a chat argument of the tokenizer.
            RowError: the template refuses the messages.
        """
        variables = {"tools": None, "documents": None, **self._names, **self.chat_args, **(chat_args or {})}
        if tools is not None:
            variables["tools"] = list(tools)
        template = self._template_of("tool_use" if variables["tools"] is not None else "default")
        try:
            return template.render(messages=list(messages), add_generation_prompt=generate, **variables)
        except TEMPLATE_ERRORS as e:
            reason = shorten(error_text(e), 500)
            raise RowError(f"{self.path}: the chat template refuses the messages: {reason}") from None

    def _template_of(self, name: str) -> ChatTemplate:
        """Return the folder's template `name`, or else its template `default`.

        Raises:
            UserError: the folder has neither of them.
        """
        if self._template is None:
            self._template = self._compile()
        if template := self._template.get(name) or self._template.get("default"):
            return template
        names = ", ".join(self._template)
        raise UserError(f"{self.path}: has the chat templates {names}; expected one named default")

    def _compile(self) -> dict[str, ChatTemplate]:
        """Compile the folder's templates, and check that they use all chat arguments of the tokenizer.

        Raises:
            UserError: there is no template, a template does not compile, or none uses an argument.
        """
        if not self._template_text:
            raise UserError(
                f"model.path = {str(self.path)!r}: no chat template; expected one as a file or in "
                "tokenizer_config.json"
            )
        text = self._template_text
        try:
            templates = {
                name: ChatTemplate(template_text)
                for name, template_text in (text.items() if isinstance(text, dict) else [("default", text)])
            }
        except (jinja2.TemplateError, RecursionError) as e:
            raise UserError(f"{self.path}: the chat template does not compile: {e}") from None
        self._check_arguments({name for template in templates.values() for name in template.variables})
        return templates

    def _check_arguments(self, variables: set[str]) -> None:
        """Check that each chat argument of the tokenizer is one of the templates' variables.

        Raises:
            UserError: an argument is not.
        """
        for name in self.chat_args:
            if name not in variables:
                candidates = sorted(variables - {"messages", "add_generation_prompt", *self._names})
                matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
                hint = (
                    f"did you mean {matches[0]}?" if matches else f"it uses {', '.join(candidates) or 'none'}"
                )
                raise UserError(
                    f"data.chat_template_args.{name}: the chat template of {self.path} does not use it; {hint}"
                )
