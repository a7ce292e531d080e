"""Forward and backward passes of one rank's part of a model over packed micro-batches.

All methods are collective, and every rank passes the same number of micro-batches.

Shapes: T tokens of a micro-batch, P tokens after padding, c context-parallel ranks, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlsys.config import Config
from rlsys.config.precision import token_multiple
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.model.attention import PackedSequences
from rlsys.trainer.model.context_parallel import Share, padded_lengths
from rlsys.trainer.model.mtp import Prediction
from rlsys.trainer.model.routing import Routing
from rlsys.trainer.pack import MicroBatch, Packer, PrefixSharing

T = TypeVar("T")

LossFn = Callable[[Scores, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(scores with gradient, their micro-batch) -> (sum of the tokens' losses, named sums of any shape for metrics)."""
ScoresOf = Callable[[Tensor, Share, float], Scores]
"""(last hidden states of a share, the share, temperature) -> scores of the micro-batch's tokens."""


@dataclass(frozen=True)
class Accumulated:
    """Metrics of the backward passes since the last update, equal on every rank.

    Attributes:
        sums: Sums of the loss function over all micro-batches and data-parallel ranks. `loss_sum` is the loss.
        padding_share: Share of padding among the computed tokens.
        shared_share: Share of all sequences' tokens that were computed for another sequence.
    """

    sums: dict[str, Tensor]
    padding_share: float
    shared_share: float


@dataclass(frozen=True)
class AccumulationState:
    """Counters of the backward passes since the last update, without the gradient.

    Attributes:
        sums: Sums of the loss function for each micro-batch, on the last pipeline stage.
        packed_tokens: Number of tokens of all sequences, without masked copies.
        real_tokens: Number of those that were computed, which excludes shared tokens.
        computed_tokens: Number of computed tokens with padding; 0: no backward pass has run.
    """

    sums: list[dict[str, Tensor]] = field(default_factory=list)
    packed_tokens: int = 0
    real_tokens: int = 0
    computed_tokens: int = 0


