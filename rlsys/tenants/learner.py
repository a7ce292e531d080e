"""Owner of the trainer: runs the tenants' passes and optimizer steps one after the other, always in the same thread.

Shapes: N tokens of a datum; T tokens of a packed micro-batch, in which a datum has one more token: the target of its
last position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.flops import crossover_length
from rlsys.core.errors import UserError
from rlsys.tenants.losses import LOSSES, LossKind, token_losses
from rlsys.tenants.messages import Datum
from rlsys.tenants.requests import AdamParams
from rlsys.trainer.bins import plan_bins
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.pack import MicroBatch
from rlsys.trainer.prefixes import Prefixes
from rlsys.trainer.resident import AdapterState, Resident
from rlsys.trainer.sft.sft import at_temperature_one
from rlsys.trainer.trainer import Trainer

MAX_STATES = 8
"""Largest number of inactive adapter states in host memory; further ones are on disk only."""
_INPUTS = ("weights", "logprobs", "advantages")


class NotFinite(Exception):
    """The gradient, or the weights after a step, are not finite; the weights remain unchanged."""


@dataclass(frozen=True)
class PassResult:
    """Result of a pass: log-probs `[N]` of each datum's targets, and the loss, a sum over all tokens."""

    logprobs: list[NDArray[np.float32]]
    loss: float
    tokens: int


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step."""

    grad_norm: float
    state: AdapterState


class Learner:
    """Owns the trainer and the adapter states in host memory.

    Methods raise UserError for invalid requests; the model then remains unchanged.
    """

    def __init__(self, config: Config) -> None:
        self.trainer = Trainer(at_temperature_one(config))
        self._resident = Resident(self.trainer)
        self._current = ""
        self._states: dict[str, AdapterState] = {}
        """States of inactive models, the most recent last."""
        self._crossover = crossover_length(self.trainer.hf)

    def first(self, seed: int) -> AdapterState:
        """Create the state of a new model."""
        return self._resident.first(seed)

    def enter(self, model: str, file: Path) -> None:
        """Activate a model.

        Args:
            model: id of the model.
            file: its state, read if it is not in host memory.
        """
        if self._current == model:
            return
        self._leave()
        state = self._states.pop(model, None)
        self._resident.enter(AdapterState.read(file.read_bytes()) if state is None else state)
        self._current = model

    def replace(self, model: str, state: AdapterState) -> None:
        """Activate a model with a new state."""
        if self._current != model:
            self._leave()
            self._states.pop(model, None)
        self._resident.enter(state)
        self._current = model

    def forget(self, model: str) -> None:
        """Drop a model's state from memory."""
        self._states.pop(model, None)
        self._current = "" if self._current == model else self._current

    def _leave(self) -> None:
        """Deactivate the current model; drop the oldest states without gradients, which are on disk too."""
        if self._current:
            self._states[self._current] = self._resident.copy()
            self._current = ""
        idle = [model for model, state in self._states.items() if not state.gradients]
        for model in idle[: max(0, len(self._states) - MAX_STATES)]:
            del self._states[model]

    # -- the active model ---------------------------------------------------------------------------------------

    def state(self) -> AdapterState:
        return self._resident.copy()

    def run(
        self, data: Sequence[Datum], kind: LossKind, params: Mapping[str, float], backward: bool
    ) -> PassResult:
        """Run one pass over `data`; with `backward`, accumulate its gradient."""
        lengths = [len(d.ids) + 1 for d in data]
        bins = filter(None, plan_bins(Prefixes.none(lengths), self.trainer.config.trainer.token_budget))
        batch = [_packed([data[i] for i in members], members) for members in bins]
        rows: dict[int, NDArray[np.float32]] = {}
        total = torch.zeros((), dtype=torch.float64)

        def loss(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            inputs = {
                "weights": micro.signal("weight"), "logprobs": micro.mu, "advantages": micro.signal("advantages"),
            }  # fmt: skip
            losses = token_losses(kind, scores.logp, inputs, params).sum()
            total.add_(losses.detach().double().cpu())
            rows.update(_by_datum(scores.logp.detach(), micro))
            return losses, {}

        if backward:
            self.trainer.passes.accumulate(batch, loss)
        else:
            for scores, micro in zip(self.trainer.passes.score(batch), batch, strict=True):
                loss(scores, micro)
        return PassResult([rows[i] for i in range(len(data))], float(total), sum(len(d.ids) for d in data))

    def step(self, params: AdamParams) -> StepResult:
        """Run an optimizer step.

        Raises:
            NotFinite: gradient or weights are not finite.
            UserError: there is no gradient.
        """
        if not self._resident.has_gradient:
            raise UserError("optim_step: expected a forward_backward since the last optim_step")
        optimizer = self.trainer.optimizer
        for group in optimizer.param_groups:
            group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
            group["weight_decay"] = params.weight_decay
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.config.clip_grad = params.grad_clip_norm
        done = self.trainer.apply(params.learning_rate, 1.0, 1.0)
        if done.skipped:
            raise NotFinite(f"optim_step: the gradient norm is {done.grad_norm}; the gradient is discarded")
        state = self._resident.copy()
        if not state.finite:
            self._current = ""  # the next request reads the state from disk
            raise NotFinite(
                f"optim_step: the step gives weights that are not finite (learning_rate = "
                f"{params.learning_rate:g}, eps = {params.eps:g}); the model remains unchanged"
            )
        return StepResult(done.grad_norm, state)

    def export(self, folder: Path) -> None:
        """Write the adapters in PEFT's format.

        Raises:
            RunError: the base model has changed.
            UserError: weights are not finite. An engine's error would not name the model.
        """
        self.trainer.check_base()
        if not self.state().finite:
            raise UserError("save_weights_for_sampler: the model has weights that are not finite")
        self.trainer.export_adapter(folder)


# -- data ---------------------------------------------------------------------------------------------------


def loss_of(name: str, params: Mapping[str, float]) -> LossKind:
    """Return a loss by its name in the protocol.

    Raises:
        UserError: unknown loss, unknown parameter, or missing parameter.
    """
    if name not in LOSSES:
        raise UserError(f"loss_fn = {name[:50]}: expected one of {', '.join(LOSSES)}")
    kind = LOSSES[name]
    for key in params:
        if key not in kind.params:
            supported = ", ".join(kind.params) or "none"
            raise UserError(f"loss_fn_config: {key[:50]}: not a parameter of {name}; supported: {supported}")
    missing = [key for key, value in kind.params.items() if np.isnan(value) and key not in params]
    if missing:
        raise UserError(f"loss_fn_config: {name} needs {missing[0]}")
    return kind


def check_data(data: Sequence[Datum], kind: LossKind, vocab_size: int, context: int) -> None:
    """Check the data of a pass.

    Args:
        data: sequences of the request.
        kind: loss.
        vocab_size: size of the vocabulary.
        context: context length of the model.

    Raises:
        UserError: a datum is invalid.
    """
    if not data:
        raise UserError("forward_backward: no data")
    expected = {"target_tokens", *kind.inputs}
    for number, datum in enumerate(data):
        n = len(datum.ids)
        if not 0 < n < context:
            raise UserError(f"datum {number}: {n} tokens, expected 1 to {context - 1}")
        if datum.inputs.keys() != expected:
            raise UserError(
                f"datum {number}: loss_fn_inputs {', '.join(sorted(datum.inputs)) or 'none'}, expected "
                f"{', '.join(sorted(expected))}"
            )
        for name, values in datum.inputs.items():
            if len(values) != n:
                raise UserError(f"datum {number}: {len(values)} {name} for {n} tokens of model_input")
            if name != "target_tokens" and not np.isfinite(values).all():
                raise UserError(f"datum {number}: {name} has a value that is not finite")
        targets = datum.inputs["target_tokens"]
        if not np.issubdtype(targets.dtype, np.integer):
            raise UserError(f"datum {number}: target_tokens are not integers")
        for name, ids in (("model_input", np.asarray(datum.ids)), ("target_tokens", targets)):
            smallest, largest = int(np.min(ids)), int(np.max(ids))
            if smallest < 0 or largest >= vocab_size:
                wrong = smallest if smallest < 0 else largest
                raise UserError(f"datum {number}: {name} has the id {wrong}, expected 0 to {vocab_size - 1}")


def _packed(data: Sequence[Datum], rows: Sequence[int]) -> MicroBatch:
    """Pack data into a micro-batch; inputs of position i are stored at token i + 1, its target."""
    starts = [0, *accumulate(len(d.ids) + 1 for d in data)]
    tokens = torch.empty(starts[-1], dtype=torch.int64)
    packed_targets = torch.empty_like(tokens)
    signals = {name: torch.zeros(starts[-1]) for name in _INPUTS}
    mask = torch.ones(starts[-1])
    for d, start, end in zip(data, starts, starts[1:], strict=False):
        targets = torch.tensor(d.inputs["target_tokens"].astype(np.int64))
        tokens[start : end - 1], tokens[end - 1] = torch.tensor(d.ids), targets[-1]
        packed_targets[start], packed_targets[start + 1 : end] = d.ids[0], targets
        mask[start] = 0
        for name, values in signals.items():
            if name in d.inputs:
                values[start + 1 : end] = torch.tensor(d.inputs[name].astype(np.float32))
    return MicroBatch(
        tokens=tokens,
        targets=packed_targets,
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        rows=torch.tensor(rows),
        sequence_index=[0] * len(data),
        mask=mask,
        mu=signals["logprobs"],
        versions=torch.zeros_like(tokens),
        advantages=signals["advantages"],
        weight=signals["weights"],
    )


def _by_datum(logp: Tensor, micro: MicroBatch) -> dict[int, NDArray[np.float32]]:
    values = logp.float().cpu().numpy()
    ends = micro.cu_seqlens.tolist()
    return {
        row: values[start + 1 : end].copy()
        for row, start, end in zip(micro.rows.tolist(), ends, ends[1:], strict=False)
    }
