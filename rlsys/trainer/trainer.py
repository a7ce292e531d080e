"""The trainer: one object per rank, built from the config, that owns model, optimizer and checkpoints.

All methods are collective: every rank calls them in the same order.
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
from rlsys.convert.fit import check_layout, check_requirements, trained_model
from rlsys.convert.flops import crossover_length
from rlsys.convert.hf import write_hf
from rlsys.convert.peft import write_adapter
from rlsys.convert.prefixes import why_not_shared
from rlsys.convert.stack import stack_experts
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
from rlsys.trainer.model.mtp import Prediction, SeparateClipping, predicted_tokens, take_metrics
from rlsys.trainer.model.routing import Routing
from rlsys.trainer.model.weights import LocalWeights, gather_hf
from rlsys.trainer.muon import add_muon
from rlsys.trainer.pack import MicroBatch, PrefixSharing
from rlsys.trainer.passes import LossFn, Passes, ScoresOf

T = TypeVar("T")


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer update.

    Attributes:
        loss: Sum of the loss over all ranks, divided by the denominator.
        grad_norm: Norm of the gradient before clipping.
        sums: Sums of the loss function over all ranks.
        routing: Metrics of replay and expert load (rlsys.trainer.model.routing); empty for a dense model.
        padding_share: Share of padding among the computed tokens.
        skipped: Whether the gradient was not finite, so that the weights are unchanged.
        without_gradient: Whether no token had a gradient, so that the weights are unchanged.
        shared_share: Share of all sequences' tokens that were computed for another sequence
            (rlsys.trainer.prefixes).
        prediction: Metrics of multi-token prediction (rlsys.trainer.model.mtp); empty if it is not trained.
    """

    loss: float
    grad_norm: float
    sums: dict[str, Tensor]
    routing: dict[str, float]
    padding_share: float
    skipped: bool = False
    without_gradient: bool = False
    shared_share: float = 0.0
    prediction: dict[str, float] = field(default_factory=dict)


def learning_rate(t: TrainerConfig, step: int, schedule: Schedule, end: float) -> float:
    """Return the learning rate of a step.

    The rate rises from t.lr_start * t.lr to t.lr during the warm-up. The first step after the warm-up has the full
    rate. Then the rate follows the schedule down to end * t.lr at step t.steps.

    Args:
        t: The config's trainer section.
        step: Number of the step, from 1.
        schedule: Shape of the decay.
        end: Final rate as a share of t.lr.
    """
    if step <= t.warmup_steps:
        return t.lr * (t.lr_start + (1 - t.lr_start) * step / t.warmup_steps)
    if schedule == "constant":
        return t.lr
    progress = min(1.0, (step - 1 - t.warmup_steps) / max(1, t.steps - t.warmup_steps))
    decay = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return t.lr * (end + (1 - end) * decay)


