"""Groups and configs for tests of planning: the choice of prompts, the number of samples, and their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsys.config import Config
from rlsys.core.types import Sample, SampleGroup
from tests.helpers.rollout_rig import make_config

BUDGET = {"rollout": {"groups_per_step": 2, "group_size": 2}}


def config_of(tmp_path: Path, **algo: Any) -> Config:
    return make_config(tmp_path, algo=algo, **BUDGET)


class Lengths:
    """Fake tokenizer. It decodes n ids to a text of n characters."""

    def decode(self, response_ids: Sequence[int]) -> str:
        return "x" * len(response_ids)

    def without_special(self, text: str) -> str:
        return text

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 100 for c in text]

    def apply_chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def group_of(answers: Sequence[str | None], rewards: Sequence[float]) -> SampleGroup:
    samples = [
        Sample(i, 0, i, [1], 0, [5] * (i + 1), [-0.5] * (i + 1), reward=r, answer=a)
        for i, (a, r) in enumerate(zip(answers, rewards, strict=True))
    ]
    return SampleGroup(0, 0, samples)
