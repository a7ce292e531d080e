"""Router replay: the experts that an engine chose, in a float32 trainer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlsys.config import Config
from rlsys.core.spans import RouteSpan, VersionSpan
from rlsys.core.types import LogProbRequest, Sample
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.segments.records import SegmentReader
from rlsys.segments.route_records import load_with_routes
from rlsys.trainer.model.routing import decode
from rlsys.trainer.pack import MicroBatch, TrainSample
from rlsys.trainer.step import score_parked
from rlsys.trainer.trainer import Trainer
from tests.helpers import trainer_cases as cases
from tests.helpers.engine_stack import set_model, stack
from tests.helpers.servers import TINY_MOE, running_engine, tiny_moe_model

pytestmark = pytest.mark.integration

SAMPLES = 64
FEW = 16
"""As many as `policy_loss` knows the advantages of."""
INTERRUPT_AT = 16
"""Tokens of an interrupted sample, or a few more."""
ROUNDED = 90
"""Of models that tests push: the one whose weights bfloat16 holds exactly."""
LAYERS, TOPK = TINY_MOE["num_hidden_layers"], TINY_MOE["num_experts_per_tok"]


def rounded() -> Any:
    """A random model whose weights are the same in bfloat16 and in float32."""
    model = tiny_moe_model(0)
    for weight in model.parameters():  # not its buffers: the frequencies of positions
        weight.data = weight.data.bfloat16().float()
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "rounded"
    rounded().save_pretrained(folder)
    return folder


async def generated(url: str, n: int, interrupt_at: int | None = None) -> list[Sample]:
    """`interrupt_at`: tokens after which a sample is aborted; it may get a few more before its engine hears of it."""

    async def one(client: EngineClient, i: int) -> Sample:
        sample, rid = Sample(i, i, 0, [1, 4, 20 + i, 40, 21, 30 + i, 5, 6], seed=i), f"replay-{i}-"
        stream = client.generate(
            sample.prompt_ids, rid=rid, max_new_tokens=60, temperature=1.0, seed=i, stop_ids=[2], routes_from=0,
        )  # fmt: skip
        abort_requested = False
        async for segment in stream:
            sample.append(dataclasses.replace(segment, spans=[VersionSpan(1, 0, len(segment.ids))]))
            if segment.finish == "abort":
                sample.resumes = 1
            elif (
                interrupt_at is not None and len(sample.response_ids) >= interrupt_at and not abort_requested
            ):
                abort_requested = True
                await client.abort(rid)
        return sample

    async with make_session() as session:
        client = EngineClient(url, session)
        return await asyncio.gather(*(one(client, i) for i in range(n)))


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sample], list[Sample]]:
    """Of a bfloat16 engine, with its routes for every position that predicted a token: whole and interrupted ones."""
    config = Config.model_validate(
        {
            "model": {"path": model, "dtype": "bfloat16"},
            "engine": {"max_running_requests": 16, "max_total_tokens": 8192, "return_routes": True},
        }
    )
    with running_engine(config, tmp_path_factory.mktemp("engine")) as url:
        complete_samples = asyncio.run(generated(url, SAMPLES))
        return complete_samples, [s for s in asyncio.run(generated(url, SAMPLES, INTERRUPT_AT)) if s.resumes]


@pytest.fixture(scope="module")
def samples(made: tuple[list[Sample], list[Sample]]) -> list[TrainSample]:
    return [TrainSample.of(s, s.sample_id) for s in made[0]]


@pytest.fixture(scope="module")
def exact_samples(engine_config: Config, engine: str, engine_run: Path) -> list[TrainSample]:
    """The same of a float32 engine that holds the same weights."""

    async def body() -> list[Sample]:
        async with stack(engine_config, engine) as s:
            set_model(ROUNDED, rounded())
            await s.push(ROUNDED)
            return await generated(engine, SAMPLES)

    with SegmentReader(engine_run) as segments:
        return [TrainSample.of(load_with_routes(segments, s), s.sample_id) for s in asyncio.run(body())]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[[str], Trainer]]:
    """A float32 trainer with this kind of replay; the one before it is closed."""
    open_ones: list[Trainer] = []

    def make(replay: str) -> Trainer:
        while open_ones:
            open_ones.pop().close()
        sections: dict[str, Any] = {"trainer": {"replay": replay, "token_budget": 512}}
        config = cases.config_of(model, tmp_path, **sections, engine={"return_routes": replay == "engine"})
        open_ones.append(Trainer(config))
        return open_ones[0]

    yield make
    while open_ones:
        open_ones.pop().close()


def chosen_experts(trainer: Trainer) -> list[Tensor]:
    """Of every forward pass from now on and every router, as a map `[P, experts]`: what megatron dispatches by."""
    expert_maps: list[Tensor] = []
    for module in trainer.modules:
        for name, child in module.named_modules():
            if name.endswith("mlp.router"):
                child.register_forward_hook(lambda _, __, out: expert_maps.append(out[1]))
    return expert_maps


def gaps(trainer: Trainer, batch: list[MicroBatch]) -> Tensor:
    """|logp - mu| of every response token."""
    parts = zip(batch, trainer.passes.logprobs(batch), strict=True)
    return torch.cat([(logp - micro.mu).abs()[micro.keep] for micro, logp in parts])


def as_map(experts: Tensor) -> Tensor:
    indices = experts.long().clamp(min=0)
    return torch.zeros(len(experts), TINY_MOE["num_experts"]).scatter(1, indices, 1).bool()


def found(trainer: Trainer, samples: list[TrainSample]) -> tuple[float, float, float]:
    """Share of tokens and layers that took the engine's experts; mean and 99.9th percentile of |logp - mu|."""
    batch = dataclasses.replace(trainer.passes.pack, shared="no")(samples)
    expert_maps = chosen_experts(trainer)
    differences = gaps(trainer, batch)
    matches = torch.cat(
        [
            (expert_map[: len(micro.tokens)] == as_map(engine))[engine[:, 0] >= 0].all(1)
            for i, micro in enumerate(batch)
            for expert_map, engine in zip(
                expert_maps[i * LAYERS : (i + 1) * LAYERS],
                decode(micro.routes, len(micro.tokens), LAYERS, TOPK).unbind(1),
                strict=True,
            )
        ]
    )
    assert len(matches) == LAYERS * sum(len(s) - 1 for s in samples)
    return float(matches.double().mean()), float(differences.mean()), float(differences.quantile(0.999))


