"""Command line of `rlsys meet`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from rlsys.agents.hosting import open_host
from rlsys.agents.multi_policy import EpisodeServer
from rlsys.core.descriptors import raise_descriptors
from rlsys.core.errors import UserError
from rlsys.http_server.clients import direct_session
from rlsys.obs.role import without_ignored

log = logging.getLogger("rlsys.meeting")

CONNECTIONS = 4096
"""Maximum number of connections of runs and episodes. An episode of two policies has at most eight connections."""


def add_meet(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `rlsys meet`."""
    sub = add("meet", meet, "run episodes of several policies, each trained by its own run")
    sub.add_argument(
        "episode", metavar="FUNCTION", help="path/to/file.py:function or package.module:function"
    )
    sub.add_argument(
        "--policy", action="append", required=True, metavar="NAME", help="name of a policy; repeat for each"
    )
    sub.add_argument("--port", type=int, required=True, help="port on loopback; 0 chooses a free one")
    sub.add_argument(
        "--wait", type=float, default=300.0, metavar="SECONDS",
        help="time that a sample waits for its partners, and for a partner whose run has died (default: 300)",
    )  # fmt: skip
    sub.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable to pass to FUNCTION; may be repeated",
    )


def meet(args: argparse.Namespace) -> int:
    """Run `rlsys meet`: serve episodes until SIGTERM or Ctrl-C.

    Raises:
        UserError: an option is invalid.
    """
    if len(set(args.policy)) != len(args.policy) or len(args.policy) < 2:
        raise UserError(f"--policy {' '.join(args.policy)}: expected two or more different names")
    for name in args.policy:
        if not name.isidentifier():
            raise UserError(f"--policy {name!r}: expected letters, digits and underscores")
    if not 0 < args.wait < math.inf:
        raise UserError(f"--wait {args.wait}: expected more than 0, and finite")
    if not 0 <= args.port <= 65535:
        raise UserError(f"--port {args.port}: expected 0 to 65535")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(args.episode, args.policy, args.port, args.wait, args.env))
    return 0


async def _serve(
    episode: str, policies: Sequence[str], port: int, wait: float, variables: Sequence[str]
) -> None:
    """Serve episodes until SIGTERM or Ctrl-C.

    Args:
        episode: import path of the function that runs an episode.
        policies: names of the policies.
        port: port on loopback.
        wait: seconds that a sample waits for its partners.
        variables: names of the environment variables that the function gets.

    Raises:
        UserError: the port is in use, or the function does not exist.
    """
    raise_descriptors(CONNECTIONS, "rlsys meet")
    stop = asyncio.Event()
    for number in without_ignored(signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    connector, times = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with direct_session(connector=connector, timeout=times) as session:
        meeting = EpisodeServer(policies, wait, session)
        host_task = asyncio.create_task(_run_host(meeting, episode, variables))
        stop_task = asyncio.create_task(stop.wait())
        try:
            await _wait_first(host_task, asyncio.create_task(meeting.wait_for_host()))
            async with meeting.listening(port) as base:
                for name in policies:
                    print(f"rlsys: {name}: rollout.generator_params.url = {base}/{name}", flush=True)
                await _wait_first(host_task, stop_task)
                meeting.close()
                # End the episodes before the server closes, so that they report no lost connections.
                host_task.cancel()
                await asyncio.wait({host_task})
        finally:
            host_task.cancel()
            await asyncio.wait({host_task})


async def _wait_first(host_task: asyncio.Task[None], other_task: asyncio.Task[Any]) -> None:
    """Wait until one of the tasks ends. If it is the host's task, raise its error."""
    await asyncio.wait({host_task, other_task}, return_when=asyncio.FIRST_COMPLETED)
    if host_task.done():
        other_task.cancel()
        host_task.result()


async def _run_host(meeting: EpisodeServer, episode: str, variables: Sequence[str]) -> None:
    """Run the process from which episodes are forked; restart it when it dies. Only errors end this."""
    while True:
        async with open_host(episode, None, None, variables, plays_episodes=True) as host:
            meeting.put_host(host)
            await host.host_exit.wait()
            log.warning("the process from which episodes are forked has died; restarting it")
