"""Description of config and plan, for `rlsys explain`. Pure."""

from __future__ import annotations

import shlex
from itertools import groupby
from pathlib import Path
from typing import Any

from launch.plan import LaunchPlan, Role
from rlsys.config import Config
from rlsys.config.algo import Spec
from rlsys.convert.config import HFConfig
from rlsys.convert.prefixes import why_not_shared
from rlsys.core.hub import snapshot_name
from rlsys.planner.memory import Fact

_PARAMS = 100
"""Maximum characters of a plug-in's parameters."""

_MAX_NODES = 4
"""Maximum number of nodes whose idle GPUs are listed."""


def describe_plan(plan: LaunchPlan) -> str:
    """List the roles by node, each with its GPUs and its command line."""
    lines = []
    for index, roles in groupby(sorted(plan.roles, key=lambda r: r.node), key=lambda r: r.node):
        node = plan.nodes[index]
        if len(plan.nodes) > 1:
            lines.append(f"node {index} ({node.name}):")
        lines += [_describe_role(role) for role in roles]
    return "\n".join(lines)


def describe_idle(config: Config, plan: LaunchPlan) -> list[str]:
    """List GPUs without a role, and those that are idle half of the time in a colocated run."""
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
    """Return (node, GPU) of all GPUs that no role of these kinds has."""
    all_gpus = {(n, gpu) for n in range(len(plan.nodes)) for gpu in range(config.launch.gpus_per_node)}
    return all_gpus - {(role.node, gpu) for role in plan.roles if role.kind in kinds for gpu in role.gpus}


def _describe_gpus(plan: LaunchPlan, gpus: set[tuple[int, int]]) -> str:
    """Return the number of GPUs, and their numbers on the first few nodes."""
    by_node = [
        f"{plan.nodes[node].name} {','.join(str(gpu) for _, gpu in on_it)}"
        for node, on_it in groupby(sorted(gpus), key=lambda node_gpu: node_gpu[0])
    ]
    rest_note = f"; and of {len(by_node) - _MAX_NODES} more nodes" if len(by_node) > _MAX_NODES else ""
    return f"{len(gpus)} ({'; '.join(by_node[:_MAX_NODES])}{rest_note})"


def _describe_role(role: Role) -> str:
    variables = "".join(f"{k}={shlex.quote(v)} " for k, v in sorted(role.env.items()))
    gpus = f"[GPU {','.join(map(str, role.gpus))}] " if role.gpus else ""
    command = shlex.join([Path(role.argv[0]).name, *role.argv[1:]])
    return f"{role.name:10}  {gpus}{variables}{command}"


def describe_parts(config: Config) -> list[Fact]:
    """Describe model, data and algorithm."""
    data, algo = config.data, config.algo
    specs_by_kind = [("advantage", [algo.advantage]), ("loss", algo.loss), ("corrections", algo.corrections)]
    specs_by_kind += [("shaping", algo.shaping), ("selectors", algo.selectors), ("planners", algo.planners)]
    specs_by_kind += [("hooks", algo.hooks), ("reducer", [algo.reducer])]
    parts = [f"{kind} {' + '.join(map(_short, specs))}" for kind, specs in specs_by_kind if specs]
    params = f" with {_flat(data.params)}" if data.params else ""
    return [
        ("model", f"{_model(config.model.path)}, {config.model.dtype}"),
        ("prompts", f"{data.source}{params}"),
        ("reward", data.reward_name),
        ("algorithm", ", ".join([*parts, f"anchor {algo.anchor}"])),
        ("mode", mode(config)),
    ]


def describe_fine_tuning(config: Config) -> list[Fact]:
    """Describe model, answers and loss of supervised fine-tuning."""
    sft, t = config.sft, config.trainer
    params = f" with {_flat(sft.params)}" if sft.params else ""
    return [
        ("model", f"{_model(config.model.path)}, {config.model.dtype}"),
        ("answers", f"{sft.traces}{params}"),
        ("loss", _short(sft.loss)),
        ("steps", f"{t.steps} train steps, a checkpoint every {t.checkpoint_every}"),
        ("learning rate", f"{t.lr:g} after {t.warmup_steps} steps, falling to {t.lr * sft.lr_end:g}"),
    ]


def _model(folder: Path) -> str:
    name = snapshot_name(folder)
    return str(folder) if name is None else f"{name} in {folder}"


def _short(spec: Spec) -> str:
    return f"{spec.name}({_flat(spec.params)})" if spec.params else spec.name


def _flat(params: dict[str, Any]) -> str:
    text = ", ".join(f"{k} {v}" for k, v in params.items())
    return text if len(text) <= _PARAMS else f"{text[:_PARAMS]} ..."


def describe_arithmetic(config: Config) -> list[Fact]:
    """Describe the numbers of samples, groups and ranks that follow from the config."""
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
        *(
            (
                f"pool {p.name}",
                f"{p.count} engine(s) of tp {p.tp or config.engine.tp}, cost {p.cost:g} a rank and second"
                + (", explores prompts" if p.role == "explore" else "")
                + (f", weights are sent once instead of {p.count} times" if p.relay else ""),
            )
            for p in config.engine.pools
        ),
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


def describe_prompts(config: Config, hf: HFConfig, transformer_engine: bool) -> Fact:
    """Describe how often the trainer computes a prompt that several samples share."""
    reason = why_not_shared(config, hf, transformer_engine)
    often = "once in each micro-batch" if reason is None else f"for every sample: {reason}"
    return "prompts of a group", f"computed {often}"


def mode(config: Config) -> str:
    """Describe the mode that follows from over_provision, max_staleness and placement (docs/architecture.md)."""
    r, stale = config.rollout, f"tokens up to {config.rollout.max_staleness} train steps old"
    if config.launch.placement == "disaggregated" and r.max_staleness > 0:
        return f"asynchronous, {stale}"
    if config.over_provision > 1:
        return f"APRIL: the rest is interrupted when enough are done; {stale}"
    return "synchronous, on-policy" if r.max_staleness == 0 else f"synchronous with surplus, {stale}"


def evaluations(config: Config) -> int:
    """Return the number of evaluations: before the first step, every eval.interval steps, and after the last.

    An evaluation of 0 prompts does not count.
    """
    if config.eval.prompts == 0:
        return 0
    steps, interval = config.trainer.steps, config.eval.interval
    return 1 + -(-steps // interval)
