"""SCOPE: from what a process judge says of a failed response to a sample that goes on behind its first wrong step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlsys.algo.planners import Accept, AddSamples, Prefix
from rlsys.algo.preflight import check
from rlsys.algo.registry import build
from rlsys.cli.preflight import check_start
from rlsys.config import Config, identity, load_config
from rlsys.core.errors import UserError
from rlsys.core.spans import Fork, TokenSpan, VersionSpan
from rlsys.core.types import Prompt, Sample, SampleGroup, Segment, Status
from rlsys.data import Tokenizer
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.planning.repairs import Repairs
from rlsys.rewards.repairs import ProcessJudge, Repair, chain_sum
from rlsys.rollout.preflight import check_names
from tests.helpers.rollout_rig import make_config
from tests.helpers.runs import ROOT

TOKENIZER = Tokenizer(ROOT / "configs/models/quickstart-moe")
PROMPT = Prompt(0, "", [1, 2], {"metadata": {"expression": "4 - 1 - 7 + 2"}})
RIGHT = "4-1=3\n3-7=-4\n-4+2=-2"


@pytest.mark.parametrize(
    ("response", "repair"),
    [
        (f"{RIGHT}</think><answer>-2</answer><eos>", None),
        (f"{RIGHT}</think><answer>5</answer><eos>", None),  # no step is wrong
        ("4-1=3\n3-7=-5\n-5+2=-3</think>", Repair(6, "3-7=-4\n")),
        ("</think><answer>3</answer><eos>", Repair(0, "4-1=3\n")),
        ("4-1=3\n3-7=-4\n-4+2=", Repair(13, "-4+2=-2")),
        ("4-1=3</think>", Repair(0, "4-1=3\n")),
    ],
)
async def test_the_rule_for_sums_names_the_first_wrong_line(response: str, repair: Repair | None) -> None:
    assert await chain_sum(make_config(Path()))(PROMPT, response) == repair


def failed(text: str, index: int = 0, reward: float = 0.0) -> Sample:
    s = Sample(index, 0, index, [1, 2], seed=5 + index, reward=reward, status=Status.FINISHED)
    ids = TOKENIZER.encode(text)
    s.append(Segment(ids, [-0.1 * (1 + i) for i in range(len(ids))], [VersionSpan(3, 0, len(ids))]))
    return s


def judge_of(repair: Repair | None) -> ProcessJudge:
    async def judge(prompt: Prompt, response: str) -> Repair | None:
        return repair

    return judge


async def test_a_repair_begins_with_whole_tokens_of_the_response() -> None:
    s = failed("4-1=3\n3-7=-5\n-5+2=-3</think>")
    repairs = Repairs(chain_sum(make_config(Path())), TOKENIZER, 5, 100)
    (prefix,) = await repairs.of(PROMPT, [s])
    assert prefix == Prefix(0, 6, tuple(TOKENIZER.encode("3-7=-4\n")))
    # "</think>" is one token here: what is right of it is said again.
    cut = Repairs(judge_of(Repair(31, "?")), TOKENIZER, 5, 100)
    s = failed("4-1=3\n3-7=-5\n-5+2=-3</think><answer>")
    (prefix,) = await cut.of(PROMPT, [s])
    prefix_text = TOKENIZER.decode(s.response_ids[: prefix.at])
    assert prefix_text + TOKENIZER.decode(list(prefix.ids)) == TOKENIZER.decode(s.response_ids)[:31] + "?"


async def test_a_judge_that_fails_or_hangs_is_no_repair() -> None:
    async def fails(prompt: Prompt, response: str) -> Repair | None:
        raise OSError("away")

    async def hangs(prompt: Prompt, response: str) -> Repair | None:
        await asyncio.Event().wait()
        return None

    async def nonsense(prompt: Prompt, response: str) -> Repair | None:
        return Repair(-1, "x")

    for judge, name in ((fails, "repairs_failed"), (hangs, "repairs_hung"), (nonsense, "repairs_failed")):
        repairs = Repairs(judge, TOKENIZER, 0.01, 100)
        assert await repairs.of(PROMPT, [failed("1")]) == [] and repairs.counts[name] == 1
    full = Repairs(judge_of(Repair(0, "12345")), TOKENIZER, 5, 5)
    assert await full.of(PROMPT, [failed("1")]) == [], "no room for an answer"


def test_scope_repairs_an_unsuccessful_group_once() -> None:
    scope = build("planner", "scope", repairs=2)
    assert scope.limit(4) == 6
    group = SampleGroup(0, 0, [failed("1", i) for i in range(3)])
    assert scope.needs_repairs(group) == [0, 1]
    prefixes = (Prefix(0, 1, (9,)), Prefix(1, 0, (8,)))
    scope.receive_repairs(0, prefixes)
    assert scope.decide(group) == AddSamples(2, prefixes=prefixes)
    again = build("planner", "scope", repairs=2)
    again.load_state_dict(scope.state_dict())
    assert again.needs_repairs(group) == () and again.decide(group) == Accept()
    won = SampleGroup(1, 0, [failed("1", 0), failed("1", 1, reward=1.0)])
    assert scope.needs_repairs(won) == () and scope.decide(won) == Accept()
    assert scope.decide(SampleGroup(2, 0, [failed("1")])) == Accept(), "nobody found anything"


@pytest.mark.parametrize("at", [0, 3])
def test_a_repaired_sample_is_in_the_ledger(tmp_path: Path, at: int) -> None:
    made_for = make_config(tmp_path)
    with_buffer = RolloutBuffer(tmp_path / FILE_NAME, identity(made_for), 4)
    version = with_buffer.versions.new(0)
    group = with_buffer.issue(Prompt(0, "", [1, 2], {}), [5, 6])
    for s in group.samples:
        s.append(Segment([10, 11, 12, 13], [-0.1, -0.2, -0.3, -0.4], [VersionSpan(version, 0, 4)]))
        s.status, s.reward = Status.FINISHED, 0.0
    (new,) = with_buffer.grow(group, [7], prefixes=[Prefix(1, at, (50, 51))])
    assert list(new.response_ids) == [*(10, 11, 12, 13)[:at], 50, 51]
    assert new.observed == [TokenSpan(at, at + 2)] and new.observed_last
    assert (new.fork, new.inherited_tokens, new.received_tokens, new.versions()) == (
        Fork(1, at),
        at,
        0,
        [version] * (at + 2),
    )
    assert new.trained() == [True] * at + [False] * 2
    new.append(Segment([60], [-0.5], [VersionSpan(version, 0, 1)]))
    with_buffer.save([new])
    with_buffer.flush()
    assert with_buffer.added_tokens == 9
    fields_before = (
        list(new.response_ids),
        list(new.mu),
        new.spans,
        new.observed,
        new.fork,
        new.inherited_tokens,
    )
    with_buffer.close()
    again = RolloutBuffer(tmp_path / FILE_NAME, identity(made_for), 4)
    back = again.active()[0].samples[2]
    assert (
        list(back.response_ids),
        list(back.mu),
        back.spans,
        back.observed,
        back.fork,
        back.inherited_tokens,
    ) == fields_before
    again.close()


def config(**sections: dict) -> Config:
    base = {"model": {"path": ROOT / "configs/models/quickstart-moe"}, "algo": {"planners": ["scope"]}}
    return Config.model_validate({**base, **sections})


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({}, "data.process_judge is not set"),
        ({"data": {"process_judge": "chain_sums"}}, "did you mean"),
        (
            {"data": {"process_judge": "chain_sum"}, "rollout": {"generator": "calculator"}},
            "cannot continue a prefix of another response",
        ),
    ],
)
def test_missing_scope_requirements_are_reported_before_the_start(sections: dict, why: str) -> None:
    with pytest.raises(UserError, match=why):
        check_names(config(**sections))
        check(config(**sections))


@pytest.mark.gate
def test_the_recipes_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("scope", "latr"):
        check_start(load_config(Path(f"algorithms/{name}")))
