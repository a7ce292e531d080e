"""Descriptions of config and plan for `rlsys explain`. Pure."""

from __future__ import annotations

import shlex
from itertools import groupby
from pathlib import Path
from typing import Any

from launch.plan import LaunchPlan, Role
from rlsys.config import Config
from rlsys.config.algo import Spec
from rlsys.config.rollout import PoolConfig
from rlsys.convert.config import HFConfig
from rlsys.convert.prefixes import why_not_shared
from rlsys.core.hub import snapshot_name
from rlsys.planner.memory import Fact

_MAX_PARAMS_CHARACTERS = 100
"""Maximum length of the description of a plug-in's parameters."""

_MAX_NODES = 4
"""Maximum number of nodes for which idle GPUs are listed."""


def describe_plan(plan: LaunchPlan) -> str:
    """Return one line per role, ordered by node: name, GPUs, environment variables and command line."""
    lines = []
    for index, roles in groupby(sorted(plan.roles, key=lambda r: r.node), key=lambda r: r.node):
        node = plan.nodes[index]
        if len(plan.nodes) > 1:
            lines.append(f"node {index} ({node.name}):")
        lines += [_describe_role(role) for role in roles]
    return "\n".join(lines)


def describe_idle(config: Config, plan: LaunchPlan) -> list[str]:
    """Return one line about GPUs without a role, and for a colocated run, one about GPUs that only one kind uses."""
    total = len(plan.nodes) * config.launch.gpus_per_node
    if not total:
        return []
    without_role = _unassigned(config, plan, "engine", "trainer")
    lines = (
        [f"IDLE: {_describe_gpus(plan, without_role)} of {total} GPUs: no role has them"]
        if without_role
        else []
    )
    if config.launch.placement == "colocated":
        for kind, when in (("engine", "while samples are generated"), ("trainer", "while the trainer works")):
            if partly_idle := _unassigned(config, plan, kind) - without_role:
                lines.append(
                    f"IDLE {when}: {_describe_gpus(plan, partly_idle)} of {total} GPUs: no {kind} has them"
                )
    return lines


def _unassigned(config: Config, plan: LaunchPlan, *kinds: str) -> set[tuple[int, int]]:
    """Return (index of the node, index of the GPU) of all GPUs that no role of these kinds has."""
    all_gpus = {(n, gpu) for n in range(len(plan.nodes)) for gpu in range(config.launch.gpus_per_node)}
    return all_gpus - {(role.node, gpu) for role in plan.roles if role.kind in kinds for gpu in role.gpus}


def _describe_gpus(plan: LaunchPlan, gpus: set[tuple[int, int]]) -> str:
    """Return the number of GPUs, and their indices on the first _MAX_NODES nodes.

    Args:
        plan: the launch plan.
        gpus: (index of the node, index of the GPU) of each.
    """
    by_node = [
        f"{plan.nodes[node].name} {','.join(str(gpu) for _, gpu in node_gpus)}"
        for node, node_gpus in groupby(sorted(gpus), key=lambda node_gpu: node_gpu[0])
    ]
    rest_note = f"; and of {len(by_node) - _MAX_NODES} more nodes" if len(by_node) > _MAX_NODES else ""
    return f"{len(gpus)} ({'; '.join(by_node[:_MAX_NODES])}{rest_note})"


def _describe_role(role: Role) -> str:
    """Return a role's line of describe_plan."""
    variables = "".join(f"{k}={shlex.quote(v)} " for k, v in sorted(role.env.items()))
    gpus = f"[GPU {','.join(map(str, role.gpus))}] " if role.gpus else ""
    command = shlex.join([Path(role.argv[0]).name, *role.argv[1:]])
    return f"{role.name:10}  {gpus}{variables}{command}"


def describe_parts(config: Config) -> list[Fact]:
    """Return (name, description) of model, data and algorithm."""
    data, algo = config.data, config.algo
    specs_by_kind = [("advantage", [algo.advantage]), ("loss", algo.loss), ("corrections", algo.corrections)]
    specs_by_kind += [("shaping", algo.shaping), ("selectors", algo.selectors), ("planners", algo.planners)]
    specs_by_kind += [("hooks", algo.hooks), ("reducer", [algo.reducer])]
    parts = [f"{kind} {' + '.join(map(_describe_spec, specs))}" for kind, specs in specs_by_kind if specs]
    params = f" with {_describe_params(data.params)}" if data.params else ""
    return [
        ("model", f"{_model(config.model.path)}, {config.model.dtype}"),
        ("prompts", f"{data.source}{params}"),
        ("reward", data.reward_name),
        ("algorithm", ", ".join([*parts, f"anchor {algo.anchor}"])),
        ("mode", mode(config)),
    ]


