"""Router against a real SGLang server: interruption changes nothing, pushes are exact, wrong weights are found."""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.core.errors import RunError
from rlsys.core.types import Status
from rlsys.core.weight_updates import EngineAddress, WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import Interruption
from rlsys.router.push import raise_if_all_quarantined
from rlsys.segments.records import SegmentReader
from rlsys.segments.route_records import load_with_routes
from rlsys.weights.checksums import EngineChecksums
from tests.helpers.engine_stack import (
    CANARIES,
    ENGINE_TENSORS,
    EOS,
    LAYERS,
    PROMPT,
    SLOW,
    TOP_K,
    Stack,
    canaries,
    logprobs,
    routes,
    sample,
    stack,
    tensors,
    wait_until,
    worst_gap,
)
from tests.helpers.ready_push import begin_push

pytestmark = [pytest.mark.integration, pytest.mark.gate]


async def test_interrupted_three_times_equals_unbroken(
    engine_config: Config, engine: str, engine_run: Path
) -> None:
    async with stack(engine_config, engine) as s:
        version, _ = await s.push(0)
        unbroken = await s.generate(sample(1, seed=11), tokens=80)
        assert len(unbroken.response_ids) == 80, "the seed should give a long response"
        await s.client.flush()
        cached_before = await cached_tokens(s.client)

        broken = sample(2, seed=11)
        await s.client.slow_down(SLOW)
        task = asyncio.create_task(s.generate(broken, tokens=80))
        lengths = []
        for at_least in (5, 20, 45):
            await wait_until(lambda n=at_least: len(broken.response_ids) >= n, task)  # type: ignore[misc]
            await s.router.interrupt()
            assert broken.status is Status.PARKED
            lengths.append(len(broken.response_ids))
            s.router.resume()
        await s.client.slow_down(None)
        await task

        assert lengths == sorted(set(lengths)), "each segment added tokens"
        assert broken.response_ids == unbroken.response_ids
        assert worst_gap(broken.mu, unbroken.mu) <= 1e-5
        assert routes(broken, engine_run) == routes(unbroken, engine_run)
        assert all(span.location is not None for span in broken.routes), "written by the engine, not answered"
        assert len(routes(broken, engine_run)) == (len(PROMPT) + 80 - 1) * LAYERS * TOP_K
        assert (broken.status, broken.resumes, broken.versions()) == (Status.TRUNCATED, 3, [version] * 80)
        # Everything but the last token of each resumed prefix is still in the engine, by both accounts.
        assert broken.cached_tokens == sum(len(PROMPT) + n - 1 for n in lengths)
        assert broken.prefilled_tokens == len(PROMPT) + sum(len(PROMPT) + n for n in lengths)
        assert await cached_tokens(s.client) - cached_before == broken.cached_tokens
        await s.router.interrupt()
        assert s.router.stats()["lost"] == 0
        answered = await stock_routes(s.client, [*PROMPT, *unbroken.response_ids])
        assert routes(unbroken, engine_run) == answered[: len(routes(unbroken, engine_run))]


async def stock_routes(client: EngineClient, ids: list[int]) -> bytes:
    """What SGLang itself answers to those who do not ask for a pointer."""
    body = {
        "input_ids": ids, "return_routed_experts": True, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }  # fmt: skip
    answer = await client.post("/generate", body)
    return (
        np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4").astype("u1").tobytes()
    )


async def cached_tokens(client: EngineClient) -> float:
    lines = (await client.get("/metrics")).splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("sglang:cached_tokens_total"))


async def test_a_full_engine_interrupted_gives_back_every_token(engine_config: Config, engine: str) -> None:
    """More samples than it decodes at once: some are interrupted in its queue, with no token yet."""
    async with stack(engine_config, engine) as s:
        await s.push(0)
        n = 3 * engine_config.engine.max_running_requests
        unbroken = await asyncio.gather(*(s.generate(sample(i, seed=i), 40) for i in range(n)))
        await s.client.slow_down(4 * SLOW)  # a busy machine looks late: the queue must not be empty by then
        broken = [sample(i, seed=i) for i in range(n)]
        tasks = [asyncio.create_task(s.generate(b, 40)) for b in broken]
        await wait_until(lambda: s.router.stats()["in_flight"] == n, tasks[0])
        await s.router.interrupt()  # perhaps before they are registered: then they come back empty
        s.router.resume()
        await wait_until(lambda: any(len(b.response_ids) > 4 for b in broken), tasks[0])
        await s.router.interrupt()
        assert s.router.stats()["in_flight"] == 0
        assert s.router.stats()["lost"] == 0
        assert {b.status for b in broken} <= {Status.PARKED, Status.FINISHED}
        assert any(not b.response_ids for b in broken), "some waited in the engine's queue"
        await s.client.slow_down(None)
        s.router.resume()
        await asyncio.gather(*tasks)
        for b, u in zip(broken, unbroken, strict=True):
            assert (b.response_ids, b.status) == (u.response_ids, u.status)
            assert worst_gap(b.mu, u.mu) <= 1e-5
        assert any(b.status is Status.FINISHED for b in broken)
        for b in broken:
            assert (b.response_ids[-1] == EOS) == (b.status is Status.FINISHED)
            assert EOS not in b.response_ids[:-1]
        await s.router.interrupt()
        stats = s.router.stats()
        # The canaries' own tokens are in the engine's count only.
        assert stats["engine_tokens"] == stats["received_tokens"] + len(CANARIES)
        assert stats["lost"] == 0


