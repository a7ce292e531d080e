"""The algorithm's plug-ins on the rollout's side, called by the manager: asked, filtered, grown, judged."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlsys.algo.group_rewards import Response
from rlsys.config import Config
from rlsys.core.errors import RunError, UserError
from rlsys.core.types import GroupState, Prompt, Sample, SampleGroup
from rlsys.planning.planning import Planning
from rlsys.rewards.judges import Judge, JudgeWithTimeout
from rlsys.router.router import PoisonRequest
from tests.helpers.planning_cases import BUDGET, Lengths, config_of, group_of
from tests.helpers.rollout_rig import Numbers, Rig, ids, length_reward, make_config, rig, settle

ROOT = Path(__file__).resolve().parents[3]


def mixed_in_odd_groups(sample: Sample) -> int:
    """Rewards (1 for an odd length) differ in odd groups and agree in even ones."""
    return 3 if sample.group_id % 2 == 0 or sample.index % 2 == 0 else 4


async def test_groups_of_equal_rewards_are_filtered_and_replaced(tmp_path: Path) -> None:
    async with rig(config_of(tmp_path, planners=["dapo"]), mixed_in_odd_groups) as r:
        await r.start()
        batch = await r.take(1)
        assert ids(batch.groups) == [1, 3]  # staleness 0: the filtered made room for exactly these
        assert batch.metrics["filtered"] == 2
        assert r.buffer.ledger().groups["filtered"] == 2


async def test_a_filter_gives_in_after_so_many_drops(tmp_path: Path) -> None:
    dapo = {"name": "dapo", "drops": 3}
    async with rig(config_of(tmp_path, planners=[dapo])) as r:  # all rewards are 1
        await r.start()
        batch = await r.take(1)
        assert ids(batch.groups) == [3, 7]


async def test_a_planner_decides_the_size_of_a_group(tmp_path: Path) -> None:
    async with rig(config_of(tmp_path, planners=["mc_grpo"])) as r:
        await r.start()
        assert [len(g.samples) for g in (await r.take(1)).groups] == [3, 3]


async def test_the_example_grows_an_unsuccessful_group_once_and_then_drops_it(tmp_path: Path) -> None:
    def lengths(sample: Sample) -> int:
        """Group 0 has no success, group 1 one in the samples that it gets later, the others two."""
        is_right = sample.group_id > 1 or (sample.group_id == 1 and sample.index == 3)
        return 3 if is_right else 4

    policy = {"name": f"{ROOT}/examples/own_planner.py:SecondChance", "extra": 2}
    async with rig(config_of(tmp_path, planners=[policy]), lengths) as r:
        await r.start()
        batch = await r.take(1)
        assert sorted((g.group_id, len(g.samples)) for g in batch.groups) == [(1, 4), (2, 2)]
        assert batch.metrics["filtered"] == 1


DARS = {"name": "dars", "signal": "plain", "largest": 6}
"""Of two wrong answers (p = 1/4): hardness asks for ceil((1.5 - 0.75) / 0.375) = 2 more."""


async def test_hard_groups_grow_once(tmp_path: Path) -> None:
    def wrong_in_group_zero(sample: Sample) -> int:
        return 4 if sample.group_id == 0 else 3

    async with rig(config_of(tmp_path, planners=[DARS]), wrong_in_group_zero) as r:
        await r.start()
        first, second = (await r.take(1)).groups
        assert [s.index for s in first.samples] == [0, 1, 2, 3]
        assert len({s.seed for s in first.samples}) == 4
        assert [s.sample_id for s in second.samples] == [6, 7]  # ids leave room for the largest group
        ledger = r.buffer.ledger()
        assert (ledger.samples["trained"], ledger.sizes["trained"]) == (6, 6)


async def test_a_restart_neither_repeats_nor_forgets_that_a_group_grew(tmp_path: Path) -> None:
    def slow_second_stage(sample: Sample) -> int:
        return 4 if sample.index < 2 else 12

    config = config_of(tmp_path, planners=[DARS])
    async with rig(config, slow_second_stage) as r:
        await r.start()
        take = asyncio.create_task(r.manager.take(1))
        for _ in range(6):
            await settle()
            r.router.tick()
        take.cancel()
        assert [len(g.samples) for g in r.buffer.active()] == [4, 4]
    async with rig(config, slow_second_stage) as r:
        await r.start()
        assert [len(g.samples) for g in (await r.take(1)).groups] == [4, 4]


async def test_a_hard_prompt_is_resampled_without_distractors_and_trained_as_original(
    tmp_path: Path,
) -> None:
    scored: list[list[int]] = []

    async def scores(prompt: list[int]) -> tuple[list[float], list[bool]]:
        scored.append(prompt)
        return [0.0, 2.0, 1.0], [True, False, False]

    def wrong_in_group_zero(sample: Sample) -> int:
        return 4 if sample.group_id == 0 else 3

    config = config_of(tmp_path, planners=["lens"])
    async with rig(config, wrong_in_group_zero, prompt_scores=scores) as r:
        await r.start()
        hard, easy = (await r.take(1)).groups
        assert scored == [hard.samples[0].prompt_ids] == [[5, 6, 0]]
        assert [(s.prompt_ids, s.trained_prompt) for s in hard.samples] == [
            *[([5, 6, 0], None)] * 2,
            *[([5, 0], [5, 6, 0])] * 2,
        ]
        assert {s.trained_prompt for s in easy.samples} == {None}


async def test_a_prompt_that_engines_die_of_censors_its_group(tmp_path: Path) -> None:
    """Before: it was asked about for ever, and its group's step waited."""

    async def scores(_: list[int]) -> tuple[list[float], list[bool]]:
        raise PoisonRequest("4 engines died while they processed the request")

    config = config_of(tmp_path, planners=["lens"])
    async with rig(config, lambda s: 4 if s.group_id == 0 else 3, prompt_scores=scores) as r:
        await r.start()
        groups = (await r.take(1)).groups
        assert 0 not in ids(groups) and len(groups) == config.rollout.groups_per_step
        assert r.buffer.counts[GroupState.CENSORED] == 1


