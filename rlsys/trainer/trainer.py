"""The trainer: one object per rank, built from the config, that owns model, optimizer and checkpoints.

Shapes: P padded tokens of a micro-batch, c context-parallel ranks, V vocabulary. All ranks call every method together
(collectives).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from megatron_patches import have_transformer_engine
from rlsys.algo.objective import Objective
from rlsys.config import Config
from rlsys.config.trainer import Schedule, TrainerConfig
from rlsys.convert.adapters import factors
from rlsys.convert.carried import with_carried
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_asked, check_layout, trained_model
from rlsys.convert.flops import crossover_length
from rlsys.convert.hf import write_hf
from rlsys.convert.peft import write_adapter
from rlsys.convert.prefixes import why_not_shared
from rlsys.convert.stack import stacked
from rlsys.core.errors import RunError
from rlsys.core.owner import Owner
from rlsys.core.weight_updates import Canary
from rlsys.segments.records import SegmentReader
from rlsys.trainer import setup
from rlsys.trainer.checkpoints.checkpoint import Checkpoints, Learner
from rlsys.trainer.control import Control
from rlsys.trainer.logprobs import Scoring
from rlsys.trainer.model.chunks import MTP, Adapters, Chunks
from rlsys.trainer.model.lora import Lora, fingerprint
from rlsys.trainer.model.model import build_model, rotates_by_position
from rlsys.trainer.model.mtp import OwnClipping, Prediction, predicted, take_metrics
from rlsys.trainer.model.routing import Routing
from rlsys.trainer.model.weights import LocalWeights, gather_hf
from rlsys.trainer.muon import add_muon
from rlsys.trainer.pack import MicroBatch, Shared
from rlsys.trainer.passes import LossFn, Passes, ScoresOf

T = TypeVar("T")


@dataclass(frozen=True)
class Updated:
    """Loss (sum over all ranks / denominator), gradient norm before clipping, and the loss function's sums.

    `routing`: figures of replay and expert load (rlsys.trainer.model.routing), empty for a dense model.
    `padding_share`: of the tokens computed, those that are padding. `shared_share`: of the tokens of all sequences,
    those that were computed for another one (rlsys.trainer.prefixes). `skipped`: the gradient was not finite, and the
    weights are as they were. `prediction`: figures of multi-token prediction (rlsys.trainer.model.mtp), empty where
    it is not trained.
    """

    loss: float
    grad_norm: float
    sums: dict[str, Tensor]
    routing: dict[str, float]
    padding_share: float
    skipped: bool = False
    shared_share: float = 0.0
    prediction: dict[str, float] = field(default_factory=dict)


def learning_rate(t: TrainerConfig, step: int, schedule: Schedule, end: float) -> float:
    """Of the 1-based `step`: up to t.lr over the warm-up steps, then by `schedule`, down to `end` of it at t.steps.

    The first step after the warm-up has the full rate.
    """
    if step <= t.warmup_steps:
        return t.lr * (step / t.warmup_steps)
    if schedule == "constant":
        return t.lr
    done = min(1.0, (step - 1 - t.warmup_steps) / max(1, t.steps - t.warmup_steps))
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return t.lr * (end + (1 - end) * left)


class Trainer:
    """Raises UserError for a layout or a model folder that does not fit; see rlsys.trainer.model.model.

    `signals` (of rlsys.algo.plugin.NEEDS) is what scores have beyond log-probs: `entropy`, `values` (builds a value
    head, unless `algo.critic` is given). `ref` keeps a copy of this rank's first weights in host memory. `owner`: see
    Checkpoints. `candidates`: see rlsys.algo.sft.imitation.
    """

    critic: Trainer | None = None
    """A value model beside this policy, see rlsys.trainer.critic."""
    teacher: object | None = None
    """A frozen model that it is compared with, see rlsys.trainer.teacher."""

    def __init__(
        self,
        config: Config,
        signals: Collection[str] = (),
        owner: Owner | None = None,
        candidates: float | None = None,
    ) -> None:
        self.config = config
        self._candidates = candidates
        self._signals = frozenset(signals)
        self.hf = trained_model(config)
        """With layers for multi-token prediction where they are trained."""
        check_layout(config, self.hf)
        check_asked(config, self.hf)
        with ExitStack() as undo:  # a trainer that cannot be built leaves no group behind: another one can be
            self._build(owner, undo)
            undo.pop_all()

    def _build(self, owner: Owner | None, undo: ExitStack) -> None:
        """`undo` gets what releases what is acquired here."""
        config, signals = self.config, self._signals
        self._device = self._joined(undo)
        self.control = self._waiting(undo)
        self.on_main = self.control.on_main
        self.rank = dist.get_rank()
        self.is_main = self.rank == 0
        if self.is_main:
            setup.say_what_is_missing()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self._chunks = self._built()
        self.named_parameters = self._chunks.trained_parameters
        """Those of this rank that are trained, by megatron's names."""
        self._transformer = self._chunks.config
        shared = "values" in signals and config.algo.critic is None
        self._head = self._chunks.add_value_head(self._device) if shared else None
        self._first_weights = self._copy_of_weights() if "ref" in signals else {}
        self._models = setup.data_parallel(self._chunks, config.parallel.overlap)
        self._expert_biases = [bias for _, bias in self._chunks.named_expert_biases()]
        self._optimizer = get_megatron_optimizer(setup.optimizer_config(config), self._models)
        if config.trainer.optimizer == "muon":
            add_muon(self._optimizer, self._chunks, self.hf)
        self._prediction, self._own_clipping = self._predicting()
        self._transformer.grad_scale_func = self._optimizer.scale_loss
        self._routing = Routing(self._chunks.modules, self.hf.layers, config.trainer.replay)
        self.segments = SegmentReader(config.run.dir, f"trainer rank {self.rank}")
        """Where the tokens of samples lie."""
        self.replayed_layers = self._routing.layers
        """Of the model, those whose routes this rank reads."""
        self._checkpoints = Checkpoints(
            config.run.dir / "checkpoints", config.trainer.keep_checkpoints, self.control, owner
        )
        self._skipped_in_a_row = 0
        self.passes = Passes(
            config, self._models, self._routing, self._scoring(), crossover_length(self.hf), self._device,
            self._optimizer.zero_grad, self._prediction,
            by_position=rotates_by_position(config, self.hf), shared=self._shared(),
        )  # fmt: skip

    def _shared(self) -> Shared:
        if why_not_shared(self.config, self.hf, self._transformer_engine()):
            return "no"
        return "by route" if self.config.trainer.replay == "engine" else "yes"

    def _transformer_engine(self) -> bool:
        return have_transformer_engine()

    def _joined(self, undo: ExitStack) -> torch.device:
        """The layout made; this rank's device."""
        device = setup.init_distributed(self.config)
        undo.callback(setup.leave_layout)
        return device

    def _waiting(self, undo: ExitStack) -> Control:
        control = Control()
        undo.callback(control.close)
        return control

    def _built(self) -> Chunks:
        chunks = build_model(self.config, self.hf, self._device)
        if (lora := self.config.trainer.lora) is not None:
            chunks.lora = Lora(chunks, self.hf, lora, self.config.run.seed)
        return chunks

    def _predicting(self) -> tuple[Prediction | None, OwnClipping | None]:
        """What trains the layer for multi-token prediction, and what clips its gradient where that is its own."""
        t = self.config.trainer
        if not self.hf.mtp:
            return None, None
        prediction = Prediction(self._chunks.modules, t.mtp_loss, t.mtp_trunk)
        if t.mtp_trunk:
            return prediction, None
        own = [p for name, p in self._chunks.named_parameters() if name.startswith(MTP)]
        return prediction, OwnClipping(self._optimizer, own, t.grad_clip)

    def from_all(self, value: T) -> list[T]:
        """`value` of every data-parallel rank, on all of them."""
        out: list[Any] = [value] * self.dp_size
        if self.dp_size > 1:
            dist.all_gather_object(out, value, group=parallel_state.get_data_parallel_group())
        return out

    def make_room(self) -> None:
        """Where engines rest on these GPUs: give back the memory that no tensor uses. It is free on every rank when
        this returns on one."""
        if not self.config.launch.release_memory:
            return
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # else the last buckets that an engine opened stay allocated
        torch.cuda.empty_cache()  # does nothing without CUDA
        self.control.wait_for_all()

    def close(self, job: bool = False) -> None:
        """Leave the groups; the trainer is of no use afterwards. `job`: also the default one, which ends the job."""
        self.control.close()
        setup.leave_layout()
        if job:
            setup.leave_job()

    # -- the optimizer --------------------------------------------------------------------------------------

    def update(
        self, batch: list[MicroBatch], loss_fn: LossFn, lr: float, denominator: float | None = None
    ) -> Updated:
        """One optimizer update on this rank's micro-batches and those accumulated before.

        The loss is the sum over all ranks divided by `denominator`, alike on every rank; when none is given, by
        the response tokens of all ranks, counted before the loss masks anything. An update whose gradient is not
        finite is skipped; raises RunError when that happens more than trainer.nonfinite_limit times in a row.
        `batch` may be empty when something was accumulated. Without a trained token the weights stay as they are, and
        `sums` is empty.
        """
        sum_over_dp = self.passes.sum_over_dp
        trained = float(sum_over_dp(torch.tensor(sum(m.response_tokens for m in batch))))
        if (
            not trained and not self.passes.accumulated
        ):  # the optimizer would move the weights by its momentum alone
            return Updated(0.0, 0.0, {}, {}, 0.0)
        if denominator is None:
            denominator = trained
        divisor = denominator
        if (
            self.config.trainer.balance_loss
        ):  # megatron weighs it by tokens and expects a division by their number
            divisor = float(sum_over_dp(torch.tensor(sum(m.real_tokens for m in batch))))
        per_prediction = 1.0
        if self._prediction is not None:  # a mean of what it predicts, whatever the objective is divided by
            tokens = torch.tensor(sum(int(predicted(m).sum()) for m in batch))
            per_prediction = divisor / max(1.0, float(sum_over_dp(tokens)))
        if batch:
            self.passes.accumulate(batch, loss_fn, divisor / denominator, per_prediction)
        done = self.apply(lr, denominator, divisor)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if done.skipped else 0
        if self._skipped_in_a_row > (limit := self.config.trainer.nonfinite_limit):
            raise RunError(
                f"the gradient was not finite in {self._skipped_in_a_row} updates in a row; "
                f"trainer.nonfinite_limit = {limit} may be skipped. The weights are those before them"
            )
        return done

    def apply(self, lr: float, denominator: float, divisor: float) -> Updated:
        """The update of what was accumulated: its gradient is divided by `divisor`, its loss by `denominator`. Where
        the gradient is not finite, the weights stay as they are."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        biases = [bias.clone() for bias in self._expert_biases]
        # Not by the schedule: its own division knows token counts only, and portions are reduced together.
        finalize_model_grads(self._models, None)
        if self._chunks.lora is not None:
            self._chunks.lora.sum_shared_gradients()
        for model in self._models:
            model.scale_gradients(1.0 / divisor)
        # Looked at before the step: Adam would carry one NaN into every weight.
        self._optimizer.prepare_grads()
        own_norm = 0.0 if self._own_clipping is None else self._own_clipping.norm()
        grad_norm = float(self._optimizer.get_grad_norm())
        skipped = not math.isfinite(grad_norm + own_norm)
        if skipped:
            for bias, before in zip(self._expert_biases, biases, strict=True):
                bias.copy_(before)  # megatron moves it while it reduces gradients
        else:
            if self._own_clipping is not None:
                self._own_clipping.clip(own_norm, grad_norm)
            self._optimizer.step()
        done = self.passes.take_accumulated()
        mean = float(done.sums.pop("loss_sum")) / denominator
        routing, prediction = self._routing.metrics(self._device), take_metrics(done.sums)
        return Updated(
            mean,
            grad_norm,
            done.sums,
            routing,
            done.padding_share,
            skipped,
            done.shared_share,
            prediction,
        )

    def _scoring(self) -> ScoresOf:
        teacher = self.config.algo.teacher
        return Scoring(
            "entropy" in self._signals,
            "sum_pi_squared" in self._signals,
            self._head,
            None if teacher is None else teacher.direction,
            self._candidates,
        )

    @property
    def models(self) -> Sequence[DistributedDataParallel]:
        """The modules with their gradient buffers."""
        return self._models

    @property
    def optimizer(self) -> Any:
        """Megatron's chain of optimizers."""
        return self._optimizer

    @property
    def adapters(self) -> Adapters | None:
        """Beside this rank's part of the model; None without trainer.lora."""
        return self._chunks.lora

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """This rank's part of the model, one module a virtual pipeline stage."""
        return self._chunks.modules

    @property
    def first_weights(self) -> Mapping[str, Tensor]:
        """This rank's weights as `model.path` has them, by parameter; empty unless `ref` is a signal."""
        return self._first_weights

    @contextmanager
    def with_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Score with other weights `{parameter: tensor}`; those of training come back unchanged.

        While it lasts, both are held: the host or the device needs room for one more copy of this rank's weights.
        """
        resident = self._copy_of_weights()
        self._fill_weights(weights)
        try:
            yield
        finally:
            self._fill_weights(resident)

    def without_replay(self) -> AbstractContextManager[None]:
        """Score with the experts that the routers choose now, whatever trainer.replay says: with those of the policy,
        a reference would be a model that nobody trained."""
        return self._routing.off()

    def _copy_of_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().to("cpu", copy=True) for name, p in self.named_parameters()}

    def _fill_weights(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])

    # -- weights --------------------------------------------------------------------------------------------

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor), adapters merged, always in the same order, on every rank. Experts come
        one by one, save in families whose folders and engines stack them."""
        return stacked(gather_hf(self._chunks, self.hf), self.hf)

    @property
    def served(self) -> HFConfig:
        """The part of it that engines hold. A layer for multi-token prediction only if they draft with it."""
        return replace(self.hf, mtp=self.hf.mtp and self.config.engine.drafts_with_model)

    def served_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """named_hf_tensors, of what engines hold."""
        return stacked(gather_hf(self._chunks, self.served), self.served)

    def named_base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The same without adapters: what they stand beside."""
        return stacked(gather_hf(self._chunks, self.hf, merge=False), self.hf)

    def local_weights(self) -> LocalWeights:
        """This rank's part of them. Collective."""
        return LocalWeights(self._chunks, self.hf)

    def export(self, folder: Path) -> None:
        """What has been trained: the adapters if there are some, else the model."""
        (self.export_hf if self._chunks.lora is None else self.export_adapter)(folder)

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder that serves by itself. Atomic."""
        if self.is_main:
            source = self.config.model.path
            write_hf(folder, source, with_carried(self.named_hf_tensors(), source, self.hf))
        else:
            for _ in self.named_hf_tensors():
                pass
        self.control.wait_for_all()

    def named_factors(self) -> Iterator[tuple[str, Tensor]]:
        """(PEFT's name, full tensor) of the adapters, as named_hf_tensors; nothing without trainer.lora."""
        lora = self.config.trainer.lora
        return gather_hf(self._chunks, self.hf, factors(self.hf, lora) if lora else ())

    def export_adapter(self, folder: Path) -> None:
        """Write the adapters as a folder that PEFT loads. Atomic."""
        lora = self.config.trainer.lora
        assert lora is not None
        if self.is_main:
            write_adapter(folder, self.config.model.path, lora, self.hf, self.named_factors())
        else:
            for _ in self.named_factors():
                pass
        self.control.wait_for_all()

    def canaries(self, sequences: list[list[int]]) -> list[Canary]:
        """The sequences with this model's log-probs of their tokens 1.. at temperature 1. They share forward passes
        as far as micro-batches have room: the engines wait meanwhile."""
        together: list[list[Tensor]] = []
        for ids in sequences:
            size = sum(map(len, together[-1])) + len(ids) if together else math.inf
            if size > self.config.trainer.token_budget:
                together.append([])
            together[-1].append(torch.tensor(ids))
        batch = [MicroBatch.of_sequences(each) for each in together]
        logps = self.passes.logprobs(batch, temperature=1.0) if batch else []
        each = chain(*(lp.split(micro.sequence_lengths) for lp, micro in zip(logps, batch, strict=True)))
        return [Canary(ids, lp[1:].tolist()) for ids, lp in zip(sequences, each, strict=True)]

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save_checkpoint(
        self, step: int, objective: Objective | None = None, score: float | None = None
    ) -> None:
        """Begin to write model, optimizer, random state and the objective's, after `step` steps.

        In the background; call finish_checkpoint before the next. `score`: of the held-out evaluation, if one
        was made of these weights. Raises RunError when the model under adapters is not what it was.
        """
        self.check_base()
        self._checkpoints.begin(step, self._learners, objective, score)

    def check_base(self) -> None:
        """Raises RunError when the model under adapters is not what it was. Collective."""
        if self._chunks.lora is not None and fingerprint(self._chunks, self.hf) != self._chunks.lora.base:
            raise RunError("weights that trainer.lora keeps frozen have changed; nothing was saved")

    def finish_checkpoint(self, wait: bool = True) -> int | None:
        """The step of a checkpoint that is on the disk since now; None when there is none, or not yet."""
        return self._checkpoints.finish(wait)

    @property
    def save_seconds(self) -> float:
        """What the last checkpoint took from its beginning to its publication, alike on every rank; 0 before the
        first."""
        return self._checkpoints.seconds

    def load_checkpoint(self, objective: Objective | None = None) -> int:
        """Continue from the newest whole checkpoint; the number of steps it had done, 0 when there is none."""
        return self._checkpoints.load(self._learners, objective)

    @property
    def _learners(self) -> list[Learner]:
        """What a checkpoint holds: the policy, and its critic if it has one."""
        found = [self] if self.critic is None else [self, self.critic]
        return [Learner(each._chunks, each._optimizer) for each in found]
