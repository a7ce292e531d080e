"""Megatron-Core's Transformer Engine path, on a stub in plain torch that has the real one's signatures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.prefix_cases import check
from tests.helpers.python_path import python_path
from tests.helpers.servers import ROOT
from tests.helpers.te_cases import FAMILIES

pytestmark = pytest.mark.integration


def run(which: str, folder: Path, *todo: str) -> dict[str, Any]:
    """What a process of its own saw: a process has one idea of whether Transformer Engine is there."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": python_path(ROOT),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }  # fmt: skip
    command = [sys.executable, "tests/helpers/te_cases.py", which, str(folder), *todo]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    report: dict[str, Any] = json.loads((folder / f"{which}.json").read_text())
    return report


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By kind of process."""
    folder = tmp_path_factory.mktemp("te")
    return {kind: run(kind, folder) for kind in ("plain", "stub", "back")}


SHARED = (
    "dense", "run", "deepseek", "replay", "balance", "support", "tied", "padded",
    "balance,replay,recompute", "deepseek,recompute", "recompute,selective",
)  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("prefixes", tmp_path_factory.mktemp("te-prefixes"), *SHARED)


@pytest.mark.parametrize("layout", SHARED)
def test_a_shared_prefix_changes_no_number_of_transformer_engines_layers(
    shared: dict[str, Any], layout: str
) -> None:
    """A micro-batch with shared tokens goes to PackedAttention, each other one to Transformer Engine's kernels."""
    assert shared[layout]["sharing"] == ("by route" if "replay" in layout else "yes")
    check(layout, shared[layout]["gaps"])
    assert shared[layout]["calls"].keys() == {"packed of shared tokens", "engine"}


SAME = 1e-6
"""Relative, of loss, gradient norm and metric. The stub takes the kernels and the order of sums that ours take, so
that what is left is a few roundings (seen: 5e-8 from equal weights, 7e-7 in later steps). A stub that rounds
otherwise does not stay within it: Adam's first steps have the size of the learning rate whatever the gradient's is,
and amplify what the first step only shows."""

SAME_OF = {"Qwen2ForCausalLM": 3e-6}
"""Wider bounds of families; Qwen2's gradient norm of a later step differs by 1.6e-6, in each run on one machine."""


def close(a: Any, b: Any) -> bool:
    return bool(a == pytest.approx(b, rel=1e-6, abs=5e-5))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_steps_are_those_of_the_local_layers(seen: dict[str, Any], family: str) -> None:
    plain, stub = (seen[kind]["trained"][family] for kind in ("plain", "stub"))
    for te_step, plain_step in zip(stub["steps"], plain["steps"], strict=True):
        assert te_step == pytest.approx(plain_step, rel=SAME_OF.get(family, SAME))
    for name in ("before", "after"):
        assert close(stub[name], plain[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("reader", "writer"), [("stub", "plain"), ("back", "stub")])
def test_a_checkpoint_crosses_transformer_engine_and_plain_torch(
    seen: dict[str, Any], reader: str, writer: str, family: str
) -> None:
    """With the optimizer: the next step is that of the run which saved it, and so are the weights behind it."""
    reference, loaded = seen[writer]["trained"][family], seen[reader]["loaded"][family]
    assert loaded["third"][0] == pytest.approx(reference["steps"][2], rel=SAME)
    assert close(loaded["after"], reference["after"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_converted_where_transformer_engine_is_installed(
    seen: dict[str, Any], family: str
) -> None:
    assert seen["stub"]["converted"][family]