async def test_an_unsuccessful_group_sees_a_solved_example_and_trains_without_it(
    tmp_path: Path,
) -> None:
    """Even lengths are wrong: group 1 takes longer, so group 0 has been solved before it."""
    config = config_of(tmp_path, planners=[{"name": "xrpo", "samples": 2, "largest": 4, "share": 0.5}])
    async with rig(config, lambda s: 4 if s.group_id == 1 else 3) as r:
        await r.start()
        easy, hard = (await r.take(1)).groups
        assert {s.trained_prompt for s in easy.samples} == {None}
        plain, seeded = hard.samples[:2], hard.samples[2:]
        assert [(s.prompt_ids, s.trained_prompt) for s in plain] == [([5, 6, 1], None)] * 2
        exemplar_ids = [5, 6, 0, 0, 1, 2]
        assert [(s.prompt_ids, s.trained_prompt) for s in seeded] == [
            ([*exemplar_ids, 5, 6, 1], [5, 6, 1])
        ] * 2


def planning(tmp_path: Path, judge: Judge | None = None, source: Any = None, **algo: Any) -> Planning:
    tokenizer: Any = Lengths()
    patient = None if judge is None else JudgeWithTimeout(judge, 5.0)
    return Planning(config_of(tmp_path, **algo), source or Numbers(), tokenizer, patient)


async def test_votes_replace_the_verifier_reward_and_preserve_it_as_plain_reward(tmp_path: Path) -> None:
    plan, group = planning(tmp_path, group_reward="ttrl"), group_of(["7", "7", None], [0, 0, 1])
    for _ in range(2):  # a second time, as after a restart: the same
        assert await plan.reward(Numbers().train(0), group) is None
        assert [s.reward for s in group.samples] == [1, 1, 0]
        assert [s.plain_reward for s in group.samples] == [0, 0, 1]


async def test_a_judge_scores_only_correct_responses_and_a_missing_verdict_censors(tmp_path: Path) -> None:
    questions: list[str] = []

    async def judge(text: str) -> str:
        questions.append(text)
        return r"\boxed{-1}" if "xx" in text else r"\boxed{0}"

    async def mute(text: str) -> str:
        return "no verdict"

    group = group_of(["a", "b", "c"], [1, 1, 0])
    plan = planning(tmp_path, judge, group_reward="fapo")
    assert await plan.reward(Numbers().train(0), group) is None
    assert [s.reward for s in group.samples] == [0, 1, -1]
    assert len(questions) == 2
    silent = planning(tmp_path, mute, group_reward="fapo")
    assert "could not judge 2" in str(await silent.reward(Numbers().train(0), group_of(["a"] * 2, [1, 1])))


