"""Conversion of a model folder's tokenizer to tokenizer.json, in a separate process:

    python -m rlsys.data.tokenizer_conversion FOLDER OUT [--trust-remote-code]

Only rlsys/core/tokenizer_files.py starts it. AutoTokenizer reads the folder. The result is written in the format of
the `tokenizers` library, loaded, and compared with AutoTokenizer on texts in many scripts; a conversion with any
different id is rejected. The folder's code runs only with `--trust-remote-code`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, LlamaTokenizer
from transformers.convert_slow_tokenizer import (
    SLOW_TO_FAST_CONVERTERS,
    TikTokenConverter,
    bytes_to_unicode,
    convert_slow_tokenizer,
)
from transformers.models.gpt2 import tokenization_gpt2

from rlsys.core.errors import UserError
from rlsys.core.model_folder import TOKENIZER
from rlsys.core.tokenizer_files import CONFIG, chat_templates, read_config, token_text

LINES = (
    "The quick brown fox jumps over the lazy dog; it's WE'LL they'd I'm don't.",
    "Größe, façade, naïve, Ünïcödé, smørrebrød, żółć, İstanbul, ﬁnal, ǅ, ʼn",
    "Привет, мир! Їжак. Здраво. Γειά σου Κόσμε. Բարեւ. გამარჯობა",
    "שלום עולם مرحبا بالعالم سلام دنیا ہیلو ܫܠܡܐ ދިވެހި",
    "नमस्ते दुनिया বাংলা ਪੰਜਾਬੀ ગુજરાતી தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල",
    "สวัสดีชาวโลก ສະບາຍດີ မင်္ဂလာပါ សួស្តី བོད་ཡིག ሰላም ᠮᠣᠩᠭᠣᠯ ᏣᎳᎩ",
    "你好,世界。機器學習、深度学习;こんにちは世界カタカナ ﾊﾝｶｸ 안녕하세요 한국어",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x ** 2}  # ok\n\n\n\tif (x != y && z) { a->b++; }\r\n",
    "\\frac{1}{2} \\boxed{7} $x^2 + y_1 = 10$ ∑∫√∞ ≠ ≤ ½ ² ₃ Ⅷ ① 𝔸𝒷 ℵ",
    '<think>\n\n</think><answer>3</answer> {"name": "f", "arguments": {"q": "\\u00e9"}} <|im_end <| |> </s >',
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 0x1F 1e-5 ١٢٣ १२३ 一二三 1a2b3c a1b22c333",
    "\U0001f600 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u2764\ufe0f #\ufe0f\u20e3 \U0001f9d1\u200d\U0001f4bb \U0001fae0 \u263a\ufe0e",
    "e\u0301 o\u0308\u0304 a\u0300\u0301\u0302 \u0915\u094d\u0937 \u200b\u200c\u200d\u200e\u202e\ufeff\u00ad",
    "\ufffd\ufffd \x00 \x01\x02\x1b[0m \x7f \x85 \u2028 \u2029 \ue000 \U000f0000 \ufdd0 \uffff \U0010ffff",
)  # fmt: skip
WHITESPACE = (
    " ", "  ", "   ", "\n", "\n\n", "\n\n\n\n", "\r\n", "\r\n\r\n", "\t", "\t\t", " \n", "\n ", " \t \n  ", "\u00a0",
    "\u2003\u2003", "\u3000", "\x0b\x0c", " " * 40, "\n" * 20, " \u00a0 \u3000\n\t ",
)  # fmt: skip
SPACE = "\u2581"
"""The space in a sentencepiece vocabulary."""
CHARACTERS_AT_ONCE = 256
RANDOM = 10_000
"""Number of random texts."""


def check_texts(special: Sequence[str], seed: int = 0) -> Iterator[str]:
    """Yield texts in many scripts for the comparison.

    They contain every assigned character in several contexts, runs of whitespace and digits, emoji, random
    characters, and complete and partial `special` tokens in and between them.
    """
    yield from LINES
    yield from WHITESPACE
    for space in WHITESPACE:
        yield from (f"a{space}b", f"{space}a{space}", f"1{space}2{space}3.{space}", f"你{space}好{space}!")
    for token in special:
        yield from (
            token,
            f" {token} ",
            f"a{token}b",
            f"\n{token}\n",
            token * 2,
            token[:-1],
            token[1:],
            f"{token[:-1]} >",
        )
    assigned = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    for start in range(0, len(assigned), CHARACTERS_AT_ONCE):
        some = assigned[start : start + CHARACTERS_AT_ONCE]
        yield "".join(f"{c}a{c} {c}1{c}{c}" for c in some)
        yield "".join(some)
    rng = random.Random(seed)
    parts = [*LINES, *WHITESPACE, *special, *"0123456789.,;:!?'\"()[]{}<>|/\\-+=*&^%$#@~`_"]
    for _ in range(RANDOM):
        pieces = rng.choices(parts, k=rng.randint(1, 12))
        starts = [rng.randrange(len(p)) for p in pieces]
        yield "".join(
            p[s : s + rng.randint(1, 12)] if len(p) > 3 else p for p, s in zip(pieces, starts, strict=True)
        )
    for length in (100, 1000, 5000):
        yield from ("a" * length, "1" * length, "你" * length, " " * length, "!" * length, "ab12 " * length)


def convert(folder: Path, out: Path, trust_remote_code: bool) -> None:
    """Write the converted tokenizer of `folder` to `out`.

    Raises:
        UserError: no tokenizer.json gives the same ids.
    """
    if not hasattr(tokenization_gpt2, "bytes_to_unicode"):
        # transformers 5 has moved it, and Kimi-K2's code imports it from its old place.
        tokenization_gpt2.bytes_to_unicode = bytes_to_unicode
    tokenizer = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=trust_remote_code, local_files_only=True
    )
    special = special_texts(folder, tokenizer)
    first_error: UserError | None = None
    for form in forms(tokenizer, folder):
        fast = FastTokenizer.from_str(json.dumps(_mark_special(form, special)))
        fast.no_padding()
        fast.no_truncation()
        try:
            compare(tokenizer, fast)
        except UserError as e:
            first_error = first_error or e
        else:
            break
    else:
        raise first_error or UserError(f"{type(tokenizer).__name__}: unsupported tokenizer class")
    config = read_config(folder) if (folder / CONFIG).is_file() else {}
    tokens = {name: token_text(token) for name, token in config.items() if name.endswith("_token")}
    names: dict[str, Any] = {name: text for name, text in tokens.items() if text}
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names |= {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    if template := tokenizer.chat_template or chat_templates(folder, config):
        names["chat_template"] = template
    (out / CONFIG).write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    fast.save(str(out / TOKENIZER))


def special_texts(folder: Path, tokenizer: Any) -> set[str]:
    """Return the texts of the special tokens of AutoTokenizer, which omits some, and of the folder's files."""
    texts = {str(t) for t in tokenizer.all_special_tokens}
    for name in (CONFIG, "special_tokens_map.json"):
        fields = json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).is_file() else {}
        texts |= {_text(t) for t in fields.get("additional_special_tokens") or ()}
        texts |= {_text(t) for t in (fields.get("added_tokens_decoder") or {}).values() if t.get("special")}
    return texts


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def forms(tokenizer: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield candidates for the content of tokenizer.json, none for an unsupported class.

    There are several if the files do not determine how the folder's class normalizes a text; `compare` finds the
    right one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, FastTokenizer):
        yield json.loads(backend.to_str())
        return
    kinds = {type(value).__module__.partition(".")[0]: value for value in vars(tokenizer).values()}
    if "tiktoken" in kinds:
        normalizers: tuple[dict[str, Any] | None, ...] = (None, {"type": "NFC"})  # of Kimi, of the first Qwen
        for normalizer in normalizers:
            yield _of_tiktoken(kinds["tiktoken"], tokenizer) | {"normalizer": normalizer}
    elif "sentencepiece" in kinds:
        llama = LlamaTokenizer.from_pretrained(folder, local_files_only=True)
        spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prefix = {"type": "Prepend", "prepend": SPACE}  # sentencepiece's dummy prefix
        for steps in ([prefix, spaces], [spaces]):
            content = json.loads(llama.backend_tokenizer.to_str())
            yield content | {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
    elif type(tokenizer).__name__ in SLOW_TO_FAST_CONVERTERS:
        yield json.loads(convert_slow_tokenizer(tokenizer).to_str())


def _of_tiktoken(encoding: Any, tokenizer: Any) -> dict[str, Any]:
    """Return a byte-level BPE with the pattern and ranks of a tiktoken encoding; special tokens keep their ids."""
    ranks, special = encoding._mergeable_ranks, encoding._special_tokens
    converter = TikTokenConverter(vocab_file="", pattern=encoding._pat_str)
    converter.load_tiktoken_bpe = lambda _: ranks
    content: dict[str, Any] = json.loads(converter.converted().to_str())
    content["model"]["vocab"] |= special  # the tokenizers library looks for the ids of added tokens in it
    is_special = {i: t.special for i, t in tokenizer.added_tokens_decoder.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": i, "content": text, "special": is_special.get(i, False), **flags}
        for text, i in sorted(special.items(), key=lambda p: p[1])
    ]
    return content


def _mark_special(content: dict[str, Any], special: set[str]) -> dict[str, Any]:
    """Set `special` for the added tokens with these texts, in place, and return the content."""
    for token in content["added_tokens"]:
        token["special"] = token["special"] or token["content"] in special
    return content


def compare(tokenizer: Any, fast: FastTokenizer) -> None:
    """Check that both tokenizers encode and decode equally.

    Raises:
        UserError: the ids or the text of an input differ; the message shows the first difference.
    """
    added = {t.content: i for i, t in fast.get_added_tokens_decoder().items()}
    for text in check_texts(list(added)[:64]):
        expected_ids = list(tokenizer.encode(text, add_special_tokens=False))
        ids = fast.encode(text, add_special_tokens=False).ids
        if ids != expected_ids:
            raise UserError(_difference(fast, ids, expected_ids))
        decoded = fast.decode(ids, skip_special_tokens=False)
        if set(ids).isdisjoint(added.values()):
            expected_text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            if decoded != expected_text:
                raise UserError(
                    f"the conversion decodes the ids {ids[:6]}... to {decoded!r:.60}; expected AutoTokenizer's text "
                    f"{expected_text!r:.60}"
                )
    for text, number in added.items():
        if tokenizer.convert_tokens_to_ids(text) != number:
            raise UserError(
                f"{text!r} has id {tokenizer.convert_tokens_to_ids(text)}, but {number} in the conversion"
            )


def _difference(fast: FastTokenizer, ids: list[int], expected_ids: list[int]) -> str:
    """Return the message for the first id of the conversion that differs from AutoTokenizer's."""
    first = next(
        (i for i, (a, b) in enumerate(zip(ids, expected_ids, strict=False)) if a != b),
        min(len(ids), len(expected_ids)),
    )
    context = fast.decode(ids[max(0, first - 4) : first + 4], skip_special_tokens=False)
    return (
        f"at {context!r:.60} AutoTokenizer gives the ids {expected_ids[first : first + 6]}, the conversion "
        f"{ids[first : first + 6]}"
    )


def main() -> int:
    """Convert a folder.

    An exception in the folder's code ends the process; the parent process shows the last line of stderr.

    Returns:
        the exit code: 0, or that of a UserError.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    try:
        convert(args.folder, args.out, args.trust_remote_code)
    except UserError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
