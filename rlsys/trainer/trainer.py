"""The trainer: one object per rank, built from the config, that owns model, optimizer and checkpoints.

Shapes: T packed tokens of a micro-batch, V vocabulary. All ranks call every method together (collectives).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlsys.algo.objective import Objective
from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_asked, check_layout
from rlsys.convert.flops import crossover_length
from rlsys.convert.hf import write_hf
from rlsys.errors import RunError
from rlsys.owner import Owner
from rlsys.precision import token_multiple
from rlsys.trainer import setup
from rlsys.trainer.checkpoint import Checkpoints, Learner
from rlsys.trainer.chunks import Chunks
from rlsys.trainer.control import Control
from rlsys.trainer.logprobs import Scores, token_scores
from rlsys.trainer.model import build_model
from rlsys.trainer.pack import MicroBatch, TrainSample, pack
from rlsys.trainer.pending import LossFn, Pending, StepResult
from rlsys.trainer.routing import Routing
from rlsys.trainer.share import Share, padded_lengths
from rlsys.trainer.weights import gather_hf
from rlsys.types import Canary

T = TypeVar("T")


class Trainer:
    """Raises UserError for a layout or a model folder that does not fit; see rlsys.trainer.model.

    `signals` (of rlsys.algo.plugin.NEEDS) is what scores have beyond log-probs: `entropy`, `values` (builds a value
    head, unless `algo.critic` is given). `ref` keeps a copy of this rank's first weights in host memory. `owner`: see
    Checkpoints.
    """

    critic: Trainer | None = None
    """A value model beside this policy, see rlsys.trainer.critic."""

    def __init__(self, config: Config, signals: Collection[str] = (), owner: Owner | None = None) -> None:
        self.config = config
        self._signals = frozenset(signals)
        self.hf = HFConfig.read(config.model.path)
        check_layout(config, self.hf)
        check_asked(config, self.hf)
        self._device = self._joined()
        self.control = self._waiting()
        self.rank = dist.get_rank()
        self.is_main = self.rank == 0
        if self.is_main:
            setup.say_what_is_missing()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self._chunks = self._built()
        self._transformer = self._chunks.config
        shared = "values" in self._signals and config.algo.critic is None
        self._head = self._chunks.add_value_head(self._device) if shared else None
        self._first_weights = self._copy_of_weights() if "ref" in self._signals else {}
        self._models = setup.data_parallel(self._chunks, config.parallel.overlap)
        self._optimizer = get_megatron_optimizer(setup.optimizer_config(config), self._models)
        self._transformer.grad_scale_func = self._optimizer.scale_loss
        self._routing = Routing(self._chunks.modules, self.hf.layers, config.trainer.replay)
        self._checkpoints = Checkpoints(
            config.run.dir / "checkpoints", config.trainer.keep_checkpoints, self.control, owner
        )
        self._skipped_in_a_row = 0
        self._pending = Pending()
        self._round = config.parallel.pp if config.parallel.vpp > 1 else 1
        self._crossover = crossover_length(self.hf)

    def _joined(self) -> torch.device:
        """The layout made; this rank's device."""
        return setup.init_distributed(self.config)

    def _waiting(self) -> Control:
        return Control()

    def _built(self) -> Chunks:
        return build_model(self.config, self.hf, self._device)

    def on_main(self, call: Callable[[], T]) -> T:
        """Run `call` on rank 0 only; every rank gets what it returned."""
        return self.control.from_main(call() if self.is_main else None)  # type: ignore[return-value]

    def from_all(self, value: T) -> list[T]:
        """`value` of every data-parallel rank, on all of them."""
        out: list[Any] = [value] * self.dp_size
        if self.dp_size > 1:
            dist.all_gather_object(out, value, group=parallel_state.get_data_parallel_group())
        return out

    def empty_cache(self) -> None:
        """Give back the device memory that no tensor uses. It is free on every rank when this returns on one."""
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without CUDA
        self.control.wait_for_all()

    def close(self) -> None:
        """Leave the groups; the trainer is of no use afterwards."""
        self.control.close()
        setup.leave_layout()

    # -- numbers --------------------------------------------------------------------------------------------

    def logprobs(self, batch: list[MicroBatch], temperature: float | None = None) -> list[Tensor]:
        """Log-prob of each token given its predecessors, `[T]` per micro-batch; 0 at a sequence's first token.

        At the rollout's temperature when none is given: what the engine calls mu.
        """
        return [scores.logp for scores in self.score(batch, temperature)]

    def score(self, batch: list[MicroBatch], temperature: float | None = None) -> list[Scores]:
        """What a forward pass says about each micro-batch, on its own device, without gradient."""
        t = self.config.rollout.temperature if temperature is None else temperature

        def score_micro(output: Tensor, share: Share, micro: MicroBatch) -> Scores:
            return self._scores(output, share, t)

        for model in self._models:
            model.eval()
        # An interleaved pipeline takes rounds of micro-batches; what fills the last one is not looked at.
        filled = [*batch, *[batch[-1]] * (-len(batch) % self._round)]
        with torch.no_grad():
            stored = self._schedule(score_micro, filled, forward_only=True)[: len(batch)]
        for model in self._models:
            model.train()
        out = self._from_last_stage([scores.to(torch.device("cpu")) for scores in stored])
        return [scores.to(micro.tokens.device) for scores, micro in zip(out, batch, strict=True)]

    def accumulate(self, batch: list[MicroBatch], loss_fn: LossFn, weight: float = 1.0) -> None:
        """Forward and backward passes of this rank's micro-batches; their number must be the same on all ranks.

        The gradient of `weight` * loss is added to what the next train_step applies. Weights stay as they are.
        """
        if not self._pending.computed_tokens:  # the first since the last update
            for model in self._models:
                model.zero_grad_buffer()
            self._optimizer.zero_grad()

        def loss(output: Tensor, share: Share, micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, sums = loss_fn(self._scores(output, share, self.config.rollout.temperature), micro)
            unused = torch.zeros((), dtype=torch.int, device=self._device)
            weighed = total * weight if weight != 1.0 else total
            return weighed, unused, {**sums, "loss_sum": total.detach()}

        self._pending.sums += self._schedule(loss, batch, forward_only=False)
        self._pending.real_tokens += sum(len(m.tokens) for m in batch if m.mask.any())
        self._pending.computed_tokens += self._computed_tokens(batch)

    def train_step(
        self, batch: list[MicroBatch], loss_fn: LossFn, lr: float, denominator: float | None = None
    ) -> StepResult:
        """One optimizer update on this rank's micro-batches and those accumulated before.

        The loss is the sum over all ranks divided by `denominator`, alike on every rank; when none is given, by
        the response tokens of all ranks, counted before the loss masks anything. An update whose gradient is not
        finite is skipped; raises RunError when that happens more than trainer.nonfinite_limit times in a row.
        `batch` may be empty when something was accumulated.
        """
        if denominator is None:
            denominator = float(self.sum_over_dp(torch.tensor(sum(m.response_tokens for m in batch))))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        # Megatron weighs a balance loss by tokens and expects a division by their number.
        divisor = self._tokens(batch) if self.config.trainer.balance_loss else denominator
        if batch:
            self.accumulate(batch, loss_fn, divisor / denominator)
        biases = {name: bias.clone() for name, bias in self._chunks.named_expert_biases()}
        # Not by the schedule: its own division knows token counts only, and portions are reduced together.
        finalize_model_grads(self._models, None)
        for model in self._models:
            model.scale_gradients(1.0 / divisor)
        # Looked at before the step: Adam would carry one NaN into every weight.
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        skipped = not math.isfinite(grad_norm)
        self._count_skipped(skipped)
        if skipped:
            for name, bias in self._chunks.named_expert_biases():
                bias.copy_(biases[name])  # megatron moves it while it reduces gradients
        else:
            self._optimizer.step()
        sums, padding_share = self._reduce(self._pending.sums), self._padding_share()
        self._pending = Pending()
        mean = float(sums.pop("loss_sum")) / denominator
        routing = self._routing.metrics(self._device)
        return StepResult(mean, grad_norm, sums, routing, padding_share, skipped)

    def _count_skipped(self, skipped: bool) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row > (limit := self.config.trainer.nonfinite_limit):
            raise RunError(
                f"the gradient was not finite in {self._skipped_in_a_row} updates in a row; "
                f"trainer.nonfinite_limit = {limit} may be skipped. The weights are those before them"
            )

    def _tokens(self, batch: list[MicroBatch]) -> float:
        return float(self.sum_over_dp(torch.tensor(sum(len(m.tokens) for m in batch))))

    def pack(self, samples: list[TrainSample]) -> list[MicroBatch]:
        """This rank's micro-batches of `samples`, which every rank gives alike."""
        budget = self.config.trainer.token_budget
        return pack(samples, budget, self.dp_rank, self.dp_size, self._round, self._crossover)

    def _computed_tokens(self, batch: list[MicroBatch]) -> int:
        """Padding included."""
        multiple, cp = token_multiple(self.config), self.config.parallel.cp
        length = self._common_length(batch) if self.config.trainer.equal_lengths else 0
        return sum(sum(padded_lengths(m.sequence_lengths, multiple, cp, length)) for m in batch)

    def _padding_share(self) -> float:
        counts = torch.tensor([self._pending.real_tokens, self._pending.computed_tokens])
        real, computed = self.sum_over_dp(counts).tolist()
        return float(1 - real / computed)

    def _schedule(
        self,
        finish: Callable[[Tensor, Share, MicroBatch], Any],
        batch: list[MicroBatch],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Megatron's pipeline schedule over the micro-batches.

        What `finish(logits, share, micro)` gave for each of them; empty on all stages but the last.
        """
        length = self._common_length(batch) if self.config.trainer.equal_lengths else 0
        cp_group = parallel_state.get_context_parallel_group()

        def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro = next(batches).to(self._device)
            share = Share.of(micro, token_multiple(self.config), cp_group, self._device, length)
            chunk = self._models.index(model)
            self._routing.begin(chunk, micro, share)
            output = model(
                share.tokens[None], share.position_ids[None], None, packed_seq_params=share.packed,
                padding_mask=self._routing.padding_mask(chunk, share),
            )  # fmt: skip
            self._routing.end(chunk, micro)
            return output, lambda out, non_loss_data=False: finish(out, share, micro)

        iterators = [iter(batch) for _ in self._models]
        stored: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._models,
            num_microbatches=len(batch),
            seq_length=length or self.config.trainer.token_budget,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return stored

    def _scores(self, output: Tensor, share: Share, temperature: float) -> Scores:
        """Of logits `[1, P / c, V / tp]`."""
        values = None if self._head is None else self._head.values()
        squares = "sum_pi_squared" in self._signals and not torch.is_grad_enabled()
        asked = {"entropy": "entropy" in self._signals, "squares": squares}
        return token_scores(output[0], share, temperature, **asked, values=values)

    def _common_length(self, batch: list[MicroBatch]) -> int:
        """The length that the longest of all ranks' micro-batches has once it can be cut."""
        p = self.config.parallel
        longest = torch.tensor(
            max(sum(padded_lengths(m.sequence_lengths, token_multiple(self.config), p.cp)) for m in batch),
            device=self._device,
        )
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return int(longest)

    def _from_last_stage(self, value: T) -> T:
        """`value` of the last pipeline stage, on all of them. Tensors in it must be on the CPU."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, parallel_state.get_pipeline_model_parallel_last_rank(), group)
        return box[0]

    def _reduce(self, stored: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Sums over micro-batches and data-parallel ranks, in float64."""
        return self._from_last_stage(
            {
                name: self.sum_over_dp(torch.stack([s[name].detach().double() for s in stored]).sum(0)).cpu()
                for name in (stored[0] if stored else ())
            }
        )

    def sum_over_dp(self, value: Tensor) -> Tensor:
        """The sum over the ranks that hold other sequences, on the device of `value`."""
        if self.dp_size == 1:
            return value
        total = value.to(self._device, copy=True)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.to(value.device)

    @property
    def models(self) -> Sequence[DistributedDataParallel]:
        """The modules with their gradient buffers."""
        return self._models

    @property
    def optimizer(self) -> Any:
        """Megatron's chain of optimizers."""
        return self._optimizer

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """This rank's part of the model, one module a virtual pipeline stage."""
        return self._chunks.modules

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters, by megatron's names."""
        return self._chunks.named_parameters()

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
        """(Hugging Face name, full tensor), experts one by one, always in the same order, on every rank."""
        return gather_hf(self._chunks, self.hf)

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder that serves by itself. Atomic."""
        if self.is_main:
            write_hf(folder, self.config.model.path, self.named_hf_tensors())
        else:
            for _ in self.named_hf_tensors():
                pass
        self.control.wait_for_all()

    def canaries(self, sequences: list[list[int]]) -> list[Canary]:
        """The sequences with this model's log-probs of their tokens 1.. at temperature 1."""
        batch = [MicroBatch.of_tokens(torch.tensor(ids)) for ids in sequences]
        logps = self.logprobs(batch, temperature=1.0)
        return [Canary(ids, lp[1:].tolist()) for ids, lp in zip(sequences, logps, strict=True)]

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save_checkpoint(
        self, step: int, objective: Objective | None = None, score: float | None = None
    ) -> None:
        """Begin to write model, optimizer, random state and the objective's, after `step` steps.

        In the background; call finish_checkpoint before the next. `score`: of the held-out evaluation, if one
        was made of these weights.
        """
        self._checkpoints.begin(step, self._learners, objective, score)

    def finish_checkpoint(self, wait: bool = True) -> int | None:
        """The step of a checkpoint that is on the disk since now; None when there is none, or not yet."""
        return self._checkpoints.finish(wait)

    @property
    def save_seconds(self) -> float:
        """What the last checkpoint took from its beginning to its publication, alike on every rank; at first inf."""
        return self._checkpoints.seconds

    def load_checkpoint(self, objective: Objective | None = None) -> int:
        """Continue from the newest whole checkpoint; the number of steps it had done, 0 when there is none."""
        return self._checkpoints.load(self._learners, objective)

    @property
    def _learners(self) -> list[Learner]:
        """What a checkpoint holds: the policy, and its critic if it has one."""
        found = [self] if self.critic is None else [self, self.critic]
        return [Learner(each._chunks, each._optimizer) for each in found]
