"""Launch plan: the processes of a run. Pure, so that `rlsys explain` can show what `rlsys train` starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.environment import Kind, environment
from rlsys.config import Config
from rlsys.config.sidecar_servers import reference_config, teacher_config
from rlsys.core.errors import UserError
from rlsys.core.identity import config_path
from rlsys.core.imports import module_command
from rlsys.core.membership import FOLDER as MEMBERS
from rlsys.core.membership import WEIGHTS_VARIABLE
from rlsys.obs.role import STACKS_VARIABLE
from rlsys.planner.layout import Layout, NodeShare, on_cuda, push_plan
from rlsys.planner.memory import with_pool
from rlsys.segments.records import FOLDER as SEGMENTS
from rlsys.segments.route_records import ROUTES_VARIABLE

EngineCommand = Callable[[Config, int, int], tuple[list[str], dict[str, str]]]
"""(config, index of the engine, port of the engine) -> command line and environment of the engine."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Node:
    """A machine of the run.

    Attributes:
        name: name of the machine in the scheduler.
        address: address at which other machines reach it.
    """

    name: str
    address: str = LOOPBACK


@dataclass(frozen=True)
class Role:
    """A process of the run.

    A unit is a set of roles that are started and ended together: the roles of a trainer, or of an engine, on several
    nodes.

    Attributes:
        name: unique name.
        kind: `engine`, `rollout` or `trainer`.
        argv: command line.
        env: environment variables besides those of all roles of its kind.
        ready_url: URL that answers 200 when the role is ready; None if no process waits for it. For the rollout
            process, a path on its Unix socket that returns its status as JSON.
        start_timeout: seconds in which the role must become ready; None for no limit.
        unit: name of its unit.
        node: index of its node.
        gpus: indices of the node's GPUs that it may use; empty for no restriction.
        engine: URL of the engine to which the role belongs; None for other roles.
        explores: whether the engine explores prompts, and generates no samples.
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
        """File name of the role's log."""
        return f"{self.name}.log"


@dataclass(frozen=True)
class Ports:
    """Ports of a run. Port 0 stands for a port that is chosen at the start.

    Attributes:
        engines: port of each engine.
        trainer_rendezvous: port for the rendezvous of a trainer on several nodes.
        engine_rendezvous: for each engine, the port for its rendezvous if it is on several nodes.
        reference: port of the reference server.
        teacher: port of the teacher server.
    """

    engines: list[int]
    trainer_rendezvous: int = 0
    engine_rendezvous: tuple[int, ...] = ()
    reference: int = 0
    teacher: int = 0


