"""ECHO: where its trees fork and what they prune, and its clip, by hand."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch

from rlsys.algo.losses import View
from rlsys.algo.methods.echo import tail_means
from rlsys.algo.registry import build
from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.spans import TopLogprobs, VersionSpan
from rlsys.core.types import Sample, Segment, Status
from rlsys.generators.echo import Certainty, Echo, width
from rlsys.generators.generator import build_generator
from tests.helpers.algo_world import DOUBLE, packed
from tests.helpers.families import Siblings
from tests.unit.generators.test_agent import MODEL, TOKENIZER
from tests.unit.generators.test_trees import never

SURE = [(math.log(0.98), 10), (math.log(0.01), 11), (math.log(0.005), 12)]
UNSURE = [(math.log(0.3), 10), (math.log(0.28), 11), (math.log(0.2), 12)]


class Moods:
    """It draws 10 always; `unsure` says at which tokens it might as well have drawn others."""

    def __init__(self, unsure: set[int]) -> None:
        self.unsure = unsure

    async def look(self, sample: Sample, most: int, tops: TopLogprobs, *, greedy: bool) -> None:
        assert not greedy
        while sample.tokens < most:
            top_logprobs = UNSURE if sample.tokens in self.unsure else SURE
            tops.by_token[sample.tokens] = top_logprobs
            sample.append(Segment([10], [top_logprobs[0][0]], [VersionSpan(1, 0, 1)]))
        sample.status = Status.TRUNCATED


def made(**params: Any) -> Echo:
    generator_params = {"window": 4, "tops": 3, "most_steps": 16, **params}
    rollout = {"generator": "echo", "generator_params": generator_params, "max_response_tokens": 40}
    config = Config.model_validate({"model": {"path": MODEL}, "rollout": rollout})
    generate = build_generator(config, TOKENIZER, never)
    assert isinstance(generate, Echo)
    return generate


async def grown(generate: Echo, moods: Moods, size: int = 6) -> list[Sample]:
    samples = [Sample(i, 0, i, [3, 4], seed=i) for i in range(size)]
    family = Siblings(samples)
    generate.attach(family, moods.look)
    await generate._wait_grown(samples[0], family, moods.look)
    return samples


def test_certainty_by_hand() -> None:
    even = Certainty([(math.log(0.25), i) for i in range(3)])
    assert (even.entropy, even.confidence) == (pytest.approx(1.0), pytest.approx(0.25))
    assert Certainty([(0.0, 1), (-50.0, 2)]).entropy == pytest.approx(0.0, abs=1e-9)


def test_width_by_hand() -> None:
    assert [width(e, c, 4) for e, c in [(0, 0), (1, 0), (1, 1), (0.7, 0.3)]] == [1, 4, 1, 2]


async def test_a_sure_model_grows_no_tree() -> None:
    samples = await grown(made(), Moods(set()))
    assert [s.tokens for s in samples] == [16, 0, 0, 0, 0, 0]


async def test_an_unsure_window_forks_at_its_most_uncertain_token() -> None:
    """Into the tokens that were next in probability; their places in the group were free."""
    generate = made(widest=6)
    samples = await grown(generate, Moods({5, 6, 7}))
    forked = [s for s in samples if s.fork is not None]
    assert {s.fork for s in forked} and all(s.fork is not None and s.fork.at in (5, 6, 7) for s in forked)
    first = forked[0]
    assert first.fork is not None
    position = first.fork.at
    assert (first.response_ids[position], first.mu[position]) == (11, UNSURE[1][0])
    assert list(first.response_ids[:position]) == [10] * position and first.inherited_tokens == position + 1
    assert generate.counts["tree_forks"] == len(forked)


async def test_branches_with_entropy_spikes_are_pruned_except_the_root() -> None:
    generate = made(widest=2, spikes=1, spike=0.5, most_steps=12)
    samples = await grown(generate, Moods(set(range(12))), size=4)
    assert samples[0].tokens == 12 and samples[0].fork is None
    assert (generate.counts["tree_forks"], generate.counts["tree_pruned"]) == (3, 2), (
        "one a window, gone in the next"
    )
    assert sum(s.discarded for s in samples) == 2 * 7, "each had seven tokens of its own, and a forced one"


async def test_after_a_restart_a_tree_forks_on() -> None:
    moods = Moods({5, 6, 7, 13, 14, 15})
    samples = [Sample(i, 0, i, [3, 4], seed=i) for i in range(12)]

    async def dies(sample: Sample, most: int, tops: TopLogprobs, *, greedy: bool) -> None:
        if sample.tokens >= 8:
            raise asyncio.CancelledError
        await moods.look(sample, most, tops, greedy=greedy)

    with pytest.raises(asyncio.CancelledError):
        await made(widest=6)._wait_grown(samples[0], Siblings(samples), dies)
    forks_before = [s.fork for s in samples if s.fork is not None]
    assert forks_before and all(fork.at < 8 for fork in forks_before)
    again = made(widest=6)
    await again._wait_grown(samples[0], Siblings(samples), moods.look)
    forks_after = [s.fork for s in samples if s.fork is not None]
    assert forks_after[: len(forks_before)] == forks_before and all(
        fork.at >= 12 for fork in forks_after[len(forks_before) :]
    )
    assert len(forks_after) - len(forks_before) == again.counts["tree_forks"] > 0
    assert sum(s.tokens == 16 for s in samples) == 1 + len(forks_before)


def test_echo_needs_the_whole_distribution() -> None:
    rollout = {"generator": "echo", "temperature": 0.8}
    with pytest.raises(UserError, match=r"temperature = 0\.8"):
        build_generator(
            Config.model_validate({"model": {"path": MODEL}, "rollout": rollout}), TOKENIZER, never
        )


def test_the_mean_of_a_tail_by_hand() -> None:
    batch = packed([4, 3], mask=[0, 1, 1, 1, 1, 1, 0])
    means = tail_means(batch, torch.tensor([9.0, 1, 2, 6, 3, 5, 9], dtype=DOUBLE), 2)
    assert means.tolist() == [4.0] * 4 + [4.0] * 3


def test_the_clip_is_wider_for_unsure_responses_by_hand() -> None:
    """Confidence 1 at the end of the first response, 0 of the second; both ratios are 1.25."""
    logp = torch.full((2,), math.log(1.25), dtype=DOUBLE)
    batch = packed([1, 1], advantages=[1.0, 1.0], sum_pi_squared=[1.0, 0.0], entropy=[0.0, 2.0])
    view = View(batch, logp, torch.zeros(2, dtype=DOUBLE))
    loss, figures = build("loss", "echo_clip", narrow=0.1, wide=0.3, steep=100.0)(view, None)
    assert figures["clip_radius"].tolist() == pytest.approx([0.2, 0.3])
    assert loss.tolist() == pytest.approx([-1.2, -1.25])
    assert figures["clipped"].tolist() == [True, False]
    shaped, _ = build("loss", "echo_clip", narrow=0.3, wide=0.3, shape=0.5)(view, None)
    assert shaped.tolist() == pytest.approx([-1.25, -1.25 * (1 + 0.5 * 3)])


def test_with_one_radius_it_is_the_plain_clip() -> None:
    g = torch.Generator().manual_seed(0)
    logp, anchor, advantages = (0.4 * torch.randn(12, generator=g, dtype=DOUBLE) for _ in range(3))
    batch = packed([5, 7], advantages=advantages.tolist(), sum_pi_squared=[0.5] * 12, entropy=[1.0] * 12)
    view = View(batch, logp, anchor)
    echo, of_echo = build("loss", "echo_clip", narrow=0.2, wide=0.2)(view, None)
    clip, of_clip = build("loss", "clip", clip_low=0.2, clip_high=0.2)(view, None)
    assert torch.allclose(echo, clip) and of_echo["clipped"].tolist() == of_clip["clipped"].tolist()
