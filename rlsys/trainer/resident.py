"""Which of several sets of adapters is in a trainer: each with its optimizer's state and its own begun gradient.

One model, one set at a time: before another tenant's pass its set goes in, and the one that was there comes out. What
comes out is all that training it depends on, so that it learns as if it had the trainer to itself.

Factors are known by PEFT's names. The optimizer holds each as a flat run of float32 (its shard); with one
data-parallel rank that is all of it.
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
from rlsys.trainer.passes import Begun
from rlsys.trainer.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each number, as torch names it."""


@dataclass
class AdapterState:
    """`weights`: float32, by PEFT's names; `moments`: the same of each of MOMENTS, empty before the first update.
    `begun`, `gradients`: of what went backward since the last one; `gradients` is empty where nothing did."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    updates: int = 0
    begun: Begun = field(default_factory=Begun)
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Whether all weights and moments are."""
        kept = (self.weights, *self.moments.values())
        return all(bool(value.isfinite().all()) for values in kept for value in values.values())

    def saved(self) -> bytes:
        """As a file of safetensors, without what was begun."""
        tensors = {f"weight/{name}": value.contiguous() for name, value in self.weights.items()}
        for moment, values in self.moments.items():
            tensors |= {f"{moment}/{name}": value.contiguous() for name, value in values.items()}
        return save(tensors, {"updates": str(self.updates)})

    @classmethod
    def read(cls, data: bytes, *, optimizer: bool = True) -> AdapterState:
        """What `saved` wrote; without the optimizer's state it begins anew."""
        found: dict[str, dict[str, Tensor]] = {"weight": {}}
        for key, value in load(data).items():
            kind, _, name = key.partition("/")
            found.setdefault(kind, {})[name] = value
        weights = found.pop("weight")
        return cls(weights, found, _updates(data)) if optimizer else cls(weights)


def _updates(data: bytes) -> int:
    """From the header: its length in 8 bytes, then JSON."""
    size = int.from_bytes(data[:8], "little")
    return int(json.loads(data[8 : 8 + size])["__metadata__"]["updates"])


@dataclass(frozen=True)
class _Place:
    """Of one factor: its parameter, and the optimizer that updates it by the flat float32 `main`."""

    name: str
    parameter: Tensor
    main: Tensor
    optimizer: torch.optim.Optimizer


class Resident:
    """Owns what is in the trainer. Raises UserError for a trainer without adapters, or with several data-parallel
    ranks: each has a part of the optimizer's state only."""

    def __init__(self, trainer: Trainer) -> None:
        if trainer.adapters is None:
            raise UserError("trainer.lora: expected adapters; without them tenants would share one model")
        if parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1:
            raise UserError("parallel: several tenants were tried with one data-parallel rank only")
        self._trainer = trainer
        self._lora = trainer.adapters
        self._places = list(_places(trainer))
        self._buffers = [b for m in trainer.models for b in (*m.buffers, *m.expert_parallel_buffers)]

    def first(self, seed: int) -> AdapterState:
        """Of a new tenant, as PEFT begins: A random, B zeros."""
        weights = {}
        for name, entry, parameter in self._lora.named_factors():
            whole = first_a(entry, seed) if "lora_A" in name else None
            value = torch.zeros_like(parameter, device="cpu") if whole is None else shard(whole, entry.rule)
            weights[name] = value.detach().float().reshape(parameter.shape)
        return AdapterState(weights)

    @torch.no_grad()
    def enter(self, state: AdapterState) -> None:
        """Put a set in the place of the one that is there. Raises RunError for one of other factors."""
        wrong = {p.name for p in self._places} ^ state.weights.keys()
        for place in self._places:
            if place.name not in wrong and state.weights[place.name].shape != place.parameter.shape:
                wrong.add(place.name)
        if wrong:
            raise RunError(f"adapters of another model or rank: {min(wrong)} and {len(wrong) - 1} more")
        for place in self._places:
            value = state.weights[place.name].to(place.main.device)
            place.main.copy_(value.reshape(-1))
            place.parameter.copy_(value)
            place.optimizer.state.pop(place.main, None)
            if state.moments:
                place.optimizer.state[place.main] = {
                    moment: values[place.name].to(place.main.device, copy=True).reshape(-1)
                    for moment, values in state.moments.items()
                }
        self._set_updates(state.updates if state.moments else 0)
        for model in self._trainer.models:
            model.zero_grad_buffer()
        for buffer, gradient in zip(self._buffers, state.gradients, strict=False):
            buffer.grad_data.copy_(gradient)
        self._trainer.passes.exchange(state.begun)

    @property
    def begun(self) -> bool:
        """Whether anything has gone backward since the last update of the set that is there."""
        held = self._trainer.passes.exchange(Begun())
        self._trainer.passes.exchange(held)
        return held.computed_tokens > 0

    @torch.no_grad()
    def copy(self) -> AdapterState:
        """Of the set that is there, in host memory."""
        begun = self._trainer.passes.exchange(Begun())
        self._trainer.passes.exchange(begun)
        moments: dict[str, dict[str, Tensor]] = {}
        for place in self._places:
            held = place.optimizer.state.get(place.main, {})
            for moment in MOMENTS:
                if moment in held:
                    flat = held[moment].detach().to("cpu", copy=True)
                    moments.setdefault(moment, {})[place.name] = flat.view(place.parameter.shape)
        return AdapterState(
            {p.name: p.main.detach().to("cpu", copy=True).view(p.parameter.shape) for p in self._places},
            moments,
            self._updates() if moments else 0,
            begun,
            [b.grad_data.to("cpu", copy=True) for b in self._buffers] if begun.computed_tokens else [],
        )

    def _updates(self) -> int:
        """torch's AdamW counts them at each parameter, Apex's and Transformer Engine's in each group."""
        place = self._places[0]
        held = place.optimizer.state[place.main]
        return int(held["step"] if "step" in held else place.optimizer.param_groups[0]["step"])

    def _set_updates(self, updates: int) -> None:
        for place in self._places:
            if isinstance(place.optimizer, torch.optim.AdamW):
                if held := place.optimizer.state.get(place.main):
                    held["step"] = torch.tensor(float(updates))
            else:
                for group in place.optimizer.param_groups:
                    group["step"] = updates


def _places(trainer: Trainer) -> Iterator[_Place]:
    """Raises RunError for a factor that no optimizer knows."""
    found: dict[int, tuple[Tensor, torch.optim.Optimizer]] = {}
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        if part.is_stub_optimizer:
            continue
        groups: list[dict[str, Any]] = part.optimizer.param_groups
        for parameter, (group, place) in part.model_param_group_index_map.items():
            found[id(parameter)] = (groups[group]["params"][place], part.optimizer)
    assert trainer.adapters is not None
    for name, _, parameter in trainer.adapters.named_factors():
        if id(parameter) not in found:
            raise RunError(f"no optimizer updates {name}")
        yield _Place(name, parameter, *found[id(parameter)])
