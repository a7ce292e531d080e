"""How many engines a trainer needs, and how long it idles with fewer: ECHO-2's capacity rule (docs/seeds.md). Pure.

A step takes T seconds. The trainer is busy for b of them, and engines stand still for L of these, while it pushes.
It trains B samples. It never waits when engines end B samples in T - L, and when a step's groups are there before
they are too old. A group that begins right after a push may take S whole steps and the next one's waiting, where
tokens may be S steps old: g <= S (T - L) + T - b, with g seconds for the longest response. Each bounds a step's
seconds from below. ECHO-2 has the rule in words; the form is ours. With N'/N above 1 a step need not wait for the
longest, and old groups are dropped: `rlsys plan` simulates that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.prefixes import group_of
from rlsys.core.machines import Machine
from rlsys.planner.costs import Costs, costs_of
from rlsys.planner.lengths import Lengths, long_tail
from rlsys.planner.memory import Fact

_DRAWS = 200
"""Groups whose longest response is averaged."""
_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Supplier:
    """A kind of engine. `rate`: samples a second that one of them ends when it is full; `cost`: of one, a second."""

    name: str
    count: int
    rate: float
    cost: float = 1.0


@dataclass(frozen=True)
class Demand:
    """What a step asks for: so many samples. Seconds: `busy`, in which it trains and pushes; `pause`, in which
    engines stand still for a push, or read again what it made wrong; `lag`, of its longest response."""

    samples: int
    busy: float
    pause: float
    lag: float

    def step_seconds(self, rate: float, staleness: int) -> float:
        """With engines that end `rate` samples a second, and tokens that may be so many steps old."""
        making = self.samples / rate
        if not staleness:
            return self.busy + max(making, self.lag)
        aged = (self.busy + self.lag + staleness * self.pause) / (staleness + 1)
        return max(self.busy, self.pause + making, aged)

    @property
    def staleness(self) -> int:
        """The least with which age alone costs no time."""
        return max(1, math.ceil(self.lag / (self.busy - self.pause) - 1e-9))

    @property
    def wanted(self) -> float:
        """Samples a second, of engines that run, that keep the trainer busy."""
        return self.samples / (self.busy - self.pause)

    def hired(self, suppliers: Sequence[Supplier]) -> dict[str, int]:
        """Engines of each kind that together end enough samples, the cheapest for a sample first; all of them, where
        they are too few."""
        wanted, found = self.wanted, {}
        for kind in sorted(suppliers, key=lambda s: s.cost / s.rate):
            found[kind.name] = min(kind.count, max(0, math.ceil(wanted / kind.rate - 1e-9)))
            wanted -= found[kind.name] * kind.rate
        return found


def rate_of(costs: Costs, lengths: Lengths, running: int, prompt: int) -> float:
    """Samples a second that an engine ends with so many requests; one that ends leaves its place to the next."""
    each = costs.decode(running, running * (prompt + _partial(lengths)))
    # So many end in a pass, on average; one more pass reads the prompts that come for them.
    ends = running / lengths.mean
    each += (1.0 - math.exp(-ends)) * costs.prefill(0)
    return 1.0 / (lengths.mean * each / running + prompt * costs.prompt_token)


def demand_of(config: Config, costs: Costs, lengths: Lengths, running: int, prompt: int) -> Demand:
    """Of a config's step. `running`: requests of an engine, which it reads again after a push."""
    n = config.samples_per_step
    pause = 0.0
    if not config.weights.rolling:
        pause = costs.push + costs.prefill(running * (prompt + _partial(lengths)))
    group = group_of(prompt, [lengths.mean] * config.rollout.group_size, costs.shared_prompts)
    busy = costs.train(group * config.rollout.groups_per_step) + costs.push
    return Demand(n, busy, pause, _last(costs, lengths, n, min(n, running), prompt))


def _partial(lengths: Lengths) -> float:
    """Tokens of a response that is met at a random moment."""
    return fmean(n * n for n in lengths.values) / lengths.mean / 2


def _last(costs: Costs, lengths: Lengths, samples: int, running: int, prompt: int) -> float:
    """Seconds until the longest of so many responses ends, which begin together, `running` of them on its engine."""
    rng, seconds = random.Random(0), 0.0
    for _ in range(_DRAWS):
        start, drawn = 0, rng.choices(lengths.values, k=samples)
        beside = [*drawn[: running - 1], max(drawn)]
        for i, length in enumerate(sorted(beside)):
            left = running - i
            seconds += (length - start) * costs.decode(left, left * (prompt + (start + length) / 2))
            start = length
    return seconds / _DRAWS + costs.prefill(running * prompt)


def describe_capacity(config: Config, hf: HFConfig, machine: Machine) -> list[Fact]:
    """What `explain` tells of a disaggregated run: engines that keep the trainer busy, the cheapest first."""
    if config.launch.placement != "disaggregated" or not config.launch.gpus_per_node:
        return []
    lengths = long_tail(config.rollout.max_response_tokens)
    running = min(config.max_running_requests, max(1, config.slots // config.engine.count))
    demand = demand_of(config, costs_of(config, hf, machine), lengths, running, _PROMPT_TOKENS)
    suppliers = []
    for name, count, tp, cost in _kinds(config):
        costs = costs_of(config, hf, machine, tp)
        suppliers.append(Supplier(name, count, rate_of(costs, lengths, running, _PROMPT_TOKENS), cost * tp))
    rate, age = sum(s.count * s.rate for s in suppliers), config.rollout.max_staleness
    told = f"a step keeps the trainer busy for {demand.busy:.0f} s: {demand.wanted:.3g} samples/s feed it, "
    told += f"engines end {rate:.3g}"
    if rate >= demand.wanted:
        hired = demand.hired(suppliers)
        told += ": " + ", ".join(f"{hired[s.name]} of {s.count} {s.name}" for s in suppliers if hired[s.name])
        told += " are enough"
    told += f"; a step takes {demand.step_seconds(rate, age):.0f} s at max_staleness {age}"
    if age < demand.staleness:
        told += f", {demand.step_seconds(rate, demand.staleness):.0f} s at {demand.staleness}"
    return [("capacity", f"{told} (N'/N above 1 needs less: rlsys plan)")]


def _kinds(config: Config) -> list[tuple[str, int, int, float]]:
    """Name, count, tp and cost of each kind of engine."""
    if not config.engine.pools:
        return [("engines", config.engine.count, config.engine.tp, 1.0)]
    return [(f"of {p.name}", p.count, p.tp or config.engine.tp, p.cost) for p in config.engine.pools]