def test_replay_uses_the_engines_experts_and_reduces_the_logprob_mismatch(
    samples: list[TrainSample], start: Callable[[str], Trainer]
) -> None:
    off, replayed = found(start("off"), samples), found(start("engine"), samples)
    print(f"bfloat16 engine, float32 trainer: off {off}, replayed {replayed}")
    assert replayed[0] == 1
    assert off[0] < 1
    assert replayed[1] < 0.5 * off[1]
    assert replayed[2] < 0.5 * off[2]


def test_exact_old_of_interrupted_samples_is_near_the_engine(
    made: tuple[list[Sample], list[Sample]], start: Callable[[str], Trainer]
) -> None:
    """The routes of the last tokens come with the abort; scored by them, stale tokens are as near to the engine as
    fresh ones are when they train. Without routes is what waited for memory when it was aborted: its engine has let
    go of them, and the step that trains it replays none either."""
    routed_samples = [s for s in made[1] if s.routes]
    print(f"{len(routed_samples)} of {len(made[1])} interrupted samples have routes")
    assert len(routed_samples) >= FEW
    for s in routed_samples:
        assert (s.routes[0].start, s.routes[-1].end) == (0, len([*s.prompt_ids, *s.response_ids]) - 1)
    mu = torch.tensor([m for s in routed_samples for m in s.mu])
    trainer, scores = start("engine"), {}
    for name, routed in (("without routes", False), ("with routes", True)):
        requests = [
            LogProbRequest(s if routed else dataclasses.replace(s, routes=[]), 0) for s in routed_samples
        ]
        scored = torch.tensor([lp for scores in score_parked(requests, trainer) for lp in scores.logp])
        differences = (scored - mu).abs()
        scores[name] = [
            float(x) for x in (differences.mean(), *differences.quantile(torch.tensor([0.99, 0.999])))
        ]
        summary, mean = ", ".join(f"{x:.3f}" for x in scores[name]), float((scored - mu).mean())
        print(
            f"|old - mu| of {len(mu)} stale tokens {name}: mean, p99, p99.9 = {summary}; of old - mu {mean:.4f}"
        )
    assert all(b < a for a, b in zip(*scores.values(), strict=True))
    assert scores["with routes"][0] < 0.6 * scores["without routes"][0]


