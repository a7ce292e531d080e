"""Process groups, seeds, gradient buffers and the optimizer's settings of one trainer rank."""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import ExitStack

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_patches import have_transformer_engine
from rlsys.config import Config
from rlsys.config.precision import check_device
from rlsys.core.errors import UserError
from rlsys.core.rendezvous import store_of_ranks
from rlsys.trainer.model.chunks import Chunks

log = logging.getLogger("rlsys.trainer")


def local_device() -> torch.device:
    """Return the CUDA device with the index LOCAL_RANK, or the CPU without CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def init_distributed(config: Config) -> torch.device:
    """Create the process groups of `config.parallel` (NCCL, or gloo without CUDA) and set the seeds.

    Returns:
        This rank's device.

    Raises:
        UserError: The number of ranks is not that of the layout, or `model.fp8` does not support this device.
        RuntimeError: This process already has a layout.
    """
    cuda = torch.cuda.is_available()
    check_device(config, torch.cuda.get_device_capability() if cuda else None, have_transformer_engine())
    device = local_device()
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # results must not depend on the number of cores
    if not dist.is_initialized():
        _join_job(cuda)
    p = config.parallel
    if dist.get_world_size() != p.world_size:
        raise UserError(f"parallel needs {p.world_size} ranks, but {dist.get_world_size()} were started")
    if parallel_state.is_initialized():
        raise RuntimeError("this process already has a trainer's layout; close that trainer first")
    with ExitStack() as undo:
        undo.callback(leave_layout)  # after an error, Megatron-Core keeps the groups that it has created
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=p.tp,
            pipeline_model_parallel_size=p.pp,
            virtual_pipeline_model_parallel_size=p.vpp if p.vpp > 1 else None,
            context_parallel_size=p.cp,
            expert_model_parallel_size=p.ep,
            expert_tensor_parallel_size=p.expert_tp,
        )
        model_parallel_cuda_manual_seed(config.run.seed)
        torch.manual_seed(config.run.seed)  # last: on a CPU the line above gives each rank a different seed
        undo.pop_all()
    return device


def _join_job(cuda: bool) -> None:
    """Create the default group of the ranks in RANK and WORLD_SIZE."""
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    dist.init_process_group(backends(cuda), store=store_of_ranks(rank, world), rank=rank, world_size=world)


def backends(cuda: bool) -> str:
    """Return the value of `backend` for torch's default group: NCCL for GPU tensors, gloo for host memory.

    With NCCL alone, torch would copy pickled objects into GPU memory on every rank.
    """
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


def log_missing_libraries() -> None:
    """Log a warning for each GPU library that is not installed. Without CUDA, log none: they all need a GPU."""
    for module, name, fallback in (
        ("transformer_engine", "Transformer Engine", "megatron-core's local layers"),
        ("amp_C", "Apex", "torch's AdamW and gradient norm"),
    ):
        if torch.cuda.is_available() and importlib.util.find_spec(module) is None:
            log.warning("%s is not installed; using %s instead", name, fallback)


def leave_layout() -> None:
    """Destroy the parallel groups, so that the same processes can create another layout.

    The default group remains: gloo hangs if the same ranks create it a second time. Megatron-Core only drops its
    references to the other groups, whose gloo threads would continue to poll.
    """
    for group in parallel_state._global_process_group_list or []:
        if group is not None:  # None stands for the default one
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def leave_job() -> None:
    """Destroy the default group at the end of a rank's work.

    Otherwise gloo's threads sometimes abort the process while it exits (once in 12 exits of a test with two ranks).
    """
    dist.destroy_process_group()


def data_parallel(chunks: Chunks, overlap: bool) -> list[DistributedDataParallel]:
    """Wrap each chunk in Megatron's DDP, which owns its gradient buffers.

    Parameters are gathered right after the update, not layer by layer in the next forward pass, because the push to
    the engines needs them.

    Args:
        chunks: This rank's model chunks.
        overlap: Whether gradients are reduced during the backward pass of the last micro-batch.
    """
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
    )
    models = [DistributedDataParallel(chunks.config, ddp, module) for module in chunks.modules]
    if overlap:  # the other micro-batches must not reduce gradients
        no_syncs = [model.no_sync for model in models]
        chunks.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    return models


def offloads(config: Config) -> bool:
    """Return whether the optimizer state is in host memory instead of GPU memory; False without a GPU.

    Raises:
        UserError: Transformer Engine, which megatron's offloading needs, is not installed.
    """
    offload = config.trainer.offload_optimizer > 0 and torch.cuda.is_available()
    if offload and not have_transformer_engine():
        raise UserError(
            f"trainer.offload_optimizer = {config.trainer.offload_optimizer:g} needs Transformer Engine, which is "
            "not installed; expected 0: without it, megatron-core 0.16.1 cannot resume with an offloaded state"
        )
    return offload


def optimizer_config(config: Config) -> OptimizerConfig:
    """Return the settings of AdamW with gradient clipping; the learning rate is set in each step."""
    t = config.trainer
    offload = offloads(config)
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
        optimizer_cpu_offload=offload,
        # Moves the float32 weights to host memory with the state. Otherwise they would stay on the GPU and be missing
        # in checkpoints, which then could not be loaded.
        use_precision_aware_optimizer=offload,
        optimizer_offload_fraction=t.offload_optimizer if offload else 0.0,
        overlap_cpu_optimizer_d2h_h2d=offload,
    )
