"""What SGLang holds of a Qwen3-MoE folder, and its checksums: written from what its model files do, not from ours."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch
from torch import Tensor

VOCABULARY_STEP = 64
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)\d+\.(\w+)\.weight")


class HeldWeights:
    """The tensors of one engine of `tp` ranks. What comes replaces what was there, as in `load_weights`."""

    def __init__(self, tensors: Mapping[str, Tensor], tp: int = 1) -> None:
        self._tensors = dict(tensors)
        self._tp = tp
        self._parts: dict[str, list[str]] = {}
        for name in self._tensors:
            self._parts.setdefault(held_in(name), []).append(name)
        self._known: dict[tuple[int, ...], tuple[list[Tensor], list[str]]] = {}
        """Digests by the tensors that they are of, which live as long as they are known; of all copies together."""

    def copy(self) -> HeldWeights:
        duplicate = HeldWeights(self._tensors, self._tp)
        duplicate._known = self._known
        return duplicate

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        assert tensors.keys() <= self._tensors.keys()
        self._tensors.update(tensors)

    def report(self) -> list[dict[str, str]]:
        """Of each rank, as `/weights_checker` answers."""
        digests = {parameter: self._of(parameter, names) for parameter, names in self._parts.items()}
        return [{parameter: ranks[rank] for parameter, ranks in digests.items()} for rank in range(self._tp)]

    def _of(self, held: str, names: list[str]) -> list[str]:
        """Digests of one of the engine's tensors, of each rank."""
        tensors = [self._tensors[name] for name in names]
        key = tuple(map(id, tensors))
        if key not in self._known:
            self._known[key] = tensors, [_sha(self._part(held, rank)) for rank in range(self._tp)]
        return self._known[key][1]

    def _part(self, held: str, rank: int) -> Tensor:
        t = self._tensors
        if held in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = torch.nn.functional.pad(t[held], (0, 0, 0, -len(t[held]) % VOCABULARY_STEP))
            return rows.chunk(self._tp)[rank]
        if held.endswith("qkv_proj.weight"):
            return torch.cat([t[held.replace("qkv_proj", f"{x}_proj")].chunk(self._tp)[rank] for x in "qkv"])
        if held.endswith("o_proj.weight"):
            return t[held].chunk(self._tp, dim=1)[rank]
        if ".experts." not in held:
            return t[held]
        stem, count = held.rsplit("experts.", 1)[0] + "experts.", 0
        while f"{stem}{count}.up_proj.weight" in t:
            count += 1
        if held.endswith("w2_weight"):
            parts = [t[f"{stem}{e}.down_proj.weight"].chunk(self._tp, dim=1)[rank] for e in range(count)]
        else:
            parts = [
                torch.cat([t[f"{stem}{e}.{x}_proj.weight"].chunk(self._tp)[rank] for x in ("gate", "up")])
                for e in range(count)
            ]
        return torch.stack(parts)


def held_in(name: str) -> str:
    """The engine's tensor that a tensor of the folder is a part of."""
    if match := _EXPERT.fullmatch(name):
        return match[1] + ("w2_weight" if match[2] == "down_proj" else "w13_weight")
    return re.sub(r"self_attn\.[qkv]_proj", "self_attn.qkv_proj", name)


def _sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
