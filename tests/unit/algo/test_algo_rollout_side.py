"""What the rollout process uses: planners, prompt choice, group rewards. Numbers by hand; and never torch."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.algo import build
from rlsys.algo.group_rewards import Response
from rlsys.algo.methods import vade as vade_method
from rlsys.algo.methods.fapo import flaw
from rlsys.algo.methods.lens_groups import purified
from rlsys.algo.methods.similarity import most_alike
from rlsys.algo.methods.ttrl_groups import majority
from rlsys.algo.methods.xrpo_groups import student_quantile
from rlsys.algo.planners import Accept, AddSamples, Drop, Hold, Planner, decide, start_size
from rlsys.algo.registry import TABLE
from rlsys.core.types import Sample, SampleGroup, Status


def group(rewards: list[float | None], group_id: int = 0, prompt_index: int = 0) -> SampleGroup:
    samples = [Sample(i, group_id, i, [5, 6, 7, 8], 0, reward=r) for i, r in enumerate(rewards)]
    return SampleGroup(group_id, prompt_index, samples)


def test_the_rollout_side_imports_no_torch() -> None:
    names = [(kind, name) for kind in ("prompt", "planner", "group_reward") for name in TABLE[kind]]
    code = (
        f"import sys, rlsys.algo, rlsys.algo.handbook, rlsys.algo.methods.deferred_samples\n"
        f"for kind, name in {names!r}: rlsys.algo.build(kind, name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- planners ------------------------------------------------------------------------------------------------


def test_dapo_drops_groups_of_one_reward_but_not_for_ever() -> None:
    dapo = build("planner", "dapo", drops=2)
    assert dapo.decide(group([1, 0])) == Accept()
    assert [type(dapo.decide(group([1, 1]))) for _ in range(3)] == [Drop, Drop, Accept]
    assert isinstance(dapo.decide(group([0, 0])), Drop)  # counts anew
    assert isinstance(
        build("planner", "dapo").decide(group([1, None])), Drop
    )  # censored samples do not count


@pytest.mark.parametrize(("size", "odd"), [(1, 3), (2, 3), (7, 9), (8, 9)])
def test_mc_grpo_makes_groups_odd(size: int, odd: int) -> None:
    assert build("planner", "mc_grpo").size(size) == odd


def test_sizes_combine() -> None:
    assert start_size([build("planner", "grpo_roc"), build("planner", "mc_grpo")], 8) == 17
    assert build("planner", "brorl", factor=4).size(8) == 32


def test_dars_by_hand() -> None:
    """n 8, p 1/4, plain: S = 3/8, peak 4: equal (4 - 3) / (3/8) = 2.67 -> 3; hardness (6 - 3) / (3/8) = 8.
    Nothing at p >= 1/2; p = 0 counts as 1/16 and is capped."""
    equal = build("planner", "dars", schedule="equal", signal="plain")
    hard = build("planner", "dars", schedule="hardness", signal="plain")
    assert (equal.extra(0.25, 8), hard.extra(0.25, 8)) == (3, 8)
    assert hard.extra(0.5, 8) == 0
    assert hard.extra(0.0, 8) == 24
    # std: S = sqrt 3 / 2, peak 8: (8 - 6.93) / 0.866 = 1.24 -> 2
    assert build("planner", "dars", schedule="equal").extra(0.25, 8) == 2


def test_dars_has_two_stages_and_remembers_them() -> None:
    dars = build("planner", "dars", signal="plain")
    assert dars.decide(group([1, 0, 0, 0, 0, 0, 1, 0])) == AddSamples(8)
    again = build("planner", "dars", signal="plain")
    again.load_state_dict(dars.state_dict())
    assert again.decide(group([0] * 16)) == Accept()
    assert isinstance(decide([dars, build("planner", "dapo")], group([0] * 16)), Drop)


def test_student_quantile_against_tables() -> None:
    for freedom, value in ((1, 12.706), (2, 4.303), (7, 2.365), (15, 2.131), (100, 1.984)):
        assert student_quantile(0.975, freedom) == pytest.approx(value, rel=2e-3)


def test_xrpo_score_by_hand() -> None:
    """Rewards 0, 1: s = 1/sqrt 2. At 90 %: t = tan(0.45 pi) with 2, 0.9 / sqrt(0.095) with 3 samples. Of ten samples
    in the round, the bonus is c sqrt(ln 11 / 2)."""
    xrpo = build("planner", "xrpo", alpha=0.1, bonus=0.05)
    two = math.tan(0.45 * math.pi) * math.sqrt(0.5) / math.sqrt(2)
    three = 0.9 / math.sqrt(0.095) * math.sqrt(0.5) / math.sqrt(3)
    assert (two, three) == (pytest.approx(3.15688, abs=1e-5), pytest.approx(1.19208, abs=1e-5))
    assert xrpo.score([0, 1], 10) == pytest.approx(two - three + 0.05 * math.sqrt(math.log(11) / 2))
    assert xrpo.score([1, 1], 10) == pytest.approx(0.05 * math.sqrt(math.log(11) / 2))
    assert xrpo.score([0, 1] * 4, 64) > xrpo.score([0] * 7 + [1], 64) > xrpo.score([0] * 8, 64)
    assert xrpo.score([0, 1] * 4, 64) > xrpo.score([0, 1] * 6, 64)


def grown(xrpo: Planner, success: Callable[[int], float], count: int) -> dict[int, SampleGroup]:
    """`count` groups of 8 through the planner, as the runner does it: each asked again when it is released."""
    rng, accepted_groups = random.Random(1), {}
    live: dict[int, SampleGroup] = {}

    def rewards(group_id: int, n: int) -> list[float]:
        return [float(rng.random() < success(group_id)) for _ in range(n)]

    def decided(group_id: int) -> None:
        decision = xrpo.decide(live[group_id])
        if isinstance(decision, AddSamples):
            previous_rewards = [s.reward for s in live[group_id].samples]
            live[group_id] = group(previous_rewards + rewards(group_id, decision.samples), group_id, group_id)
            decided(group_id)
        elif isinstance(decision, Accept):
            accepted_groups[group_id] = live.pop(group_id)

    def all_released() -> None:
        while released := xrpo.released():
            decided(min(released))

    for i in range(count):
        live[i] = group(rewards(i, 8), i, i)
        decided(i)
        all_released()
    while live:
        xrpo.close_round()
        all_released()
    return accepted_groups


@pytest.mark.parametrize("bonus", [0.05, 0.0])
def test_xrpo_grows_groups_by_the_configured_share(bonus: float) -> None:
    """At p = 1/2 a fourth of a further round per group, whatever the bonus: mean size 8 + 4 / 4."""
    groups = grown(build("planner", "xrpo", exemplars=0, bonus=bonus, largest=64), lambda _: 0.5, 2000)
    assert sum(len(g.samples) - 8 for g in groups.values()) / 4 / 2000 == pytest.approx(0.25, abs=0.005)


@pytest.mark.parametrize("bonus", [0.05, 5.0])
def test_xrpo_adds_no_samples_to_a_solved_task(bonus: float) -> None:
    groups = grown(build("planner", "xrpo", bonus=bonus), lambda _: 1.0, 400)
    assert {len(g.samples) for g in groups.values()} == {8}


def test_xrpo_prefers_uncertain_groups() -> None:
    """One group in four is uncertain, the others are all but solved: these get everything there is."""
    half, rare = (lambda i: 0.5 if i % 4 == 0 else 1.0), (lambda i: 0.5 if i % 4 == 0 else 0.0)
    for success in (half, rare):
        groups = grown(build("planner", "xrpo", exemplars=0, largest=12, share=0.2), success, 400)
        # But for the few that tie with one whose samples happen to agree: a draw decides.
        assert sum(len(g.samples) > 8 for i, g in groups.items() if i % 4) <= 3
        assert sum(len(groups[i].samples) for i in range(0, 400, 4)) == pytest.approx(
            100 * 8 + 80 * 4, abs=40
        )


def test_xrpo_holds_groups_until_their_round_closes() -> None:
    xrpo = build("planner", "xrpo", groups=3, samples=2, share=0.5, exemplars=0)
    assert [xrpo.decide(group([0, 1], i, i)) for i in range(2)] == [Hold(), Hold()]
    assert xrpo.waiting() == {0, 1}
    assert isinstance(xrpo.decide(group([1, 1], 2, 2)), Accept)  # the third closes it: one and a half groups
    assert (xrpo.waiting(), xrpo.released()) == (frozenset(), {0, 1})
    assert [xrpo.decide(group([0, 1], i, i)) for i in range(2)] == [
        Accept(),
        AddSamples(2),
    ]  # of equal scores, by a draw
    assert xrpo.decide(group([0, 1, 1, 0], 1, 1)) == Hold()  # in the next one, but not new
    again = build("planner", "xrpo", groups=3, samples=2, share=0.5, exemplars=0)
    again.load_state_dict(json.loads(json.dumps(xrpo.state_dict())))
    for planner in (xrpo, again):
        planner.restart()
        assert planner.decide(group([0, 1, 1, 0], 1, 1)) == Hold()
        assert planner.decide(group([1, 0], 5, 5)) == Hold()
        planner.close_round()  # nothing else can come; the half that was left and the new half make one group
        decisions = {i: planner.decide(group(r, i, i)) for i, r in ((1, [0, 1, 1, 0]), (5, [1, 0]))}
        assert decisions == {1: Accept(), 5: AddSamples(2)}
        planner.decide(group([1, 0], 7, 7))
        planner.forget(7)
        assert not planner.waiting()


def test_planners_discard_the_state_of_completed_and_removed_groups() -> None:
    aoi = build("planner", "aoi", samples=1)
    for group_id in (0, 1):
        aoi.receive_guidance(group_id, [1, 2])
        assert aoi.decide(group([0, 0], group_id)) == AddSamples(1, (1, 2))
    assert aoi.decide(group([0, 0, 1], 0)) == Accept()
    aoi.forget(1)
    assert aoi.state_dict() == {"mined": []}

    xrpo = build("planner", "xrpo", groups=1, samples=2, share=1.0, exemplars=0)
    assert xrpo.decide(group([0, 1], 3, 3)) == AddSamples(2)
    assert xrpo.state_dict()["grown"] == [3]
    xrpo.forget(3)
    assert xrpo.state_dict()["grown"] == []


def test_xrpo_adds_no_samples_to_a_full_group() -> None:
    xrpo = build("planner", "xrpo", groups=1, samples=2, share=1.0, largest=2, exemplars=0)
    assert xrpo.decide(group([0, 1])) == Accept()


def test_a_planner_without_probes_adds_no_sample_for_them() -> None:
    assert build("planner", "fixed").receive_probes(0, [1.0]) == 0


def test_a_released_group_resumes_at_the_planner_that_held_it() -> None:
    """dapo gave in to a group of equal rewards; asked a second time it would drop it."""
    planners = [build("planner", "dapo", drops=1), build("planner", "xrpo", groups=9, exemplars=0)]
    assert isinstance(decide(planners, group([1, 1], 0, 0)), Drop)
    assert decide(planners, group([1, 1], 1, 1)) == Hold()
    planners[1].close_round()
    assert decide(planners, group([1, 1], 1, 1)) == Accept()


def test_the_most_similar_texts_share_rare_terms() -> None:
    """All begin and end alike (1, 2 .. 3), as chats do. The query 5 6 7 begins as the second; the first has its
    tokens in another order, the third nothing but the frame."""
    texts = [[1, 2, 7, 6, 5, 3], [1, 2, 5, 6, 9, 3], [1, 2, 8, 8, 8, 3]]
    assert most_alike([1, 2, 5, 6, 7, 3], texts, 3) == [1, 0, 2]
    assert most_alike([1, 2, 5, 6, 9, 3], texts, 1) == [1]
    assert most_alike([1], [], 2) == []
    assert most_alike([], [[], [1]], 2) == [1, 0]  # of equals the later first


def test_the_most_similar_texts_have_the_largest_cosine() -> None:
    """By dense vectors of all terms."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        texts = [rng.integers(0, 6, rng.integers(3, 12)).tolist() for _ in range(7)]
        counts = [Counter([*t, *itertools.pairwise(t)]) for t in texts]
        vocabulary = sorted({term for c in counts for term in c}, key=str)
        table = np.array([[c[term] for term in vocabulary] for c in counts], dtype=float)
        table *= np.log((1 + len(texts)) / (table > 0).sum(0))
        cosines = table[:-1] @ table[-1] / np.linalg.norm(table[:-1], axis=1) / np.linalg.norm(table[-1])
        ranking = most_alike(texts[-1], texts[:-1], 6)
        assert np.all(np.diff(cosines[ranking]) <= 1e-12)


