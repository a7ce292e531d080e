"""Tests of tests/gpu on the CPU, where torch's kernels, gloo and shared memory take the place of a GPU's: what they
call is there, and what they assert is true of bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import test_objective
from tests.gpu.test_one_gpu import (  # noqa: F401
    config,
    test_a_push_over_cuda_ipc_is_attested_and_serves,
    test_log_probs_are_close_to_float32_on_the_cpu,
    test_steps_reduce_the_loss_and_a_checkpoint_resumes_training,
    trainer,
)
from tests.helpers.algo_world import World

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("path", test_objective.RECIPES, ids=lambda p: p.stem)
def test_a_recipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_objective, "World", lambda device="cpu", **asked: World(**asked))
    test_objective.test_recipe_losses_metrics_and_gradients_match_between_cuda_and_cpu(path)
