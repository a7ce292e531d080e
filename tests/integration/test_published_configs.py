"""Published config.json files of configs/models, shrunk. tests/helpers/published_configs.py makes a table of many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.convert.config import HFConfig
from rlsys.core.errors import UserError
from tests.helpers import tiny
from tests.helpers.published_configs import EXACT, ROOT, check_tiny_model, explain, read_configs

pytestmark = pytest.mark.integration

NO_DEFAULTS = {"model_type", "num_nextn_predict_layers"}
"""The latter: transformers has no layers for prediction, and no default for them."""
CONFIGS = read_configs(ROOT / "configs" / "models")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_shrunk_is_computed_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Also its export after a training step, which transformers loads."""
    trip, difference, rounding, norm, gap_of_export = check_tiny_model(CONFIGS[name], tmp_path / "work")
    assert trip == "bit-equal" and float(norm) > 0
    assert max(float(difference), float(gap_of_export)) < max(EXACT, float(rounding))


def test_a_verdict_is_one_line_or_a_fault() -> None:
    raw = CONFIGS["Qwen3-30B-A3B"]
    assert explain(raw, layers=False)[0] == "read"
    kind, words = explain({**raw, "architectures": ["GemmaForCausalLM"]}, layers=False)
    assert kind == "refused" and "is unknown; expected one of" in words
    assert json.dumps(raw)  # unchanged


@pytest.mark.parametrize("family", tiny.TINY)
def test_an_absent_field_has_the_value_that_it_has_for_transformers(family: str) -> None:
    """Or the config is refused, which names the field."""
    import transformers

    raw = tiny.raw_config(tiny.TINY[family])
    kind = getattr(transformers, raw["architectures"][0]).config_class
    inner = "text_config" if "text_config" in raw else None
    if inner:
        kind = kind.sub_configs[inner]
    part = raw[inner] if inner else raw

    def read(fields: dict[str, object]) -> str | HFConfig:
        try:
            return HFConfig.of({**raw, inner: fields} if inner else fields, "config.json")
        except UserError as e:
            return str(e)

    full_config = read(part)
    assert isinstance(full_config, HFConfig)
    unused = {"num_key_value_heads"} if full_config.latent else set()
    mismatches = []
    for name in sorted(part):
        default = getattr(kind, name, None)
        if not isinstance(default, int | float | str) or name in unused | NO_DEFAULTS:
            continue
        remaining_fields = {n: value for n, value in part.items() if n != name}
        absent = read(remaining_fields)
        if isinstance(absent, HFConfig) and absent != read({**remaining_fields, name: default}):
            mismatches.append(name)
    assert not mismatches


@pytest.mark.parametrize("family", tiny.TINY)
def test_a_null_number_of_kv_heads_is_that_of_the_heads(family: str) -> None:
    raw = tiny.raw_config(tiny.TINY[family])
    part = raw.get("text_config", raw)
    part["num_key_value_heads"] = None
    hf = HFConfig.of(raw, "config.json")
    assert hf.kv_heads == hf.heads
