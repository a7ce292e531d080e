"""Actors of a Ray cluster, one for each role, in a placement group with one bundle for each node.

Joins the cluster that RAY_ADDRESS names, else starts a Ray of its own on this machine and stops just that. Actors
are never restarted by Ray: the supervisor is the one owner of restarts. An actor holds the keeper's lifeline, so
when Ray ends the actor, or its node goes, the role ends. A lost node is replaced by any other that Ray has or gets.
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
from launch.ports import HeldPorts
from rlsys.config import Config
from rlsys.core.errors import RunError, UserError
from rlsys.core.sockets import make_folder, remove_folder

JOIN_SECONDS = 60.0
"""For the nodes of a cluster that is just starting."""
SILENT_NODE_SECONDS = 60.0
"""A machine without power does not say so; Ray itself notices after a quarter of a minute."""
GONE = "gone"
LOST = 255
"""Exit code of a role whose actor is gone."""
_OF_THE_NODE = ("CUDA_VISIBLE_DEVICES", "RAY_")
"""Variables that an actor's own process knows better than the supervisor."""


class KeeperActor:
    """Runs on the role's node and owns its keeper. One thread waits for the keeper's end, the other takes orders."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._ports = HeldPorts("")

    def run(self, command: list[str], env: dict[str, str], folder: str, log: str) -> int:
        """Start the keeper and wait for its end; its exit code, 128 + n after signal n."""
        own = {k: v for k, v in os.environ.items() if k.startswith(_OF_THE_NODE)}
        given = {k: v for k, v in env.items() if not k.startswith(_OF_THE_NODE)}
        # Ray kills an actor's children with it, without a word: between it and the keeper stands a shell, so that the
        # keeper lives to read the end of its lifeline and ends all that the role started.
        with open(log, "ab") as out:
            self._keeper = subprocess.Popen(
                ["sh", "-c", '"$@"; exit $?', "sh", *command], stdin=subprocess.PIPE, stdout=out,
                stderr=subprocess.STDOUT, env=given | own, cwd=folder, start_new_session=True,
            )  # fmt: skip
        self._started.set()
        code = self._keeper.wait()
        return code if code >= 0 else 128 - code

    def order(self, order: bytes) -> None:
        self._started.wait()
        assert self._keeper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(order)
            self._keeper.stdin.flush()

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def free_ports(self, n: int) -> list[int]:
        return self._ports.choose(n)


class ActorHandle:
    """Nothing here has a time limit: Ray itself says when an actor is gone, however busy its machine is."""

    def __init__(self, actor: Any, end: Any, what: str) -> None:
        self._actor, self._end, self._what = actor, end, what
        self._code: int | None = None

    @property
    def exit_code(self) -> int | None:
        """Raises RunError when the keeper could not even be started."""
        if self._code is None and ray.wait([self._end], timeout=0)[0]:
            try:
                self._code = ray.get(self._end)
            except ray.exceptions.RayActorError:
                self._code = LOST
            except ray.exceptions.RayTaskError as e:
                raise RunError(f"{self._what}: Ray cannot start it: {e.cause}") from None
        return self._code

    def order(self, order: bytes) -> None:
        self._actor.order.remote(order)

    def release(self) -> None:
        ray.kill(self._actor)


class RayBackend:
    def __init__(self, config: Config) -> None:
        self._config = config
        joined = os.environ.get("RAY_ADDRESS")
        if joined is None:
            # A token of its own: by itself Ray writes one into the home folder, and from then on every `ray start`
            # of this user begins a cluster that its other nodes cannot join.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            # And its workers would run at nice 15, behind everything else on the machine, the supervisor too.
            os.environ.setdefault("RAY_worker_niceness", "0")
        self._folder = make_folder() if joined is None else None
        ray.init(
            address=joined or "local", include_dashboard=False if joined is None else None,
            # Its Unix sockets ask for no key, and Ray opens this folder to everybody: only the one above is closed.
            _temp_dir=None if self._folder is None else str(self._folder / "ray"),
            logging_level="ERROR", log_to_driver=False,
        )  # fmt: skip
        self._actor_class = ray.remote(KeeperActor)
        try:
            self._settle(JOIN_SECONDS)
        except UserError:
            self._shut_down()
            raise

    def _settle(self, patience: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Reserve the nodes, and post a scout on each: one that is gone tells of its node's end."""
        self._group = self._reserve(patience, stopped)
        self._awaited: dict[int, Any] = {}
        """Places of lost nodes, and what the scouts that wait for them were asked."""
        self._scouts = [self._actor(i) for i in range(self._config.launch.nodes)]
        addresses = ray.get([scout.address.remote() for scout in self._scouts])
        self.nodes = [Node(address, address) for address in addresses]

    def free_ports(self, need: Mapping[int, int]) -> dict[int, list[int]]:
        asked = [self._scouts[node].free_ports.remote(n) for node, n in need.items()]
        return dict(zip(need, ray.get(asked), strict=True))

    def start(self, role: Role, env: dict[str, str], log: Path) -> ActorHandle:
        actor = self._actor(role.node)
        command = keeper_command(role, self._config, shielded=False)
        log.touch()  # there from now on, as soon or late as Ray has a process for the actor
        end = actor.run.remote(command, env, os.getcwd(), str(log.absolute()))
        return ActorHandle(actor, end, f"{role.name} on {self.nodes[role.node].name}")

    def preempted(self) -> bool:
        return False

    def lost_nodes(self) -> list[int]:
        """Those whose scout is gone, or does not answer. Another scout waits for such a node, which is back when the
        scout finds itself at its address."""
        asked = {i: scout.address.remote() for i, scout in enumerate(self._scouts) if i not in self._awaited}
        ray.wait([*asked.values()], num_returns=len(asked), timeout=SILENT_NODE_SECONDS)
        for i, answer in {**self._awaited, **asked}.items():
            found = _answer(answer)
            if found == self.nodes[i].address:
                self._awaited.pop(i, None)
            elif i in asked or found == GONE:
                self._scouts[i] = self._actor(i)
                self._awaited[i] = self._scouts[i].address.remote()
        return sorted(self._awaited)

    def replace_nodes(self, stopped: Callable[[], bool]) -> bool:
        """All nodes are reserved anew: any that Ray has or gets."""
        remove_placement_group(self._group)
        self._settle(self._config.start_seconds, stopped)
        return True

    def requeue(self) -> None: ...

    def close(self) -> None:
        remove_placement_group(self._group)
        self._shut_down()

    def _shut_down(self) -> None:
        ray.shutdown()
        if self._folder is not None:
            remove_folder(self._folder)

    def _reserve(self, patience: float, stopped: Callable[[], bool]) -> Any:
        """One bundle a node; the first on this one, because the rollout process is reached by loopback."""
        config, n = self._config, self._config.launch.nodes
        bundle = {"CPU": 1.0} | ({"GPU": float(g)} if (g := config.launch.gpus_per_node) else {})
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        deadline = time.monotonic() + patience
        while (alive := sum(node["Alive"] for node in ray.nodes())) < n:
            if stopped() or time.monotonic() > deadline:
                raise UserError(f"launch.nodes = {n}, but the Ray cluster has {alive}")
            time.sleep(0.5)
        group = placement_group([bundle | here, *[bundle] * (n - 1)], strategy="STRICT_SPREAD")
        if not group.wait(config.start_seconds):
            remove_placement_group(group)
            raise UserError(
                f"launch.nodes = {n} with {bundle} each: the Ray cluster has nothing free within "
                f"engine.start_timeout = {config.start_seconds:g} s"
            )
        return group

    def _actor(self, node: int) -> Any:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        options = self._actor_class.options(
            num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=2, scheduling_strategy=place
        )
        return options.remote()


def _answer(answer: Any) -> str | None:
    """A scout's address; GONE when the scout is; None when it has not answered yet."""
    try:
        return str(ray.get(answer, timeout=0))
    except ray.exceptions.RayActorError:
        return GONE
    except ray.exceptions.GetTimeoutError:
        return None
