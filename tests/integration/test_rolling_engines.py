"""Twenty rolling pushes to two real engines: one takes weights, the other generates."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config, identity
from rlsys.convert.config import HFConfig
from rlsys.core.types import AnySequence, Prompt, Sample, TokenSequence
from rlsys.core.weight_updates import Canary
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import make_session
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.ledger import check_ledger
from rlsys.ledger.store import FILE_NAME
from rlsys.planning.planning import Planning
from rlsys.rollout.manager import RolloutManager
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.weights.checksums import EngineChecksums
from rlsys.weights.gathered_push import GatheredPush
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import direct_workers
from tests.helpers.engine_stack import ENGINE_TENSORS, logprobs, tensors, worst_gap
from tests.helpers.loaded import load_tokens
from tests.helpers.servers import running_engine

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PUSHES, MODELS = 20, 2
SLOW = 0.02  # seconds for a forward pass: a response outlasts a round


class Numbers:
    """Prompt i says i."""

    def train(self, index: int) -> Prompt:
        return Prompt(index, "", [1, 10 + index // 100 % 100, 10 + index % 100, 5, 6], {})

    def heldout(self, n: int) -> list[Prompt]:
        return []


class TracedRouter(Router):
    """The product's router; responses have many lengths, so that they do not all end together."""

    async def generate(self, sample: AnySequence, **how: Any) -> AnySequence:
        how["max_response_tokens"] = 24 + 12 * (sample.sample_id * 5 % 8)
        return await super().generate(sample, **how)


class Run:
    """The product's manager, router and buffer; the trainer's weights are the version's turn of two models."""

    def __init__(self, config: Config, clients: list[EngineClient]) -> None:
        self.config, self.hf = config, HFConfig.read(config.model.path)
        self.buffer = RolloutBuffer(config.run.dir / FILE_NAME, identity(config), config.rollout.group_size)
        self.router = TracedRouter(
            list(clients), vocab_size=128, context_length=512, stop_ids=(), bounds=Bounds.of(config)
        )

        async def one(_prompt: Prompt, _text: str) -> float:
            return 1.0

        scorer = Scorer(lambda: nullcontext(one), lambda _ids: "", 60.0)
        source = Numbers()
        workers = direct_workers(config, self.router, scorer)
        self.manager = RolloutManager(
            config, self.buffer, workers, source, scorer, Planning(config, source, None)
        )
        self.sync = GatheredPush(config)
        self.made = Counter[str]()
        self.came: list[float] = []
        self.rounds: list[tuple[list[str], Counter[str]]] = []
        previous_callback = self.router.on_tokens

        def hear(sample: TokenSequence, tokens: int) -> None:
            self.made[str(sample.engine)] += tokens
            self.came.append(time.monotonic())
            previous_callback(sample, tokens)

        self.router.on_tokens = hear

    async def push(self, *, rolls: bool = True) -> None:
        engines_left = True
        while engines_left:
            ticket = await self.manager.begin_push()
            urls, initial_counts = [e.url for e in ticket.engines], self.made.copy()
            seed, checksums = ticket.weight_version % MODELS, EngineChecksums(self.hf, 1)
            if rolls:  # the engine has an update open, and the other goes on
                async with asyncio.timeout(120):
                    while not self._made_elsewhere(urls, initial_counts):
                        await asyncio.sleep(0.001)
            await asyncio.to_thread(self.sync.push, checksums.watch(tensors(seed)), ticket)
            canaries = [Canary(ids, logprobs(seed, ids)) for ids in ticket.canaries]
            metrics = await self.manager.end_push(ticket, canaries, checksums.digests())
            assert metrics["push_tensors_equal"] == ENGINE_TENSORS and metrics["push_tensors_unknown"] == 0
            engines_left = bool(metrics["push_left"])
            if rolls:
                self.rounds.append((urls, self.made - initial_counts))

    def _made_elsewhere(self, urls: list[str], before: Counter[str]) -> bool:
        return any(self.made[url] > before[url] for url in self.made if url not in urls)


@pytest.mark.parametrize("method", ["auto", "broadcast"])
async def test_one_engine_generates_while_the_other_takes_weights(
    engine_config: Config, tmp_path: Path, method: str
) -> None:
    data = engine_config.model_dump()
    data["run"]["dir"] = tmp_path / "run"
    data["launch"]["placement"], data["engine"]["count"], data["engine"]["return_routes"] = (
        "disaggregated",
        2,
        False,
    )
    data["weights"] |= {"rolling": 1, "method": method}
    data["rollout"] |= {  # a staleness that lets engines go on for as long as this takes
        "groups_per_step": 4, "group_size": 2, "max_response_tokens": 120, "over_provision": 3, "max_staleness": 99,
    }  # fmt: skip
    config = Config.model_validate(data)
    config.run.dir.mkdir()
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with running_engine(config, tmp_path / "one") as a, running_engine(config, tmp_path / "two") as b:
        async with make_session() as session:
            clients = [EngineClient(url, session) for url in (a, b)]
            for client in clients:
                await client.slow_down(SLOW)
            run, idle, pushing = Run(config, clients), 0, False

            async def look() -> None:
                nonlocal idle
                while True:
                    await asyncio.sleep(0.001)
                    figures = run.router.engine_metrics().values()
                    idle += pushing and not any(f["serving"] and f["requests"] for f in figures)

            watch = asyncio.create_task(look())
            await run.manager.restore(0)
            await run.push(rolls=False)
            batches, start_index = [], len(run.came)
            for step in range(1, PUSHES + 1):
                batch = await run.manager.take(step)
                assert batch is not None
                batches.append(replace(batch, groups=load_tokens(config.run.dir, batch.groups)))
                pushing = True
                await run.push()
                pushing = False
            watch.cancel()
            await run.manager.close()
            await asyncio.to_thread(run.sync.close)
            check_ledger(run.buffer.ledger())
            assert run.buffer.lost_tokens == 0
            run.buffer.close()
    for folder in ("one", "two"):  # one group for the first push, and one for the rounds of all others
        engine_log = (tmp_path / folder / "engine.log").read_text()
        assert engine_log.count("POST /init_weights_update_group ") == (2 if method == "broadcast" else 0)
    assert [urls for urls, _ in run.rounds] == [[a], [b]] * PUSHES
    assert idle == 0
    for urls, token_counts in run.rounds:
        assert sum(token_counts[url] for url in (a, b) if url not in urls) > 0
    samples = [s for t in batches for g in t.groups for s in g.samples]
    assert all(t.metrics["lost"] == 0 for t in batches)
    worst = max(gap_of(s) for s in samples)
    mixed = sum(len(s.spans) > 1 for s in samples)
    gaps = [y - x for x, y in zip(run.came[start_index:], run.came[start_index + 1 :], strict=False)]
    print(
        f"{method}: {len(samples)} samples, {mixed} of several versions, {sum(s.resumes for s in samples)} resumes; "
        f"worst gap {worst:.1e}; longest silence {max(gaps):.2f} s"
    )
    assert mixed > 0 and worst < 5e-5


def gap_of(s: Sample) -> float:
    """Between the engine's log-probs and those of transformers with the weights that each token says it has."""
    ids, first = [*s.prompt_ids, *s.response_ids], len(s.prompt_ids)
    expected = {span.version: logprobs(span.version % MODELS, ids)[first - 1 :] for span in s.spans}
    reference_logprobs = [expected[version][i] for i, version in enumerate(s.versions())]
    return worst_gap(list(s.mu), reference_logprobs)
