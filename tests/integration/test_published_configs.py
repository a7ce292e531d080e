"""Published config.json files of configs/models, shrunk. tests/helpers/published_configs.py makes a table of many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.published_configs import EXACT, ROOT, published, tried, verdict

pytestmark = pytest.mark.integration

CONFIGS = published(ROOT / "configs" / "models")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_shrunk_is_computed_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Also its export after a training step, which transformers loads."""
    trip, gap, norm, gap_of_export = tried(CONFIGS[name], tmp_path / "work")
    assert trip == "bit-equal" and float(norm) > 0
    assert max(float(gap), float(gap_of_export)) < EXACT


def test_a_verdict_is_one_line_or_a_fault() -> None:
    raw = CONFIGS["Qwen3-30B-A3B"]
    assert verdict(raw, layers=False)[0] == "read"
    kind, words = verdict({**raw, "architectures": ["GemmaForCausalLM"]}, layers=False)
    assert kind == "refused" and "no conversion table" in words
    assert json.dumps(raw)  # unchanged
