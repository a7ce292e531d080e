"""One run in virtual time: the product's rollout manager, router and buffer over simulated engines, and a trainer
that only waits. Who is let in, interrupted, resumed, taken or dropped is decided by the code of a real run; tokens,
losses and weights are not computed.
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
from rlsys.planner.engine import END, FIRST_PROMPT, TOKEN, SimulatedEngine, Wire
from rlsys.planner.lengths import Lengths
from rlsys.planner.virtual_time import run_virtual
from rlsys.planning.exploring import Explorer
from rlsys.planning.planning import Planning
from rlsys.rollout.manager import RolloutManager
from rlsys.router.attest import Bounds
from rlsys.router.router import Router
from rlsys.worker.scoring import Scorer

_NEVER = 1e9
"""Seconds: no limit of a run is met in here."""
_VOCABULARY = 10**9
_UNITS = 50_000
"""Of a step at most, of all its responses: what tells how many tokens a unit stands for."""
_WARM = 3
"""Train steps before the measured ones, at the least."""
_RIGHT = 0.5
"""Share of responses with reward 1. An assumption: it matters where groups of equal rewards are dropped."""


@dataclass(frozen=True)
class Forecast:
    """Means over the measured train steps."""

    step_seconds: float
    rollout_seconds: float
    """Of a step, in which the trainer waited for groups."""
    train_seconds: float
    push_seconds: float
    tokens_per_s: float
    """Trained response tokens."""
    idle_slots: float
    """Share of slots without decoding: of the samples that may be in flight, as far as engines have room."""
    staleness: float
    """Train steps between a group's oldest token and its training."""
    off_policy: float
    """Share of trained tokens that older weights sampled."""
    read_again: float
    """Tokens that engines read once more after an interruption, for each trained token."""
    dropped: float
    """Share of sampled tokens that no step trains: too old, or of a group without a signal."""
    pools: dict[str, PoolForecast] = field(default_factory=dict)
    """Of each of engine.pools, by its name."""


@dataclass(frozen=True)
class PoolForecast:
    tokens: float
    """Share of all sampled tokens that its engines made."""
    cost: float
    """Of its ranks for a million trained tokens, in the unit of engine.pools[].cost."""


class _Prompts:
    """Prompt `i` is so many ids, of which the first is its own; right answers come by chance."""

    def __init__(self, tokens: int) -> None:
        self._rest = [TOKEN] * (tokens - 1)

    def train(self, index: int) -> Prompt:
        return Prompt(index, str(index), [FIRST_PROMPT + index, *self._rest], {})

    def heldout(self, n: int) -> list[Prompt]:
        return [self.train(i) for i in range(n)]


async def _chance(prompt: Prompt, text: str) -> float:
    return float(random.Random(f"{prompt.index} {text}").random() < _RIGHT)


def grain_of(config: Config, lengths: Lengths) -> int:
    """Tokens that one unit stands for: 1 where a step is small."""
    return max(1, math.ceil(config.samples_per_step * config.over_provision * lengths.mean / _UNITS))


def simulate(
    config: Config,
    costs: Costs,
    lengths: Lengths,
    *,
    prompt_tokens: int,
    steps: int,
    by_tp: Mapping[int, Costs] | None = None,
    warm: int | None = None,
) -> Forecast:
    """Of `steps` train steps after `warm` others; where that is not given, as many as it takes to settle. `by_tp`:
    what engines cost by their size, where `engine.pools` has several; else it is in `costs`, as trainer and push are.

    Raises UserError for a config whose rollout cannot be simulated, RunError when such a run would stop."""
    with tempfile.TemporaryDirectory(prefix="rlsys-plan-") as folder:
        run = _Run(config, costs, by_tp or {}, lengths, prompt_tokens, Path(folder))
        return run_virtual(run.measured(steps, warm))