def describe_fine_tuning(config: Config) -> list[Fact]:
    """Return (name, description) of model, answers, loss and steps of supervised fine-tuning."""
    sft, t = config.sft, config.trainer
    params = f" with {_describe_params(sft.params)}" if sft.params else ""
    return [
        ("model", f"{_model(config.model.path)}, {config.model.dtype}"),
        ("answers", f"{sft.traces}{params}"),
        ("loss", _describe_spec(sft.loss)),
        ("steps", f"{t.steps} train steps, a checkpoint every {t.checkpoint_every}"),
        ("learning rate", f"{t.lr:g} after {t.warmup_steps} steps, falling to {t.lr * sft.lr_end:g}"),
    ]


def _model(folder: Path) -> str:
    """Return the path of a model folder; for a snapshot of the Hugging Face Hub, also its name."""
    name = snapshot_name(folder)
    return str(folder) if name is None else f"{name} in {folder}"


def _describe_spec(spec: Spec) -> str:
    """Return the name of a plug-in, and its parameters in parentheses."""
    return f"{spec.name}({_describe_params(spec.params)})" if spec.params else spec.name


def _describe_params(params: dict[str, Any]) -> str:
    """Return `name value, name value`, truncated to _MAX_PARAMS_CHARACTERS."""
    text = ", ".join(f"{k} {v}" for k, v in params.items())
    return text if len(text) <= _MAX_PARAMS_CHARACTERS else f"{text[:_MAX_PARAMS_CHARACTERS]} ..."


def describe_arithmetic(config: Config) -> list[Fact]:
    """Return (name, description) of the numbers of samples, groups and ranks that follow from the config."""
    r, p, n = config.rollout, config.parallel, config.samples_per_step
    per_rank = n // (p.data_parallel * config.algo.minibatches)
    capacity = config.engine.writers * config.max_running_requests
    factor = f"{'auto, from ' if r.over_provision == 'auto' else ''}{config.over_provision:g}"
    updates = config.algo.minibatches * config.algo.epochs
    prompts = config.eval.prompts
    evaluation_size = f" of {prompts} prompts" if prompts else ""
    if prompts is None:
        evaluation_size = " of 128 prompts, or of all in a held-out file"
    return [
        ("one step trains", f"{r.groups_per_step} groups x {r.group_size} samples = {n} samples"),
        (
            "in flight",
            f"{config.slots} samples (over_provision {factor}), "
            f"{config.engine.writers} engine(s) decode up to {capacity} at once",
        ),
        *((f"pool {pool.name}", _describe_pool(pool, config.engine.tp)) for pool in config.engine.pools),
        (
            "an optimizer update",
            f"{n // config.algo.minibatches} samples, {per_rank} on each of "
            f"{p.data_parallel} data-parallel rank(s), micro-batches of <= {config.trainer.token_budget} computed "
            f"tokens; {updates} update(s) a step",
        ),
        (
            "trainer ranks",
            f"{p.world_size} = tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {p.data_parallel}; "
            f"experts ep {p.ep} x etp {p.expert_tp}",
        ),
        (
            "whole run",
            f"{config.trainer.steps} steps = {config.trainer.steps * n} samples, "
            f"{evaluations(config) or 'no'} evaluations{evaluation_size}",
        ),
    ]


def _describe_pool(pool: PoolConfig, default_tp: int) -> str:
    """Return the description of a pool of engines. `default_tp`: engine.tp."""
    text = f"{pool.count} engine(s) of tp {pool.tp or default_tp}, cost {pool.cost:g} a rank and second"
    if pool.role == "explore":
        text += ", explores prompts"
    if pool.relay:
        text += f", weights are sent once instead of {pool.count} times"
    return text


def describe_prompts(config: Config, hf: HFConfig, transformer_engine: bool) -> Fact:
    """Return how often the trainer computes a prompt that several samples share."""
    reason = why_not_shared(config, hf, transformer_engine)
    frequency = "once in each micro-batch" if reason is None else f"for every sample: {reason}"
    return "prompts of a group", f"computed {frequency}"


def mode(config: Config) -> str:
    """Return the mode that follows from over_provision, max_staleness and placement (docs/architecture.md)."""
    max_staleness = config.rollout.max_staleness
    age = f"tokens up to {max_staleness} train steps old"
    if config.launch.placement == "disaggregated" and max_staleness > 0:
        return f"asynchronous, {age}"
    if config.over_provision > 1:
        return f"APRIL: a step interrupts the remaining samples when it has enough groups; {age}"
    return "synchronous, on-policy" if max_staleness == 0 else f"synchronous with surplus, {age}"


def evaluations(config: Config) -> int:
    """Return the number of evaluations: before the first step, every eval.interval steps, and after the last step.

    The number is 0 if eval.prompts is 0.
    """
    if config.eval.prompts == 0:
        return 0
    steps, interval = config.trainer.steps, config.eval.interval
    return 1 + -(-steps // interval)
