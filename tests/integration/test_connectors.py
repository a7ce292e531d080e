"""One toy of each connector, its package in a venv of its own, over loopback: rewards equal its own evaluator's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlsys.generators.environment_services import ServiceParams, Services
from tests.helpers.venvs import venv

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
"""The first time on a machine, packages are installed."""

TOYS = Path(__file__).resolve().parents[1] / "data/environments/servers.py"
Turn = str | tuple[str, list[dict[str, Any]]]


@asynccontextmanager
async def services(connector: str, python: Path, **params: Any) -> AsyncIterator[Services]:
    instance = Services(
        ServiceParams(connector=connector, python=str(python), params=params), "generator_params"
    )
    try:
        yield instance
    finally:
        await instance.close()


async def played(
    made: Services, task: dict[str, Any], seed: int, turns: Sequence[Turn]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """What is read first, the tools, and what follows each turn."""
    async with made.episode(task, seed) as episode:
        steps = []
        for turn in turns:
            text, calls = (turn, []) if isinstance(turn, str) else turn
            steps.append(await episode.step(text, calls))
        return list(episode.messages), list(episode.tools), steps


def own(python: Path, program: str, *args: str) -> Any:
    """What the package itself says, in its venv."""
    process = subprocess.run([str(python), "-c", program, *args], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


async def test_gymnasium() -> None:
    python = venv("gymnasium", "gymnasium==1.4.0", "numpy<3")
    moves = ["I go 2", "1", "to the left: 0", "2 2", "no idea", "1", "1"]
    program = """
import gymnasium, json, sys
env = gymnasium.make("FrozenLake-v1", is_slippery=True)
seen = [int(env.reset(seed=int(sys.argv[1]))[0])]
rewards = []
for move in (2, 1, 0, 2, 1, 1):
    observation, reward, terminated, truncated, _ = env.step(move)
    seen.append(int(observation)); rewards.append([float(reward), bool(terminated or truncated)])
    if terminated or truncated:
        break
print(json.dumps([seen, rewards]))
"""
    async with services(
        "gymnasium", python, id="FrozenLake-v1", kwargs={"is_slippery": True}, penalty=-0.5
    ) as pool:
        for seed in range(4):
            observations, rewards = own(python, program, str(seed))
            turns = moves[: len(rewards) + (len(rewards) > 4)]
            read, tools, steps = await played(pool, {}, seed, turns)
            wrong = [s for s, move in zip(steps, turns, strict=True) if move == "no idea"]
            right = [s for s, move in zip(steps, turns, strict=True) if move != "no idea"]
            assert [m["content"] for m in read] == [str(observations[0])] and not tools
            assert [s["messages"][0]["content"] for s in right] == [str(s) for s in observations[1:]]
            assert [[s["reward"], s["done"]] for s in right] == rewards
            assert all(s["reward"] == -0.5 and "Discrete(4)" in s["messages"][0]["content"] for s in wrong)


async def test_gymnasium_with_numbers_of_a_box_and_named_actions() -> None:
    python = venv("gymnasium", "gymnasium==1.4.0", "numpy<3")
    program = """
import gymnasium, json, numpy
env = gymnasium.make("MountainCarContinuous-v0")
env.reset(seed=3)
print(json.dumps([float(env.step(numpy.array([0.5], dtype=numpy.float32))[1]) for _ in range(2)]))
"""
    async with services("gymnasium", python, id="MountainCarContinuous-v0") as pool:
        _, _, steps = await played(pool, {}, 3, ["push 0.5", "0.5"])
        assert [s["reward"] for s in steps] == own(python, program)
    async with services("gymnasium", python, id="CartPole-v1", actions=["left", "right"]) as pool:
        _, _, steps = await played(pool, {}, 0, ["right, no: left", "right"])
        assert [s["reward"] for s in steps] == [1.0, 1.0]


async def test_reasoning_gym() -> None:
    python = venv("reasoning-gym", "reasoning-gym==0.1.25")
    program = """
import json, reasoning_gym
data = reasoning_gym.create_dataset("spell_backward", size=8, seed=5)
print(json.dumps([[e["question"], e["answer"], [data.score_answer(answer=a, entry=e) for a in (e["answer"], "x")]]
                  for e in data]))