def solved_or_not(
    group_id: int, prompt_index: int, responses: dict[tuple[int, ...], float], prompt: list[int] | None = None
) -> SampleGroup:
    samples = [
        Sample(
            i,
            group_id,
            i,
            prompt or [90 + prompt_index],
            0,
            list(ids),
            [-1.0] * len(ids),
            status=Status.FINISHED,
            reward=r,
        )
        for i, (ids, r) in enumerate(responses.items())
    ]
    return SampleGroup(group_id, prompt_index, samples)


def test_xrpo_seeds_unsolved_prompts_with_the_most_similar_solved_problems() -> None:
    """The second and the fourth have a token in common with it, the second two; its own is never shown."""
    xrpo = build("planner", "xrpo", samples=3, largest=12, exemplar_tokens=6, groups=99)
    hard = solved_or_not(0, 0, {(1, 2): 0.0, (3,): 0.0}, [7, 8, 9])
    assert xrpo.seeded_prompt(hard) == ()  # nobody has solved anything
    solved = (
        (1, [4, 5], (5, 6)),
        (2, [7, 8], (8,)),
        (3, [7, 8, 9], (9,) * 4),
        (4, [4, 9], (4, 4)),
        (0, [7, 8, 9], (1,)),
    )
    for index, prompt, right in solved:
        xrpo.decide(solved_or_not(index, index, {right: 1.0, (1,) * 6: 1.0, (2,): 0.0}, prompt))
    expected = (4, 9, 4, 4, 7, 8, 8, 7, 8, 9)  # the nearest last; the third's response is too long
    assert xrpo.seeded_prompt(hard) == expected
    hard.samples[-1].prompt_ids = [4, 5]  # as of one that was seeded: the group's own prompt is the first's
    assert xrpo.seeded_prompt(hard) == expected
    assert xrpo.decide(hard) == AddSamples(3, expected)
    again = build("planner", "xrpo")
    again.load_state_dict(json.loads(json.dumps(xrpo.state_dict())))
    assert again.seeded_prompt(hard) == expected
    for sample in hard.samples:
        sample.trained_prompt, sample.reward = [90], 1.0
    assert again.decide(hard) == Accept()  # seeded once
    assert again._solved[0] == [[7, 8, 9], [1]]  # what was seeded shows nobody how to do it
    assert build("planner", "xrpo", exemplars=0).decide(solved_or_not(9, 9, {(1,): 0.0})) == Hold()