@pytest.mark.parametrize("method", ["auto", "broadcast", "disk", "disk_delta"])
async def test_a_push_is_exact(method: str, engine_config: Config, engine: str, tmp_path: Path) -> None:
    weights = engine_config.weights.model_copy(update={"method": method})
    run = engine_config.run.model_copy(update={"dir": tmp_path})
    config = engine_config.model_copy(update={"weights": weights, "run": run})
    async with stack(config, engine) as s:
        await s.push(0)
        sample_before = await s.generate(sample(1), 30)
        version, metrics = await s.push(1)
        assert await s.client.weight_version() == version
        assert metrics["push_canary_mean"] <= 1e-6
        assert metrics["push_canary_p999"] <= 1e-5
        assert (metrics["push_tensors_equal"], metrics["push_tensors_unknown"]) == (ENGINE_TENSORS, 0)
        sample_after = await s.generate(sample(1), 30)
        assert sample_after.response_ids != sample_before.response_ids
        assert sample_after.versions() == [version] * len(sample_after.response_ids)
        expected = logprobs(1, [*PROMPT, *sample_after.response_ids])[len(PROMPT) - 1 :]
        assert worst_gap(sample_after.mu, expected) <= 1e-5
        assert sample_after.cached_tokens == 0, "a push empties the cache"
        assert s.bytes_sent >= sum(t.nbytes for _, t in tensors(1))
        version, _ = await s.push(1)
        again = await s.generate(sample(1), 30)
        assert (again.response_ids, again.versions()) == (
            sample_after.response_ids,
            [version] * len(sample_after.response_ids),
        )
        assert (s.bytes_sent == 0) == (method == "disk_delta"), "nothing has changed"


async def test_a_broadcast_continues_when_an_engine_dies_during_it(
    engine_config: Config, engine: str
) -> None:
    weights = engine_config.weights.model_copy(update={"method": "broadcast"})
    config = engine_config.model_copy(update={"weights": weights})
    peer = [sys.executable, "-m", "tests.helpers.dying_peer"]
    async with stack(config, engine) as s:
        version = next(s._versions)
        addresses = await begin_push(s.router, version)
        with subprocess.Popen(peer, stdout=subprocess.PIPE, text=True) as peer_process:
            assert peer_process.stdout is not None
            dying = EngineAddress(f"http://127.0.0.1:{int(peer_process.stdout.readline())}", 1)
            ticket = WeightUpdate(version, [*addresses, dying], CANARIES)
            await asyncio.to_thread(s.sync.push, tensors(1), ticket)
            assert peer_process.wait() == 9
        await s.router.end_push(version, canaries(1))
        assert s.router.engine_states() == {engine: f"version {version}"}


@pytest.mark.parametrize("how", ["retract", "in_place"])
async def test_an_engine_keeps_its_requests_through_a_push(
    how: Interruption, engine_config: Config, engine: str, engine_run: Path
) -> None:
    """The weights stay the same, so the response must: only their version and the keys' and values' age differ."""
    async with stack(engine_config, engine) as plain:
        s = Stack(engine_config, plain.client, how)
        first, _ = await s.push(0)
        unbroken = await s.generate(sample(1, seed=11), tokens=80)
        in_flight_sample = sample(2, seed=11)
        await s.client.slow_down(SLOW)
        task = asyncio.create_task(s.generate(in_flight_sample, tokens=80))
        await wait_until(lambda: len(in_flight_sample.response_ids) >= 20, task)
        second, _ = await s.push(0)
        assert in_flight_sample.status is Status.IN_FLIGHT
        await wait_until(lambda: len(in_flight_sample.spans) > 1, task)
        spans_before = [(v.version, v.start) for v in in_flight_sample.spans]
        await s.client.slow_down(None)
        await task
        assert spans_before == [(v.version, v.start) for v in in_flight_sample.spans], (
            "no part of its stream mixes versions"
        )
        assert in_flight_sample.response_ids == unbroken.response_ids
        assert worst_gap(in_flight_sample.mu, unbroken.mu) <= 1e-5
        assert ([v.version for v in in_flight_sample.spans], in_flight_sample.resumes) == ([first, second], 0)
        seam = len(PROMPT) + in_flight_sample.spans[1].start - 1
        assert in_flight_sample.routes[0].start == seam
        with SegmentReader(engine_run) as segments:
            (route_span,) = load_with_routes(segments, in_flight_sample).routes
        assert routes(unbroken, engine_run)[seam * LAYERS * TOP_K :] == route_span.experts
        await s.router.interrupt()
        assert s.router.stats()["lost"] == 0


