"""Heads that no kernel of the engine's attention takes are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.cli import main

ROOT = Path(__file__).resolve().parents[3]
ON_CUDA = ROOT / "configs/quickstart_cuda.yaml"
MODEL = ROOT / "configs/models/quickstart-moe"


def explained(folder: Path, size: int, *overrides: str) -> int:
    """Exit code for the quickstart's model with heads of this size."""
    fields = json.loads((MODEL / "config.json").read_text()) | {"head_dim": size}
    (folder / "config.json").write_text(json.dumps(fields))
    return main.main(["explain", str(ON_CUDA), f"model.path={folder}", *overrides])


FA3 = ("engine.extra_args=[--attention-backend, fa3]",)
FLASHINFER = ("engine.extra_args=[--attention-backend=flashinfer]",)


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (8, ()),
        (1024, ()),
        (36, FA3),
        (320, FA3),
        (32, FLASHINFER),
        (8, ("engine.deterministic=false", "model.dtype=float32")),
    ],
)
def test_heads_that_the_engines_attention_lacks_are_refused(
    size: int, overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(tmp_path, size, *overrides) == 2
    stderr = capsys.readouterr().err
    assert (
        len(stderr.splitlines()) == 1
        and f"heads of size {size}" in stderr
        and "--attention-backend" in stderr
    )


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (16, ()),
        (36, ()),
        (256, FA3),
        (64, FLASHINFER),
        (32, ("engine.deterministic=false",)),
        (8, ("launch.gpus_per_node=0",)),
    ],
)
def test_other_heads_are_explained(size: int, overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert explained(tmp_path, size, *overrides) == 0
