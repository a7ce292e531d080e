"""Two policies meet in one episode; whichever of the three dies, nobody hears two things of one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlsys.agents import remote
from rlsys.agents.hosting import open_host
from rlsys.agents.multi_policy import EpisodeServer
from rlsys.config.data import DataConfig
from rlsys.core.types import Prompt, Sample, Status
from rlsys.generators.agent import AgentGenerator
from rlsys.generators.generator import build_generator
from rlsys.generators.parser_client import ToolFailed
from rlsys.router.router import EVALUATION
from tests.unit.generators.test_agent import TOKENIZER, Model, config

pytestmark = pytest.mark.gate  # each starts a process that episodes are forked from

EPISODES = Path(__file__).resolve().parents[2] / "data/agents/episodes.py"
SAID = {
    "first": ["one</think><answer>1</answer><eos>", "two</think><answer>2</answer><eos>"],
    "second": ["six</think><answer>6</answer><eos>", "ten</think><answer>10</answer><eos>"],
}
NOW = "<user>{}<assistant><think>"
WHOLE = {
    "first": NOW.format("six</think><answer>6</answer>").join(SAID["first"]),
    "second": NOW.format("two</think><answer>2</answer>").join(SAID["second"]),
}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)


@asynccontextmanager
async def met(function: str, wait: float = 30.0, port: int = 0) -> AsyncIterator[tuple[EpisodeServer, str]]:
    async with (
        aiohttp.ClientSession() as session,
        open_host(f"{EPISODES}:{function}", None, None, (), plays_episodes=True) as host,
    ):
        meeting = EpisodeServer(("first", "second"), wait, session)
        meeting.put_host(host)
        async with meeting.listening(port) as base:
            yield meeting, base


class Run:
    """What a run's rollout process is to the meeting: a generator, and samples that outlive it."""

    def __init__(self, policy: str, base: str, model: Model | None = None, **rollout: Any) -> None:
        made_for = config("", {"run": None, "url": f"{base}/{policy}"}, **rollout)
        wanting = made_for.model_copy(update={"data": DataConfig.model_validate({"reward": "agent"})})
        self.model = model or Model(SAID[policy])
        generator = build_generator(wanting, TOKENIZER, self.model)
        assert isinstance(generator, AgentGenerator)
        self.generate: AgentGenerator = generator

    async def play(self, row: dict[str, Any], sample: Sample | None = None, seed: int = 1) -> Sample:
        text = TOKENIZER.apply_chat([{"role": "user", "content": "3+4+(2+2)"}])
        prompt = Prompt(0, text, TOKENIZER.encode(text), row, "3+4+(2+2)")
        sample = sample or Sample(seed, 1, 0, prompt.ids, seed=seed)
        await self.generate(sample, prompt)
        return sample


def reward(sample: Sample) -> float:
    assert sample.turn_rewards is not None
    return sum(mark.reward for mark in sample.turn_rewards)


def check(policy: str, sample: Sample, worth: float) -> None:
    assert TOKENIZER.decode(sample.response_ids) == WHOLE[policy]
    assert (sample.status, reward(sample), sample.extra_sequences) == (Status.FINISHED, worth, [])


def row_of(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"log": str(tmp_path / "log"), **more}