"""
    async with services(
        "reasoning_gym", python, dataset="spell_backward", params={"size": 8, "seed": 5}, turns=2
    ) as pool:
        for item, (question, answer, (full, none)) in enumerate(own(python, program)):
            read, _, steps = await played(pool, {"item": item}, 0, ["<answer>x</answer>", answer])
            assert read[0]["content"] == question
            assert [(s["reward"], s["done"]) for s in steps] == [(0.0, False), (full, True)]
            _, _, steps = await played(pool, {"item": item}, 0, ["x", "<answer>x</answer>"])
            assert [(s["reward"], s["done"]) for s in steps] == [(0.0, False), (none, True)]


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c", "name": name, "arguments": arguments}


async def test_mcp() -> None:
    python = venv("mcp", "mcp==2.3.0")
    command = [str(python), str(TOYS), "mcp_sums"]
    async with services("mcp", python, command=command, reward_tool="judge", system="use add") as pool:
        task = {"question": "3+4", "answer": 7}
        add = (
            "",
            [call("add", '{"terms": [3, 4]}'), call("add", "{"), call("judge", "{}"), call("no", "{}")],
        )
        read, tools, (first_step, last_step) = await played(pool, task, 0, [add, "7"])
        assert [m["role"] for m in read] == ["system", "user"] and read[1]["content"] == "3+4"
        assert [t["function"]["name"] for t in tools] == ["add"], "the judge is not the model's"
        contents = [m["content"] for m in first_step["messages"]]
        assert contents[0] == "7" and all(text.startswith("error") for text in contents[1:])
        assert (last_step["reward"], last_step["done"], first_step["reward"], first_step["done"]) == (
            1.0,
            True,
            0.0,
            False,
        )
        _, _, (wrong,) = await played(pool, task, 0, ["8"])
        assert (wrong["reward"], wrong["done"]) == (0.0, True)


async def test_verifiers() -> None:
    python = venv("verifiers", "verifiers==0.1.14")
    program = f"""
import asyncio, json, sys
sys.path.insert(0, {str(TOYS.parent)!r})
import servers
env = servers.load_environment()
said = json.loads(sys.argv[1])
row = dict(env.get_dataset()[int(sys.argv[2])])
async def main():
    from verifiers.types import State, AssistantMessage
    state = State.for_task(row)
    state["answer"], state["prompt"] = row["answer"], row["prompt"]
    state["completion"] = [AssistantMessage(content=said[0])]
    for text in said[1:]:
        state["completion"] += await env.env_response(state["completion"], state)
        state["completion"] += [AssistantMessage(content=text)]
    await env.rubric.score_rollout(state)
    print(json.dumps([state["reward"], len(row["prompt"])]))
asyncio.run(main())
"""
    async with services("verifiers", python, load=f"{TOYS}:load_environment") as pool:
        for replies in (["3"], ["5", "2", "3"], ["5", "6", "7"]):
            read, _, steps = await played(pool, {"example": 3}, 0, replies)
            reward, messages = own(python, program, json.dumps(replies), "3")
            assert [m["role"] for m in read] == ["system", "user"] and len(read) == messages
            assert [s["done"] for s in steps] == [False] * (len(replies) - 1) + [True]
            assert [m["content"] for s in steps[:-1] for m in s["messages"]] == [
                "lower" if int(text) > 3 else "higher" for text in replies[:-1]
            ]
            assert sum(s["reward"] for s in steps) == pytest.approx(reward, abs=1e-9)


@contextlib.contextmanager
def openenv_server(python: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([str(python), str(TOYS), "openenv_echo", str(port)])
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def test_openenv() -> None:
    python = venv("openenv", "openenv-core==0.3.0")
    program = """
import json, sys
from openenv.core.generic_client import GenericEnvClient
with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    first = env.reset(seed=4).observation["heard"]
    steps = [env.step({"message": m}) for m in ("hello", "you")]
    print(json.dumps([first, [[s.observation["heard"], s.reward, s.done] for s in steps]]))
"""
    with openenv_server(python) as url:
        first, steps = await asyncio.to_thread(own, python, program, url)
        async with services("openenv", python, url=url, field="message", show="heard") as pool:
            read, _, service_steps = await played(pool, {}, 4, ["hello", "you"])
            assert read[0]["content"] == first == "seed 4"
            assert [[s["messages"][0]["content"], s["reward"], s["done"]] for s in service_steps] == steps
            episodes = await asyncio.gather(*(played(pool, {}, 4, ["hello", "you"]) for _ in range(3)))
            assert all(steps == service_steps for _, _, steps in episodes)
        async with services("openenv", python, url=url, penalty=-1.0) as pool:
            _, _, (wrong, right) = await played(
                pool, {}, 4, ["hm", 'so <action>{"message": "hello"}</action>']
            )
            assert (wrong["reward"], right["reward"]) == (-1.0, 0.5)