async def nobody(prompt: str, responses: Sequence[Response], judge: Judge | None) -> list[float | None]:
    return [None] * len(responses)


async def test_a_group_that_cannot_be_judged_is_censored(tmp_path: Path) -> None:
    config = config_of(tmp_path, group_reward=f"{__name__}:nobody")
    async with rig(config) as r:
        r.manager._runner._planning._tokenizer = Lengths()  # type: ignore[assignment]
        await r.start()
        with pytest.raises(RunError, match="the last 4 groups could not be used"):
            await r.take(1)
        assert r.buffer.counts[GroupState.CENSORED] >= 4


async def rude(prompt: str, responses: Sequence[Response], judge: Judge | None) -> Any:
    """Does to prompts 0 to 6 what a group reward must not."""
    deed = int(prompt)
    if deed == 0:
        raise ZeroDivisionError("no such thing")
    if deed == 1:
        with contextlib.suppress(asyncio.CancelledError):  # nor is it impressed by being cancelled
            await asyncio.Event().wait()
        await asyncio.Event().wait()
    if deed == 2:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(0)
    bad = {3: [math.nan, 1.0], 4: [1.0] * 3, 5: ["full", "marks"], 6: None}
    return bad.get(deed, [1.0, 0.0])


RUDE = f"algo.group_reward {__name__}:rude "


