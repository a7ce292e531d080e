"""Router against a real SGLang server: interruption changes nothing, pushes are exact, wrong weights are found."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.engine.client import EngineClient, make_session
from rlsys.errors import RunError
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import Interruption
from rlsys.router.router import Router
from rlsys.types import Canary, EngineAddress, PushTicket, Sample, Status
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.sync import WeightSync
from tests.integration.servers import TINY_MOE, tiny_moe_model

pytestmark = pytest.mark.integration

EOS = TINY_MOE["eos_token_id"]
LAYERS, TOP_K = TINY_MOE["num_hidden_layers"], TINY_MOE["num_experts_per_tok"]
PROMPT = [1, 4, 20, 40, 21, 40, 22, 30, 23, 5, 6]
CANARIES = [[9 + (7 * i * j) % 100 for j in range(40)] for i in range(1, 5)]
SLOW = 0.03  # seconds for a forward pass: long enough to interrupt in the middle
ENGINE_TENSORS = 3 + LAYERS * 9
"""Embedding, head and norm; in each layer two norms, four of attention, a router and two of all experts."""
_models: dict[int, Any] = {}


def model(seed: int) -> Any:
    if seed not in _models:
        _models[seed] = tiny_moe_model(seed)
    return _models[seed]


def keep_model(seed: int, made: Any) -> None:
    """From now on model `seed` is this one."""
    _models[seed] = made


def logprobs(seed: int, ids: list[int]) -> list[float]:
    """Of `ids[1:]`, by transformers."""
    with torch.no_grad():
        logits = model(seed)(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def canaries(seed: int) -> list[Canary]:
    return [Canary(ids, logprobs(seed, ids)) for ids in CANARIES]


def tensors(seed: int) -> Iterable[tuple[str, Tensor]]:
    """Under the names that a checkpoint has on disk: one tensor for each expert."""
    for name, tensor in model(seed).state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                yield f"{stem}{e}.gate_proj.weight", gate
                yield f"{stem}{e}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                yield f"{name.removesuffix('down_proj')}{e}.down_proj.weight", down
        else:
            yield name, tensor


def sample(sample_id: int, seed: int = 7) -> Sample:
    return Sample(sample_id, sample_id, 0, PROMPT, seed=seed)


class Stack:
    """One engine and a router of its own, as the rollout process has them; versions count up over all tests."""

    _versions = iter(range(1, 1000))

    def __init__(self, config: Config, client: EngineClient, interruption: Interruption = "abort") -> None:
        self.client = client
        self.router = Router(
            [client],
            vocab_size=128,
            context_length=512,
            stop_ids={EOS},
            bounds=Bounds.of(config),
            routes=config.engine.return_routes,
            interruption=interruption,
        )
        self.sync = WeightSync(config, is_main=True)
        self._hf = HFConfig.read(config.model.path)

    async def push(
        self, seed: int, claimed_seed: int | None = None, hurt: Callable[[str, Tensor], Tensor] | None = None
    ) -> tuple[int, dict[str, float]]:
        """Push the weights of `seed`, with canaries of `claimed_seed`; the new version and the metrics.

        `hurt`: what becomes of a tensor between the trainer and the engine.
        """
        version = next(self._versions)
        addresses = await self.router.begin_push(version)
        ticket = PushTicket(version, addresses, CANARIES)
        checksums = EngineChecksums(self._hf, self.client.tp)
        sent = checksums.watch(tensors(seed))
        if hurt is not None:
            sent = ((name, hurt(name, tensor)) for name, tensor in sent)
        self.bytes_sent = await asyncio.to_thread(self.sync.push, sent, ticket)
        claimed = canaries(seed if claimed_seed is None else claimed_seed)
        metrics = await self.router.end_push(version, claimed, checksums.digests())
        self.router.resume()
        return version, metrics

    async def generate(self, s: Sample, tokens: int = 120) -> Sample:
        return await self.router.generate(s, max_response_tokens=tokens, temperature=1.0)


@asynccontextmanager
async def stack(config: Config, url: str) -> AsyncIterator[Stack]:
    async with make_session() as session:
        client = EngineClient(url, session, tp=config.engine.tp)
        made = Stack(config, client)
        try:
            yield made
        finally:
            await asyncio.to_thread(made.sync.close)
            await client.abort(None)
            await client.slow_down(None)


def with_stack(config: Config, url: str, body: Callable[[Stack], Awaitable[None]]) -> None:
    async def run() -> None:
        async with stack(config, url) as s:
            await body(s)

    asyncio.run(run())


async def until(true: Callable[[], bool], task: asyncio.Future[Any]) -> None:
    while not true():
        assert not task.done(), "ended too early to be interrupted"
        await asyncio.sleep(0.002)


def routes(s: Sample) -> bytes:
    """Of all positions, one byte each: there are few experts."""
    assert [r.start for r in s.routes] == [0, *(r.end for r in s.routes[:-1])]
    return b"".join(r.experts for r in s.routes)


def worst_gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_interrupted_three_times_equals_unbroken(engine_config: Config, engine: str) -> None:
    async def body(s: Stack) -> None:
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
            await until(lambda n=at_least: len(broken.response_ids) >= n, task)  # type: ignore[misc]
            await s.router.interrupt()
            assert broken.status is Status.PARKED
            lengths.append(len(broken.response_ids))
            s.router.resume()
        await s.client.slow_down(None)
        await task

        assert lengths == sorted(set(lengths)), "each segment added tokens"
        assert broken.response_ids == unbroken.response_ids
        assert worst_gap(broken.mu, unbroken.mu) <= 1e-5
        assert routes(broken) == routes(unbroken)
        assert len(routes(broken)) == (len(PROMPT) + 80 - 1) * LAYERS * TOP_K
        assert (broken.status, broken.resumes, broken.versions()) == (Status.TRUNCATED, 3, [version] * 80)
        # Everything but the last token of each resumed prefix is still in the engine, by both accounts.
        assert broken.cached_tokens == sum(len(PROMPT) + n - 1 for n in lengths)
        assert broken.prefilled_tokens == len(PROMPT) + sum(len(PROMPT) + n for n in lengths)
        assert await cached_tokens(s.client) - cached_before == broken.cached_tokens
        await s.router.interrupt()
        assert s.router.stats()["lost"] == 0

    with_stack(engine_config, engine, body)


async def cached_tokens(client: EngineClient) -> float:
    lines = (await client._get("/metrics")).splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("sglang:cached_tokens_total"))


def test_a_full_engine_interrupted_gives_back_every_token(engine_config: Config, engine: str) -> None:
    """More samples than it decodes at once: some are interrupted in its queue, with no token yet."""

    async def body(s: Stack) -> None:
        await s.push(0)
        n = engine_config.engine.max_running_requests + 24
        unbroken = await asyncio.gather(*(s.generate(sample(i, seed=i), 40) for i in range(n)))
        await s.client.slow_down(SLOW)
        broken = [sample(i, seed=i) for i in range(n)]
        tasks = [asyncio.create_task(s.generate(b, 40)) for b in broken]
        await until(lambda: s.router.stats()["in_flight"] == n, tasks[0])
        await s.router.interrupt()  # perhaps before they are registered: then they come back empty
        s.router.resume()
        await until(lambda: any(len(b.response_ids) > 4 for b in broken), tasks[0])
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

    with_stack(engine_config, engine, body)


@pytest.mark.parametrize("method", ["tensor", "broadcast", "disk", "disk_delta"])
def test_a_push_is_exact(method: str, engine_config: Config, engine: str, tmp_path: Path) -> None:
    weights = engine_config.weights.model_copy(update={"method": method})
    run = engine_config.run.model_copy(update={"dir": tmp_path})
    config = engine_config.model_copy(update={"weights": weights, "run": run})

    async def body(s: Stack) -> None:
        await s.push(0)
        before = await s.generate(sample(1), 30)
        version, metrics = await s.push(1)
        assert await s.client.weight_version() == version
        assert metrics["push_canary_mean"] <= 1e-6
        assert metrics["push_canary_p999"] <= 1e-5
        assert (metrics["push_tensors_equal"], metrics["push_tensors_unknown"]) == (ENGINE_TENSORS, 0)
        after = await s.generate(sample(1), 30)
        assert after.response_ids != before.response_ids
        assert after.versions() == [version] * len(after.response_ids)
        expected = logprobs(1, PROMPT + after.response_ids)[len(PROMPT) - 1 :]
        assert worst_gap(after.mu, expected) <= 1e-5
        assert after.cached_tokens == 0, "a push empties the cache"
        assert s.bytes_sent >= sum(t.nbytes for _, t in tensors(1))
        version, _ = await s.push(1)
        again = await s.generate(sample(1), 30)
        assert (again.response_ids, again.versions()) == (
            after.response_ids,
            [version] * len(after.response_ids),
        )
        assert (s.bytes_sent == 0) == (method == "disk_delta"), "nothing has changed"

    with_stack(config, engine, body)


def test_a_broadcast_goes_on_without_an_engine_that_dies_in_it(engine_config: Config, engine: str) -> None:
    weights = engine_config.weights.model_copy(update={"method": "broadcast"})
    config = engine_config.model_copy(update={"weights": weights})
    peer = [sys.executable, str(Path(__file__).with_name("dying_peer.py"))]

    async def body(s: Stack) -> None:
        version = next(s._versions)
        addresses = await s.router.begin_push(version)
        with subprocess.Popen(peer, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            dying = EngineAddress(f"http://127.0.0.1:{int(other.stdout.readline())}", 1)
            ticket = PushTicket(version, [*addresses, dying], CANARIES)
            await asyncio.to_thread(s.sync.push, tensors(1), ticket)
            assert other.wait(timeout=60) == 9
        await s.router.end_push(version, canaries(1))
        assert s.router.engine_states() == {engine: f"version {version}"}

    with_stack(config, engine, body)


@pytest.mark.parametrize("how", ["retract", "in_place"])
def test_an_engine_keeps_its_requests_through_a_push(
    how: Interruption, engine_config: Config, engine: str
) -> None:
    """The weights stay the same, so the response must: only their version and the keys' and values' age differ."""

    async def body(plain: Stack) -> None:
        s = Stack(engine_config, plain.client, how)
        first, _ = await s.push(0)
        unbroken = await s.generate(sample(1, seed=11), tokens=80)
        kept = sample(2, seed=11)
        await s.client.slow_down(SLOW)
        task = asyncio.create_task(s.generate(kept, tokens=80))
        await until(lambda: len(kept.response_ids) >= 20, task)
        second, _ = await s.push(0)
        assert kept.status is Status.IN_FLIGHT
        await s.client.slow_down(None)
        await task
        assert kept.response_ids == unbroken.response_ids
        assert worst_gap(kept.mu, unbroken.mu) <= 1e-5
        assert ([v.version for v in kept.spans], kept.resumes) == ([first, second], 0)
        seam = len(PROMPT) + kept.spans[1].start - 1
        assert routes(unbroken)[seam * LAYERS * TOP_K :] == kept.routes[0].experts
        await s.router.interrupt()
        assert s.router.stats()["lost"] == 0

    with_stack(engine_config, engine, body)


def test_wrong_weights_do_not_serve(engine_config: Config, engine: str) -> None:
    async def body(s: Stack) -> None:
        with pytest.raises(RunError, match=r"no engine can serve .* canary log-probs differ .*bound 1e-06"):
            await s.push(1, claimed_seed=0)
        assert s.router.stats()["engines_serving"] == 0

    with_stack(engine_config, engine, body)


def test_one_wrong_bit_in_one_tensor_is_found(engine_config: Config, engine: str) -> None:
    """So small a change passes every canary."""

    def flip(name: str, tensor: Tensor) -> Tensor:
        if name != "model.layers.1.mlp.experts.5.down_proj.weight":
            return tensor
        bits = tensor.clone().view(torch.int32)
        bits[3, 4] ^= 1
        return bits.view(torch.float32)

    async def body(s: Stack) -> None:
        told = r"holds other values in 1 tensor\(s\), first: model.layers.1.mlp.experts.w2_weight"
        with pytest.raises(RunError, match=told):
            await s.push(0, hurt=flip)
        agreement = s.router._dispatcher.pool.engines[0].agreement
        assert agreement is not None
        assert agreement.within(Bounds.of(engine_config))

    with_stack(engine_config, engine, body)


def test_a_push_that_a_dead_trainer_left_open_is_ended(engine_config: Config, engine: str) -> None:
    async def body(s: Stack) -> None:
        await s.client.begin_weight_update()
        version, _ = await s.push(0)
        assert s.router.engine_states() == {engine: f"version {version}"}

    with_stack(engine_config, engine, body)


def test_a_router_that_comes_after_another_counts_its_own_tokens(engine_config: Config, engine: str) -> None:
    """The rollout process was killed: what the engine still does for it is stopped, and nobody's loss."""

    async def abandoned(s: Stack) -> None:
        await s.push(0)
        await s.client.slow_down(SLOW)
        task = asyncio.create_task(s.generate(sample(1), 400))
        await until(lambda: bool(s.router.stats()["received_tokens"]), task)
        task.cancel()

    async def next_one(s: Stack) -> None:
        await s.push(0)
        done = await s.generate(sample(2), 20)
        await s.router.interrupt()
        stats = s.router.stats()
        assert stats["engine_tokens"] == len(done.response_ids) + len(CANARIES)
        assert stats["lost"] == 0

    with_stack(engine_config, engine, abandoned)
    with_stack(engine_config, engine, next_one)
