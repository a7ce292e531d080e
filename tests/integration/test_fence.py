"""A trainer that lost its place in the middle of a push: a real engine takes nothing more from it."""

from __future__ import annotations

import asyncio

import pytest

from rlsys.config import Config
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.wire import EngineError
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.gathered_push import GatheredPush
from tests.helpers.engine_stack import CANARIES, ENGINE_TENSORS, canaries, stack, tensors
from tests.helpers.ready_push import begin_push

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "method",
    ["auto", pytest.param("broadcast", marks=pytest.mark.slow)],  # it waits a minute for an engine to join
)
async def test_a_second_trainer_with_an_old_ticket_is_refused(
    engine: str, engine_config: Config, method: str
) -> None:
    """Both send at once, other weights; what the engine holds then is the later push's alone."""
    config = engine_config.model_copy(
        update={"weights": engine_config.weights.model_copy(update={"method": method})}
    )
    async with stack(config, engine) as s:
        await s.push(0)
        router, stale = s.router, GatheredPush(config)
        first = WeightUpdate(901, await begin_push(router, 901), CANARIES)
        second = WeightUpdate(902, await begin_push(router, 902), CANARIES)
        assert first.engines[0].epoch < second.engines[0].epoch  # type: ignore[operator]
        checksums = EngineChecksums(s._hf, 1)
        await asyncio.gather(
            asyncio.to_thread(stale.push, tensors(2), first),
            asyncio.to_thread(s.sync.push, checksums.watch(tensors(1)), second),
        )
        assert "was superseded: a newer push has begun" in stale.excluded[engine]
        assert not s.sync.excluded
        metrics = await router.end_push(902, canaries(1), checksums.digests())
        assert (metrics["push_tensors_equal"], metrics["push_tensors_unknown"]) == (ENGINE_TENSORS, 0)
        with pytest.raises(EngineError, match="is over"):
            s.client.epoch = first.engines[0].epoch
            await s.client.end_weight_update()
        await asyncio.to_thread(stale.close)
