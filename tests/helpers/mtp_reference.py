"""A reference implementation of multi-token prediction (DeepSeek-V3, section 2.2), which transformers does not have.

It is in plain torch, except that trunk and transformer layer are those of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Tensors = dict[str, Tensor]


_HUNYUAN = {"mlp.shared_mlp.": "mlp.shared_experts.", "mlp.router.gate.": "mlp.gate."}
"""Part of a tensor name in HY-V3's folders -> the same in transformers."""


def folder_name(name: str, folder_names: Iterable[str]) -> str:
    """Return the name in the folder of the tensor that transformers calls `name`."""
    for folder_part, hf_part in _HUNYUAN.items():
        if (candidate := name.replace(hf_part, folder_part)) in folder_names:
            return candidate
    return name.replace("e_score_correction_bias", "expert_bias") if name not in folder_names else name


class Reference:
    """Model and prediction layer of a folder in float64, with gradients."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        import transformers

        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager"
        ).eval()
        layers, self._names = self.model.model.layers, tensors.keys()
        self._prefix = f"model.layers.{len(layers)}."
        mtp_tensors = {
            n.removeprefix(self._prefix): t.double() for n, t in tensors.items() if n.startswith(self._prefix)
        }
        self._layer = copy.deepcopy(layers[-1])
        state = self._layer.state_dict()
        self._layer.load_state_dict({name: _layer_tensor(name, mtp_tensors) for name in state})
        names = (
            "enorm.weight",
            "hnorm.weight",
            "eh_proj.weight",
            "shared_head.norm.weight",
            "final_layernorm.weight",
        )
        self._projection_weights = {
            name: mtp_tensors[name].clone().requires_grad_() for name in names if name in mtp_tensors
        }
        self._eps = self.model.config.rms_norm_eps

    def logits(self, ids: Sequence[int], *, trunk: bool) -> Tensor:
        """Return logits `[n - 2, V]`: row i predicts token i + 2. `trunk`: whether gradients flow into the model."""
        tokens, base = torch.tensor([list(ids)]), self.model.model
        hidden = base(tokens).last_hidden_state[:, :-1]
        following = base.embed_tokens(tokens[:, 1:])
        head = self.model.lm_head.weight
        if not trunk:
            hidden, following, head = hidden.detach(), following.detach(), head.detach()
        weights = self._projection_weights
        eh_input = torch.cat(
            [self._norm(following, weights["enorm.weight"]), self._norm(hidden, weights["hnorm.weight"])], -1
        )
        joined = linear(eh_input, weights["eh_proj.weight"])
        n = joined.shape[1]
        position_ids = torch.arange(n)[None]
        causal = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        out = self._layer(
            joined, attention_mask=causal, position_ids=position_ids,
            position_embeddings=base.rotary_emb(joined, position_ids=position_ids),
        )  # fmt: skip
        out = out[0] if isinstance(out, tuple) else out
        last = next(
            weights[name] for name in ("shared_head.norm.weight", "final_layernorm.weight") if name in weights
        )
        logits: Tensor = linear(self._norm(out, last), head)[0]
        return logits[:-1]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight

    def gradients(self) -> Tensors:
        """Return the gradients by names of the folder."""
        gradients = {self._prefix + name: t.grad for name, t in self._projection_weights.items()}
        for name, parameter in self._layer.named_parameters():
            gradients |= {self._prefix + n: g for n, g in _split_experts(name, parameter.grad).items()}
        for name, parameter in self.model.named_parameters():
            gradients |= _split_experts(name, parameter.grad)
        return {
            folder_name(n, self._names): gradient for n, gradient in gradients.items() if gradient is not None
        }


def _layer_tensor(name: str, tensors: Tensors) -> Tensor:
    """Return the tensor that transformers' layer calls `name`. That layer stacks all experts in two tensors."""
    if name in tensors:
        return tensors[name]
    if name.endswith("experts.gate_up_proj"):
        return torch.stack(
            [
                torch.cat([gate, up])
                for gate, up in zip(
                    _expert_tensors(tensors, "gate"), _expert_tensors(tensors, "up"), strict=True
                )
            ]
        )
    if name.endswith("experts.down_proj"):
        return torch.stack(_expert_tensors(tensors, "down"))
    return tensors[folder_name(name, tensors)]


def _expert_tensors(tensors: Tensors, kind: str) -> list[Tensor]:
    """Return the projections `kind` of all experts, in order."""
    names = [name for name in tensors if ".experts." in name and name.endswith(f"{kind}_proj.weight")]
    return [
        tensors[name]
        for name in sorted(names, key=lambda name: int(name.split(".experts.")[1].split(".")[0]))
    ]


def _split_experts(name: str, gradient: Tensor | None) -> dict[str, Tensor | None]:
    """Return the gradients of single experts; other gradients are returned unchanged."""
    if gradient is not None and name.endswith("experts.gate_up_proj"):
        start = name.removesuffix("gate_up_proj")
        halves = [g.chunk(2) for g in gradient]
        return {
            f"{start}{e}.{kind}_proj.weight": g
            for e, gate_up in enumerate(halves)
            for kind, g in zip(("gate", "up"), gate_up, strict=True)
        }
    if gradient is not None and name.endswith("experts.down_proj"):
        return {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": g for e, g in enumerate(gradient)}
    return {name: gradient}