def noted(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


async def test_samples_of_one_row_and_seed_meet_and_each_gets_its_reward(tmp_path: Path) -> None:
    row = row_of(tmp_path)
    async with met("talk") as (meeting, base):
        runs = {p: Run(p, base) for p in SAID}
        first_sample, second_sample, *other_pair = await asyncio.gather(
            *(run.play(row, seed=seed) for seed in (1, 2) for run in runs.values())
        )
        assert meeting.counts["played"] == 2
    for first, second in ((first_sample, second_sample), other_pair):
        check("first", first, 0.25)
        check("second", second, 0.75)


async def test_an_episode_function_may_be_a_coroutine_and_request_streams(tmp_path: Path) -> None:
    async with met("talk_once") as (_, base):
        samples = await asyncio.gather(*(Run(p, base).play(row_of(tmp_path)) for p in SAID))
    assert [reward(s) for s in samples] == [1, 1]


async def killed(run: Run, row: dict[str, Any], tokens: int) -> Sample:
    """A sample whose process dies when it has so many tokens; they are saved."""
    run.model.at_once = tokens
    text = TOKENIZER.apply_chat([{"role": "user", "content": "3+4+(2+2)"}])
    sample = Sample(1, 1, 0, TOKENIZER.encode(text), seed=1)
    with pytest.raises(asyncio.CancelledError):
        await run.play(row, sample)
    sample.status = Status.PARKED
    return sample


@pytest.mark.parametrize("tokens", [3, 8, 12])
@pytest.mark.parametrize("policy", ["first", "second"])
async def test_a_sample_of_a_killed_process_rejoins_its_episode(
    policy: str, tokens: int, tmp_path: Path
) -> None:
    """Its partner notices nothing, and the function runs once."""
    row, partner_policy = row_of(tmp_path), next(p for p in SAID if p != policy)
    async with met("talk") as (meeting, base):
        partner = asyncio.create_task(Run(partner_policy, base).play(row))
        back = await killed(Run(policy, base), row, tokens)
        assert not partner.done()
        check(policy, await Run(policy, base).play(row, back), {"first": 0.25, "second": 0.75}[policy])
        check(partner_policy, await partner, {"first": 0.25, "second": 0.75}[partner_policy])
        assert meeting.counts["came_again"] == 1
    assert noted(tmp_path) == ["begun", "ended"]


async def test_a_sample_without_a_recorded_end_receives_its_reward_again(tmp_path: Path) -> None:
    row = row_of(tmp_path)
    async with met("talk") as (_, base):
        first_sample, second_sample = await asyncio.gather(*(Run(p, base).play(row) for p in SAID))
        first_sample.turn_rewards, first_sample.status = None, Status.PARKED
        again = Run("first", base)
        check("first", await again.play(row, first_sample), 0.25)
        assert again.model.asked == [], "all of it was in the ledger"
    check("second", second_sample, 0.75)
    assert noted(tmp_path) == ["begun", "ended"]


async def test_a_sample_that_diverges_after_a_restart_is_censored_with_its_partner(tmp_path: Path) -> None:
    """Its process has died with tokens that the partner has heard of."""
    row = row_of(tmp_path)
    async with met("talk") as (_, base):
        partner = asyncio.create_task(Run("second", base).play(row))
        await killed(Run("first", base), row, 12)
        with pytest.raises(
            ToolFailed,
            match="409: the episode continued without this sample: the answers of the restarted run differ",
        ):
            await Run("first", base, Model(["no</think><answer>5</answer><eos>"] * 2)).play(row)
        with pytest.raises(
            ToolFailed, match="the episode: RuntimeError: 410 the response of first has ended"
        ):
            await partner


async def test_a_killed_episode_is_replayed_from_its_recorded_turns(tmp_path: Path) -> None:
    async with met("is_killed_once") as (meeting, base):
        runs = {p: Run(p, base) for p in SAID}
        samples = await asyncio.gather(*(run.play(row_of(tmp_path)) for run in runs.values()))
        assert meeting.counts["played_again"] == 1
        counts = [run.generate.counts["agent_restarts"] for run in runs.values()]
    assert counts == [1, 1]
    # What it asked before it was killed began a conversation: the same question again is its next.
    assert [reward(s) for s in samples] == [0.25, 0.75]
    assert noted(tmp_path) == ["killed", "begun", "ended"]


@pytest.mark.parametrize("tokens", [8, 20])
async def test_the_meeting_may_die(tokens: int, tmp_path: Path) -> None:
    """Another one at the same port plays its episodes again; the samples have what was said."""
    row, runs = row_of(tmp_path), {}
    token_event = asyncio.Event()

    class Heard(Model):
        async def __call__(self, sample: Sample, **limits: Any) -> None:
            await super().__call__(sample, **limits)
            if len(sample.response_ids) >= tokens:
                token_event.set()
                await asyncio.sleep(0)

    async with met("talk") as (_, base):
        runs = {p: Run(p, base, Heard(SAID[p])) for p in SAID}
        playing = [asyncio.create_task(run.play(row)) for run in runs.values()]
        await token_event.wait()
    async with met("talk", port=int(base.rpartition(":")[2])) as (meeting, _):
        for policy, sample, worth in zip(SAID, await asyncio.gather(*playing), (0.25, 0.75), strict=True):
            check(policy, sample, worth)
        assert meeting.counts["played"] == 1
    assert noted(tmp_path) == ["begun", "begun", "ended"]


async def test_a_missing_partner_is_reported(tmp_path: Path) -> None:
    async with met("talk", wait=0.05) as (meeting, base):
        with pytest.raises(
            ToolFailed, match=r"HTTP 504: no sample of second for this row and seed 1 arrived within 0\.05 s"
        ):
            await Run("first", base).play(row_of(tmp_path))
        assert meeting.counts["without_partner"] == 1


async def test_a_permanently_lost_sample_is_reported_to_the_episode(tmp_path: Path) -> None:
    row = row_of(tmp_path)
    async with met("insists", wait=0.2) as (_, base):
        partner = asyncio.create_task(Run("second", base).play(row))
        await killed(Run("first", base, Model(["no<eos>"] * 9)), row, 7)
        assert reward(await partner) == 1
    assert noted(tmp_path) == [
        "410 the response of first has ended: the run did not send the sample again within 0.2 s"
    ]


async def test_a_sample_with_a_full_conversation_ends_with_reward_zero(tmp_path: Path) -> None:
    """It is worth 0, as with every agent; nobody waits for it."""
    row = row_of(tmp_path)
    async with met("insists") as (_, base):
        first = Run("first", base, Model(["no<eos>"] * 99, budget=60), max_response_tokens=60)
        first_sample, second_sample = await asyncio.gather(first.play(row), Run("second", base).play(row))
    assert (reward(first_sample), reward(second_sample)) == (0, 1)
    assert len(noted(tmp_path)) == 1 and "has reached its limit of tokens" in noted(tmp_path)[0]


@pytest.mark.parametrize("worth", [None, float("nan"), "much"])
async def test_an_episode_without_a_reward_for_each_is_censored(worth: object, tmp_path: Path) -> None:
    async with met("talk") as (_, base):
        results = await asyncio.gather(
            *(Run(p, base).play(row_of(tmp_path, worth=worth)) for p in SAID), return_exceptions=True
        )
    assert all(
        isinstance(e, ToolFailed)
        and 'expected {"first": NUMBER, "second": NUMBER} with finite numbers' in str(e)
        for e in results
    )


async def test_invalid_and_unauthorized_calls_are_rejected(tmp_path: Path) -> None:
    env = {
        "OPENAI_BASE_URL": "http://127.0.0.1:1",
        "OPENAI_API_KEY": "k",
        "RLSYS_REWARD_URL": "http://127.0.0.1:1",
    }
    good = {"task": {}, "seed": 1, "env": env}
    async with met("talk") as (_, base), aiohttp.ClientSession() as client:
        for path, body, status in [
            ("third", good, 404),
            ("first", [], 400),
            ("first", {**good, "seed": "1"}, 400),
            ("first", {**good, "env": {**env, "OPENAI_BASE_URL": "http://example.com"}}, 400),
            ("first", {**good, "env": {**env, "RLSYS_REWARD_URL": "file:///etc/passwd"}}, 400),
            ("seat/x/v1/chat/completions", {}, 401),
            ("episode/x/rewards", {"rewards": {}}, 401),
        ]:
            async with client.post(f"{base}/{path}", json=body) as answer:
                assert answer.status == status, path
        async with client.post(f"{base}/first", data="{}", headers={"Content-Type": "text/plain"}) as answer:
            assert answer.status == 415


async def test_two_runs_with_few_slots_and_different_orders_do_not_stall(tmp_path: Path) -> None:
    """Each has 6 places for 40 samples in its own order; some of them it never sends. All end, with a reward
    on both sides or with the reason."""
    rows, slots = 10, 6
    rng = random.Random(0)
    keys = [(r, s) for r in range(rows) for s in range(4)]
    sent_keys = {p: [k for k in keys if rng.random() < 0.9] for p in SAID}
    sent_keys["second"] = [
        k for r in range(0, rows, 2) for row in (r + 1, r) for k in sent_keys["second"] if k[0] == row
    ]

    async def session(policy: str, base: str) -> dict[tuple[int, int], float | str]:
        run, free = Run(policy, base), asyncio.Semaphore(slots)
        outcomes: dict[tuple[int, int], float | str] = {}

        async def one(key: tuple[int, int]) -> None:
            async with free:
                try:
                    sample = await run.play(row_of(tmp_path, number=key[0]), seed=1 + key[0] * 4 + key[1])
                    outcomes[key] = reward(sample)
                except ToolFailed as e:
                    outcomes[key] = str(e)

        await asyncio.gather(*map(one, sent_keys[policy]))
        return outcomes

    async with met("talk", wait=3.0) as (meeting, base):
        first, second = await asyncio.gather(*(session(p, base) for p in SAID))
        async with aiohttp.ClientSession() as client, client.get(base) as answer:
            assert (await answer.json())["playing"] == 0
    shared_keys = set(sent_keys["first"]) & set(sent_keys["second"])
    assert set(first) == set(sent_keys["first"]) and set(second) == set(sent_keys["second"]), "all have ended"
    for key in shared_keys:
        assert isinstance(first[key], float) == isinstance(second[key], float)
    for outcomes in (first, second):
        failures = {key: outcome for key, outcome in outcomes.items() if not isinstance(outcome, float)}
        assert set(outcomes) - shared_keys <= set(failures) and all(
            "no sample of" in str(outcome) for outcome in failures.values()
        )
    assert meeting.counts["played"] > 0


async def test_an_evaluation_is_paired_by_step_and_may_be_repeated_alone(tmp_path: Path) -> None:
    """A run goes back to a checkpoint and evaluates once more; its partner does not."""
    row = row_of(tmp_path)

    async def evaluate(run: Run, step: int) -> float:
        run.generate.evaluated_step = step
        text = TOKENIZER.apply_chat([{"role": "user", "content": "3+4+(2+2)"}])
        return reward(await run.play(row, Sample(EVALUATION, EVALUATION, 0, TOKENIZER.encode(text), seed=0)))

    async with met("talk") as (meeting, base):
        first, second = Run("first", base), Run("second", base)
        ahead = asyncio.create_task(evaluate(second, 4))
        assert await asyncio.gather(evaluate(first, 0), evaluate(Run("second", base), 0)) == [0.25, 0.75]
        assert not ahead.done()
        assert await evaluate(Run("first", base), 0) == 0.25
        assert await asyncio.gather(evaluate(first, 4), ahead) == [0.25, 0.75]
        assert (meeting.counts["evaluated"], meeting.counts["came_again"]) == (2, 1)
    assert noted(tmp_path) == ["begun", "ended"] * 2
