"""Learner: owns the trainer, and runs the tenants' passes and optimizer steps one after the other, in one thread.

Shapes: N tokens of a datum, T tokens of a packed micro-batch. In a micro-batch, a datum has N + 1 tokens: its input
tokens and the target of the last one.
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
"""Largest number of inactive adapter states in host memory. Further states are only on disk."""
_INPUTS = ("weights", "logprobs", "advantages")


class NotFinite(Exception):
    """Raised if the gradient, or the weights after a step, are not finite. The model's weights remain unchanged."""


@dataclass(frozen=True)
class PassResult:
    """Result of a pass.

    Attributes:
        logprobs: log-probs `[N]` of the targets of each datum.
        loss: sum of the losses of all tokens.
        tokens: number of tokens of all data.
    """

    logprobs: list[NDArray[np.float32]]
    loss: float
    tokens: int


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step. `grad_norm`: norm of the gradient before clipping."""

    grad_norm: float
    state: AdapterState


class Learner:
    """Owns the trainer and the adapter states in host memory.

    Methods raise UserError for an invalid request, which leaves the model unchanged.
    """

    def __init__(self, config: Config) -> None:
        self.trainer = Trainer(at_temperature_one(config))
        self._resident = Resident(self.trainer)
        self._current = ""
        self._states: dict[str, AdapterState] = {}
        """Id of an inactive model -> its state. The most recently active model is the last."""
        self._crossover = crossover_length(self.trainer.hf)

    def first(self, seed: int) -> AdapterState:
        """Create the state of a new model. `seed`: seed of its initial weights."""
        return self._resident.first(seed)

    def enter(self, model: str, file: Path) -> None:
        """Activate a model.

        Args:
            model: id of the model.
            file: file with the model's state, which is read if the state is not in host memory.
        """
        if self._current == model:
            return
        self._leave()
        state = self._states.pop(model, None)
        self._resident.enter(AdapterState.read(file.read_bytes()) if state is None else state)
        self._current = model

    def replace(self, model: str, state: AdapterState) -> None:
        """Activate a model with a new state, which replaces its old state."""
        if self._current != model:
            self._leave()
            self._states.pop(model, None)
        self._resident.enter(state)
        self._current = model

    def forget(self, model: str) -> None:
        """Remove the state of a model from memory."""
        self._states.pop(model, None)
        self._current = "" if self._current == model else self._current

    def _leave(self) -> None:
        """Deactivate the current model, and keep at most MAX_STATES states in memory.

        Removes the oldest states without gradients, which are also on disk.
        """
        if self._current:
            self._states[self._current] = self._resident.copy()
            self._current = ""
        removable = [model for model, state in self._states.items() if not state.gradients]
        for model in removable[: max(0, len(self._states) - MAX_STATES)]:
            del self._states[model]

    # -- the active model ---------------------------------------------------------------------------------------

    def state(self) -> AdapterState:
        """Return a copy of the active model's state."""
        return self._resident.copy()

    def run(
        self, data: Sequence[Datum], kind: LossKind, params: Mapping[str, float], backward: bool
    ) -> PassResult:
        """Run a pass of the active model over data.

        Args:
            data: the data.
            kind: the loss.
            params: parameters of the loss.
            backward: whether to compute the gradient of the loss and add it to the model's gradient.
        """
        lengths = [len(d.ids) + 1 for d in data]
        bins = filter(None, plan_bins(Prefixes.none(lengths), self.trainer.config.trainer.token_budget))
        batch = [_pack([data[i] for i in members], members) for members in bins]
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
        """Run an optimizer step of the active model.

        Raises:
            NotFinite: the gradient or the new weights are not finite.
            UserError: there is no gradient.
        """
        if not self._resident.has_gradient:
            raise UserError(
                "optim_step: the model has no gradient; expected a forward_backward since the last optim_step"
            )
        optimizer = self.trainer.optimizer
        for group in optimizer.param_groups:
            group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
            group["weight_decay"] = params.weight_decay
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.config.clip_grad = params.grad_clip_norm
        result = self.trainer.apply(params.learning_rate, 1.0, 1.0)
        if result.skipped:
            raise NotFinite(
                f"optim_step: the gradient norm is {result.grad_norm}; expected a finite norm; the gradient is "
                "discarded"
            )
        state = self._resident.copy()
        if not state.finite:
            self._current = ""  # the next request reads the state from disk
            raise NotFinite(
                "optim_step: the weights after the step are not finite (learning_rate = "
                f"{params.learning_rate:g}, eps = {params.eps:g}); the model remains unchanged"
            )
        return StepResult(result.grad_norm, state)

    def export(self, folder: Path) -> None:
        """Write the adapters of the active model in PEFT's format to a new folder.

        Raises:
            RunError: the base model has changed.
            UserError: weights are not finite.
        """
        self.trainer.check_base()
        if not self.state().finite:  # checked here, because an error of the engine would not name the model
            raise UserError(
                "save_weights_for_sampler: the model has weights that are not finite; expected finite weights"
            )
        self.trainer.export_adapter(folder)