def test_replay_changes_nothing_where_both_compute_the_same(
    exact_samples: list[TrainSample], start: Callable[[str], Trainer]
) -> None:
    off, replayed = found(start("off"), exact_samples), found(start("engine"), exact_samples)
    print(f"float32 engine, float32 trainer: off {off}, replayed {replayed}")
    assert replayed[0] == 1
    assert off[0] > 0.999
    assert replayed[2] < 1e-5


def test_the_router_learns_under_replay_and_tokens_without_routes_are_counted(
    samples: list[TrainSample], start: Callable[[str], Trainer]
) -> None:
    trainer = start("engine")
    half = [dataclasses.replace(s, routes=()) if i % 2 else s for i, s in enumerate(samples[:FEW])]
    gates_before = {n: t.clone() for n, t in trainer.named_hf_tensors() if "mlp.gate.weight" in n}
    result = trainer.update(trainer.passes.pack(half), cases.policy_loss, 1e-3)
    missing = sum(len(s) - 1 for s in half if not s.routes)
    assert result.routing["replay_missing"] == missing
    assert result.routing["replay_share"] == pytest.approx(1 - missing / sum(len(s) - 1 for s in half))
    assert 0.5 < result.routing["route_agreement"] <= 1
    assert result.routing["expert_load_max"] >= 1
    gates_after = {n: t for n, t in trainer.named_hf_tensors() if n in gates_before}
    assert all(not torch.equal(gates_before[n], t) for n, t in gates_after.items())


def test_trainer_replay_reuses_the_routes_of_the_first_scoring_pass(
    samples: list[TrainSample], start: Callable[[str], Trainer]
) -> None:
    """R2: after an update the routers would choose otherwise, and do not."""
    trainer = start("trainer")
    batch = trainer.passes.pack(samples[:FEW])
    expert_maps = chosen_experts(trainer)
    trainer.passes.score(batch)
    first = list(expert_maps)
    expert_maps.clear()
    shares = [trainer.update(batch, cases.policy_loss, 1e-2).routing for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(expert_maps, first * 3, strict=True))
    assert shares[0]["route_agreement"] == 1
    assert shares[2]["route_agreement"] < 1
    assert shares[2]["replay_share"] == 1


def test_routes_decode_by_position_and_width() -> None:
    narrow = RouteSpan(1, 3, bytes([1, 2, 3, 4, 5, 6, 7, 8]))
    wide = RouteSpan(4, 5, b"".join(int(e).to_bytes(2, "little") for e in (300, 1, 2, 3)))
    routes = decode([narrow, wide], tokens=6, layers=2, topk=2)
    assert routes[1].tolist() == [[1, 2], [3, 4]]
    assert routes[2].tolist() == [[5, 6], [7, 8]]
    assert routes[4].tolist() == [[300, 1], [2, 3]]
    assert (routes[[0, 3, 5]] == -1).all()
