"""What an update sends and what it leaves behind in memory, seen on one rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_model(tmp_path_factory.mktemp("leavings") / "model")


@pytest.fixture(params=["alltoall", "allgather"])
def trainer(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Trainer]:
    """Computes every layer again in the backward pass, with either token dispatcher."""
    trainer = Trainer(
        cases.config_of(
            model, tmp_path, parallel={"dispatcher": request.param},
            trainer={"recompute": ["layer"]},
        )
    )  # fmt: skip
    yield trainer
    trainer.close()


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes of parameters and states that all-gathers make."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func._opname:
            tensors = args[0][0] if isinstance(args[0], list) and isinstance(args[0][0], list) else args[0]
            tensors = tensors if isinstance(tensors, list) else [tensors]
            self.total += sum(t.nbytes for t in tensors if t.is_floating_point())  # pickled objects are bytes
        return func(*args, **(kwargs or {}))


def test_an_update_gathers_each_parameter_once(trainer: Trainer) -> None:
    """Dense and expert parameters have an optimizer each; neither gathers what is the other's."""
    batch = trainer.passes.pack(cases.samples())
    trainer.passes.accumulate(batch, cases.policy_loss)
    with GatheredBytes() as gathered:
        trainer.update([], cases.policy_loss, 1e-3, denominator=10.0)
    storage_sizes = {
        p.untyped_storage()._cdata: p.untyped_storage().nbytes() for _, p in trainer.named_parameters()
    }
    assert gathered.total == sum(storage_sizes.values())


def test_a_save_gathers_no_state_where_the_engines_memory_is(trainer: Trainer) -> None:
    """What ranks have of the optimizer's state goes over gloo to the host of one of them, one buffer at a time. An
    all-gather would hold all of it on each GPU, beside engines that are awake: 14.5 GB twice for Qwen3-30B on 8."""
    trainer.update(trainer.passes.pack(cases.samples()), cases.policy_loss, 1e-3)
    parameters = sum(p.numel() for _, p in trainer.named_parameters())
    with GatheredBytes() as gathered:
        cases.save(trainer, 1)
    assert gathered.total < parameters, f"{gathered.total} bytes; the state has {12 * parameters}"


def layer_inputs(trainer: Trainer, tokens: int) -> list[Tensor]:
    """The tensors alive that are as large as a layer's input, without the model's own."""
    gc.collect()
    parameter_storages = {p.untyped_storage()._cdata for _, p in trainer.named_parameters()}
    return [
        x for x in gc.get_objects()
        if type(x) is Tensor and x.is_floating_point() and x.numel() == tokens * trainer.hf.hidden_size
        and x.untyped_storage()._cdata not in parameter_storages
    ]  # fmt: skip


def test_no_layers_input_outlives_the_step(trainer: Trainer) -> None:
    """The engines want this memory; each layer's dispatcher held its input and the input's gradient."""
    batch = trainer.passes.pack(cases.samples())
    longest = max(len(micro.tokens) for micro in batch)
    trainer.update(batch, cases.policy_loss, 1e-3)
    assert [tuple(t.shape) for t in layer_inputs(trainer, longest)] == []
