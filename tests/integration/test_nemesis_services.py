"""Seeded schedules of faults on the services beside a run, which test_nemesis.py does not have.

Hosts of the relay of weights and `rlsys meet` are real processes. Each test counts by itself, from requests, answers
and loaded tensors: nothing is lost, nothing is done twice, no host loads other weights than those of a push.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from launch.ports import free_ports
from rlsys.agents.remote import open_service
from rlsys.core.weight_updates import EngineAddress
from rlsys.weights.buckets import StagingBuffers, send_in_buckets
from rlsys.weights.relay_push import RelayPush
from tests.helpers.process_faults import inject_link_fault, limit_files
from tests.helpers.proxy import Proxy, port_of
from tests.helpers.relay_host import hosts
from tests.helpers.servers import ROOT
from tests.helpers.sessions import RLSYS
from tests.unit.weights_relay.test_relay import BUCKET, Tensors, expected, model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

SEEDS = (1, 2)
CHAIN = 3
SILENCE = 4.0
"""Seconds after which a host of a chain counts as hung."""


def draw(rng: random.Random, faults: Sequence[str], more: int) -> list[str]:
    """Return each fault once, and `more` of them again, in a random order."""
    schedule = [*faults, *rng.choices(faults, k=more)]
    rng.shuffle(schedule)
    return schedule


# The relay

RELAY_FAULTS = (
    "killed", "stopped", "memory full", "second owner", "cut", "delayed", "flipped", "doubled", "none",
)  # fmt: skip


class Member:
    """A host of the chain, behind a link; started again when it was killed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self._stack.close()
        (self.host,) = self._stack.enter_context(hosts(1))
        self.link = Proxy(port_of(self.host.url))
        self._stack.callback(self.link.close)
        self.url = f"http://127.0.0.1:{self.link.port}"

    @property
    def pid(self) -> int:
        return self.host.process.pid

    def heal(self) -> None:
        self.link.heal()
        limit_files(self.pid, resource.RLIM_INFINITY)
        self.host.process.send_signal(signal.SIGCONT)
        if self.host.process.poll() is not None:
            self.start()

    def close(self) -> None:
        self._stack.close()


