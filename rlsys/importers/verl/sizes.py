"""Reads the sizes of batches, sequences and parallel groups."""

from __future__ import annotations

from rlsys.importers.draft import Draft
from rlsys.importers.sizes import Sizes
from rlsys.importers.verl.distillation import has_task_rewards
from rlsys.importers.verl.names import ACTOR, ASYNC_FLOW, FULLY_ASYNC, ONE_STEP_OFF, PROGRAM, ROLLOUT


def layout_names(section: str) -> dict[str, tuple[str, ...]]:
    """Return attribute of Sizes -> the setting that sets it, for the parallel sizes.

    `section`: section of settings that has the sizes of a Megatron trainer.
    """
    attributes = {
        "tp": "tensor_model", "pp": "pipeline_model", "vpp": "virtual_pipeline_model", "cp": "context",
        "ep": "expert_model", "etp": "expert_tensor",
    }  # fmt: skip
    return {attribute: (f"{section}.{name}_parallel_size",) for attribute, name in attributes.items()}


def read_sizes(d: Draft) -> tuple[Sizes, dict[str, tuple[str, ...]]]:
    """Return the sizes of the run, and attribute of Sizes -> the settings that set it."""
    m = f"{ACTOR}.megatron"
    names: dict[str, tuple[str, ...]] = {
        "groups": ("data.train_batch_size",), "group_size": (f"{ROLLOUT}.n",),
        "response": ("data.max_response_length",), "prompt": ("data.max_prompt_length",),
        "update": (f"{ACTOR}.ppo_mini_batch_size",),
        "micro": (f"{ACTOR}.ppo_max_token_len_per_gpu",), "nodes": ("trainer.nnodes",),
        "gpus": ("trainer.n_gpus_per_node",), "engine_tp": (f"{ROLLOUT}.tensor_model_parallel_size",),
        **layout_names(m),
    }  # fmt: skip
    n = _group_size(d)
    engine_gpus = None
    if d.get(PROGRAM) in (*ONE_STEP_OFF, *FULLY_ASYNC, *ASYNC_FLOW):
        engine_gpus = d.integer("rollout.nnodes", 1) * d.integer("rollout.n_gpus_per_node", 8)
        names["engine_gpus"] = ("rollout.nnodes", "rollout.n_gpus_per_node")
        if d.get(PROGRAM) in ONE_STEP_OFF:
            d.set_field("rollout.max_staleness", 1)
    groups, names["groups"] = _groups(d)
    sizes = Sizes(
        engine_gpus=engine_gpus, groups=groups, group_size=n,
        update=d.integer(f"{ACTOR}.ppo_mini_batch_size", 256) * n, prompt=d.integer("data.max_prompt_length", 512),
        response=d.integer("data.max_response_length", 512),
        micro=d.integer(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384), nodes=d.integer("trainer.nnodes", 1),
        gpus=d.integer("trainer.n_gpus_per_node", 8), tp=d.integer(f"{m}.tensor_model_parallel_size", 1),
        pp=d.integer(f"{m}.pipeline_model_parallel_size", 1),
        vpp=d.integer(f"{m}.virtual_pipeline_model_parallel_size", 0), cp=d.integer(f"{m}.context_parallel_size", 1),
        ep=d.integer(f"{m}.expert_model_parallel_size", 1),
        etp=d.integer(f"{m}.expert_tensor_parallel_size", 0) or None,
        engine_tp=d.integer(f"{ROLLOUT}.tensor_model_parallel_size", 2),
    )  # fmt: skip
    return sizes, names


def _group_size(d: Draft) -> int:
    """Return the number of samples of a group. It is unresolved if the advantages need more than one."""
    n = d.integer(f"{ROLLOUT}.n", 1)
    if (
        n == 1
        and not d.is_unresolved(f"{ROLLOUT}.n")
        and d.get_field("algo.advantage", "") in ("grpo", "dr_grpo", "rloo")
        and has_task_rewards(d)
    ):
        d.mark_unresolved(f"{ROLLOUT}.n", "expected more than 1: a group of one sample has no baseline")
    return n


def _groups(d: Draft) -> tuple[int, tuple[str, ...]]:
    """Return the number of groups that a step trains, and the settings that set it."""
    trained, generated = "data.train_batch_size", "data.gen_batch_size"
    groups = d.integer(trained, 1024)
    if not d.is_present(generated) or d.get(PROGRAM) in FULLY_ASYNC:
        return groups, (trained,)
    generated_groups = d.integer(generated, groups)
    if d.flag("algorithm.filter_groups.enable") or generated_groups == groups:
        return groups, (trained,)
    d.warnings.append(
        f"rollout.groups_per_step = {generated_groups}: without filter_groups a step trains {generated} prompts"
    )
    return generated_groups, (generated, trained)
