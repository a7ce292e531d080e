"""Trees on a real engine: what branches have of each other is what the weights say, and is computed once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsys.algo import build
from rlsys.algo.reduction import single_rank
from rlsys.config import Config
from rlsys.core.types import Prompt, Sample, SampleGroup, Status
from rlsys.data import Tokenizer
from rlsys.generators.generator import build_generator
from rlsys.generators.trees import TreeGenerator
from rlsys.generators.turns import sampling_turns, top_logprob_turns
from rlsys.trainer.pack import TrainSample, pack
from rlsys.trainer.step import sample_table
from tests.helpers.engine_stack import EOS, PROMPT, logprobs, stack
from tests.helpers.families import Siblings
from tests.helpers.tree_cases import depth_wise_advantages, token_names

pytestmark = [pytest.mark.integration, pytest.mark.gate]


LATR = {"second": 0.005, "max_gap": 0.9, "chunk": 8, "most_steps": 60, "suffix": 0.9, "rouge": 0.95}
ECHO = {"window": 8, "widest": 6, "most_steps": 60}


async def grown(
    config: Config, engine_config: Config, engine: str, tiny_moe: Path, prompts: list[list[int]]
) -> list[SampleGroup]:
    """A group of six for each prompt, by the config's generator."""
    async with stack(engine_config, engine) as s:
        await s.push(0)
        groups = []
        for number, prompt in enumerate(prompts):
            generate = build_generator(config, Tokenizer(tiny_moe), sampling_turns(config, s.router))
            assert isinstance(generate, TreeGenerator)
            family = Siblings([Sample(6 * number + i, number, i, prompt, seed=7 + i) for i in range(6)])
            generate.attach(family, top_logprob_turns(config, s.router))
            await asyncio.gather(*(generate(b, Prompt(number, "", prompt, {})) for b in family.samples))
            groups.append(SampleGroup(number, number, list(family.samples)))
    return groups


@pytest.mark.parametrize(("generator", "params"), [("latr", LATR), ("echo", ECHO)])
async def test_advantages_of_branches_are_those_of_a_count_of_tokens(
    engine_config: Config, engine: str, tiny_moe: Path, generator: str, params: dict[str, Any]
) -> None:
    """Trees of a real engine, packed as a step packs them; in float64, from who shares which tokens alone."""
    rollout = {"generator": generator, "generator_params": params, "max_response_tokens": 90}
    config = engine_config.model_copy(update={"rollout": Config.model_validate(
        {"model": {"path": tiny_moe}, "rollout": rollout}).rollout})  # fmt: skip
    groups = await grown(config, engine_config, engine, tiny_moe, [PROMPT, [*PROMPT, 9], [1, 7, *PROMPT[1:]]])
    samples = [s for g in groups for s in g.samples]
    forked = [s for s in samples if s.fork is not None]
    assert len(forked) >= 6 and len({s.tokens for s in samples}) > 3
    for sample in samples:
        sample.reward = float(sum(sample.response_ids) % 3) / 2
    method = build("advantage", "branch_grpo")
    everybody = torch.ones(len(samples), dtype=torch.bool)
    table = replace(sample_table(groups, 1, method.needs()), eligible=everybody)
    parts = pack([TrainSample.of(s, row) for row, s in enumerate(samples)], 256)
    assert len(parts) > 1
    part_advantages = method.per_token(method(table), table, parts, single_rank)
    expected = []
    for group in groups:
        stems = [-1 if s.fork is None else s.fork.source for s in group.samples]
        forks = [0 if s.fork is None else s.fork.at for s in group.samples]
        texts = token_names(stems, forks, [s.tokens for s in group.samples])
        expected += depth_wise_advantages([float(s.reward or 0) for s in group.samples], texts)
    for part, advantages in zip(parts, part_advantages, strict=True):
        bounds = part.cu_seqlens.tolist()
        for row, end in zip(part.rows.tolist(), bounds[1:], strict=True):
            sample_advantages = advantages[end - len(expected[row]) : end].tolist()
            assert sample_advantages == pytest.approx(expected[row], abs=1e-5), (row, samples[row].fork)


@pytest.mark.parametrize(("generator", "params"), [("latr", LATR), ("echo", ECHO)])
async def test_every_branch_has_the_log_probs_of_its_tokens(
    engine_config: Config, engine: str, tiny_moe: Path, generator: str, params: dict[str, Any]
) -> None:
    """Inherited, forced and its own ones, over an interruption in the middle of the tree."""
    rollout = {"generator": generator, "generator_params": params, "max_response_tokens": 90}
    config = engine_config.model_copy(update={"rollout": Config.model_validate(
        {"model": {"path": tiny_moe}, "rollout": rollout}).rollout})  # fmt: skip
    async with stack(engine_config, engine) as s:
        await s.push(0)
        generate = build_generator(config, Tokenizer(tiny_moe), sampling_turns(config, s.router))
        assert isinstance(generate, TreeGenerator)
        family = Siblings([Sample(70 + i, 7, i, PROMPT, seed=7 + i) for i in range(6)])
        generate.attach(family, top_logprob_turns(config, s.router))
        running = asyncio.gather(*(generate(b, Prompt(0, "", PROMPT, {})) for b in family.samples))
        while sum(b.tokens > 0 for b in family.samples) < 3:
            await asyncio.wait({running}, timeout=0.001)
            assert not running.done(), "a tree of several branches"
        await s.router.interrupt()
        s.router.resume()
        await running
        forked = [b for b in family.samples if b.fork is not None]
        assert len(forked) >= 2 and all(
            b.status in (Status.FINISHED, Status.TRUNCATED) for b in family.samples
        )
        gaps = [
            (abs(mu - logp), position)
            for b in family.samples
            for position, (mu, logp) in enumerate(
                zip(b.mu, logprobs(0, [*PROMPT, *b.response_ids])[len(PROMPT) - 1 :], strict=True)
            )
        ]
        assert max(gaps)[0] <= 1e-5, max(gaps)
        for b in forked:
            assert b.fork is not None
            stem = family.samples[b.fork.source]
            assert list(b.response_ids[: b.fork.at]) == list(stem.response_ids[: b.fork.at])
            assert b.response_ids[b.fork.at] != stem.response_ids[b.fork.at]
            # All but the forced token was in the engine already: the prefix was computed once.
            first_request = len(PROMPT) + b.inherited_tokens
            assert b.cached_tokens >= first_request - 1, (b.cached_tokens, first_request)
            assert EOS not in list(b.response_ids)[:-1]
