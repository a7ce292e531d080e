"""Trees of responses: LATR against a step by step simulation of its paper's algorithm, and what a restart finds."""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import random
from collections.abc import Sequence

import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import TopLogprobs, VersionSpan
from rlsys.core.types import Prompt, Sample, Segment, Status
from rlsys.generators.generator import build_generator
from rlsys.generators.latr import Latr, rouge_l, suffix_match
from rlsys.generators.turns import GenerateWithTopLogprobs
from tests.helpers.families import Siblings
from tests.unit.generators.test_agent import MODEL, TOKENIZER

EOS = TOKENIZER.eos_id
assert EOS is not None
IDS = [
    i
    for i in range(20)
    if i != EOS and TOKENIZER.decode([i]).strip() not in set("+-*/\\<>=()[]{}_^&%$0123456789")
]


class ToyModel:
    """The two most probable tokens follow from the last two; often they are about as probable."""

    def __init__(self, seed: int, ends: float) -> None:
        self.seed, self.ends = seed, ends

    def top(self, ids: Sequence[int]) -> list[tuple[float, int]]:
        r = random.Random(f"{self.seed} {ids[-2:]} {len(ids) // 9}")
        first, second = r.sample(IDS, 2)
        if r.random() < self.ends:
            first = EOS
        p = r.uniform(0.3, 0.8)
        return [(math.log(p), first), (math.log(min(0.98 * p, r.uniform(0.05, 1 - p))), second)]

    async def look(self, sample: Sample, most: int, tops: TopLogprobs, *, greedy: bool) -> None:
        assert greedy and tops.k == 2
        while sample.tokens < most:
            candidates = self.top([*sample.prompt_ids, *sample.response_ids])
            tops.by_token[sample.tokens] = candidates
            sample.append(Segment([candidates[0][1]], [candidates[0][0]], [VersionSpan(1, 0, 1)]))
            if candidates[0][1] == EOS:
                sample.status = Status.FINISHED
                return
        sample.status = Status.TRUNCATED


def config(**rollout: object) -> Config:
    return Config.model_validate({"model": {"path": MODEL}, "rollout": {"generator": "latr", **rollout}})


def simulated(model: ToyModel, prompt: list[int], size: int, steps: int) -> set[tuple[int, ...]]:
    """What the branches have when the tree is done: all rows one step further at a time."""
    rows: list[dict] = [{"ids": [], "birth": 0, "parent": None}]
    for step in range(steps):
        new: list[dict] = []
        for row in rows:
            if row["ids"][-1:] == [EOS]:
                continue
            (first, a), (second, b) = model.top([*prompt, *row["ids"]])
            p1, p2 = math.exp(first), math.exp(second)
            if p2 > 0.15 and p1 - p2 < 0.25 and len(rows) + len(new) < size:
                new.append({"ids": [*row["ids"], b], "birth": step, "parent": row})
            row["ids"].append(a)
        rows += new
        pruned_rows = []
        for age in (20, 30, 50):
            for row in rows:
                if row["parent"] is None or row["birth"] != step + 1 - age:
                    continue
                a, b = row["ids"][row["birth"] :], row["parent"]["ids"][row["birth"] :]
                if EOS in a or EOS in b:
                    continue
                if suffix_match(a, b) > 0.2 or rouge_l(a, b) > 0.5:
                    pruned_rows.append(row)
        while pruned_rows:
            dead = pruned_rows.pop()
            pruned_rows += [r for r in rows if r["parent"] is dead]
            rows = [r for r in rows if r is not dead]
        end_flags = [r["ids"][-1] == EOS for r in rows]
        if all(end_flags) or (len(rows) >= size and all(r["birth"] + 50 < step for r in rows)):
            break
    return {tuple(r["ids"]) for r in rows}


@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("seed", range(8))
async def test_latr_grows_the_tree_of_its_paper(seed: int, chunk: int) -> None:
    model = ToyModel(seed, ends=0.01 * (seed % 3))
    made_for = config(generator_params={"chunk": chunk, "most_steps": 120}, max_response_tokens=200)
    generate = build_generator(made_for, TOKENIZER, never)
    assert isinstance(generate, Latr)
    samples = [Sample(i, 0, i, [3, 4], seed=i) for i in range(8)]
    generate.attach(Siblings(samples), model.look)
    await generate._wait_grown(samples[0], *attached(generate))
    branches = [s for s in samples if s.tokens]
    assert {tuple(s.response_ids) for s in branches} == simulated(model, [3, 4], 8, 120)
    assert generate.counts["tree_forks"] - generate.counts["tree_pruned"] == len(branches) - 1
    for s in branches:
        prefixes = [[3, 4, *s.response_ids[:k]] for k in range(s.tokens)]
        expected = [
            {i: p for p, i in model.top(ids)}[drawn]
            for ids, drawn in zip(prefixes, s.response_ids, strict=True)
        ]
        assert list(s.mu) == expected, "each with its log-prob, drawn or forced"
    if seed == 1:
        assert generate.counts["tree_pruned"] > 0