@dataclass(frozen=True)
class LaunchPlan:
    """Roles of a run.

    Attributes:
        roles: all roles in the order in which they start. They end in the reverse order.
        nodes: machines of the run.
        run_dir: the run folder.
        shared: environment variables of all roles of a kind.
    """

    roles: list[Role]
    nodes: list[Node] = field(default_factory=lambda: [Node("localhost")])
    run_dir: Path = Path()
    shared: Mapping[Kind, dict[str, str]] = field(default_factory=dict)

    def environment(self, role: Role, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment of a role: `base`, and the variables of its kind, its folders and `Role.env`."""
        role_variables = {STACKS_VARIABLE: str((self.run_dir / "logs" / "stacks" / role.unit).absolute())}
        if role.kind == "engine":
            role_variables[WEIGHTS_VARIABLE] = str((self.run_dir / MEMBERS / "weights").absolute())
            role_variables[ROUTES_VARIABLE] = str((self.run_dir / SEGMENTS / role.unit).absolute())
        return {**base, **self.shared.get(role.kind, {}), **role_variables, **role.env}

    def router_engines(self) -> list[Role]:
        """Return for each of the router's engines the role that answers requests."""
        return [r for r in self.roles if r.kind == "engine" and r.unit.startswith("engine-") and r.ready_url]

    def unit(self, name: str) -> list[Role]:
        """Return the roles of a unit."""
        return [role for role in self.roles if role.unit == name]


def build_plan(
    config: Config, layout: Layout, nodes: list[Node], ports: Ports, engine_command: EngineCommand
) -> LaunchPlan:
    """Build the plan of a run of `config` on `nodes`.

    Raises:
        UserError: the weights cannot reach an engine on another machine.
    """
    roles, urls = _engines(config, layout, nodes, ports, engine_command)
    push_plan(config, layout)  # raises if weights cannot reach an engine
    rollout = module_command("rlsys.rollout.service", "--config", _run_config(config))
    rollout += [argument for url in urls for argument in ("--engine", url)]
    if (reference := config.engine.reference) == "own":
        sidecar_config = reference_config(config)
        roles.append(
            _sidecar("reference", "engine.reference", sidecar_config, layout, ports.reference, engine_command)
        )
        reference = roles[-1].engine
    rollout += ["--reference", reference] if reference else []
    teacher = config.algo.teacher.engine if config.algo.teacher is not None else None
    if teacher == "own":
        sidecar_config = teacher_config(config)
        roles.append(
            _sidecar("teacher", "algo.teacher.engine", sidecar_config, layout, ports.teacher, engine_command)
        )
        teacher = roles[-1].engine
    rollout += ["--teacher", teacher] if teacher else []
    roles.append(Role("rollout", "rollout", rollout, ready_url="/status"))
    roles += _trainer(config, layout, nodes, ports.trainer_rendezvous, "rlsys.train", [])
    return LaunchPlan(roles, nodes, config.run.dir, _shared(config))


def build_client_plan(
    config: Config,
    layout: Layout,
    nodes: list[Node],
    ports: Ports,
    engine_command: EngineCommand,
    module: str,
    arguments: Sequence[str] = (),
) -> LaunchPlan:
    """Build a plan of engines, and of one process that sends prompts to them: `module` with `arguments`."""
    roles, urls = _engines(config, layout, nodes, ports, engine_command)
    command = module_command(module, "--config", _run_config(config), *arguments)
    command += [argument for url in urls for argument in ("--engine", url)]
    client_role = Role(module.rpartition(".")[2], "trainer", command)
    return LaunchPlan([*roles, client_role], nodes, config.run.dir, _shared(config))


def build_tenants_plan(
    config: Config,
    layout: Layout,
    nodes: list[Node],
    ports: Ports,
    engine_command: EngineCommand,
    arguments: list[str],
) -> LaunchPlan:
    """Build a plan of engines and a trainer that serves tenants (rlsys.tenants).

    `arguments` are appended to the trainer's command line.
    """
    roles, urls = _engines(config, layout, nodes, ports, engine_command)
    all_arguments = [*(argument for url in urls for argument in ("--engine", url)), *arguments]
    roles += _trainer(config, layout, nodes, ports.trainer_rendezvous, "rlsys.tenants.serve", all_arguments)
    return LaunchPlan(roles, nodes, config.run.dir, _shared(config))


def build_sft_plan(config: Config, layout: Layout, nodes: list[Node], ports: Ports) -> LaunchPlan:
    """Build a plan of a trainer without engines, for supervised fine-tuning."""
    trainer = _trainer(config, layout, nodes, ports.trainer_rendezvous, "rlsys.trainer.sft.sft", [])
    return LaunchPlan(trainer, nodes, config.run.dir, _shared(config))


def _shared(config: Config) -> dict[Kind, dict[str, str]]:
    """Return LaunchPlan.shared for a config."""
    kinds: tuple[Kind, ...] = ("engine", "rollout", "trainer")
    cuda = on_cuda(config)
    return {kind: environment(config, kind, cuda=cuda) for kind in kinds}


def _engines(
    config: Config, layout: Layout, nodes: list[Node], ports: Ports, engine_command: EngineCommand
) -> tuple[list[Role], list[str]]:
    """Return the roles of all engines, and their URLs."""
    roles, urls = [], []
    config = with_pool(config)
    for index, shares in enumerate(layout.engines):
        # The address for clients: on one machine the configured one, with loopback for 0.0.0.0.
        host = LOOPBACK if config.engine.host == "0.0.0.0" else config.engine.host
        host = nodes[shares[0].node].address if len(nodes) > 1 else host
        url = f"http://{host}:{ports.engines[index]}"
        urls.append(url)
        roles += _engine(config, index, shares, nodes, ports, url, engine_command)
    return roles, urls


def _run_config(config: Config) -> str:
    """Return the path of the config in the run folder."""
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
    """Return one role per node of engine `index`. The first role answers requests.

    Args:
        config: config of the run, with the settings of the engines' pools.
        index: index of the engine.
        shares: nodes and GPUs of the engine.
        nodes: machines of the run.
        ports: ports of the run.
        url: URL of the engine.
        engine_command: builds the command line of an engine.
    """
    name = f"engine-{index}"
    spans = len(shares) > 1
    roles = []
    for part, share in enumerate(shares):
        local = config
        if len(nodes) > 1:  # the engine listens only on the address at which other machines reach it
            engine = config.engine.model_copy(update={"host": nodes[share.node].address})
            local = config.model_copy(update={"engine": engine})
        argv, env = engine_command(local, index, ports.engines[index])
        argv = [*argv, "--config", str(config_path(config.run.dir, name))]
        if spans:
            rendezvous = f"{nodes[shares[0].node].address}:{ports.engine_rendezvous[index]}"
            argv = [*argv, "--nnodes", str(len(shares)), "--node-rank", str(part)]
            argv += ["--dist-init-addr", rendezvous]
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


def _sidecar(
    name: str, field: str, config: Config, layout: Layout, port: int, engine_command: EngineCommand
) -> Role:
    """Return the role of another engine on the rollout process's machine, which keeps its initial weights.

    Args:
        name: name of the role.
        field: config field that requests the engine.
        config: config of the engine.
        layout: layout of the run.
        port: port of the engine.
        engine_command: builds the command line of an engine.

    Raises:
        UserError: the run uses GPUs, of which none is left for this engine.
    """
    if layout.engines[0][0].gpus:
        raise UserError(
            f"{field} = own: the plan has no GPU for another engine; start a server with the {name}'s weights, and "
            f"set {field} to its URL"
        )
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"host": LOOPBACK})})
    argv, env = engine_command(config, config.engine.count, port)
    argv = [*argv, "--config", str(config_path(config.run.dir, name))]
    url = f"http://{LOOPBACK}:{port}"
    return Role(
        name, "engine", argv, env, ready_url=f"{url}/health", start_timeout=config.start_seconds, engine=url
    )