class _Run:
    def __init__(
        self,
        config: Config,
        costs: Costs,
        by_tp: Mapping[int, Costs],
        lengths: Lengths,
        prompt_tokens: int,
        folder: Path,
    ) -> None:
        self._grain = grain_of(config, lengths)
        self._costs, self._by_tp, self._lengths = costs, by_tp, lengths
        # Else nobody asks how fast an engine is, or whose it was.
        self._watched = bool(config.engine.pools) or config.router.strategy == "hardware_affinity"
        self._prompt = max(1, round(prompt_tokens / self._grain))
        self._config = self._in_units(config, folder)
        self._early = config.trainer.early_backward
        self._step = 0
        self._waited = self._trained = self._pushed = 0.0

    def _in_units(self, config: Config, folder: Path) -> Config:
        """The same run with lengths in units, and without what is not simulated."""
        if config.rollout.generator != "single_turn":
            raise UserError(
                f"rollout.generator = {config.rollout.generator}: only single_turn can be planned yet"
            )
        changed = config.model_dump()
        rollout, engine = changed["rollout"], changed["engine"]
        changed["run"]["dir"] = folder
        changed["run"]["spans"] = False
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
            "max_total_tokens": max(64, self._units(config.engine.max_total_tokens)),
            "return_routes": False,
        }
        engine |= {"start_timeout": _NEVER, "reference": None}
        if changed["algo"]["teacher"] is not None:
            changed["algo"]["teacher"]["engine"] = None
        changed["eval"]["sets"] = []
        changed["trainer"]["replay"] = "off"
        return Config.model_validate(changed)

    def _units(self, tokens: int) -> int:
        return max(1, round(tokens / self._grain))

    async def measured(self, steps: int, warm: int | None) -> Forecast:
        config = self._config
        source = _Prompts(self._prompt)
        engines = [self._engine(i) for i in range(config.engine.count)]
        session: Any = Wire(engines)
        clients = [
            EngineClient(e.url, session, index=i, tp=config.engine.tp_of(i), limits=Limits(_NEVER, _NEVER))
            for i, e in enumerate(engines)
        ]
        router = Router(
            clients,
            vocab_size=_VOCABULARY,
            context_length=10**9,
            stop_ids=(END,),
            bounds=Bounds(_NEVER, _NEVER, uncompared=1.0),
            strategy=config.router.strategy,
            interruption=config.router.interruption,
            patience=_NEVER,
            slots=config.max_running_requests,
            kinds=config.engine,
        )
        scorer = Scorer(lambda: nullcontext(_chance), lambda ids: str(len(ids)), _NEVER, concurrency=10**6)
        planning = Planning(config, source, None, explorer=_explorer(config, router, scorer))
        buffer = RolloutBuffer(config.run.dir / FILE_NAME, identity(config), planning.largest)
        manager = RolloutManager(config, buffer, router, source, scorer, planning)
        tasks = [asyncio.create_task(engine.run()) for engine in engines]
        if self._watched:
            tasks.append(asyncio.create_task(router.watch()))
        async with AsyncExitStack() as stack:
            stack.callback(buffer.close)
            stack.push_async_callback(_ended, tasks)
            stack.push_async_callback(manager.close)
            await manager.restore(0)
            await self._push(manager)
            # Until the longest response can have been begun and ended between takes.
            a_step = config.samples_per_step * self._lengths.mean / config.slots
            longest = math.ceil(max(self._lengths.values) / a_step)
            for _ in range(_WARM + min(config.rollout.max_staleness, longest) if warm is None else warm):
                await self._train(manager)
            return await self._of_steps(manager, router, engines, steps)

    def _engine(self, index: int) -> SimulatedEngine:
        config = self._config.engine
        return SimulatedEngine(
            f"http://engine-{index}",
            self._by_tp.get(config.tp_of(index), self._costs),
            lambda seed, prompt: self._units(self._lengths.of(seed, prompt)),
            self._prompt,
            self._config.max_running_requests,
            config.max_total_tokens,
            self._grain,
            tells=self._watched,
        )

    async def _of_steps(
        self, manager: RolloutManager, router: Router, engines: Sequence[SimulatedEngine], steps: int
    ) -> Forecast:
        clock = asyncio.get_running_loop().time
        self._waited = self._trained = self._pushed = 0.0
        writers = [e for i, e in enumerate(engines) if not self._config.engine.explores(i)]
        decoding, before = sum(e.decoding for e in writers), router.stats()
        start, taken = clock(), [await self._train(manager) for _ in range(steps)]
        seconds = clock() - start
        decoding = sum(e.decoding for e in writers) - decoding
        counted = {key: n - before.get(key, 0.0) for key, n in router.stats().items()}
        samples = [s for t in taken for g in t.groups for s in g.samples]
        tokens = sum(s.tokens for s in samples)
        config = self._config
        slots = min(config.slots, len(writers) * config.max_running_requests)
        received = counted["received_tokens"] - counted["evaluation_tokens"]
        again = sum(max(0, s.prefilled_tokens - s.cached_tokens - len(s.prompt_ids)) for s in samples)
        return Forecast(
            step_seconds=seconds / steps,
            rollout_seconds=self._waited / steps,
            train_seconds=self._trained / steps,
            push_seconds=self._pushed / steps,
            tokens_per_s=tokens * self._grain / seconds,
            idle_slots=max(0.0, 1.0 - decoding / (slots * seconds)),
            staleness=sum(t.metrics["staleness_mean"] for t in taken) / steps,
            off_policy=sum(t.metrics["off_policy_share"] * t.metrics["tokens"] for t in taken) / tokens,
            read_again=again / tokens,
            dropped=max(0.0, 1.0 - tokens / received) if received else 0.0,
            pools=self._pools(counted, tokens * self._grain),
        )

    def _pools(self, counted: Mapping[str, float], trained: int) -> dict[str, PoolForecast]:
        """`counted`: of the router's figures, what the measured steps added."""
        pools = self._config.engine.pools
        made = sum(counted[f"pool_{p.name}_tokens"] for p in pools)
        return {
            p.name: PoolForecast(
                counted[f"pool_{p.name}_tokens"] / made, 1e6 * counted[f"pool_{p.name}_cost"] / trained
            )
            for p in pools
        }

    # -- the trainer's side ---------------------------------------------------------------------------------------

    async def _train(self, manager: RolloutManager) -> TrainBatch:
        """One train step and its push, in the order of rlsys/train.py."""
        clock = asyncio.get_running_loop().time
        self._step += 1
        start, gone = clock(), 0.0
        while self._early and (part := await manager.early(self._step)) is not None:
            await asyncio.sleep(work := self._costs.train(self._whole(part)) - self._costs.train_step)
            gone += work
        taken = await manager.take(self._step)
        if taken is None:
            raise RunError("a simulated engine came back without weights")
        self._waited += clock() - start
        start = clock()
        await asyncio.sleep(max(0.0, self._costs.train(self._whole(taken)) - gone))
        self._trained += clock() - start
        start = clock()
        await self._push(manager)
        self._pushed += clock() - start
        return taken

    def _whole(self, taken: TrainBatch) -> list[int]:
        """Tokens of each sequence, prompts included."""
        return [self._grain * (s.tokens + len(s.prompt_ids)) for g in taken.groups for s in g.samples]

    async def _push(self, manager: RolloutManager) -> None:
        left = True
        while left:
            ticket: WeightUpdate = await manager.begin_push()
            await asyncio.sleep(self._costs.push)
            canaries = [Canary(ids, [-1.0] * (len(ids) - 1)) for ids in ticket.canaries]
            left = bool((await manager.end_push(ticket, canaries))["push_left"])


def _explorer(config: Config, router: Router, scorer: Scorer) -> Explorer | None:
    if not config.engine.explorers:
        return None
    generate = build_generator(config, None, sampling_turns(config, router, explorers=True))
    return Explorer(generate, scorer, config.run.seed)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """What ended by itself is raised."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
