"""`rlsys eval` asks a real engine that serves already: no push, no run."""

from __future__ import annotations

import asyncio

import pytest

from rlsys.config import Config
from rlsys.core.identity import ANONYMOUS
from rlsys.evaluation.evaluation import evaluate

pytestmark = [pytest.mark.integration, pytest.mark.gate]


def test_an_engine_is_evaluated_with_the_weights_that_it_has(engine: str, engine_config: Config) -> None:
    data = engine_config.model_dump()
    data["eval"]["prompts"], data["rollout"]["max_response_tokens"] = 6, 24
    config = Config.model_validate(data)
    first, second = (asyncio.run(evaluate(config, {engine: ANONYMOUS})) for _ in range(2))
    assert first == second, "greedy answers do not change"
    assert first.prompts == 6
    assert 0 <= first.accuracy <= 1
    assert 0 < first.mean_length <= 24
