"""Owns the one trainer, and does what tenants ask of it, one request after the other. In one thread, always the same.

Shapes: N tokens of a datum; T of a packed micro-batch, in which a datum has one more: what its last position is to
predict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from rlsys.trainer.resident import AdapterState, Resident
from rlsys.trainer.sft.sft import at_temperature_one
from rlsys.trainer.trainer import Trainer

HELD = 8
"""Sets of adapters that stay in host memory while others are trained; more lie on the disk alone."""
_INPUTS = ("weights", "logprobs", "advantages")


class NotFinite(Exception):
    """The gradient, or what a step would make of the weights, is not finite: the weights stay as they are."""


@dataclass(frozen=True)
class Passed:
    """Log-probs `[N]` of each datum's targets, and the loss: a sum over all tokens."""

    logprobs: list[NDArray[np.float32]]
    loss: float
    tokens: int


@dataclass(frozen=True)
class Stepped:
    grad_norm: float
    state: AdapterState


class Learner:
    """Raises UserError for a request that makes no sense; the model it was for is then as it was."""

    def __init__(self, config: Config) -> None:
        self.trainer = Trainer(at_temperature_one(config))
        self._resident = Resident(self.trainer)
        self._inside = ""
        self._held: dict[str, AdapterState] = {}
        """By model, of those that are out; the one that was in last stands last."""
        self._crossover = crossover_length(self.trainer.hf)

    def first(self, seed: int) -> AdapterState:
        """Of a new model."""
        return self._resident.first(seed)

    def enter(self, model: str, file: Path) -> None:
        """Bring a model in. `file`: holds it, if it is not at hand."""
        if self._inside == model:
            return
        self._leave()
        state = self._held.pop(model, None)
        self._resident.enter(AdapterState.read(file.read_bytes()) if state is None else state)
        self._inside = model

    def replace(self, model: str, state: AdapterState) -> None:
        """Go on with `state` in the place of what the model is."""
        if self._inside != model:
            self._leave()
            self._held.pop(model, None)
        self._resident.enter(state)
        self._inside = model

    def forget(self, model: str) -> None:
        """Of a model that nobody trains any more."""
        self._held.pop(model, None)
        self._inside = "" if self._inside == model else self._inside

    def _leave(self) -> None:
        """What has begun no gradient is on the disk as it is, so the oldest of these may go."""
        if self._inside:
            self._held[self._inside] = self._resident.copy()
            self._inside = ""
        idle = [model for model, state in self._held.items() if not state.gradients]
        for model in idle[: max(0, len(self._held) - HELD)]:
            del self._held[model]

    # -- what a model that is in is asked for -------------------------------------------------------------------

    def state(self) -> AdapterState:
        return self._resident.copy()

    def run(
        self, data: Sequence[Datum], kind: LossKind, params: Mapping[str, float], backward: bool
    ) -> Passed:
        """One pass over all of `data`; with `backward` its gradient is added to what was begun."""
        batch = [_packed([data[i] for i in members], members) for members in self._bins(data)]
        rows: dict[int, NDArray[np.float32]] = {}
        total = torch.zeros((), dtype=torch.float64)

        def loss(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            losses = token_losses(kind, scores.logp, _inputs(micro), params).sum()
            total.add_(losses.detach().double().cpu())
            rows.update(_by_datum(scores.logp.detach(), micro))
            return losses, {}

        if backward:
            self.trainer.passes.accumulate(batch, loss)
        else:
            for scores, micro in zip(self.trainer.passes.score(batch), batch, strict=True):
                loss(scores, micro)
        return Passed([rows[i] for i in range(len(data))], float(total), sum(len(d.ids) for d in data))

    def step(self, params: AdamParams) -> Stepped:
        """Raises NotFinite; UserError when nothing has gone backward since the last one."""
        if not self._resident.has_gradient:
            raise UserError("optim_step: nothing has gone backward since the last one")
        optimizer = self.trainer.optimizer
        for group in optimizer.param_groups:
            group["betas"], group["eps"] = (params.beta1, params.beta2), params.eps
            group["weight_decay"] = params.weight_decay
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.config.clip_grad = params.grad_clip_norm
        done = self.trainer.apply(params.learning_rate, 1.0, 1.0)
        if done.skipped:
            raise NotFinite(f"optim_step: the gradient's norm is {done.grad_norm}: it was dropped")
        state = self._resident.copy()
        if not state.finite:
            self._inside = ""  # its next request reads it from the disk
            raise NotFinite(
                f"optim_step: weights that are not finite came of it (learning_rate = {params.learning_rate:g}, "
                f"eps = {params.eps:g}); the model is as it was before"
            )
        return Stepped(done.grad_norm, state)

    def export(self, folder: Path) -> None:
        """The adapters as a folder of PEFT's. Raises RunError when the model under them has changed, UserError for
        weights that are not finite: an engine would answer with an error that names nobody."""
        self.trainer.check_base()
        if not self.state().finite:
            raise UserError("save_weights_for_sampler: the model has weights that are not finite")
        self.trainer.export_adapter(folder)

    def _bins(self, data: Sequence[Datum]) -> list[list[int]]:
        lengths = [len(d.ids) + 1 for d in data]
        return [b for b in plan_bins(lengths, self.trainer.config.trainer.token_budget) if b]


# -- data ---------------------------------------------------------------------------------------------------


def loss_of(name: str, params: Mapping[str, float]) -> LossKind:
    """Raises UserError for one that is not served, or parameters that it has not."""
    if name not in LOSSES:
        raise UserError(f"loss_fn = {name[:50]}: expected one of {', '.join(LOSSES)}")
    kind = LOSSES[name]
    for key in params:
        if key not in kind.params:
            known = ", ".join(kind.params) or "none"
            raise UserError(f"loss_fn_config: {key[:50]} is no parameter of {name}; it has {known}")
    missing = [key for key, value in kind.params.items() if np.isnan(value) and key not in params]
    if missing:
        raise UserError(f"loss_fn_config: {name} needs {missing[0]}")
    return kind


def check_data(data: Sequence[Datum], kind: LossKind, vocab_size: int, context: int) -> None:
    """Raises UserError for what would not train, or would stop the process."""
    if not data:
        raise UserError("forward_backward: no data")
    wanted = {"target_tokens", *kind.inputs}
    for number, datum in enumerate(data):
        n = len(datum.ids)
        if not 0 < n < context:
            raise UserError(f"datum {number}: {n} tokens, expected 1 to {context - 1}")
        if datum.inputs.keys() != wanted:
            raise UserError(
                f"datum {number}: loss_fn_inputs {', '.join(sorted(datum.inputs)) or 'none'}, expected "
                f"{', '.join(sorted(wanted))}"
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
            least, most = int(np.min(ids)), int(np.max(ids))
            if least < 0 or most >= vocab_size:
                wrong = least if least < 0 else most
                raise UserError(f"datum {number}: {name} has the id {wrong}, the vocabulary {vocab_size} ids")


def _packed(data: Sequence[Datum], rows: Sequence[int]) -> MicroBatch:
    """Values of position i stand at token i + 1, which is what it is asked to predict."""
    starts = [0, *accumulate(len(d.ids) + 1 for d in data)]
    tokens = torch.empty(starts[-1], dtype=torch.int64)
    asked = torch.empty_like(tokens)
    held = {name: torch.zeros(starts[-1]) for name in _INPUTS}
    mask = torch.ones(starts[-1])
    for d, start, end in zip(data, starts, starts[1:], strict=False):
        targets = torch.tensor(d.inputs["target_tokens"].astype(np.int64))
        tokens[start : end - 1], tokens[end - 1] = torch.tensor(d.ids), targets[-1]
        asked[start], asked[start + 1 : end] = d.ids[0], targets
        mask[start] = 0
        for name, values in held.items():
            if name in d.inputs:
                values[start + 1 : end] = torch.tensor(d.inputs[name].astype(np.float32))
    return MicroBatch(
        tokens=tokens,
        targets=asked,
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        rows=torch.tensor(rows),
        sequence_index=[0] * len(data),
        mask=mask,
        mu=held["logprobs"],
        versions=torch.zeros_like(tokens),
        advantages=held["advantages"],
        weight=held["weights"],
    )


def _inputs(micro: MicroBatch) -> dict[str, Tensor]:
    get = partial(MicroBatch.signal, micro)
    return {"weights": get("weight"), "logprobs": micro.mu, "advantages": get("advantages")}


def _by_datum(logp: Tensor, micro: MicroBatch) -> dict[int, NDArray[np.float32]]:
    found = logp.float().cpu().numpy()
    ends = micro.cu_seqlens.tolist()
    return {
        row: found[start + 1 : end].copy()
        for row, start, end in zip(micro.rows.tolist(), ends, ends[1:], strict=False)
    }
