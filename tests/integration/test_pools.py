"""Two real engines of unlike size behind one router: one push, each attested for its own ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.core.types import Sample
from rlsys.core.weight_updates import WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.weights.checksums import EngineChecksums
from tests.helpers.engine_stack import (
    CANARIES,
    PROMPT,
    canaries,
    logprobs,
    model,
    set_model,
    tensors,
    transport_of,
    worst_gap,
)
from tests.helpers.ready_push import begin_push
from tests.helpers.servers import running_engine, tiny_moe_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SEED = 40


@pytest.mark.parametrize("method", ["auto", "broadcast", "disk"])
async def test_engines_of_one_and_of_two_ranks_take_the_same_push(
    engine_config: Config, tmp_path: Path, method: str
) -> None:
    for version in (1, 2):
        # SGLang on a CPU pads each rank's part of an expert to 32 units, which no checksum could foretell.
        set_model(SEED + version, tiny_moe_model(SEED + version, moe_intermediate_size=64))
    data = engine_config.model_dump()
    data["run"]["dir"] = tmp_path / "run"
    data["engine"] |= {
        "pools": [{"name": "small", "count": 1}, {"name": "wide", "count": 1, "tp": 2}],
        "count": None,
        "return_routes": False,
    }
    data["weights"]["method"] = method
    model(SEED + 1).save_pretrained(tmp_path / "model")
    data["model"]["path"] = tmp_path / "model"
    config = Config.model_validate(data)
    config.run.dir.mkdir()
    alike = [
        config.engine.model_copy(update={"pools": [], "count": 1, "tp": config.engine.tp_of(i)})
        for i in (0, 1)
    ]
    (tmp_path / "small").mkdir()
    (tmp_path / "wide").mkdir()
    with (
        running_engine(config.model_copy(update={"engine": alike[0]}), tmp_path / "small") as small,
        running_engine(config.model_copy(update={"engine": alike[1]}), tmp_path / "wide") as wide,
    ):
        async with make_session() as session:
            clients = [
                EngineClient(url, session, tp=config.engine.tp_of(i), index=i)
                for i, url in enumerate((small, wide))
            ]
            router = Router(
                clients, vocab_size=128, context_length=512, stop_ids=(), bounds=Bounds.of(config),
                engine_config=config.engine,
            )  # fmt: skip
            sync, hf = transport_of(config), HFConfig.read(config.model.path)
            watch = asyncio.create_task(router.watch())
            async with asyncio.timeout(
                120
            ):  # one that does not answer yet would be left to a push of its own
                while set(router.engine_states().values()) != {"without weights"}:
                    await asyncio.sleep(0.05)
            for version in (1, 2):
                ticket = WeightUpdate(version, await begin_push(router, version), CANARIES)
                assert [e.tp for e in ticket.engines] == [1, 2], router.engine_states()
                checksums = EngineChecksums(hf, *config.engine.tps)
                await asyncio.to_thread(sync.push, checksums.watch(tensors(SEED + version)), ticket)
                assert not sync.excluded
                metrics = await router.end_push(version, canaries(SEED + version), checksums.digests())
                assert metrics["push_tensors_unknown"] == 0 < metrics["push_tensors_equal"]
            assert set(router.engine_states().values()) == {"version 2"}
            router.resume()
            samples = [Sample(i, i, 0, [*PROMPT, 10 + i], seed=i + 1) for i in range(4)]
            await asyncio.gather(
                *(router.generate(s, max_response_tokens=20, temperature=1.0) for s in samples)
            )
            await router.interrupt()
            stats = router.stats()
            watch.cancel()
            await asyncio.to_thread(sync.close)
    assert {s.engine for s in samples} == {small, wide}
    for s in samples:
        expected = logprobs(SEED + 2, [*s.prompt_ids, *s.response_ids])[len(s.prompt_ids) - 1 :]
        assert worst_gap(list(s.mu), expected) < 5e-5
    assert stats["lost"] == 0
    assert stats["pool_small_tokens"] > 0 < stats["pool_wide_tokens"]
    assert stats["pool_wide_rank_seconds"] == pytest.approx(2 * stats["pool_small_rank_seconds"], rel=0.5)
