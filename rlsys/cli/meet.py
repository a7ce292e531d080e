"""The command line of `rlsys meet`."""

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
from rlsys.agents.multi_policy import Meeting
from rlsys.core.errors import UserError
from rlsys.obs.descriptors import raise_descriptors
from rlsys.obs.role import without_ignored

log = logging.getLogger("rlsys.meeting")

CONNECTIONS = 4096
"""Of runs and of episodes, at once: an episode of two policies has eight at most."""


def add_meet(add: Callable[..., argparse.ArgumentParser]) -> None:
    """`add` makes a sub-command: name, function, help."""
    sub = add("meet", meet, "play episodes of several policies, each a run of its own")
    sub.add_argument(
        "episode", metavar="FUNCTION", help="path/to/file.py:function or package.module:function"
    )
    sub.add_argument(
        "--policy", action="append", required=True, metavar="NAME", help="one of those that meet; repeated"
    )
    sub.add_argument("--port", type=int, required=True, help="on loopback; 0 takes a free one")
    sub.add_argument(
        "--wait", type=float, default=300.0, metavar="SECONDS",
        help="how long a sample waits for its partners, and a partner for one whose run has died (300)",
    )  # fmt: skip
    sub.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable that FUNCTION may read",
    )


def meet(args: argparse.Namespace) -> int:
    """Until SIGTERM or Ctrl-C."""
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
    """Raises UserError for a port that is taken, or a function that does not exist."""
    raise_descriptors(CONNECTIONS, "rlsys meet")
    stop = asyncio.Event()
    for number in without_ignored(signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    connector, times = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=times, trust_env=False) as session:
        meeting = Meeting(policies, wait, session)
        keeper = asyncio.create_task(_keep_host(meeting, episode, variables))
        stopped = asyncio.create_task(stop.wait())
        try:
            await _first(keeper, asyncio.create_task(meeting.hosted()))
            async with meeting.listening(port) as base:
                for name in policies:
                    print(f"rlsys: {name}: rollout.generator_params.url = {base}/{name}", flush=True)
                await _first(keeper, stopped)
                meeting.close()
                keeper.cancel()  # before its episodes see their addresses go
                await asyncio.wait({keeper})
        except OSError as e:
            raise UserError(f"--port {port}: {e.strerror or e}") from None
        finally:
            keeper.cancel()
            await asyncio.wait({keeper})


async def _first(keeper: asyncio.Task[None], other: asyncio.Task[Any]) -> None:
    """Until one of them ends. Raises what ended the keeper."""
    await asyncio.wait({keeper, other}, return_when=asyncio.FIRST_COMPLETED)
    if keeper.done():
        other.cancel()
        keeper.result()


async def _keep_host(meeting: Meeting, episode: str, variables: Sequence[str]) -> None:
    """A process that episodes are forked from, and another one after its death. For ever."""
    while True:
        async with open_host(episode, None, None, variables, meets=True) as host:
            meeting.put_host(host)
            await host.lost.wait()
            log.warning("the process of the episodes has died; it is started anew")
