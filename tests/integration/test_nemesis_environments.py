"""A seeded schedule of faults on the service of environments, and on the link to it.

The checker computes each episode by itself: no episode is lost, no turn is played twice (the sum that the environment
keeps would be another one), and no answer is that of another turn or episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rlsys.core.sockets import make_folder, remove_folder
from rlsys.environments.client import EnvironmentFailed, RemoteEpisode
from rlsys.environments.serve import KEY
from rlsys.generators.environment_services import Service
from tests.helpers.process_faults import double_request, limit_files
from tests.helpers.proxy import Proxy
from tests.helpers.servers import ROOT
from tests.integration.test_nemesis_services import draw
from tests.unit.environments.test_environment_services import OWN, processes, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FAULTS = (
    "killed", "stopped", "hung", "disk full", "second owner", "cut", "delayed", "doubled", "flipped", "none",
)  # fmt: skip
TURNS = 6
STEP_SECONDS = 20.0
PARAMS = {"slow": 0.05}


@dataclass(frozen=True)
class Play:
    """An episode: its terms, what is said at each turn, and the rewards that follow from both."""

    terms: tuple[int, ...]
    texts: tuple[str, ...]

    @classmethod
    def drawn(cls, rng: random.Random) -> Play:
        terms = tuple(rng.randrange(10**6) for _ in range(TURNS))
        totals = [sum(terms[: turn + 1]) for turn in range(TURNS)]
        return cls(terms, tuple(str(total + rng.choice((0, 0, 1))) for total in totals))

    def expected(self) -> list[tuple[float, bool, str]]:
        """Reward, whether it is the last turn, and what the environment says."""
        return [
            (
                float(int(text) == sum(self.terms[: turn + 1])),
                turn == TURNS - 1,
                (*map(str, self.terms), "")[turn + 1],
            )
            for turn, text in enumerate(self.texts)
        ]

    def played(self, url: str, key: str) -> str:
        """Return how it ended: right, wrong, or why it failed."""
        try:
            with RemoteEpisode(url, key, {"terms": self.terms}, 0, STEP_SECONDS) as episode:
                steps = [episode.step(text) for text in self.texts]
        except EnvironmentFailed as e:
            return f"failed: {e}"
        results = [(s["reward"], s["done"], "".join(m["content"] for m in s["messages"])) for s in steps]
        return "right" if results == self.expected() else f"wrong: {results}, expected {self.expected()}"


def second(service: Service) -> subprocess.Popen[bytes]:
    """Another process on the same socket: one that a launch before has left."""
    listening = service._listening
    assert listening is not None
    words = [f"{OWN}:Sums", "--params", json.dumps(PARAMS), "--leases", "64", "--idle", "60"]
    return subprocess.Popen(
        [sys.executable, "-m", "rlsys.environments.serve", *words, "--socket", str(listening.fileno())],
        cwd=ROOT, env={**os.environ, KEY: service.key}, pass_fds=[listening.fileno()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


async def strike(service: Service, link: Proxy, fault: str, rng: random.Random) -> None:
    """Let a fault begin, and end."""
    process = next(iter(processes()), None)
    if fault in ("killed", "stopped", "hung"):
        while process is None:
            await asyncio.sleep(0.05)
            process = next(iter(processes()), None)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            if fault == "stopped":
                await asyncio.sleep(2)
                process.send_signal(signal.SIGCONT)
    elif fault == "disk full":
        if process is not None:
            limit_files(process.pid, 0)
    elif fault == "second owner":
        second_owner = second(service)
        assert second_owner.stdout is not None and second_owner.stdin is not None
        await asyncio.to_thread(second_owner.stdout.readline)
        await asyncio.sleep(0.5)
        second_owner.stdin.close()
        await asyncio.to_thread(second_owner.wait)
        second_owner.stdout.close()
    elif fault == "cut":
        link.cut()
        await asyncio.sleep(1)
    elif fault == "delayed":
        link.slow(rng.uniform(0.05, 0.5))
        await asyncio.sleep(2)
    elif fault == "doubled":
        link.change(double_request)
        await asyncio.sleep(1)
    elif fault == "flipped":
        link.change(lambda data: bytes([data[0] ^ 1]) + data[1:] if rng.random() < 0.2 else data)
        await asyncio.sleep(0.2)
    link.heal()


async def run_schedule(seed: int, more: int, at_once: int) -> Counter[str]:
    rng = random.Random(seed)
    schedule = draw(rng, FAULTS, more)
    print(f"{seed}: {', '.join(schedule)}")
    ends = Counter[str]()
    folder = make_folder()
    try:
        async with (
            running(params=PARAMS, step_seconds=STEP_SECONDS) as services,
            services.service() as service,
        ):
            link = Proxy(lambda: Path(service.url.removeprefix("unix:")), folder / "link")
            url = f"unix:{folder / 'link'}"
            with contextlib.closing(link):
                for fault in schedule:
                    plays = [Play.drawn(rng) for _ in range(at_once)]
                    tasks = [
                        asyncio.create_task(asyncio.to_thread(p.played, url, service.key)) for p in plays
                    ]
                    await asyncio.sleep(rng.uniform(0, 0.3))
                    await strike(service, link, fault, rng)
                    for end in await asyncio.gather(*tasks):
                        kind = end.partition(":")[0]
                        ends["refused" if kind == "failed" and fault == "flipped" else kind] += 1
                        if end != "right":
                            print(f"{fault}: {end}")
            print(f"{dict(ends)}, {services.restarts} restarts")
    finally:
        remove_folder(folder)
    return ends


@pytest.mark.gate
async def test_no_episode_is_lost_and_no_turn_played_twice() -> None:
    ends = await run_schedule(1, 0, 6)
    assert (ends["failed"], ends["wrong"]) == (0, 0) and ends["right"] >= 6 * (len(FAULTS) - 1)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
async def test_no_episode_is_lost_in_longer_schedules(seed: int) -> None:
    ends = await run_schedule(seed, 20, 16)
    assert (ends["failed"], ends["wrong"]) == (0, 0) and ends["right"] > 16 * len(FAULTS)
