"""The tensors that SGLang holds of a Qwen3-MoE folder, and their checksums, independent of the product's code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import torch
from torch import Tensor

VOCABULARY_STEP = 64
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)\d+\.(\w+)\.weight")


class EngineWeights:
    """The tensors of one engine with `tp` ranks. `load` replaces tensors, as SGLang's `load_weights` does."""

    def __init__(self, tensors: Mapping[str, Tensor], tp: int = 1) -> None:
        self._tensors = dict(tensors)
        self._tp = tp
        self._parts: dict[str, list[str]] = {}
        for name in self._tensors:
            self._parts.setdefault(engine_tensor_name(name), []).append(name)
        self._digests: dict[tuple[int, ...], tuple[list[Tensor], list[str]]] = {}
        """IDs of tensors -> the tensors (kept alive, so that IDs stay valid) and their digests. Copies share it."""

    def copy(self) -> EngineWeights:
        duplicate = EngineWeights(self._tensors, self._tp)
        duplicate._digests = self._digests
        return duplicate

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        assert tensors.keys() <= self._tensors.keys()
        self._tensors.update(tensors)

    def report(self) -> list[dict[str, str]]:
        """Return the digests of each rank, as `/weights_checker` does."""
        digests = {
            engine_name: self._rank_digests(engine_name, names) for engine_name, names in self._parts.items()
        }
        return [
            {engine_name: ranks[rank] for engine_name, ranks in digests.items()} for rank in range(self._tp)
        ]

    def _rank_digests(self, engine_name: str, names: list[str]) -> list[str]:
        """Return the digests of one engine tensor on all ranks."""
        tensors = [self._tensors[name] for name in names]
        key = tuple(map(id, tensors))
        if key not in self._digests:
            self._digests[key] = tensors, [_digest(self._part(engine_name, rank)) for rank in range(self._tp)]
        return self._digests[key][1]

    def _part(self, engine_name: str, rank: int) -> Tensor:
        t = self._tensors
        if engine_name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = torch.nn.functional.pad(t[engine_name], (0, 0, 0, -len(t[engine_name]) % VOCABULARY_STEP))
            return rows.chunk(self._tp)[rank]
        if engine_name.endswith("qkv_proj.weight"):
            return torch.cat(
                [t[engine_name.replace("qkv_proj", f"{x}_proj")].chunk(self._tp)[rank] for x in "qkv"]
            )
        if engine_name.endswith("o_proj.weight"):
            return t[engine_name].chunk(self._tp, dim=1)[rank]
        if ".experts." not in engine_name:
            return t[engine_name]
        stem, count = engine_name.rsplit("experts.", 1)[0] + "experts.", 0
        while f"{stem}{count}.up_proj.weight" in t:
            count += 1
        if engine_name.endswith("w2_weight"):
            parts = [t[f"{stem}{e}.down_proj.weight"].chunk(self._tp, dim=1)[rank] for e in range(count)]
        else:
            parts = [
                torch.cat([t[f"{stem}{e}.{x}_proj.weight"].chunk(self._tp)[rank] for x in ("gate", "up")])
                for e in range(count)
            ]
        return torch.stack(parts)


def engine_tensor_name(name: str) -> str:
    """Return the name of the engine tensor that contains a tensor of the folder."""
    if match := _EXPERT.fullmatch(name):
        return match[1] + ("w2_weight" if match[2] == "down_proj" else "w13_weight")
    return re.sub(r"self_attn\.[qkv]_proj", "self_attn.qkv_proj", name)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