class Chain:
    """A trainer's side and CHAIN hosts. Counts hosts that loaded something else than a push."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.members = [Member() for _ in range(CHAIN)]
        self._relays = self._new()
        self._epoch = 0
        self._versions: list[dict[str, str]] = [{}]
        self.counts = Counter[str]()

    def _new(self, seconds: float = SILENCE) -> RelayPush:
        return RelayPush([range(CHAIN)], seconds, 60.0)

    def begin(self, relays: RelayPush, version: int) -> None:
        self._epoch += 1
        for member in self.members:
            member.host.begin(self._epoch)
        urls = [member.url for member in self.members]
        relays.begin([EngineAddress(url, 1, -1, i, epoch=self._epoch) for i, url in enumerate(urls)], version)

    def push(self, version: int, fault: str) -> None:
        """Push a version, with the fault before one of its buckets, and count."""
        tensors = model(version, megabytes=self._rng.choice((12, 24)))  # another size is other files
        victim, fault_index = self._rng.choice(self.members), self._rng.randrange(1, 3)
        owner, sent = self._relays, 0
        self._versions.append(expected(tensors))
        self.begin(owner, version)

        def send(flat: Any) -> None:
            nonlocal sent
            sent += 1
            if sent == fault_index:
                self.strike(victim, fault)
            owner.send(flat)

        send_in_buckets(tensors.items(), BUCKET, StagingBuffers(shared=False), send)
        owner.end()
        if fault == "second owner":
            assert set(owner.excluded) == {member.url for member in self.members}, owner.excluded
            owner.close()
            owner = self._relays = self._new()
            self.begin(owner, version)
            self.send_all(owner, tensors)
        excluded = set(owner.excluded)
        self.count(excluded)
        for member in self.members:
            member.heal()

    def strike(self, victim: Member, fault: str) -> None:
        if fault == "killed":
            victim.host.process.kill()
            victim.host.process.wait()
        elif fault == "stopped":
            victim.host.process.send_signal(signal.SIGSTOP)
        elif fault == "memory full":
            limit_files(victim.pid, 4096)
        elif fault == "second owner":
            second_owner = self._new()
            self.begin(second_owner, 10_000 + self._epoch)
            second_owner.close()
        elif fault != "none":
            inject_link_fault(victim.link, fault, self._rng)

    def send_all(self, relays: RelayPush, tensors: Tensors) -> None:
        send_in_buckets(tensors.items(), BUCKET, StagingBuffers(shared=False), relays.send)
        relays.end()

    def count(self, excluded: set[str]) -> None:
        """Compare what hosts have loaded with what was pushed, tensor by tensor."""
        for member in self.members:
            loaded = member.url not in excluded
            self.counts["loaded" if loaded else "excluded"] += 1
            member.host.process.send_signal(signal.SIGCONT)
            if member.host.process.poll() is not None:
                self.counts["lost"] += loaded
                continue
            tensors = member.host.state()["tensors"]
            self.counts["lost"] += loaded and tensors != self._versions[-1]
            self.counts["wrong weights"] += tensors not in self._versions

    def finish(self, version: int) -> None:
        """Push once more without faults: every host gets everything."""
        self._relays.close()
        self._relays = self._new(60.0)
        self.push(version, "none")
        assert self._relays.excluded == {}

    def close(self) -> None:
        self._relays.close()
        for member in self.members:
            member.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_relayed_weights_are_those_of_a_push(seed: int) -> None:
    schedule = draw(random.Random(seed), RELAY_FAULTS, 7)
    print(f"{seed}: {', '.join(schedule)}")
    with contextlib.closing(Chain(seed)) as chain:
        for version, fault in enumerate(schedule, 1):
            chain.push(version, fault)
            print(f"{version} {fault}: {dict(chain.counts)}")
        chain.finish(len(schedule) + 1)
        print(dict(chain.counts))
        assert (chain.counts["lost"], chain.counts["wrong weights"]) == (0, 0)
        assert chain.counts["loaded"] > len(schedule), "faults cost single hosts"


# The meeting

EPISODE = """
import time
from openai import OpenAI

def play(row, policies):
    said = {}
    for name, policy in policies.items():
        answer = OpenAI(**policy, max_retries=0, timeout=60).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": row["question"]}]
        )
        said[name] = float(answer.choices[0].message.content)
        time.sleep(0.5)
    return said
