"""Simulation of a run in virtual time: rollout manager, router and buffer of a real run over simulated engines.

The code of a real run decides about admission, interruption, resumption, selection and dropping of samples. The
simulated trainer only waits: tokens, losses and weights are not computed.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.config import Config, identity
from rlsys.convert.prefixes import Sharing, group_of
from rlsys.core.errors import RunError, UserError
from rlsys.core.types import Prompt, TrainBatch
from rlsys.core.weight_updates import Canary, WeightUpdate
from rlsys.engine.client import EngineClient
from rlsys.engine.wire import Limits
from rlsys.generators.generator import build_generator
from rlsys.generators.turns import sampling_turns
from rlsys.ledger.buffer import RolloutBuffer
from rlsys.ledger.store import FILE_NAME
from rlsys.planner.costs import Costs
from rlsys.planner.lengths import LengthDistribution
from rlsys.planner.memory import with_pool
from rlsys.planner.simulated_engine import END, FIRST_PROMPT, TOKEN, SimulatedEngine, SimulatedSession
from rlsys.planner.virtual_time import run_virtual
from rlsys.planning.exploring import Explorer
from rlsys.planning.planning import Planning
from rlsys.rollout.manager import RolloutManager
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.worker.scoring import Scorer
from rlsys.worker.workers import direct_workers

_NEVER = 366 * 86400.0
"""Time limit in seconds that no simulation reaches."""
_VOCABULARY = 10**9
_MAX_UNITS = 50_000
"""Largest number of units of a step's responses, which determines the number of tokens per unit."""
_MIN_WARMUP_STEPS = 3
"""Smallest number of train steps before the measured ones."""
_SUCCESS_RATE = 0.5
"""Assumed share of responses with reward 1. It has an effect only if groups with equal rewards are dropped."""


@dataclass(frozen=True)
class Forecast:
    """Means over the measured train steps.

    Attributes:
        step_seconds: Duration of a train step. rollout_seconds: Time in which the trainer waits for groups.
            train_seconds: Time of training. push_seconds: Time of the push. tokens_per_s: Trained response tokens per
            second. idle_slots: Fraction of the slots that do not decode. The number of slots is the number of samples
            in flight, or the number of requests that the engines decode at once if this is smaller.
        staleness: Train steps between a group's oldest token and its training. off_policy: Fraction of the trained
            tokens that older weights sampled. recomputed: Tokens that engines prefill again after interruptions, per
            trained token. dropped: Fraction of the sampled tokens that are not trained, because they are too old or
            their group has equal rewards.
        pools: Name of each of engine.pools -> its forecast.
    """

    step_seconds: float
    rollout_seconds: float
    train_seconds: float
    push_seconds: float
    tokens_per_s: float
    idle_slots: float
    staleness: float
    off_policy: float
    recomputed: float
    dropped: float
    pools: dict[str, PoolForecast] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolForecast:
    """Forecast of an engine pool.

    Attributes:
        tokens: Fraction of all sampled tokens that the pool's engines generate.
        cost: Cost of the pool's ranks per million trained tokens, in the unit of engine.pools[].cost.
    """

    tokens: float
    cost: float


class _Prompts:
    """Prompt source. Prompts have `tokens` tokens, and prompt `i` starts with the id FIRST_PROMPT + i."""

    def __init__(self, tokens: int) -> None:
        self._tail = [TOKEN] * (tokens - 1)

    def train(self, index: int) -> Prompt:
        return Prompt(index, str(index), [FIRST_PROMPT + index, *self._tail], {})

    def heldout(self, n: int) -> list[Prompt]:
        return [self.train(i) for i in range(n)]


async def _random_reward(prompt: Prompt, text: str) -> float:
    """Return a random reward of 0 or 1 that depends only on the prompt and the text."""
    return float(random.Random(f"{prompt.index} {text}").random() < _SUCCESS_RATE)


def tokens_per_unit(config: Config, lengths: LengthDistribution) -> int:
    """Return the smallest number of tokens per unit with which a step's responses have at most _MAX_UNITS units."""
    return max(1, math.ceil(config.samples_per_step * config.over_provision * lengths.mean / _MAX_UNITS))


def simulate(
    config: Config,
    costs: Costs,
    lengths: LengthDistribution,
    *,
    prompt_tokens: int,
    steps: int,
    by_tp: Mapping[int, Costs] | None = None,
    warmup_steps: int | None = None,
) -> Forecast:
    """Simulate a run.

    Args:
        config: config of the run.
        costs: costs of engines, trainer and push.
        lengths: distribution of response lengths.
        prompt_tokens: length of every prompt.
        steps: number of measured train steps.
        by_tp: costs of engines by tensor-parallel size, if they differ from `costs`.
        warmup_steps: number of train steps before the measured ones; None: enough for a steady state.

    Raises:
        UserError: rollout.generator cannot be simulated.
        RunError: the simulated run ends with an error.
    """
    with tempfile.TemporaryDirectory(prefix="rlsys-plan-") as folder:
        run = _Run(config, costs, by_tp or {}, lengths, prompt_tokens, Path(folder))
        return run_virtual(run.measure(steps, warmup_steps))


