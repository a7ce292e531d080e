"""Swap of adapter sets in one trainer, each with its optimizer state and its accumulated gradient.

The trainer has one model and one adapter set at a time. Before a pass of another tenant, the current set is saved and
the tenant's set is loaded. The saved state contains everything that training depends on, so that the results of a
tenant do not depend on other tenants.

Factors have PEFT's names. The optimizer stores each factor as a flat float32 tensor, its shard; with one
data-parallel rank, the shard is the whole factor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors.torch import load, save
from torch import Tensor

from rlsys.core.errors import RunError, UserError
from rlsys.trainer.model.lora import first_a
from rlsys.trainer.model.weights import shard
from rlsys.trainer.passes import AccumulationState
from rlsys.trainer.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments of each parameter, by torch's names."""


@dataclass
class AdapterState:
    """State of one adapter set, in host memory.

    Attributes:
        weights: Float32 factors, by PEFT's names.
        moments: Moments of the factors, by MOMENTS and PEFT's names; empty before the first update.
        updates: Number of optimizer updates.
        accumulation: Counters of the backward passes since the last update.
        gradients: Content of the gradient buffers; empty if no backward pass has run since the last update.
    """

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    updates: int = 0
    accumulation: AccumulationState = field(default_factory=AccumulationState)
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Return whether all weights and moments are finite."""
        groups = (self.weights, *self.moments.values())
        return all(bool(value.isfinite().all()) for values in groups for value in values.values())

    def to_bytes(self) -> bytes:
        """Serialise weights, moments and number of updates as a safetensors file."""
        tensors = {f"weight/{name}": value.contiguous() for name, value in self.weights.items()}
        for moment, values in self.moments.items():
            tensors |= {f"{moment}/{name}": value.contiguous() for name, value in values.items()}
        return save(tensors, {"updates": str(self.updates)})

    @classmethod
    def read(cls, data: bytes, *, optimizer: bool = True) -> AdapterState:
        """Parse the output of `to_bytes`. `optimizer`: whether to include moments and number of updates."""
        groups: dict[str, dict[str, Tensor]] = {"weight": {}}
        for key, value in load(data).items():
            kind, _, name = key.partition("/")
            groups.setdefault(kind, {})[name] = value
        weights = groups.pop("weight")
        return cls(weights, groups, _updates(data)) if optimizer else cls(weights)


def _updates(data: bytes) -> int:
    """Read the number of updates from the header of a safetensors file: 8 bytes with its length, then JSON."""
    size = int.from_bytes(data[:8], "little")
    return int(json.loads(data[8 : 8 + size])["__metadata__"]["updates"])


@dataclass(frozen=True)
class _FactorSlot:
    """One factor of the trainer. `optimizer` updates the flat float32 tensor `main`, a copy of `parameter`."""

    name: str
    parameter: Tensor
    main: Tensor
    optimizer: torch.optim.Optimizer


class Resident:
    """Owner of the current adapter set in the trainer.

    Raises:
        UserError: The trainer has no adapters, or several data-parallel ranks, which would shard the optimizer state.
    """

    def __init__(self, trainer: Trainer) -> None:
        if trainer.adapters is None:
            raise UserError(
                "trainer.lora is not set; expected adapters, because tenants share the base model"
            )
        if (ranks := parallel_state.get_data_parallel_world_size(with_context_parallel=True)) > 1:
            raise UserError(
                f"parallel has {ranks} data-parallel and context-parallel ranks; expected 1 with tenants"
            )
        self._trainer = trainer
        self._lora = trainer.adapters
        self._slots = list(_factor_slots(trainer))
        self._buffers = [b for m in trainer.models for b in (*m.buffers, *m.expert_parallel_buffers)]

    def first(self, seed: int) -> AdapterState:
        """Return the initial adapters of a new tenant, as in PEFT: A is random, B is 0."""
        weights = {}
        for name, entry, parameter in self._lora.named_factors():
            full = first_a(entry, seed) if "lora_A" in name else None
            value = torch.zeros_like(parameter, device="cpu") if full is None else shard(full, entry.rule)
            weights[name] = value.detach().float().reshape(parameter.shape)
        return AdapterState(weights)

    @torch.no_grad()
    def enter(self, state: AdapterState) -> None:
        """Load `state` in place of the current set.

        Raises:
            RunError: The factors of `state` do not fit the model.
        """
        self._check_factors(state.weights)
        for slot in self._slots:
            value = state.weights[slot.name].to(slot.main.device)
            slot.main.copy_(value.reshape(-1))
            slot.parameter.copy_(value)
            slot.optimizer.state.pop(slot.main, None)
            if state.moments:
                slot.optimizer.state[slot.main] = {
                    moment: values[slot.name].to(slot.main.device, copy=True).reshape(-1)
                    for moment, values in state.moments.items()
                }
        self._set_updates(state.updates if state.moments else 0)
        for model in self._trainer.models:
            model.zero_grad_buffer()
        for buffer, gradient in zip(self._buffers, state.gradients, strict=False):
            buffer.grad_data.copy_(gradient)
        self._trainer.passes.exchange(state.accumulation)

    def _check_factors(self, weights: dict[str, Tensor]) -> None:
        """Raise RunError unless the factors have the names and shapes of the model's."""
        wrong = {slot.name for slot in self._slots} ^ weights.keys()
        wrong |= {
            slot.name
            for slot in self._slots
            if slot.name not in wrong and weights[slot.name].shape != slot.parameter.shape
        }
        if wrong:
            raise RunError(
                f"adapters of another model or LoRA rank: {len(wrong)} factors do not fit the model and "
                f"trainer.lora.rank, first: {min(wrong)}"
            )

    @property
    def has_gradient(self) -> bool:
        """Return whether a backward pass has run since the last update of the current set."""
        state = self._trainer.passes.exchange(AccumulationState())
        self._trainer.passes.exchange(state)
        return state.computed_tokens > 0

    @torch.no_grad()
    def copy(self) -> AdapterState:
        """Copy the current set to host memory."""
        accumulation = self._trainer.passes.exchange(AccumulationState())
        self._trainer.passes.exchange(accumulation)
        moments: dict[str, dict[str, Tensor]] = {}
        for slot in self._slots:
            optimizer_state = slot.optimizer.state.get(slot.main, {})
            for moment in MOMENTS:
                if moment in optimizer_state:
                    flat = optimizer_state[moment].detach().to("cpu", copy=True)
                    moments.setdefault(moment, {})[slot.name] = flat.view(slot.parameter.shape)
        return AdapterState(
            {s.name: s.main.detach().to("cpu", copy=True).view(s.parameter.shape) for s in self._slots},
            moments,
            self._updates() if moments else 0,
            accumulation,
            [b.grad_data.to("cpu", copy=True) for b in self._buffers] if accumulation.computed_tokens else [],
        )

    def _updates(self) -> int:
        """Read the number of updates from the optimizer.

        Torch's AdamW stores it per parameter; Apex and Transformer Engine store it per group.
        """
        slot = self._slots[0]
        optimizer_state = slot.optimizer.state[slot.main]
        return int(
            optimizer_state["step"] if "step" in optimizer_state else slot.optimizer.param_groups[0]["step"]
        )

    def _set_updates(self, updates: int) -> None:
        for slot in self._slots:
            if isinstance(slot.optimizer, torch.optim.AdamW):
                if optimizer_state := slot.optimizer.state.get(slot.main):
                    optimizer_state["step"] = torch.tensor(float(updates))
            else:
                for group in slot.optimizer.param_groups:
                    group["step"] = updates


def _factor_slots(trainer: Trainer) -> Iterator[_FactorSlot]:
    """Iterate over the trainer's factors.

    Raises:
        RunError: No optimizer updates a factor.
    """
    slots: dict[int, tuple[Tensor, torch.optim.Optimizer]] = {}
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        if part.is_stub_optimizer:
            continue
        groups: list[dict[str, Any]] = part.optimizer.param_groups
        for parameter, (group, index) in part.model_param_group_index_map.items():
            slots[id(parameter)] = (groups[group]["params"][index], part.optimizer)
    assert trainer.adapters is not None
    for name, _, parameter in trainer.adapters.named_factors():
        if id(parameter) not in slots:
            raise RunError(f"{name}: no optimizer updates this factor")
        yield _FactorSlot(name, parameter, *slots[id(parameter)])
