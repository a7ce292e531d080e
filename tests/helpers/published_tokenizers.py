"""Tokenizers in other published forms than tokenizer.json: tiktoken with custom code (Kimi), sentencepiece (Llama),
sentencepiece with custom code (Ernie), and vocab.json with merges.txt (GPT-2). Their small vocabularies are trained
on CORPUS."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12,345.67 -- isn't it?\n\n\tdef f(x):\n        return x + 1\n",
    "你好,世界。今天天气很好,我们去公园散步吧。機器學習 こんにちは世界 カタカナ 안녕하세요 세계",
    "Привет, мир! Как дела? Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "<answer>42</answer> 3+4=7 7-1=6 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 naïve café Ünïcödé",
] * 20
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{L}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPECIAL = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "[UNK]",
    "[PAD]",
)
PLAIN = ("<|tool_call_begin|>", "<|tool_call_end|>")
RESERVED = 16
TEMPLATE = (
    "{% for m in messages %}<|im_{{ m['role'] }}|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
CODE = '''"""Tokenizer on tiktoken, as Kimi's."""

import base64

import tiktoken
from transformers import PreTrainedTokenizer

PATTERN = r"""{pattern}"""
RESERVED = {reserved}


def visible(data):
    """Return one printable character per byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {{b: chr(b) for b in plain}}
    table |= {{b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in table)}}
    return "".join(table[b] for b in data)


class RankTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "tiktoken.model"}}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        with open(vocab_file, "rb") as file:
            rows = [line.split() for line in file if line.strip()]
        ranks = {{base64.b64decode(token): int(rank) for token, rank in rows}}
        names = {{i: t.content for i, t in (added_tokens_decoder or {{}}).items()}}
        last = len(ranks) + RESERVED
        special = {{names.get(i, f"<|reserved_token_{{i}}|>"): i for i in range(len(ranks), last)}}
        self.model = tiktoken.Encoding("ranks", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self.texts = {{i: visible(token) for token, i in ranks.items()}} | {{i: t for t, i in special.items()}}
        self.ids = {{t: i for i, t in self.texts.items()}}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return dict(self.ids)

    def _tokenize(self, text, **kwargs):
        return [self.texts[i] for i in self.model.encode({text}, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self.ids[token]

    def _convert_id_to_token(self, index):
        return self.texts[index]

    def convert_tokens_to_string(self, tokens):
        return self.model.decode([self.ids[t] for t in tokens])

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()
'''


def byte_level(size: int = 600) -> tuple[dict[str, int], list[str]]:
    """Return the vocabulary and the merges (`a b`) of a byte-level BPE on CORPUS; the 256 bytes come first."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(fast.to_str())["model"]
    return model["vocab"], [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]


def as_bytes(token: str) -> bytes:
    """Return the bytes of a token in the byte-level alphabet."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    table |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in plain)}
    return bytes(table[c] for c in token)


def remove_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)


def write_kimi(folder: Path, normalized: str = "text") -> int:
    """Write tiktoken.model, tokenization_ranks.py, tokenizer_config.json and a chat template.

    Args:
        folder: The model folder.
        normalized: Python expression of the text to encode, as a function of `text`.

    Returns:
        The size of the vocabulary.
    """
    remove_tokenizer(folder)
    vocab, _ = byte_level()
    lines = [
        f"{base64.b64encode(as_bytes(t)).decode()} {i}" for t, i in sorted(vocab.items(), key=lambda p: p[1])
    ]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenization_ranks.py").write_text(
        CODE.format(pattern=PATTERN, reserved=RESERVED, text=normalized)
    )
    added = {
        str(len(vocab) + i): {
            "content": t, "special": t in SPECIAL, "normalized": False, "lstrip": False, "rstrip": False,
            "single_word": False,
        }
        for i, t in enumerate((*SPECIAL, *PLAIN))
    }  # fmt: skip
    names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    settings = {
        "tokenizer_class": "RankTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_ranks.RankTokenizer", None]},
        "added_tokens_decoder": added,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **names}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return len(vocab) + RESERVED


def write_gpt2(folder: Path) -> int:
    """Write vocab.json and merges.txt, with special tokens in special_tokens_map.json and added_tokens.json.

    Returns:
        The size of the vocabulary.
    """
    remove_tokenizer(folder)
    vocab, merges = byte_level()
    vocab["<|endoftext|>"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    added = {t: len(vocab) + i for i, t in enumerate(("<|im_end|>", "<|im_user|>", "<|im_assistant|>"))}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    ends = ("bos_token", "eos_token", "unk_token")
    (folder / "special_tokens_map.json").write_text(
        json.dumps({**dict.fromkeys(ends, "<|endoftext|>"), "additional_special_tokens": list(added)})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return len(vocab) + len(added)


def write_llama(folder: Path) -> int:
    """Write tokenizer.model (sentencepiece with byte fallback) and a tokenizer_config.json in the form of Llama 2.

    Returns:
        The size of the vocabulary.
    """
    import sentencepiece  # type: ignore[import-untyped]

    remove_tokenizer(folder)
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter("\n".join(CORPUS).split("\n")), model_writer=file, vocab_size=700,
            model_type="bpe", byte_fallback=True, character_coverage=0.99, split_digits=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False,
            num_threads=1, minloglevel=2,
        )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    settings = {
        "tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "add_eos_token": False,
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}"
        "{{ eos_token }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(model.vocab_size())


PIECES = '''"""Tokenizer on sentencepiece, as Ernie's."""

import sentencepiece
from transformers import PreTrainedTokenizer


class PieceTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tokenizer.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.pieces.vocab_size()

    def get_vocab(self):
        return {self.pieces.id_to_piece(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text, **kwargs):
        return self.pieces.encode_as_pieces(text)

    def _convert_token_to_id(self, token):
        return self.pieces.piece_to_id(token)

    def _convert_id_to_token(self, index):
        return self.pieces.id_to_piece(index)

    def convert_tokens_to_string(self, tokens):
        return self.pieces.decode(tokens)

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()
'''


def write_ernie(folder: Path) -> int:
    """Write a tokenizer.model as `write_llama`, with custom code that reads it. Return the size of the vocabulary."""
    size = write_llama(folder)
    (folder / "tokenization_pieces.py").write_text(PIECES)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PieceTokenizer"
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_pieces.PieceTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return size


FORMS = {"kimi": write_kimi, "gpt2": write_gpt2, "llama": write_llama, "ernie": write_ernie}
CODE_FORMS = ("kimi", "ernie")
"""Forms with custom code in the folder."""
