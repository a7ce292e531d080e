"""The quickstart's untrained model: `python -m rlsys.data.quickstart_model FOLDER [--seed 0]`.

The model is a Qwen3-MoE with 774,208 random parameters (float32, 3.1 MB). The tokenizer has 106 tokens: single
characters, and tags such as <answer>. Tags are not special tokens, because engines omit special tokens from the text.
`rlsys sft configs/quickstart_sft.yaml` trains the model to write the steps of a sum (README.md of
configs/models/quickstart-moe).
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, EXPERT_FF = 128, 3, 4, 2, 32, 8, 2, 64
CONTEXT = 1024
VOCAB_SIZE = 128  # the tokenizer's 106 tokens, padded: splits evenly over 2, 4 or 8 tensor parallel ranks
INIT_STD = 0.02

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TAGS = ("<user>", "<assistant>", "<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
PAD, BOS, EOS, UNK = range(4)

CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def model_config() -> dict[str, object]:
    """Return the content of config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,  # SGLang requires it, although no layer is dense
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": EXPERT_FF,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_position_embeddings": CONTEXT,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def random_weights(seed: int) -> dict[str, np.ndarray]:
    """Return random tensors in float32 by their Hugging Face names.

    Weights of norms are 1; other weights have a normal distribution with the standard deviation INIT_STD.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * INIT_STD).astype(np.float32)

    def ones(n: int) -> np.ndarray:
        return np.ones(n, dtype=np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, HIDDEN),
        "lm_head.weight": normal(VOCAB_SIZE, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
    }
    for i in range(LAYERS):
        layer = {
            "input_layernorm.weight": ones(HIDDEN),
            "post_attention_layernorm.weight": ones(HIDDEN),
            "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm.weight": ones(HEAD_DIM),
            "self_attn.k_norm.weight": ones(HEAD_DIM),
            "mlp.gate.weight": normal(EXPERTS, HIDDEN),
        }
        for e in range(EXPERTS):
            layer[f"mlp.experts.{e}.gate_proj.weight"] = normal(EXPERT_FF, HIDDEN)
            layer[f"mlp.experts.{e}.up_proj.weight"] = normal(EXPERT_FF, HIDDEN)
            layer[f"mlp.experts.{e}.down_proj.weight"] = normal(HIDDEN, EXPERT_FF)
        tensors |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    return tensors


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into the folder."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *TAGS, *CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    _write_json(
        folder / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False, **names}
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_model(folder: Path, seed: int = 0) -> None:
    """Create the model folder with config.json, generation_config.json, model.safetensors and the tokenizer's files.

    Args:
        seed: seed of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", model_config())
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    _write_json(folder / "generation_config.json", ids)
    save_file(random_weights(seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(folder)


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_model(args.folder, args.seed)


if __name__ == "__main__":
    main()
