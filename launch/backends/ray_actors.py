"""Backend `ray`: one actor per role, in a placement group with one bundle per node.

The backend joins the cluster that RAY_ADDRESS names. Without RAY_ADDRESS it starts a private Ray on this machine, and
stops it at the end. Ray never restarts actors; only the supervisor restarts roles. An actor has the pipe to the
keeper, so a role ends with its actor or node. Any node that Ray has or gets can replace a lost node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launch.backends import keeper_command
from launch.plan import Node, Role
from launch.ports import PortReservation
from rlsys.config import Config
from rlsys.core.errors import RunError, UserError
from rlsys.core.sockets import make_folder, remove_folder

JOIN_SECONDS = 60.0
"""Time limit for the nodes of a starting cluster to join."""
SILENT_NODE_SECONDS = 60.0
"""Time limit for a response of a node. A machine without power closes no connection; Ray detects it after 15 s."""
ACTOR_DEAD = "gone"
"""Result of a call to a dead actor, in place of an address."""
NODE_LOST = 255
"""Exit code of a role whose actor is dead."""
_NODE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "RAY_")
"""Prefixes of the environment variables that a role gets from its actor; it gets all others from the supervisor."""


class KeeperActor:
    """Owns a role's keeper on the role's node. One thread waits for the keeper's end, another forwards orders."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._ports = PortReservation("")

    def run(self, command: list[str], env: dict[str, str], folder: str, log: str) -> int:
        """Start the keeper, wait for its end, and return its exit code; 128 + n after signal n.

        Args:
            command: command line of the keeper.
            env: environment of the supervisor.
            folder: working directory of the keeper.
            log: file to which the output is appended.
        """
        node_env = {k: v for k, v in os.environ.items() if k.startswith(_NODE_VARIABLES)}
        role_env = {k: v for k, v in env.items() if not k.startswith(_NODE_VARIABLES)}
        # Ray kills the children of an actor with the actor. With a shell between actor and keeper, the keeper
        # survives, reads the end of the pipe, and ends all processes of the role.
        with open(log, "ab") as output:
            self._keeper = subprocess.Popen(
                ["sh", "-c", '"$@"; exit $?', "sh", *command], stdin=subprocess.PIPE, stdout=output,
                stderr=subprocess.STDOUT, env=role_env | node_env, cwd=folder, start_new_session=True,
            )  # fmt: skip
        self._started.set()
        code = self._keeper.wait()
        return code if code >= 0 else 128 - code

    def order(self, order: bytes) -> None:
        """Forward an order to the keeper, once it has started."""
        self._started.wait()
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(order)
            self._keeper.stdin.flush()

    def address(self) -> str:
        """Return the IP address of the node."""
        return str(ray.util.get_node_ip_address())

    def free_ports(self, n: int) -> list[int]:
        """Reserve `n` free ports of the node as long as the actor lives, and return them."""
        return self._ports.choose(n)


