"""An engine without weights gets them from one that serves: no trainer is needed, and nobody's sample is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.helpers.router_rig import A, B, Rig, check, routing, sample
from tests.helpers.scripted_engine import ScriptedEngine, checksums

pytestmark = pytest.mark.virtual_clock

C = "http://c:1"
LONG = 190


def pair(peer_weights: list[int] | None, **options: Any) -> tuple[ScriptedEngine, ...]:
    return tuple(ScriptedEngine(url, ends_at=lambda seed: LONG, peer_weights=peer_weights) for url in (A, B))


async def push(r: Rig, *, only_stale: bool = False) -> None:
    await r.push(only_stale=only_stale, sums=checksums(r.version + (not only_stale)))


async def test_a_peer_copy_is_attested_and_the_source_keeps_its_samples() -> None:
    peer_weights: list[int] = []
    async with routing(*pair(peer_weights), peers=True) as r:
        await push(r)
        samples = [sample(i, seed=i) for i in range(4)]
        tasks = [r.start(s, LONG) for s in samples]
        await asyncio.sleep(0.1)
        joiner = ScriptedEngine(C, peer_weights=peer_weights)
        r.join(joiner)
        stale_engines = []
        for _ in range(60):
            await asyncio.sleep(0.05)
            stale_engines.append(r.router.stale_engines)
        assert stale_engines == [[]] * 60, "the trainer is never asked"
        assert r.router.engine_states()[C] == "version 1" and joiner.weights == 1 and peer_weights == []
        order = [call for call in joiner.calls if "weight" in call or "generate" in call]
        assert order == [
            "begin_weight_update", "update_weights_from_tensor", "end_weight_update", "update_weight_version",
            "weights_checker", "generate",
        ]  # fmt: skip
        await asyncio.gather(*tasks)
        for s in samples:
            check(s, versions={1}, ends_at=LONG, budget=LONG)
            assert s.resumes == 0
        await asyncio.gather(*(r.start(sample(i)) for i in range(10, 16)))
        assert joiner.prompts
        assert (await r.settle())["lost"] == 0
        holds = {e.url: e.holds for e in await r.router.begin_push(2)}
        assert holds == {A: 1, B: 1, C: -1}, "it has to join the trainer's process group"


async def test_a_copy_with_wrong_checksums_does_not_serve() -> None:
    peer_weights: list[int] = []
    async with routing(*pair(peer_weights), peers=True) as r:
        await push(r)
        r.engines[0].weights = r.engines[1].weights = 77  # both hold something else by now
        r.join(ScriptedEngine(C, peer_weights=peer_weights))
        await asyncio.sleep(5)
        assert r.router.engine_states()[C] == "without weights"
        assert r.router.stale_engines == [C], "the trainer's come"
        await push(r, only_stale=True)
        assert r.router.engine_states()[C] == "version 1"


@pytest.mark.parametrize("who", ["nobody can", "the one that gives dies", "the one that takes dies"])
async def test_a_failed_copy_falls_back_to_the_trainer_without_paused_engines(
    who: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer_weights: list[int] | None = None if who == "nobody can" else []
    async with routing(*pair(peer_weights), peers=True) as r:
        await push(r)
        tasks = [r.start(sample(i, seed=i), LONG) for i in range(4)]
        await asyncio.sleep(0.1)
        joiner = ScriptedEngine(C, peer_weights=peer_weights)
        dying = {"the one that gives dies": r.engines[0], "the one that takes dies": joiner}.get(who)
        if dying is not None:
            dying._update_weights_from_tensor = lambda body: _die(dying)  # type: ignore[method-assign]
        r.join(joiner)
        await asyncio.sleep(5)
        if dying is not None:
            del dying._update_weights_from_tensor
            dying.restart()
            await asyncio.sleep(30)
        while r.router.stale_engines:
            await push(r, only_stale=True)
        await asyncio.gather(*tasks)
        assert [(e.paused, e.update_open) for e in r.engines] == [(None, False)] * 3
        assert set(r.router.engine_states().values()) == {"version 1"}
        failed = any(m.startswith(f"{C}: copying the weights from ") for m in caplog.messages)
        assert failed == (who == "the one that takes dies")


def _die(engine: ScriptedEngine) -> tuple[int, str]:
    engine.die()
    return 500, "the server died"


async def test_a_push_waits_for_the_copy_and_includes_the_new_engine() -> None:
    peer_weights: list[int] = []
    async with routing(*pair(peer_weights), peers=True) as r:
        await push(r)
        joiner = ScriptedEngine(C, peer_weights=peer_weights)
        r.join(joiner)
        while "begin_weight_update" not in joiner.calls:
            await asyncio.sleep(0.001)
        await push(r)
        assert set(r.router.engine_states().values()) == {"version 2"}
        assert {e.weights for e in r.engines} == {2}


async def test_without_checksums_a_new_engine_waits_for_the_trainer() -> None:
    peer_weights: list[int] = []
    async with routing(*pair(peer_weights), peers=True) as r:
        await r.push()
        r.join(ScriptedEngine(C, peer_weights=peer_weights))
        await asyncio.sleep(3)
        assert r.router.stale_engines == [C]


class SlowlyAttested(ScriptedEngine):
    """Several looks of the router pass while it computes its canaries."""

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path.startswith("/generate"):
            await asyncio.sleep(3)
        return await super().answer(path, body)


async def test_an_engine_under_attestation_gets_no_peer_copy() -> None:
    """It has no version yet, while the others serve already: a copy would abort its canaries."""
    peer_weights: list[int] = []
    async with routing(
        ScriptedEngine(A, peer_weights=peer_weights), SlowlyAttested(B, peer_weights=peer_weights), peers=True
    ) as r:
        for _ in range(2):
            await push(r)
        assert r.router.engine_states() == {A: "version 2", B: "version 2"}
        assert "update_weights_from_tensor" not in r.engines[0].calls + r.engines[1].calls


async def test_no_copy_begins_while_samples_are_called_back_for_a_push() -> None:
    peer_weights: list[int] = []
    async with routing(*pair(peer_weights), peers=True) as r:
        await push(r)
        tasks = [r.start(sample(i, seed=i), LONG) for i in range(4)]
        await asyncio.sleep(0.1)
        r.engines[0].hung = True  # so that it takes a while
        pushing = asyncio.create_task(push(r))
        await asyncio.sleep(0.1)
        r.join(ScriptedEngine(C, peer_weights=peer_weights))
        await asyncio.sleep(4)
        r.engines[0].wake()
        await pushing
        assert r.router.engine_states() == {A: "version 2", B: "version 2", C: "version 2"}
        assert "update_weights_from_tensor" not in r.engines[2].calls
        await asyncio.gather(*tasks)


async def test_aborted_canaries_cost_an_engine_a_push_and_not_the_run() -> None:
    async with routing(*pair(None)) as r:
        await r.push()
        r.engines[1].pending_aborts = 1
        await r.push()
        assert r.router.engine_states()[A] == "version 2"
        await asyncio.sleep(3)
        assert r.router.stale_engines == [B]
        await r.push(only_stale=True)
        assert r.router.engine_states() == {A: "version 2", B: "version 2"}
