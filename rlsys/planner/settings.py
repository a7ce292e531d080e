"""Settings of a config to try: placement and number of trainer ranks and engines, N'/N, and staleness."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rlsys.config import Config
from rlsys.config.mistakes import explain_error
from rlsys.convert.config import HFConfig
from rlsys.convert.fit import check_layout
from rlsys.core.errors import UserError
from rlsys.core.machines import Machine
from rlsys.planner.layout import lay_out, push_plan
from rlsys.planner.memory import memory_problems

PER_NODE = 8
"""GPUs per node of larger runs."""
_OVER = (1.0, 1.5, 2.0)
_AGE = 4
"""max_staleness to try with N'/N above 1, if the config has 0."""
_SHARES = (0.25, 0.5, 0.75)
"""Fractions of the GPUs for the trainer of a disaggregated run."""


@dataclass(frozen=True)
class Setting:
    """A config to try."""

    name: str
    config: Config


def unchanged_setting(config: Config) -> Setting:
    """Return the config itself as a setting."""
    return Setting("unchanged", config)


def settings(
    config: Config, hf: HFConfig, gpus: int | None, machine: Machine | None
) -> Iterator[Setting | str]:
    """Yield each possible setting, or a text with the reason why it is impossible.

    `gpus` None: use the config's own layout only.
    """
    for placement, layout in _layouts(config, gpus):
        for over in _OVER:
            ages = {0} if over == 1.0 else {config.rollout.max_staleness or _AGE}
            if over == 1.0 and config.launch.placement == "disaggregated":
                ages.add(config.rollout.max_staleness)
            for age in sorted(ages):
                name = f"{placement}, N'/N {over:g}, {age} step{'s' * (age != 1)} old"
                rollout = {"over_provision": over, "max_staleness": age}
                try:
                    changed_config = _with_changes(config, {**layout, "rollout": rollout})
                    check_layout(changed_config, hf)
                    push_plan(changed_config, lay_out(changed_config))
                except UserError as e:
                    yield f"{name}: {e}"
                    continue
                if machine is not None and (problems := memory_problems(changed_config, hf, machine.memory)):
                    yield f"{name}: {problems[0]}"
                else:
                    yield Setting(name, changed_config)


def _layouts(config: Config, gpus: int | None) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Yield a description, and the changed fields by section."""
    if gpus is None:
        count, placement = config.engine.count, config.launch.placement
        yield f"{placement}, {count} engine{'s' * (count > 1)}", {}
        return
    per_node = min(gpus, PER_NODE)
    launch: dict[str, Any] = {"nodes": -(-gpus // per_node), "gpus_per_node": per_node}
    if launch["nodes"] > 1 and config.launch.backend == "local":
        launch["backend"] = "slurm"
    p, tp = config.parallel, config.engine.tp
    of_model = p.tp * p.pp * p.cp
    yield (
        f"colocated, {gpus // tp} engines",
        {
            "launch": {**launch, "placement": "colocated"},
            "parallel": {"dp": gpus // of_model},
            "engine": {"count": gpus // tp},
        },
    )
    least = math.lcm(of_model, p.pp * p.ep * p.expert_tp)
    for_trainer = {max(least, round(share * gpus / least) * least) for share in _SHARES}
    for trained_on in sorted(for_trainer):
        count = (gpus - trained_on) // tp
        yield (
            f"disaggregated, {count} engines beside {trained_on} trainer GPUs",
            {
                "launch": {**launch, "placement": "disaggregated", "release_memory": False},
                "parallel": {"dp": trained_on // of_model},
                "engine": {"count": count},
            },
        )


def _with_changes(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    values = config.model_dump()
    for section, fields in changes.items():
        values[section] |= fields
    try:
        return Config.model_validate(values)
    except ValidationError as e:
        raise UserError(explain_error(e, Config)) from None