def _trainer(
    config: Config, layout: Layout, nodes: list[Node], port: int, module: str, arguments: list[str]
) -> list[Role]:
    """Return one role of `launch.ranks` per node. Ranks are numbered in the order of the nodes.

    Args:
        config: config of the run.
        layout: layout of the run.
        nodes: machines of the run.
        port: port for the rendezvous of several nodes.
        module: module that each rank runs.
        arguments: arguments of the module, after `--config`.
    """
    roles = []
    shares = layout.trainer
    world = sum(share.count for share in shares)
    for part, share in enumerate(shares):
        address = nodes[share.node].address if len(nodes) > 1 else config.engine.host
        argv = module_command("launch.ranks", "--ranks", str(share.count), "--address", address)
        if len(shares) > 1:
            first = sum(earlier.count for earlier in shares[:part])
            argv += ["--first", str(first), "--world", str(world)]
            argv += ["--meet", f"{nodes[shares[0].node].address}:{port}"]
        argv += ["-m", module, "--config", _run_config(config)]
        name = "trainer" if len(shares) == 1 else f"trainer-{part}"
        roles.append(
            Role(
                name, "trainer", [*argv, *arguments],
                unit="trainer", node=share.node, gpus=share.gpus,
            )
        )  # fmt: skip
    return roles
