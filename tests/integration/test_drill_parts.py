"""The parts of the drill that only a GPU runs, on the CPU up to the device call: what they call must exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_checks
import pytest
import torch

pytestmark = pytest.mark.integration


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Collected figures; of the device only its memory counters are stood in for."""
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    return {}


@pytest.mark.parametrize("part", ["cache", "checkpoint"])
def test_a_part_of_the_allocator_runs(part: str, figures: dict[str, Any]) -> None:
    getattr(gpu_checks, f"_{part}")(lambda **values: figures.update(values))
    expected = {"cache": {"kept_bytes", "kept_after_make_room"}, "checkpoint": {"held_bytes", "peak_bytes"}}
    assert figures.keys() == expected[part]


def test_models_of_one_drill_lie_in_its_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_node

    monkeypatch.setenv(gpu_node.MODELS, str(tmp_path))
    config = gpu_node.layer_config(tmp_path / "run", 2)
    assert config.model.path.parent == tmp_path
    assert (config.model.path / "model.safetensors").exists()