async def test_wrong_weights_do_not_serve(engine_config: Config, engine: str) -> None:
    async with stack(engine_config, engine) as s:
        with pytest.raises(RunError, match=r"no engine can serve .* canary log-probs differ .*bound 1e-06"):
            await s.push(1, claimed_seed=0)
        assert s.router.stats()["engines_serving"] == 0


async def test_one_wrong_bit_in_one_tensor_is_detected(engine_config: Config, engine: str) -> None:
    """So small a change passes every canary."""

    def flip(name: str, tensor: Tensor) -> Tensor:
        if name != "model.layers.1.mlp.experts.5.down_proj.weight":
            return tensor
        bits = tensor.clone().view(torch.int32)
        bits[3, 4] ^= 1
        return bits.view(torch.float32)

    async with stack(engine_config, engine) as s:
        message = r"holds other values in 1 tensor\(s\), first: model.layers.1.mlp.experts.w2_weight"
        with pytest.raises(RunError, match=message):
            await s.push(0, corrupt=flip)
        agreement = s.router._dispatcher.pool.engines[0].agreement
        assert agreement is not None
        assert agreement.within(Bounds.of(engine_config))


async def test_a_push_left_open_by_a_dead_trainer_is_ended(engine_config: Config, engine: str) -> None:
    async with stack(engine_config, engine) as s:
        await s.client.begin_weight_update()
        version, _ = await s.push(0)
        assert s.router.engine_states() == {engine: f"version {version}"}


async def test_a_new_router_counts_only_its_own_tokens(engine_config: Config, engine: str) -> None:
    """The rollout process was killed: what the engine still does for it is stopped, and nobody's loss."""
    async with stack(engine_config, engine) as s:
        await s.push(0)
        await s.client.slow_down(SLOW)
        task = asyncio.create_task(s.generate(sample(1), 400))
        await wait_until(lambda: bool(s.router.stats()["received_tokens"]), task)
        task.cancel()
    async with stack(engine_config, engine) as s:
        await s.push(0)
        final_sample = await s.generate(sample(2), 20)
        await s.router.interrupt()
        stats = s.router.stats()
        assert stats["engine_tokens"] == len(final_sample.response_ids) + len(CANARIES)
        assert stats["lost"] == 0


def moved(seed: int) -> dict[str, Tensor]:
    """The weights of `seed`; norms too, which are ones in every random model."""
    return {name: t * (1 + seed / 8) if t.ndim == 1 else t for name, t in tensors(seed)}


async def test_no_faulty_push_is_attested(engine_config: Config, engine: str) -> None:
    """One tensor of each kind is left out on the way, or is the previous version's; two experts change places.
    Without canaries: tensors alone decide."""
    old, new = moved(0), moved(1)
    faulty = {"nothing": new}
    for name in {re.sub(r"\d+", "#", name): name for name in new}.values():
        faulty[f"without {name}"] = {n: t for n, t in new.items() if n != name}
        faulty[f"old {name}"] = {**new, name: old[name]}
    first, second = (f"model.layers.1.mlp.experts.{e}." for e in (0, 1))
    swapped_experts = {n.replace(second, first): t for n, t in new.items() if second in n}
    swapped_experts |= {n.replace(first, second): t for n, t in new.items() if first in n}
    faulty["experts swapped"] = {**new, **swapped_experts}
    attested = []
    for fault, fault_tensors in faulty.items():
        async with stack(engine_config, engine) as s:
            for expected, pushed_tensors in ((old, old), (new, fault_tensors)):
                version = next(s._versions)
                ticket = WeightUpdate(version, await begin_push(s.router, version), [])
                sums = EngineChecksums(HFConfig.read(engine_config.model.path), 1)
                for _ in sums.watch(expected.items()):
                    pass
                await asyncio.to_thread(s.sync.push, pushed_tensors.items(), ticket)
                try:
                    await s.router.end_push(version, [], sums.digests())
                    raise_if_all_quarantined(s.router, version)
                except RunError as e:
                    assert pushed_tensors is fault_tensors and "holds other values" in str(e)
                    break
            else:
                attested.append(fault)
    assert attested == ["nothing"]
