"""Build, scoring pass, update and weight gathering of a rank under a meter, on fake tensors or with real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patches.distributed_optimizer_step import create_states
from megatron_patches.registry import target
from rlsys.algo.objective import Objective
from rlsys.config import Config
from rlsys.config.precision import token_multiple
from rlsys.convert.config import HFConfig
from rlsys.convert.hash_shares import PENDING_BYTES
from rlsys.rehearse.figures import HOST
from rlsys.rehearse.meter import Meter
from rlsys.rehearse.stand_ins import Setting
from rlsys.rehearse.tensors import FakeTensors
from rlsys.trainer import trainer as trainer_module
from rlsys.trainer.control import Control
from rlsys.trainer.logprobs import Scores
from rlsys.trainer.model.chunks import Chunks
from rlsys.trainer.model.context_parallel import padded_lengths
from rlsys.trainer.model.model import build_model
from rlsys.trainer.pack import MicroBatch, TrainSample, build
from rlsys.trainer.trainer import Trainer


def samples_for(config: Config, vocab_size: int, shared: bool) -> list[TrainSample]:
    """Return samples of maximum length that exactly fill a micro-batch.

    They form groups of rollout.group_size samples with one prompt each; the last group may be smaller.

    Args:
        config: The config.
        vocab_size: Number of ids of the model.
        shared: Whether the samples of a group share the tokens of their prompt.
    """
    budget, size = config.trainer.token_budget, config.rollout.group_size
    longest = min(config.rollout.max_response_tokens, budget)
    group_prompt = max(1, longest // 4)
    samples: list[TrainSample] = []
    while budget > 1:
        # Each sample computes the last token of its prompt.
        shared_tokens = group_prompt - 1 if shared and len(samples) % size else 0
        length = min(longest, budget + shared_tokens)
        prompt = group_prompt if shared_tokens else min(group_prompt, length - 1)
        response = length - prompt
        budget -= length - shared_tokens
        # Different first tokens of prompts and of responses prevent that samples share other tokens.
        group_id, member_id = (1 + number % (vocab_size - 1) for number in divmod(len(samples), size))
        prompt_ids = [group_id, *[1] * (prompt - 1)]
        response_ids = [member_id, *[2] * (response - 1)]
        samples.append(TrainSample(prompt_ids, response_ids, [-1.0] * response, [0] * response, row=0))
    return samples


def stand_in_loss(scores: Scores, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss with the structure and memory of policy losses, and no sums.

    A real objective needs only additional vectors of one number per token.
    """
    ratio = (scores.logp - micro.mu).exp()
    loss = -(torch.minimum(ratio, ratio.clamp(0.8, 1.28)) * micro.mask).sum()
    for extra in (scores.entropy, scores.values):
        if extra is not None:
            loss = loss + (extra * micro.mask).sum()
    return loss, {}


class _Weightless(Trainer):
    """Trainer that loads no weights."""

    def _load_model(self) -> Chunks:
        return build_model(self.config, self.hf, self._device, load=lambda *_: None)

    def _transformer_engine(self) -> bool:
        """Return whether the layout is for GPUs, on which Transformer Engine is expected."""
        return self.config.launch.gpus_per_node > 0

    def _create_control(self, undo: ExitStack) -> Control:
        """Return a control over the fake world group, in which no gloo group can be created."""
        return Control(dist.group.WORLD)


