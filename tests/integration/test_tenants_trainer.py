"""Several sets of adapters in one trainer, turn by turn: each learns as if it were alone, and the model stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.core.errors import RunError, UserError
from rlsys.trainer.resident import AdapterState, Resident
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases

pytestmark = [pytest.mark.integration, pytest.mark.gate]

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8}}
STEPS = 3


@pytest.fixture(params=["float32", "bfloat16"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainer]:
    folder = cases.write_model(tmp_path / "model")
    config = cases.config_of(folder, tmp_path / "run", trainer=LORA, model={"dtype": request.param})
    trainer = Trainer(config)
    yield trainer
    trainer.close()


def rollouts(tenant: int) -> list[list[Any]]:
    """Two portions of recorded samples of each tenant, another half for each."""
    samples = cases.samples(n=16)[8 * tenant : 8 * tenant + 8]
    return [samples[:4], samples[4:]]


class Turns:
    """Brings each tenant's set into the trainer when it is its turn."""

    def __init__(self, trainer: Trainer, tenants: int) -> None:
        self._trainer, self._resident, self._inside = trainer, Resident(trainer), -1
        self._out = [stirred(self._resident.first(seed), seed) for seed in range(tenants)]
        self.seen: list[list[Tensor]] = [[] for _ in range(tenants)]
        self._updates = [0] * tenants

    def enter(self, tenant: int) -> None:
        if self._inside == tenant:
            return
        if self._inside >= 0:
            self._out[self._inside] = self._resident.copy()
        self._resident.enter(self._out[tenant])
        self._inside = tenant

    def backward(self, tenant: int, portion: int) -> None:
        self.enter(tenant)
        passes = self._trainer.passes
        passes.accumulate(passes.pack(rollouts(tenant)[portion]), cases.policy_loss)
        self.seen[tenant].append(torch.cat([g.double().view(-1) for g in self._resident.copy().gradients]))

    def update(self, tenant: int) -> None:
        self.enter(tenant)
        result = self._trainer.apply(1e-2, 64.0, 64.0)
        assert not result.skipped
        state = self._resident.copy()
        self._updates[tenant] += 1
        assert (state.updates, state.gradients) == (self._updates[tenant], [])
        self.seen[tenant].append(
            torch.tensor([result.loss, result.grad_norm, *_sums(state)], dtype=torch.float64)
        )


def stirred(state: AdapterState, seed: int) -> AdapterState:
    """With a B that is not zero, or A would have no gradient."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in state.weights.items():
        if "lora_B" in name:
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return state


def _sums(state: AdapterState) -> list[float]:
    values = [*state.weights.values(), *(v for m in state.moments.values() for v in m.values())]
    return [float(v.double().abs().sum()) for v in values]


def together(trainer: Trainer) -> list[list[Tensor]]:
    turns = Turns(trainer, 2)
    for _ in range(STEPS):
        for portion in (0, 1):
            for tenant in (0, 1):
                turns.backward(tenant, portion)
        for tenant in (1, 0):
            turns.update(tenant)
    return turns.seen


def alone(trainer: Trainer, tenant: int) -> list[Tensor]:
    turns = Turns(trainer, 2)
    for _ in range(STEPS):
        turns.backward(tenant, 0)
        turns.backward(tenant, 1)
        turns.update(tenant)
    figures: list[Tensor] = turns.seen[tenant]
    return figures


def test_alternating_adapter_sets_match_the_results_of_separate_training(trainer: Trainer) -> None:
    base_before = trainer.adapters.base if trainer.adapters else 0
    shared_figures = together(trainer)
    gaps = []
    for tenant in (0, 1):
        for a, b in zip(shared_figures[tenant], alone(trainer, tenant), strict=True):
            gaps.append(float((a - b).abs().max()))
    print(f"largest difference of losses, gradients, weights and moments: {max(gaps):.1e}")
    assert max(gaps) <= 1e-6
    assert float((shared_figures[0][0] - shared_figures[1][0]).abs().max()) > 1e-3, (
        "they learn different things"
    )
    trainer.check_base()
    assert trainer.adapters is not None and trainer.adapters.base == base_before


def test_a_serialized_adapter_set_resumes_bit_for_bit(trainer: Trainer) -> None:
    resident = Resident(trainer)
    resident.enter(stirred(resident.first(0), 0))

    def step() -> list[float]:
        trainer.passes.accumulate(trainer.passes.pack(rollouts(0)[0]), cases.policy_loss)
        result = trainer.apply(1e-2, 64.0, 64.0)
        return [result.loss, result.grad_norm, *_sums(resident.copy())]

    step()
    state_bytes = resident.copy().to_bytes()
    expected = [step(), step()]
    resident.enter(AdapterState.read(state_bytes))
    assert [step(), step()] == expected
    fresh = AdapterState.read(state_bytes, optimizer=False)
    assert (fresh.moments, fresh.updates) == ({}, 0)
    resident.enter(fresh)
    assert step() != expected[0], "the optimizer began anew"
    assert resident.copy().updates == 1


def test_a_set_of_other_factors_is_refused(trainer: Trainer) -> None:
    resident = Resident(trainer)
    state = resident.first(0)
    name = next(iter(state.weights))
    with pytest.raises(RunError, match="adapters of another model or LoRA rank"):
        resident.enter(AdapterState({**state.weights, name: torch.zeros(3, 3)}))


def test_a_trainer_without_adapters_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(cases.config_of(cases.write_model(tmp_path / "model"), tmp_path / "run"))
    try:
        with pytest.raises(UserError, match=r"trainer.lora is not set; expected adapters"):
            Resident(trainer)
    finally:
        trainer.close()