class Trainer:
    """Owner of the model, its optimizer and its checkpoints on one rank.

    Args:
        config: The run's config.
        signals: Required signals besides log-probs, names of rlsys.algo.plugin.NEEDS. `values` adds a value head
            unless `algo.critic` is set; `ref` keeps a copy of this rank's initial weights in host memory.
        owner: See Checkpoints.
        candidates: See rlsys.trainer.logprobs.Scoring.

    Raises:
        UserError: The layout does not fit the model or the number of ranks, or the model folder is invalid.
    """

    critic: Trainer | None = None
    """The policy's critic (rlsys.trainer.critic); None: the policy has none."""
    teacher: object | None = None
    """Frozen models to which the policy is compared (rlsys.trainer.teacher); None: there are none."""

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
        """Model configuration, with MTP layers if they are trained."""
        check_layout(config, self.hf)
        check_requirements(config, self.hf)
        # After an error, no process group may remain: the same process may build another trainer.
        with ExitStack() as undo:
            self._build(owner, undo)
            undo.pop_all()

    def _build(self, owner: Owner | None, undo: ExitStack) -> None:
        """Build all parts. `undo` receives a callback for each resource that must be released after an error."""
        config, signals = self.config, self._signals
        self._device = self._init_layout(undo)
        self.control = self._create_control(undo)
        self.on_main = self.control.on_main
        self.rank = dist.get_rank()
        self.is_main = self.rank == 0
        if self.is_main:
            setup.log_missing_libraries()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self._chunks = self._build_model()
        self.named_parameters = self._chunks.trained_parameters
        """Trained parameters of this rank, by Megatron's names."""
        self._transformer = self._chunks.config
        has_value_head = "values" in signals and config.algo.critic is None
        self._head = self._chunks.add_value_head(self._device) if has_value_head else None
        self._first_weights = self._copy_of_weights() if "ref" in signals else {}
        self._models = setup.data_parallel(self._chunks, config.parallel.overlap)
        self._expert_biases = [bias for _, bias in self._chunks.named_expert_biases()]
        self._optimizer = get_megatron_optimizer(setup.optimizer_config(config), self._models)
        if config.trainer.optimizer == "muon":
            add_muon(self._optimizer, self._chunks, self.hf)
        self._prediction, self._mtp_clipping = self._build_prediction()
        self._transformer.grad_scale_func = self._optimizer.scale_loss
        self._routing = Routing(self._chunks.modules, self.hf.layers, config.trainer.replay)
        self.segments = SegmentReader(config.run.dir, f"trainer rank {self.rank}")
        """Reader of the samples' tokens."""
        self.replayed_layers = self._routing.layers
        """Layers of the model whose engine routes this rank replays."""
        self._checkpoints = Checkpoints(
            config.run.dir / "checkpoints", config.trainer.keep_checkpoints, self.control, owner
        )
        self._skipped_in_a_row = 0
        self.passes = Passes(
            config, self._models, self._routing, self._scoring_function(), crossover_length(self.hf), self._device,
            self._optimizer.zero_grad, self._prediction,
            by_position=rotates_by_position(config, self.hf), shared=self._prefix_sharing(),
        )  # fmt: skip

    def _prefix_sharing(self) -> PrefixSharing:
        if why_not_shared(self.config, self.hf, self._transformer_engine()):
            return "no"
        return "by route" if self.config.trainer.replay == "engine" else "yes"

    def _transformer_engine(self) -> bool:
        return have_transformer_engine()

    def _init_layout(self, undo: ExitStack) -> torch.device:
        """Create the process groups of the layout, and return this rank's device."""
        device = setup.init_distributed(self.config)
        undo.callback(setup.leave_layout)
        return device

    def _create_control(self, undo: ExitStack) -> Control:
        control = Control()
        undo.callback(control.close)
        return control

    def _build_model(self) -> Chunks:
        chunks = self._load_model()
        if (lora := self.config.trainer.lora) is not None:
            chunks.lora = Lora(chunks, self.hf, lora, self.config.run.seed)
        return chunks

    def _load_model(self) -> Chunks:
        return build_model(self.config, self.hf, self._device)

    def _build_prediction(self) -> tuple[Prediction | None, SeparateClipping | None]:
        """Return the loss of the MTP layer, and the layer's clipping if its gradient is separate from the model's.

        Both are None without trained MTP layers.
        """
        t = self.config.trainer
        if not self.hf.mtp:
            return None, None
        output = self._chunks.output_layer(self.hf.vocab_size)
        prediction = Prediction(self._chunks.modules[-1], output, t.mtp_loss, t.mtp_trunk)
        if t.mtp_trunk:
            return prediction, None
        mtp_parameters = [p for name, p in self._chunks.named_parameters() if name.startswith(MTP)]
        return prediction, SeparateClipping(self._optimizer, mtp_parameters, t.grad_clip)

    def gather_dp(self, value: T) -> list[T]:
        """Return the values of all data-parallel ranks, in rank order, on each of these ranks."""
        values: list[Any] = [value] * self.dp_size
        if self.dp_size > 1:
            dist.all_gather_object(values, value, group=parallel_state.get_data_parallel_group())
        return values

    def release_unused_memory(self) -> None:
        """Release GPU memory that no tensor uses, if engines share these GPUs.

        Return after every rank has released its memory.
        """
        if not self.config.launch.release_memory:
            return
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # otherwise buckets that an engine has opened remain allocated
        torch.cuda.empty_cache()  # does nothing without CUDA
        self.control.wait_for_all()

    def close(self, job: bool = False) -> None:
        """Destroy the process groups. `job`: also the default group. The trainer cannot be used afterwards."""
        self.control.close()
        setup.leave_layout()
        if job:
            setup.leave_job()

    # -- the optimizer --------------------------------------------------------------------------------------

    def update(
        self, batch: list[MicroBatch], loss_fn: LossFn, lr: float, denominator: float | None = None
    ) -> UpdateResult:
        """Run one optimizer update with the gradient of `batch` and of the backward passes since the last update.

        Args:
            batch: This rank's micro-batches; may be empty if backward passes have run since the last update.
            loss_fn: Computes the loss sum of a micro-batch.
            lr: Learning rate.
            denominator: Divides the loss sum of all ranks; equal on every rank. None: the number of trained tokens on
                all ranks, before the loss masks any.

        Returns:
            The result. If no token is trained, the weights stay unchanged, and `sums` is empty.

        Raises:
            RunError: The gradient was not finite in more than trainer.nonfinite_limit updates in a row. Each of these
                updates was skipped.
        """
        sum_over_dp = self.passes.sum_over_dp
        trained = float(sum_over_dp(torch.tensor(sum(m.response_tokens for m in batch))))
        if not trained and not self.passes.has_gradient:
            # The optimizer would move the weights by its momentum alone.
            return UpdateResult(0.0, 0.0, {}, {}, 0.0, without_gradient=True)
        if denominator is None:
            denominator = trained
        divisor = denominator
        if self.config.trainer.balance_loss:
            # Megatron weights its auxiliary loss by tokens and expects a division by their number.
            divisor = float(sum_over_dp(torch.tensor(sum(m.real_tokens for m in batch))))
        prediction_weight = 1.0
        if self._prediction is not None:
            # The MTP loss is a mean over its predicted tokens, which does not depend on the objective's divisor.
            tokens = torch.tensor(sum(int(predicted_tokens(m).sum()) for m in batch))
            prediction_weight = divisor / max(1.0, float(sum_over_dp(tokens)))
        if batch:
            self.passes.accumulate(batch, loss_fn, divisor / denominator, prediction_weight)
        result = self.apply(lr, denominator, divisor)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if self._skipped_in_a_row > (limit := self.config.trainer.nonfinite_limit):
            raise RunError(
                f"the gradient was not finite in {self._skipped_in_a_row} updates in a row; expected at most "
                f"trainer.nonfinite_limit = {limit}. The weights are those before these updates"
            )
        return result

    def apply(self, lr: float, denominator: float, divisor: float) -> UpdateResult:
        """Apply the gradient of the backward passes since the last update.

        The weights stay unchanged if the gradient is not finite, or if the loss function's sum `effective`, the
        number of tokens with a gradient, is 0.

        Args:
            lr: Learning rate.
            denominator: Divides the reported loss.
            divisor: Divides the gradient.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        biases = [bias.clone() for bias in self._expert_biases]
        self._reduce_gradients(divisor)
        # Checked before the step: Adam would propagate one NaN into every weight.
        self._optimizer.prepare_grads()
        mtp_norm = 0.0 if self._mtp_clipping is None else self._mtp_clipping.norm()
        grad_norm = float(self._optimizer.get_grad_norm())
        accumulated = self.passes.take_accumulated()
        without_gradient = not accumulated.sums.get("effective", 1)
        skipped = not without_gradient and not math.isfinite(grad_norm + mtp_norm)
        if skipped or without_gradient:
            for bias, previous in zip(self._expert_biases, biases, strict=True):
                bias.copy_(previous)  # Megatron updates it while it reduces gradients
        else:
            if self._mtp_clipping is not None:
                self._mtp_clipping.clip(mtp_norm, grad_norm)
            self._optimizer.step()
        loss_sum = float(accumulated.sums.pop("loss_sum"))
        routing = self._routing.metrics(self._device)
        prediction = take_metrics(accumulated.sums)
        return UpdateResult(
            loss=loss_sum / denominator,
            grad_norm=grad_norm,
            sums=accumulated.sums,
            routing=routing,
            padding_share=accumulated.padding_share,
            skipped=skipped,
            without_gradient=without_gradient,
            shared_share=accumulated.shared_share,
            prediction=prediction,
        )

    def _reduce_gradients(self, divisor: float) -> None:
        """Sum the gradients of all ranks and divide them by `divisor`.

        Megatron's schedule could do this, but would divide by token counts only, and reduce the gradients of early
        backward passes separately.
        """
        finalize_model_grads(self._models, None)
        if self._chunks.lora is not None:
            self._chunks.lora.sum_shared_gradients()
        for model in self._models:
            model.scale_gradients(1.0 / divisor)

    def _scoring_function(self) -> ScoresOf:
        return Scoring(
            self._chunks.output_layer(self.hf.vocab_size),
            entropy="entropy" in self._signals,
            squares="sum_pi_squared" in self._signals,
            head=self._head,
            teacher=self.config.algo.teacher,
            candidates=self._candidates,
        )

    @property
    def models(self) -> Sequence[DistributedDataParallel]:
        """Model chunks of this rank in Megatron's DDP, which owns their gradient buffers."""
        return self._models

    @property
    def optimizer(self) -> Any:
        """Megatron's chain of optimizers."""
        return self._optimizer

    @property
    def adapters(self) -> Adapters | None:
        """Adapters of this rank's part of the model; None without trainer.lora."""
        return self._chunks.lora

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """Modules of this rank's part of the model, one per virtual pipeline stage."""
        return self._chunks.modules

    @property
    def first_weights(self) -> Mapping[str, Tensor]:
        """Initial weights of this rank, by parameter, in host memory; empty unless `ref` is a signal."""
        return self._first_weights

    @contextmanager
    def with_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which this rank's model has other weights.

        Meanwhile the training weights are in host memory, which needs space for them.

        Args:
            weights: The weights, by parameter.
        """
        training_weights = self._copy_of_weights()
        self._fill_weights(weights)
        try:
            yield
        finally:
            self._fill_weights(training_weights)

    def without_replay(self) -> AbstractContextManager[None]:
        """Return a context in which routers select experts themselves, whatever trainer.replay is.

        A reference model that replays the policy's experts would not be the model that was trained.
        """
        return self._routing.off()

    def _copy_of_weights(self) -> dict[str, Tensor]:
        return {name: p.detach().to("cpu", copy=True) for name, p in self.named_parameters()}

    def _fill_weights(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])

    # -- weights --------------------------------------------------------------------------------------------

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (Hugging Face name, full tensor) of the model with merged adapters, on every rank.

        The order is always the same. Each expert has its own tensors, except in families whose folders and engines
        stack experts.
        """
        return stack_experts(gather_hf(self._chunks, self.hf), self.hf)

    @property
    def served_config(self) -> HFConfig:
        """Model configuration of the engines, with the MTP layer only if they use it as a draft model."""
        return replace(self.hf, mtp=self.hf.mtp and self.config.engine.drafts_with_model)

    def served_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors of `named_hf_tensors` that engines load."""
        return stack_experts(gather_hf(self._chunks, self.served_config), self.served_config)

    def named_base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors of `named_hf_tensors`, but without merged adapters."""
        return stack_experts(gather_hf(self._chunks, self.hf, merge=False), self.hf)

    def local_weights(self) -> LocalWeights:
        """Return this rank's weights, by entry of the name table."""
        return LocalWeights(self._chunks, self.hf)

    def export(self, folder: Path) -> None:
        """Write the adapters as a PEFT folder, or a model without adapters as a Hugging Face folder. Atomic."""
        if self._chunks.lora is None:
            self.export_hf(folder)
        else:
            self.export_adapter(folder)

    def export_hf(self, folder: Path) -> None:
        """Write the model with merged adapters as a Hugging Face folder. Atomic."""
        if self.is_main:
            source = self.config.model.path
            write_hf(folder, source, with_carried(self.named_hf_tensors(), source, self.hf))
        else:
            for _ in self.named_hf_tensors():  # takes part in the gathering
                pass
        self.control.wait_for_all()

    def named_factors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over (PEFT name, full tensor) of the adapters, on every rank; empty without trainer.lora."""
        lora = self.config.trainer.lora
        return gather_hf(self._chunks, self.hf, factors(self.hf, lora) if lora else ())

    def export_adapter(self, folder: Path) -> None:
        """Write the adapters as a PEFT folder. Atomic."""
        lora = self.config.trainer.lora
        assert lora is not None
        if self.is_main:
            write_adapter(folder, self.config.model.path, lora, self.hf, self.named_factors())
        else:
            for _ in self.named_factors():  # takes part in the gathering
                pass
        self.control.wait_for_all()

    def canaries(self, sequences: list[list[int]]) -> list[Canary]:
        """Return canaries: the sequences with this model's log-probs of all tokens but the first, at temperature 1.

        Several sequences share a forward pass, because the engines wait for the result.
        """
        packed: list[list[Tensor]] = []
        for ids in sequences:
            size = sum(map(len, packed[-1])) + len(ids) if packed else math.inf
            if size > self.config.trainer.token_budget:
                packed.append([])
            packed[-1].append(torch.tensor(ids))
        batch = [MicroBatch.of_sequences(micro_sequences) for micro_sequences in packed]
        logprobs = self.passes.logprobs(batch, temperature=1.0) if batch else []
        logprobs_by_sequence = chain(
            *(logp.split(micro.sequence_lengths) for logp, micro in zip(logprobs, batch, strict=True))
        )
        return [
            Canary(ids, logp[1:].tolist()) for ids, logp in zip(sequences, logprobs_by_sequence, strict=True)
        ]

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save_checkpoint(
        self, step: int, objective: Objective | None = None, score: float | None = None
    ) -> None:
        """Start to write a checkpoint in the background. Call finish_checkpoint before the next call.

        The checkpoint contains model, optimizer, random state and the objective's state.

        Args:
            step: Number of completed steps.
            objective: The objective; None: the checkpoint contains no state of it.
            score: Result of the held-out evaluation of these weights; None: not evaluated.

        Raises:
            RunError: The frozen base model of adapters has changed.
        """
        self.check_base()
        self._checkpoints.begin(step, self._learners, objective, score)

    def check_base(self) -> None:
        """Raise RunError if the frozen base model of adapters has changed."""
        if self._chunks.lora is not None and fingerprint(self._chunks, self.hf) != self._chunks.lora.base:
            raise RunError("trainer.lora: frozen weights have changed; the checkpoint was not saved")

    def finish_checkpoint(self, wait: bool = True) -> int | None:
        """Publish the started checkpoint if every rank has written it, see Checkpoints.finish."""
        return self._checkpoints.finish(wait)

    @property
    def save_seconds(self) -> float:
        """Seconds that the last checkpoint took, see Checkpoints.seconds; equal on every rank."""
        return self._checkpoints.seconds

    def load_checkpoint(self, objective: Objective | None = None) -> int:
        """Load the newest complete checkpoint and return its number of steps; 0 if there is none."""
        return self._checkpoints.load(self._learners, objective)

    @property
    def _learners(self) -> list[Learner]:
        """Models of a checkpoint: the policy, and its critic if it has one."""
        trainers = [self] if self.critic is None else [self, self.critic]
        return [Learner(trainer._chunks, trainer._optimizer) for trainer in trainers]
