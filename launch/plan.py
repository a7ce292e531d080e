"""Config -> the processes of a run: pure, so that `rlsys explain` shows exactly what `rlsys train` starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launch.environment import Kind, environment
from rlsys.config import Config
from rlsys.config.beside import reference_config, teacher_config
from rlsys.core.errors import UserError
from rlsys.core.identity import config_path
from rlsys.core.membership import FOLDER as MEMBERS
from rlsys.core.membership import WEIGHTS_VARIABLE
from rlsys.obs.role import STACKS_VARIABLE
from rlsys.planner.layout import Layout, NodeShare, on_cuda, push_plan
from rlsys.segments.records import FOLDER as SEGMENTS
from rlsys.segments.route_records import ROUTES_VARIABLE

EngineCommand = Callable[[Config, int, int], tuple[list[str], dict[str, str]]]
"""(config, index of the engine, its port) -> command line and environment."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Node:
    """One machine of the run: its name for the scheduler, its address for the other machines."""

    name: str
    address: str = LOOPBACK


@dataclass(frozen=True)
class Role:
    """One process to start on node `node` of the run.

    Roles of one `unit` live and die together: the trainer's nodes, or those of an engine that spans several.
    `ready_url` answers 200 when it can work (None: nobody waits for it); the rollout process's is a path
    at its Unix socket, and gives its counts as JSON. `gpus`: indices into the node's GPUs; empty: whatever it finds.
    `engine`: the URL of the engine that it is, or is a part of. `explores`: that engine tries prompts out, and writes
    no samples.
    """

    name: str
    kind: Kind
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    ready_url: str | None = None
    start_timeout: float | None = None
    unit: str = ""
    node: int = 0
    gpus: tuple[int, ...] = ()
    engine: str | None = None
    explores: bool = False

    def __post_init__(self) -> None:
        if not self.unit:
            object.__setattr__(self, "unit", self.name)

    @property
    def log_name(self) -> str:
        return f"{self.name}.log"


@dataclass(frozen=True)
class Ports:
    """The engines' ports in order, and where the nodes of one unit meet.

    `trainer_meeting` and `engine_meetings` are used by units on several nodes only, `reference` and `teacher` by the
    servers that are called so.
    """

    engines: list[int]
    trainer_meeting: int = 0
    engine_meetings: tuple[int, ...] = ()
    reference: int = 0
    teacher: int = 0