def test_xrpo_remembers_the_problems_solved_last() -> None:
    xrpo = build("planner", "xrpo", memory=2, exemplars=3)
    for index in range(4):
        xrpo.decide(solved_or_not(index, index, {(index,): 1.0}))
    assert list(xrpo._solved) == [2, 3]


def test_lens_cleans_hard_prompts_once_and_spares_protected_tokens() -> None:
    assert purified([5, 6, 7, 8], [0.1, 9, 3, 8], 0.5, [False, True, False, False]) == (5, 6)
    lens = build("planner", "lens", share=0.25)
    hard = group([0, 0, 0, 0])
    assert lens.decide(hard) == Accept()  # nobody scored its prompt
    lens.receive_scores(0, [0, 0, 5, 0], [False] * 4)
    assert lens.decide(hard) == AddSamples(4, (5, 6, 8))
    lens.receive_scores(0, [0, 0, 5, 0], [False] * 4)
    assert lens.decide(hard) == Accept()
    lens.receive_scores(1, [0, 0, 5, 0], [False] * 4)
    assert lens.decide(group([1, 1, 0, 0], 1)) == Accept()


# -- prompt choice -------------------------------------------------------------------------------------------


def test_a_pool_yields_each_prompt_once_per_round_in_a_new_order() -> None:
    pool = build("prompt", "pool", size=7, seed=1)
    rounds = [[pool.index(7 * r + i) for i in range(7)] for r in range(3)]
    assert all(sorted(indices) == list(range(7)) for indices in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    again = build("prompt", "pool", size=7, seed=1)
    assert [again.index(g) for g in (20, 3, 9)] == [rounds[2][6], rounds[0][3], rounds[1][2]]


def test_vade_is_deterministic_resumable_and_never_draws_an_active_prompt() -> None:
    source, restored_source = build("prompt", "vade", pool=6), build("prompt", "vade", pool=6)
    drawn = [source.index(g) for g in range(6)]
    assert sorted(drawn) == list(range(6))
    assert [source.index(g) for g in range(6)] == drawn
    source.on_rewards(group([1, 0], 2, drawn[2]))
    restored_source.load_state_dict(source.state_dict())
    assert source.index(6) == restored_source.index(6) == drawn[2]  # the only one that is free


def test_vade_takes_the_largest_p_times_1_minus_p_squared_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws 0.1, 1/3, 1/2, 0.9: scores 0.081, 0.148, 0.125, 0.009. p (1 - p) would take 1/2 first."""
    drawn = SimpleNamespace(beta=lambda *_: np.array([0.1, 1 / 3, 0.5, 0.9]))
    monkeypatch.setattr(vade_method, "stream", lambda *_: drawn)
    vade = build("prompt", "vade", pool=4)
    assert [vade.index(g) for g in range(4)] == [1, 2, 0, 3]


def test_vade_prefers_prompts_of_medium_difficulty() -> None:
    vade = build("prompt", "vade", pool=20)
    truth = [1.0] * 8 + [0.0] * 8 + [0.4] * 4
    visits: Counter[int] = Counter()
    for g in range(600):
        prompt = vade.index(g)
        visits[prompt] += g >= 200
        vade.on_rewards(group([float((g * 8 + i) % 5 < 5 * truth[prompt]) for i in range(8)], g, prompt))
    assert sum(visits[p] for p in range(16, 20)) > 0.5 * sum(visits.values())


def test_vade_forgets() -> None:
    vade = build("prompt", "vade", pool=2, all_decay=0.5)
    vade.on_rewards(group([1] * 8, 0, 0))
    assert vade.posterior()[0].tolist() == [9, 1]
    vade.on_rewards(group([1], 1, 1))
    assert vade.posterior()[0].tolist() == [5, 2]


def test_templates_differ_in_system_text_opening_and_format() -> None:
    """As the authors' do: some have a system text, some force an opening, some ask for a form of their own and are
    marked for their structure. All ask for a form that a verifier reads, in words that name it."""
    templates = build("prompt", "prompt_augmentation").templates
    assert {t.form for t in templates} == {"tags", "boxed", "line"}
    for part in ("system", "opening", "marks"):
        assert 2 <= sum(bool(getattr(t, part)) for t in templates) < len(templates), part
    for t in templates[1:]:
        asks = {"tags": "<answer>", "boxed": r"\boxed{}", "line": "`Answer:`"}[t.form]
        assert asks in t.system + t.user
        assert all(mark.strip("<>/:") in t.system + t.user for mark in t.marks)


def test_augmentation_draws_one_template_per_group_evenly() -> None:
    chooser = build("prompt", "prompt_augmentation")
    assert chooser.template(3) == chooser.template(3)
    counts = Counter(chooser.template(g) for g in range(400))
    assert len(counts) == len(chooser.templates) == 8
    assert min(counts.values()) > 30
    template = build(
        "prompt", "prompt_augmentation", templates=[{"system": "S", "user": "Q: {question}?"}]
    ).template(0)
    assert template.messages("1+1") == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q: 1+1?"},
    ]
    assert build("prompt", "in_order").template(0).messages("x") == [{"role": "user", "content": "x"}]


# -- group rewards -------------------------------------------------------------------------------------------


def answers(*values: str | None, mu: float = -1.0) -> list[Response]:
    return [Response("", a, [mu, mu]) for a in values]


def reward(
    name: str, responses: list[Response], judge: object = None, **params: object
) -> list[float | None]:
    return asyncio.run(build("group_reward", name, **params)("1+1", responses, judge))


def test_ttrl_by_hand() -> None:
    assert reward("ttrl", answers("4", "5", "4", None)) == [1, 0, 1, 0]
    assert reward("ttrl", answers("5", "4")) == [1, 0]  # a tie goes to the first
    assert reward("ttrl", answers(None, None)) == [0, 0]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=12))
def test_the_majority_has_the_most_votes(votes: list[str | None]) -> None:
    winner, counts = majority(votes), Counter(v for v in votes if v is not None)
    assert (winner is None) == (not counts)
    assert winner is None or counts[winner] == max(counts.values())


def test_dare_by_hand() -> None:
    """3 times "a" with u = 0.5, once "b" with u = 0.25: masses 6 : 4; bonus 0.1 (1/4) 0.5 and 0.1 (3/4) 0.75."""
    responses = [*answers("a", "a", "a", mu=-0.5), *answers("b", mu=-0.25)]
    rewards = reward("dare", responses, eps=1e-9)
    assert rewards == pytest.approx([0.6 + 0.0125] * 3 + [0.4 + 0.05625])
    assert reward("dare", responses, eps=1e-9, tau=0.45) == pytest.approx([1.0] * 3 + [0.0])
    assert reward("dare", answers(None)) == [0]


def test_dare_counts_only_answers_that_were_not_pruned_by_hand() -> None:
    """6 "a" and 6 "b" with u = 0.2, four junk answers once each with u = 0.9: these fall below tau. Of the rest a and
    b have half the mass and half of 12 votes: 0.5 + 0.5 (1/2) 0.8 = 0.7. Of 16 votes it would have been 0.75."""
    sure = [*answers(*"aaaaaa", *"bbbbbb", mu=-0.2)]
    junk = [Response("", a, [-0.9]) for a in "cdef"]
    rewards = reward("dare", [*sure, *junk], alpha=0.5)
    assert rewards == pytest.approx([0.7] * 12 + [0.0] * 4)


def test_fapo_by_hand() -> None:
    async def judge(text: str) -> str:
        assert "Problem:\n1+1\n" in text and "Right answer:\n2\n" in text
        if "silent" in text:
            return "I cannot say"
        return r"so \boxed{2}" if "flawed" in text else r"first \boxed{4}, no: \boxed{-1}"

    marks = (("sound", 1.0), ("flawed", 1.0), ("wrong", 0.0), ("silent", 1.0), ("x", None))
    responses = [Response(t, None, [], r, "2") for t, r in marks]
    assert reward("fapo", responses, judge) == [1, 0, -1, None, None]
    assert reward("fapo", responses, judge, no_verdict="sound") == [1, 0, -1, 1, None]  # as the authors do
    with pytest.raises(ValueError, match="needs a judge"):
        reward("fapo", responses)


def test_the_judge_receives_the_key_and_the_response_verbatim() -> None:
    judge_prompts: list[str] = []

    async def judge(text: str) -> str:
        judge_prompts.append(text)
        return r"\boxed{-2}"

    response = Response("I say {key} and {prompt}", None, [], 1.0, "17")
    assert reward("fapo", [response], judge, question="{key}|{response}") == [0.0]  # -2 is no -1: a flaw
    assert judge_prompts == ["17|I say {key} and {prompt}"]
    unknown = Response("x", None, [], 1.0)
    with pytest.raises(ValueError, match="the problem has no `answer`"):
        reward("fapo", [unknown], judge)
    assert reward("fapo", [unknown], judge, question="{response}?") == [0.0]


def test_flaw_reads_the_last_box() -> None:
    assert flaw(r"\boxed{ 3 }") == 3
    assert flaw("none") is None
