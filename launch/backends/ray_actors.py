"""Actors of a Ray cluster, one for each role, in a placement group with one bundle for each node.

Joins the cluster that RAY_ADDRESS names, else starts a Ray of its own on this machine and stops just that. Actors
are never restarted by Ray: the supervisor is the one owner of restarts. An actor holds the keeper's lifeline, so
when Ray ends the actor, or its node goes, the role ends.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch.backends import keeper_command
from launch.plan import Node, Role
from launch.ports import free_ports
from rlsys.config import Config
from rlsys.errors import RunError, UserError

ANSWER_SECONDS = 30.0
"""A live actor answers in milliseconds; one that does not is lost."""
JOIN_SECONDS = 60.0
"""For the nodes of a cluster that is just starting."""
LOST = 255
"""Exit code of a role whose actor is gone."""
_OF_THE_NODE = ("CUDA_VISIBLE_DEVICES", "RAY_")
"""Variables that an actor's own process knows better than the supervisor."""


class KeeperActor:
    """Runs on the role's node; owns its keeper."""

    def start(self, command: list[str], env: dict[str, str], folder: str, log: str) -> None:
        own = {k: v for k, v in os.environ.items() if k.startswith(_OF_THE_NODE)}
        given = {k: v for k, v in env.items() if not k.startswith(_OF_THE_NODE)}
        # Ray kills an actor's children with it, without a word: between it and the keeper stands a shell, so that the
        # keeper lives to read the end of its lifeline and ends all that the role started.
        with open(log, "ab") as out:
            self._keeper = subprocess.Popen(
                ["sh", "-c", '"$@"; exit $?', "sh", *command], stdin=subprocess.PIPE, stdout=out,
                stderr=subprocess.STDOUT, env=given | own, cwd=folder, start_new_session=True,
            )  # fmt: skip

    def exit_code(self) -> int | None:
        code = self._keeper.poll()
        return code if code is None or code >= 0 else 128 - code

    def order(self, order: bytes) -> None:
        assert self._keeper.stdin is not None
        if self._keeper.poll() is None:
            self._keeper.stdin.write(order)
            self._keeper.stdin.flush()

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def free_ports(self, n: int) -> list[int]:
        return free_ports("", n)


class ActorHandle:
    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._code: int | None = None

    @property
    def exit_code(self) -> int | None:
        if self._code is None:
            self._code = self._ask(self._actor.exit_code.remote())
        return self._code

    def order(self, order: bytes) -> None:
        if self._code is None:
            self._ask(self._actor.order.remote(order))

    def release(self) -> None:
        ray.kill(self._actor)

    def _ask(self, answer: Any) -> Any:
        try:
            return ray.get(answer, timeout=ANSWER_SECONDS)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            self._code = LOST
            return LOST


class RayBackend:
    def __init__(self, config: Config) -> None:
        self._grace = config.launch.grace_seconds
        joined = os.environ.get("RAY_ADDRESS")
        ray.init(address=joined or "local", include_dashboard=False if joined is None else None,
                 logging_level="ERROR", log_to_driver=False)  # fmt: skip
        self._actor_class = ray.remote(KeeperActor)
        self._group = self._reserve(config)
        scouts = [self._actor(i) for i in range(config.launch.nodes)]
        addresses = ray.get([scout.address.remote() for scout in scouts])
        self.nodes = [Node(address, address) for address in addresses]
        self._scouts = scouts

    def free_ports(self, node: int, n: int) -> list[int]:
        ports: list[int] = ray.get(self._scouts[node].free_ports.remote(n))
        return ports

    def start(self, role: Role, env: dict[str, str], log: Path) -> ActorHandle:
        actor = self._actor(role.node)
        command = keeper_command(role, self._grace, shielded=False)
        try:
            ray.get(
                actor.start.remote(command, env, os.getcwd(), str(log.absolute())), timeout=ANSWER_SECONDS
            )
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as e:
            raise RunError(f"{role.name}: Ray cannot start it on {self.nodes[role.node].name}: {e}") from None
        return ActorHandle(actor)

    def preempted(self) -> bool:
        return False

    def requeue(self) -> None: ...

    def close(self) -> None:
        remove_placement_group(self._group)
        ray.shutdown()

    def _reserve(self, config: Config) -> Any:
        """One bundle a node; the first on this one, because the rollout process is reached by loopback."""
        bundle = {"CPU": 1.0} | ({"GPU": float(g)} if (g := config.launch.gpus_per_node) else {})
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        n = config.launch.nodes
        deadline = time.monotonic() + JOIN_SECONDS
        while (alive := sum(node["Alive"] for node in ray.nodes())) < n and time.monotonic() < deadline:
            time.sleep(0.5)
        if alive < n:
            ray.shutdown()
            raise UserError(f"launch.nodes = {n}, but the Ray cluster has {alive}")
        group = placement_group([bundle | here, *[bundle] * (n - 1)], strategy="STRICT_SPREAD")
        if not group.wait(config.engine.start_timeout):
            ray.shutdown()
            raise UserError(
                f"launch.nodes = {n} with {bundle} each: the Ray cluster has nothing free within "
                f"engine.start_timeout = {config.engine.start_timeout:g} s"
            )
        return group

    def _actor(self, node: int) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        options = self._actor_class.options(
            num_cpus=0, max_restarts=0, max_task_retries=0, scheduling_strategy=place
        )
        return options.remote()
