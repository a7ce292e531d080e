"""Experts as one grouped GEMM: operations of a step, numbers, layouts of memory, checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

pytestmark = [pytest.mark.integration, pytest.mark.gate]


class Operations(TorchDispatchMode):
    """Counts operations that compute, as a GPU would launch at least one kernel for each; `waits`: those whose result
    the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            self.waits += 1
        elif not func.is_view and not name.startswith(("empty", "new_empty", "c10d", "set_")):
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    with cases.one_at_a_time(tmp_path / "run") as make:
        yield make


def test_a_step_launches_no_kernel_per_expert(tmp_path: Path, start: Callable[..., Trainer]) -> None:
    """Four layers of 128 experts, of which a token takes 8, as in Qwen3-30B-A3B; one micro-batch. The optimizer, whose
    kernels differ between a CPU and a GPU, is not counted."""
    model = cases.write_model(tmp_path / "moe", num_experts=128, num_experts_per_tok=8)
    trainer = start(model, trainer={"token_budget": 512})
    batch = trainer.passes.pack(cases.samples())
    assert len(batch) == 1
    trainer.update(batch, cases.policy_loss, 1e-3)
    trainer.optimizer.step = lambda: (True, 1.0, 0)
    with Operations() as counted:
        trainer.update(batch, cases.policy_loss, 1e-3)
    print(counted.launches.most_common(12), counted.waits)
    assert counted.launches.total() < 1500, counted.launches.most_common(8)
