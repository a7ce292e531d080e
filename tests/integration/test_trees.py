"""Trees on a real engine: what branches have of each other is what the weights say, and is computed once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.types import Prompt, Sample, Status
from rlsys.data import Tokenizer
from rlsys.generators.generator import build_generator
from rlsys.generators.trees import TreeGenerator
from rlsys.generators.turns import sampling_turns, top_logprob_turns
from tests.helpers.engine_stack import EOS, PROMPT, logprobs, stack
from tests.helpers.families import Siblings

pytestmark = [pytest.mark.integration, pytest.mark.gate]


LATR = {"second": 0.005, "behind": 0.9, "chunk": 8, "most_steps": 60, "suffix": 0.9, "rouge": 0.95}
ECHO = {"window": 8, "widest": 6, "most_steps": 60}


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
            (abs(mu - logp), place)
            for b in family.samples
            for place, (mu, logp) in enumerate(
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
