"""Model folders without weights, with the tokenizer, stop ids and chat template of published families."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from rlsys.data.quickstart_model import write_model


@dataclass(frozen=True)
class Family:
    """Tokens of a model family.

    Attributes:
        eos: EOS token in tokenizer_config.json.
        config: Tokens of `eos_token_id` in config.json.
        generation: Tokens of `eos_token_id` in generation_config.json.
        turn_end: Token that the chat template writes after an answer; empty: the next role token ends the turn.
        user: Role token of the user.
    """

    eos: str
    config: tuple[str, ...]
    generation: tuple[str, ...]
    turn_end: str = ""
    user: str = "<user>"

    @property
    def stops(self) -> tuple[str, ...]:
        """All tokens that end a response."""
        tokens = (self.eos, *self.config, *self.generation, *([self.turn_end] if self.turn_end else []))
        return tuple(dict.fromkeys(tokens))


FAMILIES = {
    "glm": Family(
        "<|endoftext|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        user="<|user|>",
    ),
    "llama": Family("<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), (), "<|eot_id|>"),
    "qwen": Family("<|im_end|>", ("<|im_end|>",), ("<|im_end|>", "<|endoftext|>"), "<|im_end|>"),
    "ernie": Family("</s>", ("</s>",), (), "<|end_of_sentence|>"),
    "kimi": Family("[EOS]", ("[EOS]",), ("<|im_end|>",), "<|im_end|>"),
    "gpt_oss": Family(
        "<|return|>", ("<|return|>",), ("<|return|>", "<|endoftext|>", "<|call|>"), "<|return|>"
    ),
}


def write_family(folder: Path, name: str) -> Family:
    """Write the quickstart's folder with the tokens, stop ids and turn end of family `name`."""
    family = FAMILIES[name]
    write_model(folder)
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = (*family.stops, family.user)
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    fast.save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer_config.json", eos_token=family.eos)
    for file, tokens in (("config.json", family.config), ("generation_config.json", family.generation)):
        ids = [fast.token_to_id(t) for t in tokens]
        edit(folder / file, eos_token_id=(ids if len(ids) != 1 else ids[0]) or None)
    assistant = "{{ m['content'] }}" + family.turn_end
    (folder / "chat_template.jinja").write_text(
        "<bos>{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>"
        f"{assistant}{{% else %}}{family.user}{{{{ m['content'] }}}}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return family


def edit(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