class Rehearsal:
    """Owner of the trainer and the meter.

    Attributes:
        config: The config.
        meter: The meter.
        batch: Micro-batches of the step; empty before the step.
        trainer: The trainer, after `build`.
    """

    def __init__(
        self,
        config: Config,
        node_of: Callable[[int], int],
        fake: FakeTensors | None,
        report: Callable[[str], None],
    ) -> None:
        """Initialise.

        Args:
            config: The config.
            node_of: Returns the node of a rank.
            fake: Runs operations on fake tensors; None: weights, ranks and collectives are real.
            report: Receives lines of progress.
        """
        self.config = config
        self.meter = Meter(node_of, fake)
        self.batch: list[MicroBatch] = []
        self._report = report

    def setting(self, skew: float) -> Setting:
        """Return the settings of the stand-ins, which must be installed before `build`. `skew`: see routing_map."""
        return Setting(self.meter, skew, lambda: self.batch, getattr(torch, self.config.model.dtype))

    def build(self) -> None:
        """Build the trainer, including the state that the optimizer creates in its first step."""
        signals = Objective(self.config.algo).requirements.passes
        kind = Trainer if self.meter.fake is None else _Weightless
        with self.meter:
            self.trainer = kind(self.config, signals)
        for optimizer in _optimizers(self.trainer):
            create_states(optimizer)
        self._name_kinds()
        self._report(
            f"rank {self.trainer.rank}: built, {sum(self.meter.memory.current.values()) / 1e9:.3g} GB"
        )

    def step(self, micro_batches: int) -> None:
        """Run a scoring pass, an update and the gathering of weights, and record their phases in the meter.

        `micro_batches`: number of micro-batches.
        """
        t = self.trainer
        shared = t.passes.pack.shared
        samples = samples_for(self.config, t.hf.vocab_size, shared != "no")
        self.batch = [build(samples, shared) for _ in range(micro_batches)]
        self.meter.from_neighbour = stage_shape(self.config, t.hf, self.batch[0])
        with self.meter, _phases(self.meter, t, self._report):
            self._begin("score")
            t.passes.score(self.batch)
            self._begin("passes")
            t.update(self.batch, stand_in_loss, self.config.trainer.lr)
            self._begin("gather")
            self._gather()
            self.meter.begin("")
        self._name_kinds()

    def _gather(self) -> None:
        """Gather full tensors as a push does. On a GPU, a push holds up to PENDING_BYTES of them before a hash."""
        pending: list[Tensor] = []
        limit = PENDING_BYTES if self.config.launch.gpus_per_node else 0
        for _, tensor in self.trainer.served_tensors():
            pending.append(tensor)
            if sum(item.nbytes for item in pending) >= limit:
                pending.clear()

    def _begin(self, phase: str) -> None:
        self._report(f"rank {self.trainer.rank}: {phase}")
        self.meter.begin(phase)

    def _name_kinds(self) -> None:
        """Set the kinds of the storages of model and optimizer in the meter."""
        record, trainer = self.meter.memory.record, self.trainer
        buffers = [b for model in trainer.models for b in (*model.buffers, *model.expert_parallel_buffers)]
        buffer_storages = {b.param_data.untyped_storage()._cdata for b in buffers if b.param_data is not None}
        for buffer in buffers:
            record(buffer.grad_data, "gradients")
            if buffer.param_data is not None:
                record(buffer.param_data, "weights")
        for _, parameter in trainer.named_parameters():
            record(parameter.data, "weights")
        for first in trainer.first_weights.values():
            record(first, HOST)
        for optimizer in _optimizers(trainer):
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                # The optimizer updates float32 weights in their buffers, without a float32 copy.
                if p.untyped_storage()._cdata not in buffer_storages:
                    record(p.data, "optimizer")
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        record(value, "optimizer")


def stage_shape(config: Config, hf: HFConfig, micro: MicroBatch) -> list[int]:
    """Return the shape of the hidden states that pipeline stages send, `[tokens / (cp tp), 1, hidden]`."""
    p = config.parallel
    tokens = sum(padded_lengths(micro.computed_lengths, token_multiple(config), p.cp))
    return [tokens // p.cp // p.tp, 1, hf.hidden_size]


def _optimizers(trainer: Trainer) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers in Megatron's chain."""
    optimizer = trainer.optimizer
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


@contextmanager
def _phases(meter: Meter, trainer: Trainer, report: Callable[[str], None]) -> Iterator[None]:
    """Begin the phases `reduce` and `update` of an update within the context when the trainer reaches them."""
    finalize: Any = target("phases", trainer_module, "finalize_model_grads", package="rlsys.rehearse.step")
    step: Any = trainer.optimizer.step

    def reduce(*args: Any, **kwargs: Any) -> Any:
        meter.begin("reduce")
        return finalize(*args, **kwargs)

    def update(*args: Any, **kwargs: Any) -> Any:
        report(f"rank {trainer.rank}: update")
        meter.begin("update")
        return step(*args, **kwargs)

    trainer_module.finalize_model_grads = reduce
    trainer.optimizer.step = update
    try:
        yield
    finally:
        trainer_module.finalize_model_grads = finalize
        trainer.optimizer.step = step
