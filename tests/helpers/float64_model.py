"""A Qwen3 mixture of experts in float64, the reference for the trainer's float32 results.

It follows the formulas of the papers and uses no code of the trainer, Megatron or transformers: Yang et al. 2025
(Qwen3), section 2; Su et al. 2021 (rotary positions); Zhang and Sennrich 2019 (RMSNorm); Shazeer 2020 (SwiGLU). Under
torchrun it exports a model with adapters from several ranks: `-m tests.helpers.float64_model WORKSPACE LAYOUT...`.

Shapes: t tokens of one sequence, h hidden, n heads, g key heads, d head size, E experts, k of them per token.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases


class Float64Model:
    """The model of a Hugging Face folder. `weights`: leaf tensors with gradients by names of the folder."""

    def __init__(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        tensors = weights if weights is not None else load_file(folder / "model.safetensors")
        self.weights = {name: w.double().clone().requires_grad_() for name, w in tensors.items()}
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def logprobs(self, ids: Sequence[int], routes: Tensor | None = None) -> Tensor:
        """Return log-probs `[t, V]` of the next token. `routes` `[t - 1, layers, k]`: experts to use."""
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(list(ids))]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            hidden = hidden + self._attention(prefix, self._norm(hidden, f"{prefix}input_layernorm.weight"))
            forced = None if routes is None else routes[:, layer]
            normed = self._norm(hidden, f"{prefix}post_attention_layernorm.weight")
            hidden = hidden + self._experts(prefix, normed, forced)
        logits = self._norm(hidden, "model.norm.weight") @ self.weights["lm_head.weight"].T
        return logits - torch.logsumexp(logits, -1, keepdim=True)

    def token_logprobs(self, ids: Sequence[int], routes: Tensor | None = None) -> Tensor:
        """Return log-probs `[t - 1]` of `ids[1:]`."""
        table = self.logprobs(ids, routes)
        return torch.stack([table[i, token] for i, token in enumerate(list(ids)[1:])])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.weights[name]

    def _attention(self, prefix: str, x: Tensor) -> Tensor:
        n, g, d = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        t, w = len(x), self.weights
        q = self._norm(
            (x @ w[f"{prefix}self_attn.q_proj.weight"].T).view(t, n, d), f"{prefix}self_attn.q_norm.weight"
        )
        k = self._norm(
            (x @ w[f"{prefix}self_attn.k_proj.weight"].T).view(t, g, d), f"{prefix}self_attn.k_norm.weight"
        )
        v = (x @ w[f"{prefix}self_attn.v_proj.weight"].T).view(t, g, d)
        q, k = self._rotate(q), self._rotate(k)
        out = []
        for head in range(n):
            group = head // (n // g)
            scores = q[:, head] @ k[:, group].T / math.sqrt(d)
            future = torch.ones(t, t, dtype=torch.bool).triu(1)
            out.append(torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v[:, group])
        return torch.cat(out, -1) @ w[f"{prefix}self_attn.o_proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        """Apply rotary positions: rotate pair i (x[i], x[i + d/2]) by position * theta^(-2 i / d)."""
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * torch.tensor(
            [theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64
        )
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        real, imaginary = x[..., :half], x[..., half:]
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)

    def _experts(self, prefix: str, x: Tensor, forced: Tensor | None) -> Tensor:
        """Return sum over experts e of p_e / sum(p) * SwiGLU_e(x) for each token x, where p = softmax(router(x))."""
        w, k = self.weights, self.config["num_experts_per_tok"]
        p = torch.softmax(x @ w[f"{prefix}mlp.gate.weight"].T, -1)
        out = []
        for i, token in enumerate(x):
            experts = p[i].topk(k).indices if forced is None or i >= len(forced) else forced[i]
            share = p[i, experts.long()]
            if self.config["norm_topk_prob"]:
                share = share / share.sum()
            total = torch.zeros_like(token)
            for e, weight in zip(experts.tolist(), share, strict=True):
                gate, up, down = (
                    w[f"{prefix}mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up", "down")
                )
                inner = gate @ token
                total = total + weight * (down @ (inner * torch.sigmoid(inner) * (up @ token)))
            out.append(total)
        return torch.stack(out)


def main(workspace: Path, layouts: list[str]) -> None:
    """Export a model with random adapters from each layout: its log-probs, its adapters, and the merged model."""
    for layout in layouts:
        trainer = Trainer(
            cases.config_of(workspace / "model", workspace / f"run-{layout}", **cases.sections(layout))
        )
        cases.randomize_adapters(trainer)
        logps = cases.canary_logps(trainer)
        trainer.export_hf(workspace / f"merged-{layout}")
        trainer.export_adapter(workspace / f"adapter-{layout}")
        if trainer.is_main:
            (workspace / f"logps-{layout}.json").write_text(json.dumps(logps))
        trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
