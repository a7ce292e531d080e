"""A real engine with a router, as in the rollout process, and reference log-probs from transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.core.types import Sample
from rlsys.core.weight_updates import Canary, WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.router.attest import Bounds
from rlsys.router.dispatch import Interruption
from rlsys.router.push import raise_if_all_quarantined
from rlsys.router.router import Router
from rlsys.segments.records import SegmentReader
from rlsys.segments.route_records import load_with_routes
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.weight_transport import GatheredTransport, transport_class
from tests.helpers.ready_push import begin_push
from tests.helpers.servers import TINY_MOE, tiny_moe_model

EOS = TINY_MOE["eos_token_id"]
LAYERS, TOP_K = TINY_MOE["num_hidden_layers"], TINY_MOE["num_experts_per_tok"]
PROMPT = [1, 4, 20, 40, 21, 40, 22, 30, 23, 5, 6]
CANARIES = [[9 + (7 * i * j) % 100 for j in range(40)] for i in range(1, 5)]
SLOW = 0.03
"""Seconds per forward pass, long enough to interrupt a request."""
ENGINE_TENSORS = 3 + LAYERS * 9
"""Number of the engine's tensors: embedding, head and final norm; per layer two norms, four of attention, router, and
two that stack all experts."""
_models: dict[int, Any] = {}


def model(seed: int) -> Any:
    if seed not in _models:
        _models[seed] = tiny_moe_model(seed)
    return _models[seed]


def set_model(seed: int, value: Any) -> None:
    """Use `value` as the model of `seed`."""
    _models[seed] = value


def logprobs(seed: int, ids: list[int]) -> list[float]:
    """Return transformers' log-probs of `ids[1:]`."""
    with torch.no_grad():
        logits = model(seed)(torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def canaries(seed: int) -> list[Canary]:
    return [Canary(ids, logprobs(seed, ids)) for ids in CANARIES]


def tensors(seed: int) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors of a model under their checkpoint names, one tensor per expert."""
    for name, tensor in model(seed).state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for e, gate_up in enumerate(tensor):
                gate, up = gate_up.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                yield f"{stem}{e}.gate_proj.weight", gate
                yield f"{stem}{e}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                yield f"{name.removesuffix('down_proj')}{e}.down_proj.weight", down
        else:
            yield name, tensor


def transport_of(config: Config) -> GatheredTransport:
    """Return the transport of weights.method, in a process that stands for all trainer ranks."""
    kind = transport_class(config)
    assert issubclass(kind, GatheredTransport)
    return kind(config)


def sample(sample_id: int, seed: int = 7) -> Sample:
    return Sample(sample_id, sample_id, 0, PROMPT, seed=seed)


class Stack:
    """An engine and its own router, as in the rollout process. Weight versions increase over all tests."""

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
        self.sync = transport_of(config)
        self._hf = HFConfig.read(config.model.path)

    async def push(
        self,
        seed: int,
        claimed_seed: int | None = None,
        corrupt: Callable[[str, Tensor], Tensor] | None = None,
    ) -> tuple[int, dict[str, float]]:
        """Push the weights of a model to the engine.

        Args:
            seed: seed of the model.
            claimed_seed: seed of the model that computes the canaries; None: `seed`.
            corrupt: (name, tensor) -> the tensor that the engine receives; None: unchanged tensors.

        Returns:
            The new weight version and the metrics of the push.
        """
        version = next(self._versions)
        addresses = await begin_push(self.router, version)
        ticket = WeightUpdate(version, addresses, CANARIES)
        checksums = EngineChecksums(self._hf, self.client.tp)
        named_tensors = checksums.watch(tensors(seed))
        if corrupt is not None:
            named_tensors = ((name, corrupt(name, tensor)) for name, tensor in named_tensors)
        self.bytes_sent = await asyncio.to_thread(self.sync.push, named_tensors, ticket)
        claimed = canaries(seed if claimed_seed is None else claimed_seed)
        metrics = await self.router.end_push(version, claimed, checksums.digests())
        raise_if_all_quarantined(self.router, version)
        self.router.resume()
        return version, metrics

    async def generate(self, s: Sample, tokens: int = 120) -> Sample:
        return await self.router.generate(s, max_response_tokens=tokens, temperature=1.0)


@asynccontextmanager
async def stack(config: Config, url: str) -> AsyncIterator[Stack]:
    async with make_session() as session:
        client = EngineClient(url, session, tp=config.engine.tp)
        engine_stack = Stack(config, client)
        try:
            yield engine_stack
        finally:
            await asyncio.to_thread(engine_stack.sync.close)
            await client.abort(None)
            await client.slow_down(None)


async def wait_until(condition: Callable[[], bool], task: asyncio.Future[Any]) -> None:
    while not condition():
        assert not task.done(), "the task ended before the condition was met"
        await asyncio.sleep(0.002)


def routes(s: Sample, run: Path) -> bytes:
    """Return the expert IDs of all positions, one byte each. `run`: run folder with the segments."""
    assert [r.start for r in s.routes] == [0, *(r.end for r in s.routes[:-1])]
    with SegmentReader(run) as segments:
        return b"".join(r.experts for r in load_with_routes(segments, s).routes)


def worst_gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))