# -- data ---------------------------------------------------------------------------------------------------


def find_loss(name: str, params: Mapping[str, float]) -> LossKind:
    """Return the loss with this name in the protocol, after checking the names of its parameters.

    Raises:
        UserError: the loss or a parameter is unknown, or a required parameter is missing.
    """
    if name not in LOSSES:
        raise UserError(f"loss_fn = {name[:50]}: expected one of {', '.join(LOSSES)}")
    kind = LOSSES[name]
    for key in params:
        if key not in kind.params:
            expected = ", ".join(kind.params) or "no parameters"
            raise UserError(f"loss_fn_config: {key[:50]}: not a parameter of {name}; expected {expected}")
    missing = [key for key, value in kind.params.items() if np.isnan(value) and key not in params]
    if missing:
        raise UserError(f"loss_fn_config: {missing[0]} is missing; {name} requires it")
    return kind


def check_data(data: Sequence[Datum], kind: LossKind, vocab_size: int, context: int) -> None:
    """Check the data of a pass.

    Args:
        data: data of the request.
        kind: the loss.
        vocab_size: size of the vocabulary.
        context: context length of the model, in tokens.

    Raises:
        UserError: there is no datum, or a datum is invalid.
    """
    if not data:
        raise UserError("data is empty; expected at least one datum")
    for number, datum in enumerate(data):
        _check_datum(f"datum {number}", datum, kind, vocab_size, context)


def _check_datum(name: str, datum: Datum, kind: LossKind, vocab_size: int, context: int) -> None:
    """Check one datum. `name`: prefix of errors. The other arguments and the error are as in `check_data`."""
    n = len(datum.ids)
    if not 0 < n < context:
        raise UserError(f"{name}: {n} tokens; expected 1 to {context - 1}")
    expected = {"target_tokens", *kind.inputs}
    if datum.inputs.keys() != expected:
        raise UserError(
            f"{name}: loss_fn_inputs {', '.join(sorted(datum.inputs)) or 'none'}; expected "
            f"{', '.join(sorted(expected))}"
        )
    for input_name, values in datum.inputs.items():
        if len(values) != n:
            raise UserError(f"{name}: {len(values)} {input_name} for {n} tokens of model_input; expected {n}")
        if input_name != "target_tokens" and not (finite := np.isfinite(values)).all():
            i = int(np.argmin(finite))
            raise UserError(f"{name}: {input_name}[{i}] = {values[i]}; expected a finite number")
    targets = datum.inputs["target_tokens"]
    if not np.issubdtype(targets.dtype, np.integer):
        raise UserError(f"{name}: target_tokens have the type {targets.dtype}; expected int64")
    for field, ids in (("model_input", np.asarray(datum.ids)), ("target_tokens", targets)):
        smallest, largest = int(np.min(ids)), int(np.max(ids))
        if smallest < 0 or largest >= vocab_size:
            invalid = smallest if smallest < 0 else largest
            raise UserError(f"{name}: {field} has the id {invalid}; expected 0 to {vocab_size - 1}")


def _pack(data: Sequence[Datum], rows: Sequence[int]) -> MicroBatch:
    """Pack data into a micro-batch. The loss inputs of position i are stored at token i + 1, its target.

    Args:
        data: the data.
        rows: index of each datum in the request.
    """
    starts = [0, *accumulate(len(d.ids) + 1 for d in data)]
    tokens = torch.empty(starts[-1], dtype=torch.int64)
    packed_targets = torch.empty_like(tokens)
    signals = {name: torch.zeros(starts[-1]) for name in _INPUTS}
    mask = torch.ones(starts[-1])
    for d, start, end in zip(data, starts, starts[1:], strict=False):
        targets = torch.tensor(d.inputs["target_tokens"].astype(np.int64))
        tokens[start : end - 1] = torch.tensor(d.ids)
        tokens[end - 1] = targets[-1]
        packed_targets[start] = d.ids[0]
        packed_targets[start + 1 : end] = targets
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
    """Split the log-probs `[T]` of a micro-batch by datum.

    Returns:
        index of a datum -> log-probs `[N]` of its targets.
    """
    values = logp.float().cpu().numpy()
    starts = micro.cu_seqlens.tolist()
    return {
        row: values[start + 1 : end].copy()
        for row, start, end in zip(micro.rows.tolist(), starts, starts[1:], strict=False)
    }
