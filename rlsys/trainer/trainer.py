"""The trainer: one object per rank, built from the config, that owns model, optimizer and checkpoints.

Shapes: T packed tokens of a micro-batch, V vocabulary. All ranks call every method together (collectives).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patches
from rlsys.config import Config
from rlsys.convert.hf import HFConfig
from rlsys.convert.layout import names, to_hf
from rlsys.errors import RunError
from rlsys.trainer.pack import MicroBatch
from rlsys.types import Canary

megatron_patches.apply()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from rlsys.convert.shards import shard_axis, unshard  # noqa: E402
from rlsys.trainer import checkpoint  # noqa: E402
from rlsys.trainer.model import build_model, local_name  # noqa: E402

T = TypeVar("T")
LossFn = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(logp `[T]` with gradient, its micro-batch) -> (sum of token losses, sums for metrics of any shape)."""

CANARY_LENGTHS = (16, 48, 96, 160)


@dataclass(frozen=True)
class StepResult:
    """Mean loss per response token, gradient norm before clipping, and the loss function's sums over all ranks."""

    loss: float
    grad_norm: float
    sums: dict[str, Tensor]


class Trainer:
    """Raises UserError for a layout or a model folder that does not fit; see rlsys.trainer.model."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.hf = HFConfig.read(config.model.path)
        self._device = _init_distributed(config)
        self.rank = dist.get_rank()
        self.is_main = self.rank == 0
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self._module = build_model(config, self.hf).to(self._device)
        self._transformer = self._module.config
        self._model = DistributedDataParallel(
            self._transformer,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            self._module,
        )
        self._optimizer = get_megatron_optimizer(_optimizer_config(config), [self._model])
        self._transformer.finalize_model_grads_func = finalize_model_grads
        self._transformer.grad_scale_func = self._optimizer.scale_loss
        self._canaries = _canary_tokens(self.hf)

    # -- together ---------------------------------------------------------------------------------------------

    def on_main(self, call: Callable[[], T]) -> T:
        """Run `call` on rank 0 only; every rank gets what it returned."""
        box = [call() if self.is_main else None]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    # -- numbers ----------------------------------------------------------------------------------------------

    def logprobs(self, batch: list[MicroBatch]) -> list[Tensor]:
        """Log-prob of each token given its predecessors, `[T]` per micro-batch; 0 at a sequence's first token."""
        self._model.eval()
        with torch.no_grad():
            out = [self._logp(self._forward(self._model, micro), micro) for micro in batch]
        self._model.train()
        return out

    def train_step(self, batch: list[MicroBatch], loss_fn: LossFn, lr: float) -> StepResult:
        """One optimizer update. The loss is summed over all ranks and divided by all their response tokens.

        Raises RunError when the gradient is not finite; the weights are then unchanged.
        """
        self._model.train()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        stored = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, loss_fn=loss_fn),
            data_iterator=iter(batch),
            model=[self._model],
            num_microbatches=len(batch),
            seq_length=self.config.trainer.token_budget,
            micro_batch_size=1,
            forward_only=False,
        )
        ok, grad_norm, _ = self._optimizer.step()
        if not ok or grad_norm is None or not torch.isfinite(torch.tensor(float(grad_norm))):
            raise RunError(f"gradient norm is {grad_norm}: the step was not taken")
        sums = self._reduce(stored)
        tokens = sums.pop("response_tokens")
        return StepResult(float(sums.pop("loss_sum") / tokens), float(grad_norm), sums)

    def _forward_step(
        self, batches: Iterator[MicroBatch], model: Any, loss_fn: LossFn
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        micro = next(batches)
        logits = self._forward(model, micro)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, sums = loss_fn(self._logp(output, micro), micro)
            tokens = torch.tensor(micro.response_tokens, dtype=torch.int, device=self._device)
            return total, tokens, {**sums, "loss_sum": total.detach(), "response_tokens": tokens}

        return logits, loss

    def _forward(self, model: Any, micro: MicroBatch) -> Tensor:
        """Logits `[1, T, V / tp]`."""
        lengths = micro.cu_seqlens.to(self._device)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            max_seqlen_q=micro.max_length,
            max_seqlen_kv=micro.max_length,
        )
        tokens, positions = (t[None].to(self._device) for t in (micro.tokens, micro.position_ids))
        output: Tensor = model(tokens, positions, None, packed_seq_params=packed)
        return output

    def _logp(self, logits: Tensor, micro: MicroBatch) -> Tensor:
        """`[T]` float32, at the rollout's temperature: what the engine calls mu."""
        targets = micro.tokens.to(self._device).roll(-1)
        scaled = logits[0].float() / self.config.rollout.temperature
        following = -vocab_parallel_cross_entropy(scaled, targets)
        first = torch.zeros_like(following, dtype=torch.bool)
        first[micro.cu_seqlens[:-1].long()] = True
        return following.roll(1).masked_fill(first, 0.0)

    def _reduce(self, stored: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Sums over micro-batches and data-parallel ranks, in float64."""
        out = {}
        for name in stored[0]:
            total = torch.stack([s[name].detach().double() for s in stored]).sum(0)
            if self.dp_size > 1:
                dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
            out[name] = total.cpu()
        return out

    # -- weights ----------------------------------------------------------------------------------------------

    def named_hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor), experts one by one, always in the same order, on every rank."""
        mine = dict(self._module.named_parameters())
        ep, ep_rank = (
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        per_rank = self.hf.experts // ep if self.hf.experts else 0
        for rule, name, targets in names(self.hf):
            local = local_name(name, ep_rank * per_rank, per_rank)
            axis = shard_axis(rule, name)
            full = None if local is None else unshard(mine[local].detach(), axis, rule.layout)
            if ep > 1 and ".local_experts." in name:
                owner = int(name.split("local_experts.")[1].split(".")[0]) // per_rank
                full = self._from_expert_rank(full, name, owner)
            assert full is not None
            yield from zip(targets, to_hf(rule, full, self.hf), strict=True)

    def _from_expert_rank(self, tensor: Tensor | None, name: str, owner: int) -> Tensor:
        """Broadcast an expert's parameter from the rank that holds it. Experts have equal shapes everywhere."""
        if tensor is None:
            first = next(iter(n for n in dict(self._module.named_parameters()) if ".local_experts.0." in n))
            layer, tail = name.split("mlp.")[0], name.split("local_experts.")[1].split(".", 1)[1]
            like = dict(self._module.named_parameters())[f"{layer}mlp.experts.local_experts.0.{tail}"]
            assert first
            etp = parallel_state.get_expert_tensor_parallel_world_size()
            shape = list(like.shape)
            shape[0 if "linear_fc1" in name else 1] *= etp
            tensor = like.new_empty(shape)
        group = parallel_state.get_expert_model_parallel_group()
        dist.broadcast(tensor := tensor.contiguous(), src=dist.get_global_rank(group, owner), group=group)
        return tensor

    def canaries(self) -> list[Canary]:
        """Fixed random sequences with this model's log-probs of their tokens 1.. at temperature 1."""
        batch = [_as_batch(ids) for ids in self._canaries]
        temperature = self.config.rollout.temperature
        if temperature != 1.0:
            raise RunError("canaries at temperature != 1 are not implemented")
        logps = self.logprobs(batch)
        return [Canary(ids, lp[1:].tolist()) for ids, lp in zip(self._canaries, logps, strict=True)]

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int) -> None:
        """Model, optimizer and random state after `step` steps, in config.run.dir/checkpoints. Atomic."""
        t = self.config.trainer
        checkpoint.save(
            self.config.run.dir / "checkpoints", step, self._module, self._optimizer, t.keep_checkpoints
        )

    def load_checkpoint(self) -> int:
        """Continue from the newest whole checkpoint; the number of steps it had done, 0 when there is none."""
        return checkpoint.load(self.config.run.dir / "checkpoints", self._module, self._optimizer)


def _init_distributed(config: Config) -> torch.device:
    """Process group, parallel groups, seeds. One thread per rank on a CPU: results do not depend on the cores."""
    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    if not dist.is_initialized():
        for name, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "0"),
        ):
            os.environ.setdefault(name, value)
        dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    p = config.parallel
    if dist.get_world_size() != p.world_size:
        raise RunError(f"the layout needs {p.world_size} ranks, {dist.get_world_size()} were started")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.expert_tp,
    )
    torch.manual_seed(config.run.seed)
    model_parallel_cuda_manual_seed(config.run.seed)
    return device


def _optimizer_config(config: Config) -> OptimizerConfig:
    t = config.trainer
    return OptimizerConfig(
        optimizer="adam",
        lr=t.lr,
        min_lr=t.lr,
        weight_decay=t.weight_decay,
        adam_beta1=t.betas[0],
        adam_beta2=t.betas[1],
        adam_eps=1e-8,
        clip_grad=t.grad_clip,
        bf16=config.model.dtype == "bfloat16",
        params_dtype=getattr(torch, config.model.dtype),
        use_distributed_optimizer=True,
    )


def _canary_tokens(hf: HFConfig) -> list[list[int]]:
    generator = torch.Generator().manual_seed(20)
    lengths = [min(n, hf.context_length - 1) for n in CANARY_LENGTHS]
    return [torch.randint(0, hf.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def _as_batch(ids: list[int]) -> MicroBatch:
    n = len(ids)
    zeros = torch.zeros(n)
    return MicroBatch(
        torch.tensor(ids), torch.arange(n), torch.tensor([0, n], dtype=torch.int32), zeros, zeros,
        torch.ones(n), torch.zeros(n, dtype=torch.int64),
    )  # fmt: skip
