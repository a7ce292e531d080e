"""Text <-> ids of a Hugging Face model folder, with its chat template. No torch, no transformers.

Token in, token out: a response is decoded for its reward only; decoded text is never encoded again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from rlsys.errors import UserError

LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, each of which may be an id."""


class Tokenizer:
    """`tokenizer.json`, `tokenizer_config.json` and the chat template of the folder `path`.

    Raises UserError that names the file when one is missing or cannot be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"model.path = {str(self.path)!r}: no tokenizer.json there")
        try:
            self._fast = FastTokenizer.from_file(str(file))
        except Exception as e:  # noqa: BLE001  (the Rust library raises bare Exception)
            raise UserError(f"{file}: not a tokenizer file: {e}") from None
        # Padding and truncation that some folders ship would change what a prompt is.
        self._fast.no_padding()
        self._fast.no_truncation()
        config = _read_json(self.path / "tokenizer_config.json")
        self._names = {
            k: t
            for k in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (t := _token_text(config.get(k)))
        }
        self.eos_token = self._names.get("eos_token", "")
        eos = self._fast.token_to_id(self.eos_token)
        if eos is None:
            raise UserError(
                f"{self.path}/tokenizer_config.json: eos_token = {self.eos_token!r} is not in tokenizer.json"
            )
        self.eos_id: int = eos
        self.special_ids = frozenset(i for i, t in self._fast.get_added_tokens_decoder().items() if t.special)
        """Ids that mark something, as a turn or an end, and are no text."""
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        self._template_text = _chat_template(self.path, config)
        self._template: jinja2.Template | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands: no bos or eos is added."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included. Ids of a padded vocabulary that it lacks give nothing."""
        return self._fast.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each id; together they are `decode(ids)`. Of ids that only together are a character, the last
        one has it and the others have none.

        What a decoder makes of an id depends on the ids before it, so each is decoded with those that came last.
        """
        out: list[str] = []
        context = 0  # where the last id with text begins
        whole = 0  # ids before this one have their text
        for end in range(1, len(ids) + 1):
            before, text = self.decode(ids[context:whole]), self.decode(ids[context:end])
            if (
                text.endswith("\N{REPLACEMENT CHARACTER}")
                and end < len(ids)
                and end - whole < LONGEST_CHARACTER
            ):
                out.append("")
                continue
            out.append(text[len(before) :])
            context, whole = whole, end
        return out

    def apply_chat(self, messages: Sequence[dict[str, str]], *, generate: bool = True) -> str:
        """The chat template over `messages` ({"role", "content"}); `generate` opens the assistant's turn.

        Raises UserError when the folder has no template or the template refuses the messages.
        """
        if self._template is None:
            self._template = self._compile()
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=generate, **self._names
            )
        except jinja2.TemplateError as e:
            raise UserError(f"{self.path}: the chat template refuses the messages: {e}") from None

    def _compile(self) -> jinja2.Template:
        if self._template_text is None:
            raise UserError(
                f"model.path = {str(self.path)!r}: no chat template, as a file or in tokenizer_config.json"
            )
        # The dialect of Hugging Face chat templates: trimmed blocks, sandboxed, three extra functions.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        env.globals["raise_exception"] = _refuse
        env.globals["strftime_now"] = lambda fmt: datetime.now(UTC).strftime(fmt)
        try:
            return env.from_string(self._template_text)
        except jinja2.TemplateError as e:
            raise UserError(f"{self.path}: the chat template does not compile: {e}") from None


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: not readable as JSON: {e}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _token_text(token: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or an object with its text under `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones: the one for plain chat
        return next((t["template"] for t in template if t.get("name") == "default"), None)
    return template