class Passes:
    """Owner of Megatron's schedule and of the state accumulated since the last update."""

    def __init__(
        self,
        config: Config,
        models: Sequence[DistributedDataParallel],
        routing: Routing,
        scores_of: ScoresOf,
        crossover: float,
        device: torch.device,
        zero_grad: Callable[[], None] = lambda: None,
        prediction: Prediction | None = None,
        *,
        by_position: bool = False,
        shared: PrefixSharing = "no",
    ) -> None:
        """Initialise.

        Args:
            config: The run's config.
            models: This rank's model chunks.
            routing: Replay in the routers of `models`.
            scores_of: Computes the scores from the last hidden states.
            crossover: Length of a sequence whose attention costs as much as everything else (rlsys.convert.flops).
            device: Device of the model.
            zero_grad: Clears the gradients of the optimizer.
            prediction: Loss of the MTP layer; None: no MTP layer is trained.
            by_position: Whether rotary embeddings need the positions of tokens in every micro-batch, not only in
                those with shared tokens (rlsys.trainer.model.attention).
            shared: Whether common first tokens of sequences are computed once.
        """
        self._config = config
        self._models = list(models)
        self._routing = routing
        self._scores_of = scores_of
        self._zero_grad = zero_grad
        self._device = device
        self._prediction = prediction
        self._multiple = token_multiple(config)
        self._cp = config.parallel.cp
        self._equal_lengths = config.equal_lengths
        self._round = config.parallel.pp if config.parallel.vpp > 1 else 1
        self._dp_size = parallel_state.get_data_parallel_world_size()
        dp_rank, budget = parallel_state.get_data_parallel_rank(), config.trainer.token_budget
        self.pack = Packer(budget, dp_rank, self._dp_size, self._round, crossover, shared)
        self._by_position = by_position
        self._sums: list[dict[str, Tensor]] = []  # on the last stage: one per micro-batch
        self._packed_tokens = self._real_tokens = self._computed_tokens = 0

    def logprobs(self, batch: list[MicroBatch], temperature: float | None = None) -> list[Tensor]:
        """Return the log-prob of each token, `[T]` per micro-batch; 0 at the first token of a sequence.

        Args:
            batch: This rank's micro-batches.
            temperature: Sampling temperature; None: rollout.temperature, at which the engine computed mu.
        """
        return [scores.logp for scores in self.score(batch, temperature)]

    def score(self, batch: list[MicroBatch], temperature: float | None = None) -> list[Scores]:
        """Score each micro-batch in a forward pass without gradient. The scores are on the micro-batch's device.

        `temperature`: see `logprobs`.
        """
        sampling_temperature = self._config.rollout.temperature if temperature is None else temperature

        def score_micro(hidden: Tensor, share: Share, micro: MicroBatch) -> Scores:
            return self._scores_of(hidden, share, sampling_temperature)

        for model in self._models:
            model.eval()
        # An interleaved pipeline processes rounds of micro-batches. Copies pad the last round; their results are
        # dropped.
        padded = [*batch, *[batch[-1]] * (-len(batch) % self._round)]
        with torch.no_grad():
            results = self._schedule(score_micro, padded, forward_only=True)[: len(batch)]
        for model in self._models:
            model.train()
        host_scores = from_last_stage([scores.to(torch.device("cpu")) for scores in results])
        return [scores.to(micro.tokens.device) for scores, micro in zip(host_scores, batch, strict=True)]

    def accumulate(
        self, batch: list[MicroBatch], loss_fn: LossFn, weight: float = 1.0, prediction_weight: float = 1.0
    ) -> None:
        """Run forward and backward passes, and add the gradient to that of the next update.

        Args:
            batch: This rank's micro-batches.
            loss_fn: Computes the loss sum of a micro-batch.
            weight: Factor of the loss.
            prediction_weight: Factor of the loss of multi-token prediction.
        """
        temperature = self._config.rollout.temperature
        if not self._computed_tokens:  # the first since the last update
            for model in self._models:
                model.zero_grad_buffer()
            self._zero_grad()

        def loss(hidden: Tensor, share: Share, micro: MicroBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss_sum, sums = loss_fn(self._scores_of(hidden, share, temperature), micro)
            sums = {**sums, "loss_sum": loss_sum.detach()}
            total = loss_sum * weight if weight != 1.0 else loss_sum
            if self._prediction is not None:
                mtp_loss, mtp_sums = self._prediction.loss(share, micro)
                total = total + mtp_loss * prediction_weight
                sums |= mtp_sums
            unused_token_count = torch.zeros((), dtype=torch.int, device=self._device)
            return total, unused_token_count, sums

        self._sums += self._schedule(loss, batch, forward_only=False)
        real = [m for m in batch if not m.copy]
        self._packed_tokens += sum(len(m.tokens) for m in real)
        self._real_tokens += sum(sum(m.computed_lengths) for m in real)

    @property
    def has_gradient(self) -> bool:
        """Return whether a backward pass has run since the last update."""
        return self._computed_tokens > 0

    def take_accumulated(self) -> Accumulated:
        """Return the metrics since the last update, with sums over all ranks in float64, and reset the counters."""
        state = self.exchange(AccumulationState())
        micro_sums = state.sums
        counts = torch.tensor([state.packed_tokens, state.real_tokens, state.computed_tokens])
        sums = {
            name: self.sum_over_dp(torch.stack([s[name].detach().double() for s in micro_sums]).sum(0)).cpu()
            for name in (micro_sums[0] if micro_sums else ())
        }
        packed, real, computed = self.sum_over_dp(counts).tolist()
        return Accumulated(from_last_stage(sums), 1 - real / computed, 1 - real / max(1, packed))

    def exchange(self, state: AccumulationState) -> AccumulationState:
        """Replace the counters by `state` and return the previous ones.

        The gradient buffers do not change: the caller must replace their content, too.
        """
        previous = AccumulationState(
            self._sums, self._packed_tokens, self._real_tokens, self._computed_tokens
        )
        self._sums, self._packed_tokens = state.sums, state.packed_tokens
        self._real_tokens, self._computed_tokens = state.real_tokens, state.computed_tokens
        return previous

    def sum_over_dp(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over data-parallel ranks, on the device of `value`."""
        if self._dp_size == 1:
            return value
        total = value.to(self._device, copy=True)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.to(value.device)

    def _schedule(
        self,
        finish: Callable[[Tensor, Share, MicroBatch], Any],
        batch: list[MicroBatch],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's pipeline schedule over the micro-batches.

        Args:
            finish: (last hidden states, share of this rank, micro-batch) -> result of a micro-batch.
            batch: This rank's micro-batches.
            forward_only: Whether there is no backward pass.

        Returns:
            The results of `finish`; empty on all pipeline stages but the last.
        """
        length = self._common_length(batch)
        cp_group = parallel_state.get_context_parallel_group()

        def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            micro = next(batches)
            if micro.tokens.device != self._device:
                micro = micro.to(self._device)
            share = Share.of(micro, self._multiple, cp_group, self._device, length)
            chunk = self._models.index(model)
            if chunk == 0 and not forward_only:
                self._computed_tokens += len(share.tokens) * self._cp
            self._routing.begin(chunk, micro, share)
            positions = share.position_ids if self._by_position or share.prefixes else None
            packed = PackedSequences.of(
                share.lengths, self._device, share.gathered_index, share.prefixes, positions
            )
            output = model(
                share.tokens[None], share.position_ids[None], None,
                padding_mask=self._routing.padding_mask(chunk, micro, share),
                packed_seq_params=packed,
            )  # fmt: skip
            self._routing.end(chunk, micro)
            return output, lambda out, non_loss_data=False: finish(out, share, micro)

        iterators = [iter(batch) for _ in self._models]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._models,
            num_microbatches=len(batch),
            seq_length=length or self._config.trainer.token_budget,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results

    def _common_length(self, batch: list[MicroBatch]) -> int:
        """Return the length to which the micro-batches of all ranks are padded; 0 if their lengths may differ."""
        if not self._equal_lengths:
            return 0
        local_length = max(sum(padded_lengths(m.computed_lengths, self._multiple, self._cp)) for m in batch)
        longest = torch.tensor(local_length, device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return int(longest)


def from_last_stage(value: T) -> T:
    """Return the `value` of the last pipeline stage on all stages. Its tensors must be on the CPU. Collective."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, parallel_state.get_pipeline_model_parallel_last_rank(), group)
    return values[0]
