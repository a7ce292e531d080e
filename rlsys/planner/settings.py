"""Settings that `rlsys plan` compares: placement, numbers of trainer ranks and engines, N'/N, and staleness."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rlsys.config import Config
from rlsys.config.mistakes import explain_error
from rlsys.config.trainer import ParallelConfig
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_layout
from rlsys.core.errors import UserError
from rlsys.core.machines import Machine
from rlsys.planner.layout import lay_out, push_plan
from rlsys.planner.layout_search import Candidate, first_fit
from rlsys.planner.memory import memory_problems

PER_NODE = 8
"""Largest number of GPUs per node."""
_OVER_PROVISIONS = (1.0, 1.5, 2.0)
"""Compared values of N'/N (rollout.over_provision)."""
_DEFAULT_AGE = 4
"""max_staleness of settings with N'/N above 1, if the config has 0."""
_TRAINER_SHARES = (0.25, 0.5, 0.75)
"""Compared shares of the GPUs for the trainer of a disaggregated run."""


Changes = dict[str, dict[str, Any]]
"""Changes of a config: section -> field -> value."""


@dataclass(frozen=True)
class Setting:
    """A config to compare, and its description."""

    name: str
    config: Config


def unchanged_setting(config: Config) -> Setting:
    """Return the config as a setting without changes."""
    return Setting("unchanged", config)


def settings(
    config: Config, hf: HFConfig, gpus: int | None, machine: Machine | None
) -> Iterator[Setting | str]:
    """Yield the settings to compare, and for each impossible setting a line with the reason.

    If no setting with the config's parallelism is possible, settings with the first layout that fits follow.

    Args:
        config: the config.
        hf: configuration of the model.
        gpus: number of GPUs; None for the layout of the config only.
        machine: the GPU; None if the memory is not checked.
    """
    possible = False
    for placement, layout in _layouts(config, gpus):
        for setting in _variants(config, hf, machine, placement, layout):
            possible |= isinstance(setting, Setting)
            yield setting
    if possible or gpus is None or machine is None:
        return
    fit = first_fit(hf, gpus, machine, lambda c: _with_changes(config, _changes(config, hf, gpus, c)))
    if fit is not None:
        yield from _variants(config, hf, machine, _describe(fit[0]), _changes(config, hf, gpus, fit[0]))


def _variants(
    config: Config, hf: HFConfig, machine: Machine | None, layout_name: str, layout: Changes
) -> Iterator[Setting | str]:
    """Yield the settings of a layout for each N'/N and staleness; for an impossible setting, its name and the reason.

    Args:
        config: the config.
        hf: configuration of the model.
        machine: the GPU; None if the memory is not checked.
        layout_name: description of the layout.
        layout: config fields that the layout changes.
    """
    for over in _OVER_PROVISIONS:
        ages = {0} if over == 1.0 else {config.rollout.max_staleness or _DEFAULT_AGE}
        if over == 1.0 and config.launch.placement == "disaggregated":
            ages.add(config.rollout.max_staleness)
        for age in sorted(ages):
            name = f"{layout_name}, N'/N {over:g}, {age} step{'s' * (age != 1)} old"
            rollout = {"over_provision": over, "max_staleness": age}
            try:
                changed_config = _with_changes(config, {**layout, "rollout": rollout})
                check_layout(changed_config, hf)
                push_plan(changed_config, lay_out(changed_config))
            except UserError as e:
                yield f"{name}: {e}"
                continue
            if (groups := changed_config.rollout.groups_per_step) != config.rollout.groups_per_step:
                name += f", {groups} groups a step"
            if machine is not None and (problems := memory_problems(changed_config, hf, machine.memory)):
                yield f"{name}: {problems[0]}"
            else:
                yield Setting(name, changed_config)


def _describe(c: Candidate) -> str:
    """Describe a layout."""
    offload = ", optimizer in host memory" if c.offload else ""
    return f"colocated, bfloat16, tp {c.tp}, pp {c.pp}, ep {c.ep}{offload}, engines of tp {c.engine_tp}"


def _launch_changes(config: Config, gpus: int) -> dict[str, Any]:
    """Return the changed fields of `launch` for a number of GPUs."""
    per_node = min(gpus, PER_NODE)
    launch: dict[str, Any] = {"nodes": -(-gpus // per_node), "gpus_per_node": per_node}
    if launch["nodes"] > 1 and config.launch.backend == "local":
        launch["backend"] = "slurm"
    return launch


def _changes(config: Config, hf: HFConfig, gpus: int, c: Candidate) -> Changes:
    """Return the changes for a layout in which trainer and engines share all GPUs."""
    launch = {"placement": "colocated", "release_memory": True}
    return {
        "model": {"dtype": "bfloat16"},
        "parallel": {
            "tp": c.tp, "pp": c.pp, "vpp": 1, "cp": 1, "ep": c.ep, "etp": 1 if hf.experts else None,
            "dp": gpus // (c.tp * c.pp),
        },
        "trainer": {"offload_optimizer": c.offload, "recompute": ["layer"]},
        "engine": {"count": gpus // c.engine_tp, "tp": c.engine_tp, "max_total_tokens": None},
        "launch": _launch_changes(config, gpus) | launch,
    }  # fmt: skip


def _layouts(config: Config, gpus: int | None) -> Iterator[tuple[str, Changes]]:
    """Yield descriptions of layouts with the config's parallelism, and their changes.

    Args:
        config: the config.
        gpus: number of GPUs; None for the layout of the config only.
    """
    if gpus is None:
        count, placement = config.engine.count, config.launch.placement
        yield f"{placement}, {count} engine{'s' * (count > 1)}", {}
        return
    launch, p, tp = _launch_changes(config, gpus), config.parallel, config.engine.tp
    replica_ranks = p.tp * p.pp * p.cp
    smallest_world = math.lcm(replica_ranks, p.pp * p.ep * p.expert_tp)
    yield (
        f"colocated, {gpus // tp} engines",
        {
            "launch": {**launch, "placement": "colocated"},
            "parallel": {"dp": gpus // smallest_world * smallest_world // replica_ranks},
            "engine": {"count": gpus // tp},
        },
    )
    worlds = {
        max(smallest_world, round(share * gpus / smallest_world) * smallest_world)
        for share in _TRAINER_SHARES
    }
    for world in sorted(worlds):
        count = (gpus - world) // tp
        yield (
            f"disaggregated, {count} engines beside {world} trainer GPUs",
            {
                "launch": {**launch, "placement": "disaggregated", "release_memory": False},
                "parallel": {"dp": world // replica_ranks},
                "engine": {"count": count},
            },
        )


def _with_changes(config: Config, changes: Changes) -> Config:
    """Return the config with these changes, and with the nearest valid rollout.groups_per_step.

    The samples of a step must be divisible by the data-parallel size times the number of mini-batches.

    Raises:
        UserError: the changed config is invalid.
    """
    values = config.model_dump()
    for section, fields in changes.items():
        values[section] |= fields
    try:
        parts = ParallelConfig.model_validate(values["parallel"]).data_parallel * config.algo.minibatches
        divisor = parts // math.gcd(parts, config.rollout.group_size)
        groups = max(1, round(config.rollout.groups_per_step / divisor)) * divisor
        values["rollout"]["groups_per_step"] = groups
        return Config.model_validate(values)
    except ValidationError as e:
        raise UserError(explain_error(e, Config)) from None