"""
MEETING_FAULTS = ("killed", "stopped", "disk full", "second owner", "cut", "delayed", "none")
SAMPLES = 30


class Runs:
    """Two runs' side of a meeting: answers of the policies, and the rewards that samples are told."""

    def __init__(self) -> None:
        self.rewards: dict[str, list[float]] = {}
        self.ended: dict[str, list[str | None]] = {}
        self.sent_again = 0
        app = web.Application()
        app.router.add_post("/{sample}/v1/chat/completions", self._answer)
        app.router.add_post("/{sample}/reward", self._reward)
        self.server = TestServer(app)

    @staticmethod
    def worth(sample: str) -> float:
        """The response to a sample, which is its reward."""
        return float(int(sample[1:]) * 2 + (sample[0] == "b"))

    async def _answer(self, request: web.Request) -> web.Response:
        content = str(self.worth(request.match_info["sample"]))
        message = {"role": "assistant", "content": content}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": "policy", "choices": choices}
        )

    async def _reward(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.rewards.setdefault(request.match_info["sample"], []).append(float(payload["reward"]))
        return web.json_response({})

    async def send(self, service: Any, policy: str, number: int) -> None:
        """Send a sample until it has ended, as a run does."""
        sample, base = f"{policy}{number}", str(self.server.make_url("/"))
        env = {
            "OPENAI_BASE_URL": f"{base}{sample}/v1", "OPENAI_API_KEY": sample,
            "RLSYS_REWARD_URL": f"{base}{sample}/reward", "RLSYS_SAMPLE_ID": str(number),
        }  # fmt: skip
        while True:
            _, end_future = service.start({"question": f"q{number}"}, number, env)
            end = await end_future
            if not end.kill_reason:
                self.ended.setdefault(sample, []).append(end.error)
                return
            self.sent_again += 1


class Meet:
    """`rlsys meet`, started again at the same port, behind a link."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_ports("127.0.0.1", 1)[0]
        (folder / "episode.py").write_text(EPISODE)
        self.link = Proxy(self._port)
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.link.port}"

    def command(self) -> list[str]:
        words = ["--policy", "a", "--policy", "b", "--port", str(self._port), "--wait", "120"]
        return [*RLSYS, "meet", f"{self._folder}/episode.py:play", *words]

    def start(self) -> None:
        with (self._folder / "meet.log").open("ab") as log:
            self.process = subprocess.Popen(self.command(), cwd=ROOT, stdout=log, stderr=log)

    async def listens(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            assert self.process.poll() is None, (self._folder / "meet.log").read_text()[-2000:]
            await asyncio.sleep(0.1)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.link.close()


async def commit_at_meeting(meet: Meet, fault: str, rng: random.Random) -> None:
    """Do it, and end it after some seconds."""
    if fault == "killed":
        meet.process.kill()
        meet.process.wait()
        meet.start()
        await meet.listens()
    elif fault == "stopped":
        meet.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(5)
        meet.process.send_signal(signal.SIGCONT)
    elif fault == "disk full":
        tree = [meet.process.pid, *(p.pid for p in psutil.Process(meet.process.pid).children(recursive=True))]
        for pid in tree:
            limit_files(pid, 4096)
        await asyncio.sleep(3)
        for pid in tree:
            limit_files(pid, resource.RLIM_INFINITY)
    elif fault == "second owner":
        second = await asyncio.create_subprocess_exec(*meet.command(), cwd=ROOT, stderr=subprocess.PIPE)
        _, words = await second.communicate()
        assert second.returncode == 2 and b"port" in words
    elif fault != "none":
        inject_link_fault(meet.link, fault, rng)
        await asyncio.sleep(3)
        meet.link.heal()


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_sample_of_a_meeting_ends_once_with_its_reward(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    schedule = draw(rng, MEETING_FAULTS, 3)
    print(f"{seed}: {', '.join(schedule)}")
    runs, meet = Runs(), Meet(tmp_path)
    await runs.server.start_server()
    try:
        await meet.listens()
        async with open_service(f"{meet.url}/a") as a, open_service(f"{meet.url}/b") as b:
            tasks = []
            for number in range(SAMPLES):
                if number % 3 == 2 and schedule:
                    await commit_at_meeting(meet, schedule.pop(), rng)
                for policy, service in (("a", a), ("b", b)):
                    tasks.append(asyncio.create_task(runs.send(service, policy, number)))
                await asyncio.sleep(rng.uniform(0, 1))
            assert not schedule
            await asyncio.gather(*tasks)
    finally:
        meet.close()
        await runs.server.close()
    samples = [f"{policy}{number}" for number in range(SAMPLES) for policy in "ab"]
    lost = [s for s in samples if s not in runs.ended]
    errors = {s: e for s in samples for e in runs.ended.get(s, []) if e is not None}
    wrong = {s: rewards for s, rewards in runs.rewards.items() if set(rewards) != {runs.worth(s)}}
    rewarded_well = [s for s in samples if runs.ended.get(s) == [None] and s in runs.rewards]
    print(f"{len(samples)} samples, {runs.sent_again} sent again; errors {errors}")
    assert (lost, wrong) == ([], {})
    assert len(rewarded_well) + len(errors) == len(samples)
    assert not errors