@pytest.mark.parametrize("last", [1, 7, 24, 33, 60])
@pytest.mark.parametrize("seed", range(4))
async def test_a_restart_between_two_steps_does_not_change_the_tree(seed: int, last: int) -> None:
    model = ToyModel(seed, ends=0.01 * (seed % 3))
    samples = [Sample(i, 0, i, [3, 4], seed=i) for i in range(8)]

    async def dies(sample: Sample, most: int, tops: TopLogprobs, *, greedy: bool) -> None:
        if sample.tokens >= last:
            raise asyncio.CancelledError
        await model.look(sample, most, tops, greedy=greedy)

    made_for = config(generator_params={"chunk": 1, "most_steps": 120}, max_response_tokens=200)
    with contextlib.suppress(asyncio.CancelledError):
        await grown(made_for, samples, dies)
    saved = [pickle.loads(pickle.dumps(s)) for s in samples]
    again = await grown(made_for, saved, model.look)
    assert {tuple(s.response_ids) for s in saved if s.tokens} == simulated(model, [3, 4], 8, 120)
    if seed == 1 and last < 30:
        assert again.counts["tree_forks"] > 0, "after the restart"


@pytest.mark.parametrize("chunk", [7, 16])
async def test_after_a_restart_in_the_middle_no_saved_token_is_lost(chunk: int) -> None:
    """What was probable in their places is not known any more. A tree that was done stays as it is."""
    model, asked = ToyModel(1, 0.0), 0
    samples = [Sample(i, 0, i, [3, 4], seed=i) for i in range(8)]

    async def dies(sample: Sample, most: int, tops: TopLogprobs, *, greedy: bool) -> None:
        nonlocal asked
        asked += 1
        await model.look(sample, most if asked < 4 else sample.tokens + 3, tops, greedy=greedy)
        if asked >= 4:
            sample.status = Status.PARKED
            raise asyncio.CancelledError

    made_for = config(generator_params={"chunk": chunk, "most_steps": 120}, max_response_tokens=200)
    with pytest.raises(asyncio.CancelledError):
        await grown(made_for, samples, dies)
    had = [list(s.response_ids) for s in samples if s.tokens]
    await grown(made_for, samples, model.look)
    branches = [list(s.response_ids) for s in samples if s.tokens]
    kept_branches = [ids for ids in had if any(branch[: len(ids)] == ids for branch in branches)]
    assert kept_branches[0] == had[0] and len(branches) > len(had), (
        "the root, and all but those that were pruned since"
    )
    for sample in samples:
        sample.status = Status.PARKED
    expected = [(list(s.response_ids), s.fork, s.discarded) for s in samples]
    await grown(made_for, samples, never)
    assert [(list(s.response_ids), s.fork, s.discarded) for s in samples] == expected


async def grown(made_for: Config, samples: list[Sample], look: GenerateWithTopLogprobs) -> Latr:
    """As a rollout process that has just begun does it."""
    generate = build_generator(made_for, TOKENIZER, never)
    assert isinstance(generate, Latr)
    generate.attach(Siblings(samples), look)
    await generate._wait_grown(samples[0], *attached(generate))
    return generate


def attached(generate: Latr) -> tuple:
    return generate._family, generate._generate


async def never(sample: Sample, **more: object) -> None:
    raise AssertionError("nobody samples here")


async def test_siblings_wait_for_the_tree_and_then_continue_independently() -> None:
    model, order = ToyModel(1, 0.0), list[int]()

    async def speak(sample: Sample, **more: object) -> None:
        order.append(sample.tokens)
        sample.status = Status.FINISHED

    made_for = config(generator_params={"most_steps": 60}, max_response_tokens=200)
    generate = build_generator(made_for, TOKENIZER, speak)
    assert isinstance(generate, Latr)
    samples = [Sample(i, 0, i, [3, 4], seed=i) for i in range(4)]
    generate.attach(family := Siblings(samples), model.look)
    await asyncio.gather(*(generate(s, Prompt(0, "", [3, 4], {})) for s in samples))
    assert sorted(order) == sorted(s.tokens for s in samples) and max(order) > 50
    assert family.keep_count >= 3
    # One that comes later (a planner's), and one after a restart, grow no tree.
    late = Sample(4, 0, 4, [3, 4], seed=4)
    samples.append(late)
    await generate(late, Prompt(0, "", [3, 4], {}))
    assert late.tokens == 0 and order[-1] == 0


def test_likeness_by_hand() -> None:
    assert suffix_match([1, 2, 3, 4], [9, 3, 4, 8]) == 0.5, "3 4 ends one and is in the other"
    assert suffix_match([1, 2, 3, 4], [4, 9, 9, 9]) == 0.25
    assert suffix_match([1, 1, 1], [2, 2, 2]) == 0.0
    assert suffix_match([5, 5, 5], [5, 5, 5]) == 1.0
    assert rouge_l([1, 2, 3, 4], [1, 3, 4, 9]) == 0.75
    assert rouge_l([1, 2], [3, 4]) == 0.0


def test_latr_needs_the_whole_distribution_at_temperature_one() -> None:
    for fields, why in [({"temperature": 0.7}, "temperature = 0.7"), ({"top_k": 20}, "top_k = 20")]:
        with pytest.raises(UserError, match=why):
            build_generator(config(**fields), TOKENIZER, never)
    with pytest.raises(UserError, match="requires a tokenizer"):
        build_generator(config(), None, never)
    with pytest.raises(ValueError, match=r"engine\.ngram_drafts = 4: .*; expected ngram_drafts = 0"):
        Config.model_validate(
            {"model": {"path": MODEL}, "engine": {"ngram_drafts": 4}, "rollout": {"generator": "latr"}}
        )