@dataclass(frozen=True)
class LaunchPlan:
    """All roles in the order in which they start; they end in the reverse order."""

    roles: list[Role]
    nodes: list[Node] = field(default_factory=lambda: [Node("localhost")])
    run_dir: Path = Path()
    shared: Mapping[Kind, dict[str, str]] = field(default_factory=dict)
    """Environment variables that all roles of a kind get."""

    def environment(self, role: Role, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """`base` with what all roles of its kind get, where this one may write its stacks and routes, and its own."""
        own = {STACKS_VARIABLE: str((self.run_dir / "logs" / "stacks" / role.unit).absolute())}
        if role.kind == "engine":
            own[WEIGHTS_VARIABLE] = str((self.run_dir / MEMBERS / "weights").absolute())
            own[ROUTES_VARIABLE] = str((self.run_dir / SEGMENTS / role.unit).absolute())
        return {**base, **self.shared.get(role.kind, {}), **own, **role.env}

    def pool(self) -> list[Role]:
        """Of each engine that the router knows, the role that answers for it."""
        return [r for r in self.roles if r.kind == "engine" and r.unit.startswith("engine-") and r.ready_url]

    def unit(self, name: str) -> list[Role]:
        return [role for role in self.roles if role.unit == name]


def build_plan(
    config: Config, layout: Layout, nodes: list[Node], ports: Ports, engine_command: EngineCommand
) -> LaunchPlan:
    """The roles of `config` on `nodes`. Port 0 stands for one that is chosen at the start.

    Raises UserError when the weights cannot reach an engine on another machine.
    """
    roles, urls = _engines(config, layout, nodes, ports, engine_command)
    push_plan(config, layout)  # refuses what weights cannot reach
    rollout = [sys.executable, "-m", "rlsys.rollout.service", "--config", _run_config(config)]
    rollout += [word for url in urls for word in ("--engine", url)]
    if (reference := config.engine.reference) == "own":
        own = reference_config(config)
        roles.append(_beside("reference", "engine.reference", own, layout, ports.reference, engine_command))
        reference = roles[-1].engine
    rollout += ["--reference", reference] if reference else []
    teacher = config.algo.teacher.engine if config.algo.teacher is not None else None
    if teacher == "own":
        own = teacher_config(config)
        roles.append(_beside("teacher", "algo.teacher.engine", own, layout, ports.teacher, engine_command))
        teacher = roles[-1].engine
    rollout += ["--teacher", teacher] if teacher else []
    roles.append(Role("rollout", "rollout", rollout, ready_url="/status"))
    roles += _trainer(config, layout, nodes, ports.trainer_meeting, "rlsys.train", [])
    return LaunchPlan(roles, nodes, config.run.dir, _shared(config))


def build_asking_plan(
    config: Config,
    layout: Layout,
    nodes: list[Node],
    ports: Ports,
    engine_command: EngineCommand,
    module: str,
) -> LaunchPlan:
    """Engines, and the process of `module` (its full name) that sends prompts to them."""
    roles, urls = _engines(config, layout, nodes, ports, engine_command)
    asking = [sys.executable, "-m", module, "--config", _run_config(config)]
    asking += [word for url in urls for word in ("--engine", url)]
    asking_role = Role(module.rpartition(".")[2], "trainer", asking)
    return LaunchPlan([*roles, asking_role], nodes, config.run.dir, _shared(config))


def build_tenants_plan(
    config: Config,
    layout: Layout,
    nodes: list[Node],
    ports: Ports,
    engine_command: EngineCommand,
    arguments: list[str],
) -> LaunchPlan:
    """An engine, and a trainer that does what tenants ask (rlsys.tenants). `arguments`: further ones of it."""
    roles, urls = _engines(config, layout, nodes, ports, engine_command)
    more = [*(word for url in urls for word in ("--engine", url)), *arguments]
    roles += _trainer(config, layout, nodes, ports.trainer_meeting, "rlsys.tenants.serve", more)
    return LaunchPlan(roles, nodes, config.run.dir, _shared(config))


def build_sft_plan(config: Config, layout: Layout, nodes: list[Node], ports: Ports) -> LaunchPlan:
    """Fine-tuning on traces: the trainer alone."""
    trainer = _trainer(config, layout, nodes, ports.trainer_meeting, "rlsys.trainer.sft.sft", [])
    return LaunchPlan(trainer, nodes, config.run.dir, _shared(config))


def _shared(config: Config) -> dict[Kind, dict[str, str]]:
    kinds: tuple[Kind, ...] = ("engine", "rollout", "trainer")
    cuda = on_cuda(config)
    return {kind: environment(config, kind, cuda=cuda) for kind in kinds}


def _engines(
    config: Config, layout: Layout, nodes: list[Node], ports: Ports, engine_command: EngineCommand
) -> tuple[list[Role], list[str]]:
    """The roles of all engines, and their URLs."""
    roles, urls = [], []
    for index, shares in enumerate(layout.engines):
        # What others reach: on one machine the configured address, where loopback stands for 0.0.0.0.
        host = LOOPBACK if config.engine.host == "0.0.0.0" else config.engine.host
        host = nodes[shares[0].node].address if len(nodes) > 1 else host
        url = f"http://{host}:{ports.engines[index]}"
        urls.append(url)
        roles += _engine(config, index, shares, nodes, ports, url, engine_command)
    return roles, urls


def _run_config(config: Config) -> str:
    return str(config.run.dir / "config.yaml")


def _engine(
    config: Config,
    index: int,
    shares: list[NodeShare],
    nodes: list[Node],
    ports: Ports,
    url: str,
    engine_command: EngineCommand,
) -> list[Role]:
    """One role, or one for each node that the engine spans; the first one answers requests."""
    name = f"engine-{index}"
    spans = len(shares) > 1
    roles = []
    for part, share in enumerate(shares):
        local = config
        if len(nodes) > 1:  # listens to the other machines, and to them only
            engine = config.engine.model_copy(update={"host": nodes[share.node].address})
            local = config.model_copy(update={"engine": engine})
        argv, env = engine_command(local, index, ports.engines[index])
        argv = [*argv, "--config", str(config_path(config.run.dir, name))]
        if spans:
            meeting = f"{nodes[shares[0].node].address}:{ports.engine_meetings[index]}"
            argv = [*argv, "--nnodes", str(len(shares)), "--node-rank", str(part)]
            argv += ["--dist-init-addr", meeting]
        if share.gpus:
            env = {k: v for k, v in env.items() if k != "CUDA_VISIBLE_DEVICES"}
        roles.append(
            Role(
                f"{name}.{part}" if spans else name, "engine", argv, env,
                ready_url=f"{url}/health" if part == 0 else None,
                start_timeout=config.start_seconds, unit=name, node=share.node, gpus=share.gpus, engine=url,
                explores=config.engine.explores(index),
            )
        )  # fmt: skip
    return roles


def _beside(
    name: str, field: str, own: Config, layout: Layout, port: int, engine_command: EngineCommand
) -> Role:
    """One more engine of the config `own`, beside the rollout process, which keeps the weights that it starts with.
    `field`: asks for it."""
    if layout.engines[0][0].gpus:
        raise UserError(
            f"{field} = own: no GPU is planned for it; start a server of the {name}'s weights yourself and give its "
            "URL"
        )
    own = own.model_copy(update={"engine": own.engine.model_copy(update={"host": LOOPBACK})})
    argv, env = engine_command(own, own.engine.count, port)
    argv = [*argv, "--config", str(config_path(own.run.dir, name))]
    url = f"http://{LOOPBACK}:{port}"
    return Role(
        name, "engine", argv, env, ready_url=f"{url}/health", start_timeout=own.start_seconds, engine=url
    )


def _trainer(
    config: Config, layout: Layout, nodes: list[Node], meeting: int, module: str, arguments: list[str]
) -> list[Role]:
    """One `launch.ranks` for each node; ranks are numbered through in the order of the nodes."""
    roles = []
    shares = layout.trainer
    world = sum(share.count for share in shares)
    for part, share in enumerate(shares):
        address = nodes[share.node].address if len(nodes) > 1 else config.engine.host
        argv = [sys.executable, "-m", "launch.ranks", "--ranks", str(share.count), "--address", address]
        if len(shares) > 1:
            first = sum(earlier.count for earlier in shares[:part])
            argv += ["--first", str(first), "--world", str(world)]
            argv += ["--meet", f"{nodes[shares[0].node].address}:{meeting}"]
        argv += ["-m", module, "--config", _run_config(config)]
        name = "trainer" if len(shares) == 1 else f"trainer-{part}"
        roles.append(
            Role(
                name, "trainer", [*argv, *arguments],
                unit="trainer", node=share.node, gpus=share.gpus,
            )
        )  # fmt: skip
    return roles