class _Run:
    """State of a simulated run."""

    def __init__(
        self,
        config: Config,
        costs: Costs,
        by_tp: Mapping[int, Costs],
        lengths: LengthDistribution,
        prompt_tokens: int,
        folder: Path,
    ) -> None:
        self._unit_tokens = tokens_per_unit(config, lengths)
        self._costs, self._by_tp, self._lengths = costs, by_tp, lengths
        # Otherwise the router does not use the speed of engines.
        self._reports_speed = bool(config.engine.pools) or config.router.strategy == "hardware_affinity"
        self._prompt = max(1, round(prompt_tokens / self._unit_tokens))
        self._config = self._in_units(config, folder)
        self._early = config.trainer.early_backward
        self._step = 0
        self._waited = self._trained = self._pushed = 0.0

    def _in_units(self, config: Config, folder: Path) -> Config:
        """Return the config with lengths in units, and without parts that are not simulated.

        Raises:
            UserError: rollout.generator cannot be simulated.
        """
        pool_tokens = with_pool(config).fixed_pool_tokens or 0
        if config.rollout.generator != "single_turn":
            raise UserError(
                f"rollout.generator = {config.rollout.generator} cannot be simulated; expected single_turn"
            )
        values = config.model_dump()
        rollout, engine = values["rollout"], values["engine"]
        values["run"]["dir"] = folder
        values["run"]["spans"] = False
        rollout["max_response_tokens"] = self._units(config.rollout.max_response_tokens)
        rollout |= {
            "stall_timeout": _NEVER,
            "repeat": None,
            "stop": [],
            "top_k": None,
            "top_p": 1.0,
            "min_p": 0.0,
        }
        engine |= {
            "max_total_tokens": max(64, self._units(pool_tokens)),
            "return_routes": False,
        }
        engine |= {"start_timeout": _NEVER, "reference": None}
        if values["algo"]["teacher"] is not None:
            values["algo"]["teacher"]["engine"] = None
        values["eval"]["sets"] = []
        values["trainer"]["replay"] = "off"
        return Config.model_validate(values)

    def _units(self, tokens: int) -> int:
        """Return the number of units of this number of tokens, at least 1."""
        return max(1, round(tokens / self._unit_tokens))

    async def measure(self, steps: int, warmup_steps: int | None) -> Forecast:
        """Simulate the warm-up steps, then the measured steps. Args: see `simulate`."""
        config = self._config
        source = _Prompts(self._prompt)
        engines = [self._engine(i) for i in range(config.engine.count)]
        session: Any = SimulatedSession(engines)
        clients = [
            EngineClient(e.url, session, index=i, tp=config.engine.tp_of(i), limits=Limits(_NEVER, _NEVER))
            for i, e in enumerate(engines)
        ]
        router = Router(
            clients,
            vocab_size=_VOCABULARY,
            context_length=10**9,
            stop_ids=(END,),
            bounds=Bounds(_NEVER, _NEVER, max_unknown_share=1.0),
            strategy=config.router.strategy,
            interruption=config.router.interruption,
            push_timeout_s=_NEVER,
            slots=config.max_running_requests,
            engine_config=config.engine,
        )
        scorer = Scorer(
            lambda: nullcontext(_random_reward), lambda ids: str(len(ids)), _NEVER, concurrency=10**6
        )
        planning = Planning(config, source, None, explorer=_explorer(config, router, scorer))
        buffer = RolloutBuffer(config.run.dir / FILE_NAME, identity(config), planning.largest)
        workers = direct_workers(config, router, scorer)
        manager = RolloutManager(config, buffer, workers, source, scorer, planning)
        tasks = [asyncio.create_task(engine.run()) for engine in engines]
        if self._reports_speed:
            tasks.append(asyncio.create_task(router.watch()))
        async with AsyncExitStack() as stack:
            stack.callback(buffer.close)
            stack.push_async_callback(_cancel, tasks)
            stack.push_async_callback(manager.close)
            await manager.restore(0)
            await self._push(manager)
            for _ in range(self._warmup_steps() if warmup_steps is None else warmup_steps):
                await self._train(manager)
            return await self._measure_steps(manager, router, engines, steps)

    def _warmup_steps(self) -> int:
        """Return the number of train steps until a steady state.

        In this time the longest response can start and end, or becomes too old.
        """
        tokens_per_step = self._config.samples_per_step * self._lengths.mean / self._config.slots
        longest = math.ceil(max(self._lengths.values) / tokens_per_step)
        return _MIN_WARMUP_STEPS + min(self._config.rollout.max_staleness, longest)

    def _engine(self, index: int) -> SimulatedEngine:
        """Return the simulated engine with this index."""
        config = self._config.engine
        return SimulatedEngine(
            f"http://engine-{index}",
            self._by_tp.get(config.tp_of(index), self._costs),
            lambda seed, prompt: self._units(self._lengths.sample(seed, prompt)),
            self._prompt,
            self._config.max_running_requests,
            config.max_total_tokens or 0,
            self._unit_tokens,
            reports_first_token=self._reports_speed,
        )

    async def _measure_steps(
        self, manager: RolloutManager, router: Router, engines: Sequence[SimulatedEngine], steps: int
    ) -> Forecast:
        """Simulate `steps` train steps, and return the means over them."""
        clock = asyncio.get_running_loop().time
        self._waited = self._trained = self._pushed = 0.0
        writers = [e for i, e in enumerate(engines) if not self._config.engine.explores(i)]
        previous_decoding, previous_stats = sum(e.decoding for e in writers), router.stats()
        start = clock()
        batches = [await self._train(manager) for _ in range(steps)]
        seconds = clock() - start
        decoding = sum(e.decoding for e in writers) - previous_decoding
        stats = {key: n - previous_stats.get(key, 0.0) for key, n in router.stats().items()}
        samples = [s for t in batches for g in t.groups for s in g.samples]
        tokens = sum(s.tokens for s in samples)
        config = self._config
        slots = min(config.slots, len(writers) * config.max_running_requests)
        received = stats["received_tokens"] - stats["evaluation_tokens"]
        recomputed = sum(max(0, s.prefilled_tokens - s.cached_tokens - len(s.prompt_ids)) for s in samples)
        return Forecast(
            step_seconds=seconds / steps,
            rollout_seconds=self._waited / steps,
            train_seconds=self._trained / steps,
            push_seconds=self._pushed / steps,
            tokens_per_s=tokens * self._unit_tokens / seconds,
            idle_slots=max(0.0, 1.0 - decoding / (slots * seconds)),
            staleness=sum(t.metrics["staleness_mean"] for t in batches) / steps,
            off_policy=sum(t.metrics["off_policy_share"] * t.metrics["tokens"] for t in batches) / tokens,
            recomputed=recomputed / tokens,
            dropped=max(0.0, 1.0 - tokens / received) if received else 0.0,
            pools=self._pools(stats, tokens * self._unit_tokens),
        )

    def _pools(self, stats: Mapping[str, float], trained_tokens: int) -> dict[str, PoolForecast]:
        """Return the forecast of each engine pool.

        Args:
            stats: increase of each of the router's statistics in the measured steps.
            trained_tokens: number of trained response tokens in the measured steps.
        """
        pools = self._config.engine.pools
        sampled_tokens = sum(stats[f"pool_{p.name}_tokens"] for p in pools)
        return {
            p.name: PoolForecast(
                stats[f"pool_{p.name}_tokens"] / sampled_tokens,
                1e6 * stats[f"pool_{p.name}_cost"] / trained_tokens,
            )
            for p in pools
        }

    # -- the trainer's side ---------------------------------------------------------------------------------------

    async def _train(self, manager: RolloutManager) -> TrainBatch:
        """Simulate a train step and its push, in the order of rlsys/train.py; return the batch of the step."""
        clock = asyncio.get_running_loop().time
        self._step += 1
        start = clock()
        early_seconds = 0.0
        while self._early and (part := await manager.early(self._step)) is not None:
            part_seconds = self._costs.train(self._sequence_lengths(part)) - self._costs.train_step
            await asyncio.sleep(part_seconds)
            early_seconds += part_seconds
        batch = await manager.take(self._step)
        if batch is None:
            raise RunError(
                "simulation: an engine joined again without weights; expected that all engines stay in the run"
            )
        self._waited += clock() - start
        start = clock()
        await asyncio.sleep(max(0.0, self._costs.train(self._sequence_lengths(batch)) - early_seconds))
        self._trained += clock() - start
        start = clock()
        await self._push(manager)
        self._pushed += clock() - start
        return batch

    def _sequence_lengths(self, batch: TrainBatch) -> list[Sharing]:
        """Return the lengths of the sequences of a batch in tokens, with their prompts."""
        lengths: list[Sharing] = []
        for group in batch.groups:
            prompt = self._unit_tokens * len(group.samples[0].prompt_ids)
            responses = [self._unit_tokens * sample.tokens for sample in group.samples]
            lengths += group_of(prompt, responses, self._costs.shared_prompts)
        return lengths

    async def _push(self, manager: RolloutManager) -> None:
        """Simulate a push with all its rounds."""
        remaining = True
        while remaining:
            update: WeightUpdate = await manager.begin_push()
            await asyncio.sleep(self._costs.push)
            canaries = [Canary(ids, [-1.0] * (len(ids) - 1)) for ids in update.canaries]
            remaining = bool((await manager.end_push(update, canaries))["push_left"])


def _explorer(config: Config, router: Router, scorer: Scorer) -> Explorer | None:
    """Return the service that runs probes; None without exploration engines."""
    if not config.engine.explorers:
        return None
    generate = build_generator(config, None, sampling_turns(config, router, explorers=True))
    return Explorer(generate, scorer, config.run.seed)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks, and raise the exception of a task that has failed."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