@pytest.mark.virtual_clock
async def test_whatever_a_group_reward_does_costs_one_group(tmp_path: Path) -> None:
    rollout = {"rollout": {**BUDGET["rollout"], "reward_timeout": 5, "over_provision": 4, "max_staleness": 4}}
    config = make_config(tmp_path, algo={"group_reward": f"{__name__}:rude"}, **rollout)
    plan = Planning(config, Numbers(), Lengths())  # type: ignore[arg-type]
    reasons = [await plan.reward(Numbers().train(i), group_of(["a", "b"], [1, 0])) for i in range(8)]
    line = next(i for i, x in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise ZeroDiv" in x)
    assert reasons == [
        RUDE + f"raised ZeroDivisionError: no such thing (tests/unit/planning/{Path(__file__).name}:{line})",
        RUDE + "took longer than rollout.reward_timeout = 5 s",
        RUDE + "was cancelled",
        RUDE + "returned the reward nan; expected a finite number",
        RUDE + "returned [1.0, 1.0, 1.0]; expected a list of 2 rewards",
        RUDE + "returned the reward 'full'; expected a finite number",
        RUDE + "returned None; expected a list of 2 rewards",
        None,
    ]
    assert plan.counts == {"group_reward_hung": 1, "group_reward_failed": 6}


async def test_the_run_continues_without_groups_whose_group_reward_failed(tmp_path: Path) -> None:
    config = config_of(tmp_path, group_reward=f"{__name__}:zero_raises")
    async with rig(config) as r:
        r.manager._runner._planning._tokenizer = Lengths()  # type: ignore[assignment]
        await r.start()
        batch = await r.take(1)
        assert ids(batch.groups) == [1, 2]
        assert (batch.metrics["censored"], batch.metrics["group_reward_failed"]) == (1, 1)


async def zero_raises(prompt: str, responses: Sequence[Response], judge: Judge | None) -> list[float]:
    return [1.0 / int(prompt)] * len(responses)


class Questions(Numbers):
    def train(self, index: int) -> Prompt:
        return Prompt(index, f"{index}+1", [index], {}, f"{index}+1")


def test_each_group_keeps_the_text_of_its_template(tmp_path: Path) -> None:
    plan = planning(tmp_path, source=Questions(), prompt="prompt_augmentation")
    texts = [plan.prompt(i).text for i in range(20)]
    assert len({t.replace(str(i), "N", 1) for i, t in enumerate(texts)}) > 3
    group = SampleGroup(3, 3, [Sample(3, 3, 0, plan.prompt(3).ids, 0)])
    assert plan.restored_prompt(group) == plan.prompt(3)
    group.samples[0].prompt_ids = [1]
    with pytest.raises(UserError, match="the token ids of prompt 3 differ from those in the ledger"):
        plan.restored_prompt(group)
    group.samples[0].own_prompt = True  # an agent's
    assert plan.restored_prompt(group) == plan.prompt(3)
    with pytest.raises(UserError, match="returns whole chats"):
        [planning(tmp_path, prompt="prompt_augmentation").prompt(i) for i in range(9)]


async def test_prompt_selection_state_survives_a_restart(tmp_path: Path) -> None:
    config = config_of(tmp_path, prompt={"name": "vade", "pool": 8})
    async with rig(config, mixed_in_odd_groups) as r:
        await r.start()
        prompt_indexes = [g.prompt_index for g in (await r.take(1)).groups]
        assert prompt_indexes != [0, 1]
        state_before = r.manager._runner._planning.state()
    async with rig(config, mixed_in_odd_groups) as r:
        assert r.manager._runner._planning.state() == state_before
        assert all(str(index) in state_before for index in prompt_indexes)


def uncertain_in_even_groups(sample: Sample) -> int:
    """Of groups 0, 2, ..: one right, one wrong response; both right in the others."""
    return 4 if sample.group_id % 2 == 0 and sample.index % 2 else 3


async def test_groups_wait_for_their_round_and_the_uncertain_ones_grow(tmp_path: Path) -> None:
    """A round of two: group 0 gets two samples. Then it waits with group 2, which came in the place of group 1;
    nothing else can come, so this round closes with one new group, and half a group gets nothing."""
    xrpo = {"name": "xrpo", "groups": 2, "samples": 2, "share": 0.5, "largest": 6}
    config = config_of(tmp_path, planners=[xrpo, {"name": "dapo"}])
    async with rig(config, uncertain_in_even_groups) as r:
        await r.start()
        batch = await r.take(1)
        sizes = {g.group_id: len(g.samples) for g in batch.groups}
        assert sizes == {0: 4, 2: 2}
        assert r.buffer.ledger().groups["filtered"] == 1  # dapo drops group 1, after its round


async def test_a_round_that_can_never_be_full_closes_when_all_that_may_run_wait(tmp_path: Path) -> None:
    xrpo = {"name": "xrpo", "groups": 50, "samples": 1, "share": 1.0, "largest": 6}
    async with rig(config_of(tmp_path, planners=[xrpo]), uncertain_in_even_groups) as r:
        await r.start()
        sizes = {g.group_id: len(g.samples) for g in (await r.take(1)).groups}
        assert sizes == {0: 3, 1: 2}


async def test_a_waiting_group_waits_again_after_a_restart(tmp_path: Path) -> None:
    """A group waits when the process ends, and again when the trainer begins anew; each is decided once."""
    xrpo = {"name": "xrpo", "groups": 2, "samples": 2, "share": 0.5, "largest": 6}
    config = config_of(tmp_path, planners=[xrpo])

    def one_is_slow(sample: Sample) -> int:
        return 19 if sample.group_id == 1 else uncertain_in_even_groups(sample)

    for again in (False, True):
        async with rig(config, one_is_slow) as r:
            await r.start()
            planning = r.manager._runner._planning
            task = asyncio.create_task(r.manager.take(1))
            for _ in range(60):
                r.router.tick()
                await settle()
                if planning.waiting():
                    break
            assert planning.waiting() == {0}
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if again:
                await r.start()
                assert not planning.waiting()
                sizes = {g.group_id: len(g.samples) for g in (await r.take(1)).groups}
                assert sizes == {0: 4, 1: 2}


@pytest.mark.parametrize("groups", [1, 3, 50])
@pytest.mark.parametrize(("over_provision", "max_staleness"), [(1, 0), (2, 1), (2, 3)])
async def test_steps_get_their_groups_whatever_the_size_of_a_round(
    tmp_path: Path, groups: int, over_provision: int, max_staleness: int
) -> None:
    """Groups wait, grow, expire and are dropped; twelve steps, in the middle of which the trainer begins anew."""
    rng = Random(groups)
    lengths: dict[int, int] = {}

    def length(sample: Sample) -> int:
        return lengths.setdefault(sample.sample_id, rng.randint(1, 18))

    rollout = {
        "groups_per_step": 3, "group_size": 2, "over_provision": over_provision, "max_staleness": max_staleness
    }  # fmt: skip
    xrpo = {"name": "xrpo", "groups": groups, "samples": 2, "largest": 6, "exemplars": 1}
    config = make_config(tmp_path, algo={"planners": [xrpo, {"name": "dapo", "drops": 4}]}, rollout=rollout)
    group_ids: list[int] = []
    sizes: set[int] = set()
    async with rig(config, length) as r:
        await r.start()
        for step in range(1, 13):
            batch = await r.take(step)
            assert len(batch.groups) == 3
            assert all(s.reward is not None for g in batch.groups for s in g.samples)
            group_ids += ids(batch.groups)
            sizes |= {len(g.samples) for g in batch.groups}
            if step == 6:
                await r.start(6)
            else:
                await r.push()
        assert len(set(group_ids)) == len(group_ids)
        assert sizes >= {2, 4}


async def test_an_unsuccessful_group_gets_a_hint_and_trains_without_it(
    tmp_path: Path,
) -> None:
    questions: list[str] = []

    async def judge(text: str) -> str:
        questions.append(text)
        return "go slowly"

    def wrong_in_group_zero(sample: Sample) -> int:
        return 4 if sample.group_id == 0 else 3

    config = config_of(tmp_path, planners=[{"name": "aoi", "samples": 3, "failed_responses": 1}])
    patient = JudgeWithTimeout(judge, 5.0)
    async with rig(config, wrong_in_group_zero, judge=patient, tokenizer=Lengths()) as r:
        await r.start()
        batch = await r.take(1)
        hard, easy = batch.groups
        assert (
            len(questions) == 1
            and "Wrong solution 1:\nxxxx\n" in questions[0]
            and "Wrong solution 2" not in questions[0]
        )
        prompt_ids = hard.samples[0].prompt_ids
        hint = Lengths().encode("Hint: go slowly")
        assert [s.trained_prompt for s in hard.samples] == [None, None, prompt_ids, prompt_ids, prompt_ids]
        assert all(s.prompt_ids[-len(hint) :] == hint for s in hard.samples[2:])
        assert {s.trained_prompt for s in easy.samples} == {None}
        assert (batch.metrics["guided"], batch.metrics["guidance_missing"]) == (1, 0)


async def test_a_failing_judge_leaves_the_group_unchanged(tmp_path: Path) -> None:
    async def judge(text: str) -> str:
        raise OSError("no judge")

    config = config_of(tmp_path, planners=["aoi"])
    async with rig(config, lambda s: 4, judge=JudgeWithTimeout(judge, 5.0), tokenizer=Lengths()) as r:
        await r.start()
        assert [len(g.samples) for g in (await r.take(1)).groups] == [2, 2]


async def test_a_restart_neither_repeats_nor_loses_a_hint(tmp_path: Path) -> None:
    async def judge(text: str) -> str:
        return "go slowly"

    def slow_second_stage(sample: Sample) -> int:
        return 4 if sample.index < 2 else 12

    config = config_of(tmp_path, planners=[{"name": "aoi", "samples": 2}])
    async with rig(config, slow_second_stage, judge=JudgeWithTimeout(judge, 5.0), tokenizer=Lengths()) as r:
        await r.start()
        take = asyncio.create_task(r.manager.take(1))
        for _ in range(6):
            await settle()
            r.router.tick()
        take.cancel()
        assert [len(g.samples) for g in r.buffer.active()] == [4, 4]
    async with rig(config, slow_second_stage, judge=JudgeWithTimeout(judge, 5.0), tokenizer=Lengths()) as r:
        await r.start()
        assert [len(g.samples) for g in (await r.take(1)).groups] == [4, 4]


FAILING = """
from typing import Any

from rlsys.algo.planners import Accept, AddSamples, Decision, Hold, Planner, Prefix
from rlsys.algo.prompts import PromptChooser
from rlsys.core.types import SampleGroup


class Failing(Planner):
    \"\"\"Raise for every group whose id is a multiple of `every`.\"\"\"

    where: str
    every: int

    def _check(self, where: str, group_id: int) -> None:
        if where == self.where and group_id % self.every == 0:
            {}["missing"]

    def needs_probes(self, group_id: int) -> int:
        self._check("needs_probes", group_id)
        return 0

    def decide(self, group: SampleGroup) -> Decision:
        self._check("decide", group.group_id)
        if self.where in DECISIONS and group.group_id % self.every == 0:
            decision: Any = DECISIONS[self.where]
            return decision
        return Accept()

    def limit(self, size: int) -> int:
        return size + 2

    def on_decided(self, group: SampleGroup, *, accepted: bool) -> None:
        self._check("on_decided", group.group_id)

    def forget(self, group_id: int) -> None:
        self._check("forget", group_id)

    def waiting(self) -> frozenset[int]:
        self._check("waiting", 0)
        return self._unknown("waiting of no group")

    def released(self) -> frozenset[int]:
        self._check("released", 0)
        return self._unknown("released of no group")

    def _unknown(self, where: str) -> Any:
        return None if where == self.where else {10**6} if self.where == f"{where} that exists" else frozenset()

    def close_round(self) -> None:
        self._check("close_round", 0)

    def restart(self) -> None:
        self._check("restart", 0)

    @property
    def counts(self) -> dict[str, float]:
        self._check("counts", 0)
        return {}

    def state_dict(self) -> dict[str, Any]:
        self._check("state_dict", 0)
        return {"a": {1}} if self.where == "state_dict of no JSON" else {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check("load_state_dict", 0)


DECISIONS = {
    "no decision": None, "no more samples": AddSamples(0), "too many samples": AddSamples(3),
    "ids that are none": AddSamples(1, prompt_ids=("a",)),
    "a prefix of no sample": AddSamples(1, prefixes=(Prefix(9, 0, ()),)),
}


class Choosing(PromptChooser):
    # Raise, or return no index, for every group whose id is a multiple of three.

    where: str

    def index(self, group_id: int) -> int:
        if self.where == "index" and group_id % 3 == 0:
            {}["missing"]
        return {"no index": None, "an index below 0": -1, "too large an index": 2**70}.get(self.where, group_id) if (
            group_id % 3 == 0) else group_id

    def template(self, group_id: int) -> Any:
        if self.where == "template" and group_id % 3 == 0:
            {}["missing"]
        return None if self.where == "no template" and group_id % 3 == 0 else super().template(group_id)
"""


def failing(tmp_path: Path, where: str, every: int, **rollout: Any) -> Config:
    (tmp_path / "failing.py").write_text(FAILING)
    name = f"{tmp_path / 'failing.py'}:Failing"
    return make_config(
        tmp_path, algo={"planners": [{"name": name, "where": where, "every": every}]}, rollout=rollout
    )


DECISIONS = [
    "no decision",
    "no more samples",
    "too many samples",
    "ids that are none",
    "a prefix of no sample",
]


@pytest.mark.parametrize("where", ["needs_probes", "decide", "on_decided", *DECISIONS])
async def test_a_planner_that_raises_for_one_group_costs_that_group(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(failing(tmp_path, where, 3, max_failed_share=1.0)) as r:
        await r.start()
        batch = await r.take(1)
        assert ids(batch.groups) == [1, 2]
        assert (batch.metrics["censored"], batch.metrics["censored_samples_exception"]) == (1, 2)
        await r.push()
        assert ids((await r.take(2)).groups) == [4, 5]
    errors = {"no decision": "TypeError: decide returned None", "too many samples": "AddSamples.samples = 3"}
    error = errors.get(where, "Error: " if where in DECISIONS else "KeyError: 'missing'")
    assert error in caplog.text and "group 0" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize(
    "where", ["index", "no index", "an index below 0", "too large an index", "template", "no template"]
)
async def test_a_prompt_chooser_that_raises_for_one_group_costs_that_group(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    prompt = {"name": f"{tmp_path / 'failing.py'}:Choosing", "where": where}
    config = make_config(tmp_path, algo={"prompt": prompt}, rollout={"max_failed_share": 1.0})
    async with rig(config) as r:
        await r.start()
        (batch,) = await asyncio.gather(r.take(1), return_exceptions=True)
        assert not isinstance(batch, BaseException), batch
        assert ids(batch.groups) == [1, 2]
        assert (batch.metrics["censored"], batch.metrics["censored_samples_exception"]) == (1, 2)
    assert "algo.prompt" in caplog.text and "group 0" in caplog.text and "Traceback" in caplog.text


HOOKS = {
    "waiting": "waiting: KeyError: 'missing'",
    "waiting of no group": "waiting: TypeError: ",
    "released": "released: KeyError: 'missing'",
    "released of no group": "released: TypeError: ",
    "released of no group that exists": "released() contains group 1000000; expected ids of held groups",
    "close_round": "close_round: KeyError: 'missing'",
    "restart": "restart: KeyError: 'missing'",
    "counts": "counts: KeyError: 'missing'",
    "state_dict": "state_dict: KeyError: 'missing'",
    "state_dict of no JSON": "state_dict: TypeError: ",
    "load_state_dict": "load_state_dict: KeyError: 'missing'",
}


@pytest.mark.parametrize("where", HOOKS)
async def test_a_planner_state_failure_is_a_one_line_run_error(tmp_path: Path, where: str) -> None:
    """What concerns all groups cannot cost one of them."""
    (error,) = await asyncio.gather(two_processes(failing(tmp_path, where, 1)), return_exceptions=True)
    assert isinstance(error, RunError), repr(error)
    name = f"algo.planners[0] = '{tmp_path / 'failing.py'}:Failing': "
    assert str(error).startswith(name + HOOKS[where]) and "\n" not in str(error), error
    assert "failing.py:" in str(error) or "missing" not in HOOKS[where], error


async def two_processes(config: Config) -> None:
    """Take a step, close a round without groups, and restore the state in another process."""
    rig = Rig(config, lambda s: 3, length_reward)
    try:
        await rig.start()
        await rig.take(1)
        rig.manager._runner._planning.close_round()
        state = rig.manager._runner._planning.state()
        Planning(config, Numbers(), Lengths()).restore(state)  # type: ignore[arg-type]
    finally:
        await asyncio.gather(rig.manager.close(), return_exceptions=True)
        rig.buffer.close()


async def test_a_planner_that_releases_a_group_for_ever_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    config = config_of(tmp_path, planners=[f"{tmp_path / 'held.py'}:Held"])
    async with rig(config) as r:
        await r.start()
        with pytest.raises(RunError, match=r"held.py:Held': released\(\) contains group 0; expected ids"):
            await r.take(1)


HELD = """
from rlsys.algo.planners import Accept, Decision, Hold, Planner
from rlsys.core.types import SampleGroup

class Held(Planner):
    _held: set[int] = set()
    _open: set[int] = set()

    def decide(self, group: SampleGroup) -> Decision:
        if group.group_id in self._open:
            return Accept()
        self._held.add(group.group_id)
        return Hold()

    def waiting(self) -> frozenset[int]:
        return frozenset(self._held - self._open)

    def released(self) -> frozenset[int]:
        return frozenset(self._open)

    def close_round(self) -> None:
        self._open |= self._held
"""


async def test_a_planner_error_for_an_undecided_group_is_not_fatal(
    tmp_path: Path,
) -> None:
    async def odd(prompt: Prompt, text: str) -> float:
        if prompt.index == 0:
            raise ValueError("no reward")
        return 1.0

    async with rig(failing(tmp_path, "forget", 1, max_failed_share=1.0), reward=odd) as r:
        await r.start()
        assert ids((await r.take(1)).groups) == [1, 2]


async def test_a_planner_that_raises_for_every_group_stops_the_run(tmp_path: Path) -> None:
    async with rig(failing(tmp_path, "decide", 1, max_failed_share=1.0)) as r:
        await r.start()
        with pytest.raises(
            RunError, match=r"the last 4 groups could not be used; the last one: KeyError: 'missing'"
        ):
            await r.take(1)


async def test_a_planner_that_raises_for_many_groups_stops_the_run(tmp_path: Path) -> None:
    async with rig(failing(tmp_path, "decide", 2)) as r:
        await r.start()
        with pytest.raises(
            RunError, match=r"failed with unexpected exceptions, more than rollout.max_failed"
        ):
            await r.take(1)
