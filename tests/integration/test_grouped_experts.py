"""Experts as one grouped GEMM: operations of a step, numbers, layouts of memory, checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patches import weight_gradients
from rlsys.ops import grouped_gemm
from rlsys.trainer.model import model
from rlsys.trainer.model.experts import GroupedExperts
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
    with cases.trainer_factory(tmp_path / "run") as make:
        yield make


def test_a_step_launches_no_kernel_per_expert(tmp_path: Path, start: Callable[..., Trainer]) -> None:
    """Four layers of 128 experts, of which a token takes 8, as in Qwen3-30B-A3B; one micro-batch. Adam, whose kernels
    differ between a CPU and a GPU, is not counted; the gradient norm is."""
    folder = cases.write_model(tmp_path / "moe", num_experts=128, num_experts_per_tok=8)
    trainer = start(folder, trainer={"token_budget": 512})
    batch = trainer.passes.pack(cases.samples())
    assert len(batch) == 1
    trainer.update(batch, cases.policy_loss, 1e-3)
    trainer.optimizer.step = lambda: (True, 1.0, 0)
    with Operations() as counted:
        trainer.update(batch, cases.policy_loss, 1e-3)
    assert counted.waits < 40
    assert counted.launches.total() < 1500, counted.launches.most_common(8)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether experts are computed one by one from now on, as megatron-core does it."""
    original_check = grouped_gemm.supported
    return lambda apart: monkeypatch.setattr(
        grouped_gemm, "supported", (lambda *_: False) if apart else original_check
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_numbers_are_those_of_experts_one_by_one(
    architecture: str,
    dtype: str,
    tmp_path: Path,
    start: Callable[..., Trainer],
    one_by_one: Callable[[bool], None],
) -> None:
    folder = cases.write_model(tmp_path / "moe", architecture)
    results = []
    for apart in (True, False):
        one_by_one(apart)
        trainer = start(folder, model={"path": folder, "dtype": dtype})
        results.append((cases.canary_logps(trainer), cases.steps(trainer, 3)))
    (logps, steps), (their_logps, their_steps) = results
    assert torch.equal(torch.tensor(logps), torch.tensor(their_logps))
    torch.testing.assert_close(
        torch.tensor([step[:2] for step in steps]), torch.tensor([step[:2] for step in their_steps])
    )


def test_weights_and_gradients_of_a_layer_are_views_of_megatrons_buffers(
    tmp_path: Path, start: Callable[..., Trainer]
) -> None:
    """No copy of them is made."""
    trainer = start(cases.write_model(tmp_path / "moe"))
    layers = [m for module in trainer.modules for m in module.modules() if isinstance(m, GroupedExperts)]
    assert len(layers) == 4
    for layer in layers:
        experts: list[Any] = list(layer.local_experts)
        for weights in ([e.linear_fc1.weight for e in experts], [e.linear_fc2.weight for e in experts]):
            for tensors in (weights, [weight.main_grad for weight in weights]):
                view = grouped_gemm.strided_view(tensors)
                assert view is not None
                assert all(torch.equal(a, b) for a, b in zip(view, tensors, strict=True))


@pytest.mark.parametrize("saved_apart", [True, False])
def test_checkpoints_load_whichever_way_experts_were_computed(
    saved_apart: bool, tmp_path: Path, start: Callable[..., Trainer], one_by_one: Callable[[bool], None]
) -> None:
    """Megatron's own layer wrote one of them: same keys, same optimizer state, same next step."""
    folder = cases.write_model(tmp_path / "moe")
    grouped_init, upstream = GroupedExperts.__init__, GroupedExperts.__mro__[1].__init__

    def write(apart: bool) -> None:
        one_by_one(apart)
        GroupedExperts.__init__ = upstream if apart else grouped_init  # type: ignore[method-assign]

    try:
        write(saved_apart)
        trainer = start(folder)
        cases.steps(trainer, 2)
        trainer.save_checkpoint(2)
        trainer.finish_checkpoint()
        expected = cases.steps(trainer, 1)
        write(not saved_apart)
        trainer = start(folder)
        assert trainer.load_checkpoint() == 2
        torch.testing.assert_close(
            torch.tensor(cases.steps(trainer, 1)[0][:2]), torch.tensor(expected[0][:2])
        )
    finally:
        GroupedExperts.__init__ = grouped_init  # type: ignore[method-assign]


def test_weight_gradients_may_be_accumulated_as_they_are_computed(
    tmp_path: Path, start: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Transformer Engine, but without Apex's kernel."""
    folder, step_results = cases.write_model(tmp_path / "moe"), []
    added: list[torch.Tensor] = []
    product = weight_gradients.Products.wgrad_gemm_accum_fp32

    def noted(x: torch.Tensor, grad: torch.Tensor, main: torch.Tensor) -> None:
        added.append(main)
        product(x, grad, main)

    monkeypatch.setattr(weight_gradients.Products, "wgrad_gemm_accum_fp32", noted)
    for fused in (False, True):
        fields = {"gradient_accumulation_fusion": fused, "apply_rope_fusion": False}
        monkeypatch.setattr(model, "_fusions", lambda *_, fields=fields: fields)
        trainer = start(folder)
        assert not added
        step_results.append([step[:2] for step in cases.steps(trainer, 2)])
    assert len(added) > 0
    torch.testing.assert_close(torch.tensor(step_results[0]), torch.tensor(step_results[1]))
