"""Table of published model folders. Each entry of FAMILIES states the files, the names of tokens, the fields of
config.json that differ from those of transformers, and the chat template.

`write` makes a folder of that form with a tiny random model; tests/integration/test_published_families.py tests every
entry. Weights, vocabularies and templates are our own; the facts are from the sources that each entry names:

    configs     config.json files of github:ai-dynamo/aiconfigurator and github:mlc-ai/mlc-llm (August 2026)
    slime       scripts of github:THUDM/slime (stop ids that its users pass)
    miles       scripts of github:radixark/miles
    nemo        github:NVIDIA-NeMo/RL, nemo_rl/models/policy
    sglang      readers and parsers of SGLang 0.5.23
    card        the model card, from memory: not checked against a stored copy
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.helpers import tiny
from tests.helpers.published_tokenizers import byte_level, write_ernie, write_kimi, write_llama

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "3+4="},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
]
"""A conversation in which the model calls a tool."""
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]

CHATML = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A special token ends each turn, tool calls are JSON in tags, and the result of a tool is a user turn."""
ROLE_MARKS = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v | tojson }}"
    "</arg_value>{% endfor %}\n</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A turn has no end token: the role token of the next turn ends it. The arguments of a tool call are an object."""
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }}{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>"
    "commentary<|message|>{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}{% for c in m.tool_calls %}"
    "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% elif m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Different tokens end the last answer, earlier answers and tool calls."""
BARS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}"
    "<｜tool▁output▁end｜>{% else %}<｜Assistant｜>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}"
    "<｜end▁of▁sentence｜>{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