class ActorHandle:
    """Handle of a role's actor. It needs no time limits, because Ray reports a dead actor, also of a busy machine."""

    def __init__(self, actor: Any, exit_code: Any, description: str) -> None:
        """Create the handle.

        Args:
            actor: the KeeperActor.
            exit_code: Ray's reference to the result of `run`.
            description: role and node, for errors.
        """
        self._actor, self._exit_code, self._description = actor, exit_code, description
        self._code: int | None = None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the keeper; NODE_LOST if its actor is dead; None while it runs.

        Raises:
            RunError: the keeper could not be started.
        """
        if self._code is None and ray.wait([self._exit_code], timeout=0)[0]:
            try:
                self._code = ray.get(self._exit_code)
            except ray.exceptions.RayActorError:
                self._code = NODE_LOST
            except ray.exceptions.RayTaskError as e:
                raise RunError(f"{self._description}: Ray cannot start the role: {e.cause}") from None
        return self._code

    def order(self, order: bytes) -> None:
        self._actor.order.remote(order)

    def release(self) -> None:
        ray.kill(self._actor)


class RayBackend:
    """Starts roles as actors of a Ray cluster."""

    def __init__(self, config: Config) -> None:
        self._config = config
        address = os.environ.get("RAY_ADDRESS")
        if address is None:
            # Without this token, Ray would write one into the home folder, and every later `ray start` of this user
            # would start a cluster that other nodes cannot join.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # By default, Ray's workers run at nice 15, which gives priority to all other processes of the machine.
            os.environ.setdefault("RAY_worker_niceness", "0")
        self._folder = make_folder() if address is None else None
        ray.init(
            address=address or "local", include_dashboard=False if address is None else None,
            # Ray's Unix sockets need no key, and Ray makes this folder accessible to all users, so its parent is
            # private.
            _temp_dir=None if self._folder is None else str(self._folder / "ray"),
            logging_level="ERROR", log_to_driver=False,
        )  # fmt: skip
        self._actor_class = ray.remote(KeeperActor)
        try:
            self._reserve_nodes(JOIN_SECONDS)
        except UserError:
            self._shut_down()
            raise

    def _reserve_nodes(self, timeout_s: float, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Reserve the nodes, and start a scout on each: an actor whose death shows that the node is lost.

        Args:
            timeout_s: time limit for enough nodes to join the cluster.
            is_stopped: returns True to end the wait.

        Raises:
            UserError: the cluster has too few nodes or resources.
        """
        self._group = self._reserve(timeout_s, is_stopped)
        self._pending: dict[int, Any] = {}
        """Index of a lost node -> pending call to the scout that waits for a node."""
        self._scouts = [self._actor(i) for i in range(self._config.launch.nodes)]
        addresses = ray.get([scout.address.remote() for scout in self._scouts])
        self.nodes = [Node(address, address) for address in addresses]

    def free_ports(self, need: Mapping[int, int]) -> dict[int, list[int]]:
        calls = [self._scouts[node].free_ports.remote(n) for node, n in need.items()]
        return dict(zip(need, ray.get(calls), strict=True))

    def start(self, role: Role, env: dict[str, str], log: Path) -> ActorHandle:
        actor = self._actor(role.node)
        command = keeper_command(role, self._config, shielded=False)
        log.touch()  # the supervisor may read the log before Ray has a process for the actor
        exit_code = actor.run.remote(command, env, os.getcwd(), str(log.absolute()))
        return ActorHandle(actor, exit_code, f"{role.name} on {self.nodes[role.node].name}")

    def preempted(self) -> bool:
        return False

    def lost_nodes(self) -> list[int]:
        """Return the indices of the nodes whose scout is dead or does not respond.

        A new scout is started for each such node. The node is available again if the new scout runs at its address.
        """
        calls = {i: scout.address.remote() for i, scout in enumerate(self._scouts) if i not in self._pending}
        ray.wait([*calls.values()], num_returns=len(calls), timeout=SILENT_NODE_SECONDS)
        for i, answer in {**self._pending, **calls}.items():
            address = _answer(answer)
            if address == self.nodes[i].address:
                self._pending.pop(i, None)
            elif i in calls or address == ACTOR_DEAD:
                self._scouts[i] = self._actor(i)
                self._pending[i] = self._scouts[i].address.remote()
        return sorted(self._pending)

    def replace_nodes(self, is_stopped: Callable[[], bool]) -> bool:
        """Reserve all nodes again, of the nodes that Ray has or gets."""
        remove_placement_group(self._group)
        self._reserve_nodes(self._config.start_seconds, is_stopped)
        return True

    def requeue(self) -> None: ...

    def close(self) -> None:
        remove_placement_group(self._group)
        self._shut_down()

    def _shut_down(self) -> None:
        """Disconnect from the cluster, or stop the private Ray."""
        ray.shutdown()
        if self._folder is not None:
            remove_folder(self._folder)

    def _reserve(self, timeout_s: float, is_stopped: Callable[[], bool]) -> Any:
        """Reserve one bundle per node, and return the placement group.

        The first bundle is on this node, because the supervisor reaches the rollout process only on its own machine.
        The arguments and errors are those of _reserve_nodes.
        """
        config, n = self._config, self._config.launch.nodes
        bundle = {"CPU": 1.0} | ({"GPU": float(g)} if (g := config.launch.gpus_per_node) else {})
        this_node = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        deadline = time.monotonic() + timeout_s
        while (alive := sum(node["Alive"] for node in ray.nodes())) < n:
            if is_stopped() or time.monotonic() > deadline:
                raise UserError(
                    f"launch.nodes = {n}: the Ray cluster has {alive} nodes; expected at least {n}, within "
                    f"{timeout_s:g} s"
                )
            time.sleep(0.5)
        group = placement_group([bundle | this_node, *[bundle] * (n - 1)], strategy="STRICT_SPREAD")
        if not group.wait(config.start_seconds):
            remove_placement_group(group)
            raise UserError(
                f"launch.nodes = {n}: the Ray cluster had no {n} nodes with free resources {bundle} within "
                f"engine.start_timeout = {config.start_seconds:g} s"
            )
        return group

    def _actor(self, node: int) -> Any:
        """Start an actor on a node of the placement group."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        options = self._actor_class.options(
            num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=2, scheduling_strategy=strategy
        )
        return options.remote()


def _answer(answer: Any) -> str | None:
    """Return the result of a scout's `address`; ACTOR_DEAD if the scout is dead; None if it has not answered yet."""
    try:
        return str(ray.get(answer, timeout=0))
    except ray.exceptions.RayActorError:
        return ACTOR_DEAD
    except ray.exceptions.GetTimeoutError:
        return None
