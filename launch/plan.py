"""Config -> the processes of a run: pure, so that `rlsys explain` shows exactly what `rlsys train` starts."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlsys.config import Config

Kind = Literal["engine", "rollout", "trainer"]

EngineCommand = Callable[[Config, int, int], tuple[list[str], dict[str, str]]]
"""(config, index of the engine, its port) -> command line and environment."""

THREADS = {
    "OMP_NUM_THREADS": "1",  # several processes share the cores
    "TORCH_COMPILE_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a run reads only what is on this disk
    "PYTHONUNBUFFERED": "1",  # a log must hold the last line before a death
}


@dataclass(frozen=True)
class Role:
    """One process to start.

    `ready_url` answers 200 when it can work (None: nobody waits for it); the rollout process's gives its
    counts as JSON.
    """

    name: str
    kind: Kind
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    ready_url: str | None = None
    start_timeout: float | None = None

    @property
    def log_name(self) -> str:
        return f"{self.name}.log"


@dataclass(frozen=True)
class Ports:
    """Ports of one machine: the engines' in order, and the rollout process's."""

    engines: list[int]
    rollout: int


@dataclass(frozen=True)
class Plan:
    """All roles in the order in which they start; they end in the reverse order."""

    roles: list[Role]

    def environment(self, role: Role, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        return {**base, **THREADS, **role.env}


def build_plan(config: Config, ports: Ports, engine_command: EngineCommand) -> Plan:
    """The roles of `config` on one machine. Port 0 stands for one that is chosen at the start."""
    run_config = str(config.run.dir / "config.yaml")
    host = "127.0.0.1" if config.engine.host == "0.0.0.0" else config.engine.host
    engine_urls = [f"http://{host}:{port}" for port in ports.engines]
    rollout_url = f"http://127.0.0.1:{ports.rollout}"
    roles = []
    for index, (port, url) in enumerate(zip(ports.engines, engine_urls, strict=True)):
        argv, env = engine_command(config, index, port)
        timeout = config.engine.start_timeout
        roles.append(Role(f"engine-{index}", "engine", argv, env, f"{url}/health", timeout))
    rollout = [sys.executable, "-m", "rlsys.rollout.service", "--config", run_config]
    rollout += ["--port", str(ports.rollout)]
    for url in engine_urls:
        rollout += ["--engine", url]
    roles.append(Role("rollout", "rollout", rollout, ready_url=f"{rollout_url}/status"))
    roles.append(_trainer(config, "rlsys.train", "--rollout", rollout_url))
    return Plan(roles)


def build_sft_plan(config: Config) -> Plan:
    """Fine-tuning on traces: the trainer alone."""
    return Plan([_trainer(config, "rlsys.trainer.sft")])


def _trainer(config: Config, module: str, *args: str) -> Role:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
    torchrun += ["--nproc-per-node", str(config.parallel.world_size), "-m", module]
    return Role("trainer", "trainer", [*torchrun, "--config", str(config.run.dir / "config.yaml"), *args])


def describe_plan(plan: Plan) -> str:
    """The roles and their command lines, as text."""
    lines = []
    for role in plan.roles:
        own = " ".join(f"{k}={shlex.quote(v)}" for k, v in sorted(role.env.items()))
        command = shlex.join([Path(role.argv[0]).name, *role.argv[1:]])
        lines.append(f"{role.name:10}  {own + ' ' if own else ''}{command}")
    return "\n".join(lines)


def describe_arithmetic(config: Config) -> str:
    """How many samples, groups and ranks the numbers of the config come to, one fact a line."""
    r, p, n = config.rollout, config.parallel, config.samples_per_step
    per_rank = n // (p.data_parallel * config.algo.minibatches)
    capacity = config.engine.count * config.engine.max_running_requests
    facts = [
        f"one step trains      {r.groups_per_step} groups x {r.group_size} samples = {n} samples",
        f"in flight            {config.slots} samples (over_provision {r.over_provision:g}), "
        f"{config.engine.count} engine(s) decode up to {capacity} at once",
        f"mode                 {mode(config)}",
        f"an optimizer update  {n // config.algo.minibatches} samples, {per_rank} on each of "
        f"{p.data_parallel} data-parallel rank(s), micro-batches of <= {config.trainer.token_budget} tokens",
        f"trainer ranks        {p.world_size} = tp {p.tp} x pp {p.pp} x cp {p.cp} x dp {p.data_parallel}; "
        f"experts ep {p.ep} x etp {p.expert_tp}",
        f"whole run            {config.trainer.steps} steps = {config.trainer.steps * n} samples, "
        f"{evaluations(config)} evaluations of {config.eval.prompts} prompts",
    ]
    return "\n".join(facts)


def mode(config: Config) -> str:
    """What the three numbers make: see the table in docs/architecture.md."""
    r, stale = config.rollout, f"tokens up to {config.rollout.max_staleness} versions old"
    if config.launch.placement == "disaggregated" and r.max_staleness > 0:
        return f"asynchronous, {stale}"
    if r.over_provision > 1:
        return f"APRIL: the rest is interrupted when enough are done; {stale}"
    return "synchronous, on-policy" if r.max_staleness == 0 else f"synchronous with surplus, {stale}"


def evaluations(config: Config) -> int:
    """One before the first step, one every eval.every steps, one after the last."""
    steps, every = config.trainer.steps, config.eval.every
    return 1 + -(-steps // every)