"""The arguments of a tool call are text."""
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role in ('user', 'system') %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} [/TOOL_RESULTS]{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS] {{ c.function | tojson }}{% endfor %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
PIPES = (
    "{% for m in messages %}<|im_{{ 'system' if m.role == 'tool' else m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}{{ c.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Published:
    """The published form of a model family.

    Attributes:
        name: Name of a published model.
        tiny: Entry in tests/helpers/tiny.py.
        sources: Sources of the facts, as the module docstring lists them.
        template: Chat template.
        eos: EOS token in tokenizer_config.json.
        config: Tokens of `eos_token_id` in config.json; empty: the field is absent.
        generation: Tokens of `eos_token_id` in generation_config.json; empty: the field is absent.
        turn_end: Token that the template writes after an answer; None: none.
        form: Form of the tokenizer: fast (tokenizer.json), kimi (tiktoken.model and code), llama (tokenizer.model of
            sentencepiece) or ernie (tokenizer.model of sentencepiece and code).
        qwen_words: A fast tokenizer splits text like transformers' class for Qwen2, regardless of tokenizer.json,
            and also has vocab.json and merges.txt.
        special: Further special tokens.
        bos: BOS token.
        inline: tokenizer_config.json holds the template.
        text_arguments: The template takes the arguments of a tool call as text.
        files: Further files without weights.
        unindexed: Weight files outside the index.
        code: auto_map refers to configuration_published.py.
        quirks: Fields of config.json; None removes a field.
        transformers_5: config.json writes rope and dtype as transformers 5 does.
    """

    name: str
    tiny: str
    sources: str
    template: str
    eos: str
    config: tuple[str, ...]
    generation: tuple[str, ...]
    turn_end: str | None
    form: str = "fast"
    qwen_words: bool = False
    special: tuple[str, ...] = ()
    bos: str | None = None
    inline: bool = False
    text_arguments: bool = False
    files: tuple[str, ...] = ("README.md", "LICENSE")
    unindexed: tuple[str, ...] = ()
    code: bool = False
    quirks: Mapping[str, Any] = field(default_factory=dict)
    transformers_5: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """All tokens that end a response."""
        ends = () if self.turn_end is None else (self.turn_end,)
        return tuple(dict.fromkeys((self.eos, *self.config, *self.generation, *ends)))

    @property
    def chat(self) -> list[dict[str, Any]]:
        """CHAT in the form that the template takes."""
        if not self.text_arguments:
            return CHAT
        messages: list[dict[str, Any]] = json.loads(json.dumps(CHAT))
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        return messages


_VOCAB_FILES = ("README.md", "LICENSE")
_QWEN: dict[str, Any] = {
    "template": CHATML,
    "eos": "<|im_end|>",
    "config": ("<|im_end|>",),
    "generation": ("<|im_end|>", "<|endoftext|>"),
    "turn_end": "<|im_end|>",
    "special": ("<|im_start|>",),
    "inline": True,
    "files": _VOCAB_FILES,
    "qwen_words": True,
}
_GLM: dict[str, Any] = {
    "template": ROLE_MARKS,
    "eos": "<|endoftext|>",
    "config": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "generation": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "turn_end": None,
    "special": ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
    "files": ("README.md",),
}
_SENTENCE = "<｜end▁of▁sentence｜>"
_DEEPSEEK: dict[str, Any] = {
    "template": BARS,
    "eos": _SENTENCE,
    "config": (_SENTENCE,),
    "generation": (_SENTENCE,),
    "turn_end": _SENTENCE,
    "inline": True,
    "text_arguments": True,
    "bos": "<｜begin▁of▁sentence｜>",
    "code": True,
    "special": (
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
    "files": ("README.md", "LICENSE-MODEL", "modeling_published.py"),
}
_KIMI: dict[str, Any] = {
    "form": "kimi",
    "template": PIPES,
    "eos": "[EOS]",
    "config": ("[EOS]",),
    "generation": ("<|im_end|>",),
    "turn_end": "<|im_end|>",
    "bos": "[BOS]",
    "code": True,
    "files": ("README.md", "LICENSE", "modeling_published.py", "tool_declaration_ts.py"),
}

FAMILIES = {
    family.tiny: family
    for family in (
        Published(
            "Qwen2.5-7B-Instruct", "qwen2", "configs; card (generation ids)", **_QWEN,
            quirks={"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 4},
        ),
        Published("Qwen3-0.6B", "qwen3", "configs; card", **_QWEN, quirks={"sliding_window": None}),
        Published(
            "Qwen3-30B-A3B", "qwen3-moe", "configs; card", **_QWEN,
            quirks={"decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001},
        ),
        Published(
            "Llama-3.1-8B-Instruct", "llama", "configs; card (original/)", HEADERS, "<|eot_id|>",
            ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
            "<|eot_id|>", bos="<|begin_of_text|>", special=("<|start_header_id|>", "<|end_header_id|>"),
            inline=True, files=("README.md", "LICENSE", "USE_POLICY.md"),
            unindexed=("original/consolidated.00.pth",), quirks={"mlp_bias": False, "pretraining_tp": 1},
        ),
        Published(
            "Mixtral-8x7B-Instruct-v0.1", "mixtral", "configs; card", BRACKETS, "</s>", ("</s>",), ("</s>",), "</s>",
            form="llama", bos="<s>", unindexed=("consolidated.00.pt",), files=("README.md",),
            quirks={"sliding_window": None, "output_router_logits": False},
        ),
        Published(
            "GLM-4.5-Air", "glm-4.5", "slime run-glm4.7-355B-A32B.sh (stop ids); card", **_GLM,
            quirks={"num_nextn_predict_layers": 0},
        ),
        Published("GLM-4.7-Flash", "glm-4.7-flash", "configs (eos ids); miles run_glm45_355b_a32b.py", **_GLM),
        Published(
            "DeepSeek-V3", "deepseek-v3", "configs (auto_map, rope_scaling); card", **_DEEPSEEK,
            quirks={"ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "num_nextn_predict_layers": 0},
        ),
        Published("DeepSeek-V2", "deepseek-v2", "configs; card", **_DEEPSEEK, quirks={"ep_size": 1}),
        Published(
            "DeepSeek-V2-Lite", "deepseek-v2-lite", "configs; card", **_DEEPSEEK,
            quirks={"ep_size": 1, "q_lora_rank": None},
        ),
        Published("Kimi-K2-Instruct", "kimi-k2", "configs (auto_map); nemo (files); slime", **_KIMI),
        Published("Moonlight-16B-A3B-Instruct", "moonlight", "nemo __init__.py (files); card", **_KIMI),
        Published(
            "gpt-oss-20b", "gpt-oss", "configs; card (metal/, original/)", HARMONY, "<|return|>", ("<|return|>",),
            ("<|return|>", "<|endoftext|>", "<|call|>"), "<|return|>", bos="<|startoftext|>",
            special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
            files=("README.md", "LICENSE", "USAGE_POLICY"),
            unindexed=("original/model.safetensors", "metal/model.bin"),
            quirks={"swiglu_limit": 7.0, "initial_context_length": 64, "experts_per_token": 2},
        ),
        Published(
            "Qwen1.5-MoE-A2.7B-Chat", "qwen2-moe", "configs; card", **_QWEN, quirks={"use_sliding_window": False},
        ),
        Published(
            "HY-V3", "hy-v3", "sglang hunyuan_v3.py; card", CHATML, "<|eos|>", ("<|eos|>",),
            ("<|eos|>", "<|im_end|>"), "<|im_end|>", special=("<|im_start|>",), transformers_5=True,
        ),
        Published(
            "MiniMax-M2.5", "minimax-m2", "configs (no eos in config.json, auto_map); card", CHATML, "[e~[", (),
            ("[e~[",), "<|im_end|>", special=("<|im_start|>",), bos="]~!b[", code=True,
            files=(*_VOCAB_FILES, "modeling_published.py"), quirks={"use_mtp": False, "mtp_transformer_layers": 1},
        ),
        Published(
            "OLMoE-1B-7B-Instruct", "olmoe", "card", CHATML, "<|endoftext|>", ("<|endoftext|>",),
            ("<|endoftext|>",), "<|im_end|>", special=("<|im_start|>",), inline=True, quirks={"clip_qkv": None},
        ),
        Published(
            "ERNIE-4.5-21B-A3B-PT", "ernie-4.5", "sglang ernie4.py; card", BRACKETS, "</s>", ("</s>",), (), "</s>",
            form="ernie", bos="<s>", files=("README.md", "LICENSE"),
            quirks={"moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_use_aux_free": True},
        ),
        Published(
            "Qwen3-Next-80B-A3B-Instruct", "qwen3-next", "configs; card", **_QWEN,
            quirks={"decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 2},
            transformers_5=True,
        ),
        Published(
            "Qwen3-VL-30B-A3B-Instruct", "qwen3-vl-moe", "configs (text_config); card",
            **{**_QWEN, "files": (*_VOCAB_FILES, "preprocessor_config.json", "video_preprocessor_config.json")},
            transformers_5=True,
        ),
    )
}  # fmt: skip
"""Families by the name of the tiny model. tests/integration/test_published_families.py checks that all tiny models
are listed."""

_CODE = '''"""Model configuration under a custom name."""

from transformers import {base}


class PublishedConfig({base}):
    pass
'''


def write(folder: Path, family: Published) -> Path:
    """Write a folder of this form: a tiny random model in float32, with a tokenizer of a few hundred tokens."""
    folder.mkdir(parents=True)
    size = _write_tokenizer(folder, family)
    architecture = tiny.TINY[family.tiny].architecture
    tiny_family = tiny.TINY[family.tiny]
    tiny.write(folder, tiny_family, **{**tiny_family.served, "vocab_size": -(-size // 8) * 8})
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")) if family.form == "fast" else None
    _write_config(folder, family, architecture, ids)
    for name in family.files:
        (folder / name).write_text("{}\n" if name.endswith(".json") else f"# {family.name}: {name}\n")
    for name in family.unindexed:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"outside the index")
    if family.code:
        (folder / "configuration_published.py").write_text(
            _CODE.format(base=f"{architecture.partition('For')[0]}Config")
        )
    return folder


def _write_tokenizer(folder: Path, family: Published) -> int:
    """Write the tokenizer and return the size of its vocabulary."""
    if family.form == "kimi":
        size = write_kimi(folder)
    elif family.form in ("llama", "ernie"):
        size = (write_llama if family.form == "llama" else write_ernie)(folder)
    else:
        size = _write_fast(folder, family)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if family.inline:
        settings["chat_template"] = family.template
    else:
        (folder / "chat_template.jinja").write_text(family.template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return size


def _write_fast(folder: Path, family: Published) -> int:
    vocab, merges = byte_level()
    pairs = [(first, second) for first, _, second in (m.partition(" ") for m in merges)]
    fast = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.pre_tokenizer = _qwen_words() if family.qwen_words else plain
    if family.qwen_words:
        fast.normalizer = normalizers.NFC()  # type: ignore[assignment]
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    fast.decoder = decoders.ByteLevel()
    bos = () if family.bos is None else (family.bos,)
    marks = dict.fromkeys((*bos, *family.stops, *family.special))
    fast.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in marks])
    fast.save(str(folder / "tokenizer.json"))
    names = {"eos_token": family.eos, **({} if family.bos is None else {"bos_token": family.bos})}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocab) + len(marks)


def _qwen_words() -> Any:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _write_config(folder: Path, family: Published, architecture: str, fast: Tokenizer | None) -> None:
    """Write config.json and generation_config.json in their published form."""
    raw = json.loads((folder / "config.json").read_text())
    language = raw.get("text_config", raw)
    for part in (raw, language):
        part.pop("eos_token_id", None)
    if not family.transformers_5:
        raw["torch_dtype"] = raw.pop("dtype", "float32")
        rope = raw.pop("rope_parameters", None) or {}
        raw["rope_theta"] = rope.pop("rope_theta", 10000.0)
        if share := rope.pop("partial_rotary_factor", None):
            raw["partial_rotary_factor"] = share
        kind = rope.pop("rope_type", "default")
        raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        raw["transformers_version"] = "4.46.0"
    language |= family.quirks
    if family.code:
        raw["auto_map"] = {"AutoConfig": "configuration_published.PublishedConfig"}
    generation: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    for fields, tokens in ((language, family.config), (generation, family.generation)):
        token_ids = [_id_of(folder, fast, token) for token in tokens]
        if token_ids:
            fields["eos_token_id"] = token_ids if len(token_ids) > 1 else token_ids[0]
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _id_of(folder: Path, fast: Tokenizer | None, token: str) -> int:
    if fast is not None:
        token_id = fast.token_to_id(token)
        assert token_id is not None, token
        return int(token_id)
    from transformers import AutoTokenizer

    return int(AutoTokenizer.from_pretrained(folder, trust_remote_code=True).convert_tokens_to_ids(token))
