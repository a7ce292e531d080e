"""Number of engines that a trainer needs, and its idle time with fewer: ECHO-2's capacity rule (docs/seeds.md). Pure.

A step takes T seconds. The trainer is busy for b of them, and engines pause for L of these, while it pushes.
It trains B samples. It never waits if engines finish B samples in T - L, and if a step's groups are complete
before they are too old. A group that starts right after a push may take S whole steps and the next one's
waiting time, if tokens may be S steps old: g <= S (T - L) + T - b, with g seconds for the longest response.
Both bound a step's seconds from below. ECHO-2 has the rule in words; the formula is ours. With N'/N above 1 a
step need not wait for the longest response, and old groups are dropped: `rlsys plan` simulates that.
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
from rlsys.planner.costs import Costs, estimate_costs
from rlsys.planner.lengths import LengthDistribution, long_tail
from rlsys.planner.memory import Fact

_DRAWS = 200
"""Number of random groups over which the longest response is averaged."""
_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine.

    Attributes:
        name: name for messages.
        count: number of engines.
        rate: samples per second that a full engine finishes.
        cost: cost of one engine per second.
    """

    name: str
    count: int
    rate: float
    cost: float = 1.0


@dataclass(frozen=True)
class Demand:
    """Requirements of a train step.

    Attributes:
        samples: number of samples.
        busy: seconds of training and pushing.
        pause: seconds in which engines are paused for a push, or recompute prefixes after it.
        lag: seconds of the longest response.
    """

    samples: int
    busy: float
    pause: float
    lag: float

    def step_seconds(self, rate: float, staleness: int) -> float:
        """Return the seconds of a step with engines that finish `rate` samples per second, and this max_staleness."""
        generation = self.samples / rate
        if not staleness:
            return self.busy + max(generation, self.lag)
        age_bound = (self.busy + self.lag + staleness * self.pause) / (staleness + 1)
        return max(self.busy, self.pause + generation, age_bound)

    @property
    def staleness(self) -> int:
        """Smallest max_staleness that costs no time."""
        return max(1, math.ceil(self.lag / (self.busy - self.pause) - 1e-9))

    @property
    def required_rate(self) -> float:
        """Samples per second, of running engines, that keep the trainer busy."""
        return self.samples / (self.busy - self.pause)

    def engines_needed(self, kinds: Sequence[EngineKind]) -> dict[str, int]:
        """Return the sufficient number of engines of each kind, the cheapest per sample first; all, if too few."""
        remaining_rate, counts = self.required_rate, {}
        for kind in sorted(kinds, key=lambda s: s.cost / s.rate):
            counts[kind.name] = min(kind.count, max(0, math.ceil(remaining_rate / kind.rate - 1e-9)))
            remaining_rate -= counts[kind.name] * kind.rate
        return counts


def engine_rate(costs: Costs, lengths: LengthDistribution, running: int, prompt: int) -> float:
    """Return the samples per second of an engine with `running` requests.

    A new request replaces a finished one.
    """
    pass_seconds = costs.decode(running, running * (prompt + _partial(lengths)))
    # Mean number of requests that end in a pass; one more pass reads the prompts that replace them.
    ends = running / lengths.mean
    pass_seconds += (1.0 - math.exp(-ends)) * costs.prefill(0)
    return 1.0 / (lengths.mean * pass_seconds / running + prompt * costs.prompt_token)


def step_demand(
    config: Config, costs: Costs, lengths: LengthDistribution, running: int, prompt: int
) -> Demand:
    """Return the demand of a config's train step.

    `running`: requests of an engine, whose prefixes it recomputes after a push.
    """
    n = config.samples_per_step
    pause = 0.0
    if not config.weights.rolling:
        pause = costs.push + costs.prefill(running * (prompt + _partial(lengths)))
    group = group_of(prompt, [lengths.mean] * config.rollout.group_size, costs.shared_prompts)
    busy = costs.train(group * config.rollout.groups_per_step) + costs.push
    return Demand(n, busy, pause, _last(costs, lengths, n, min(n, running), prompt))


def _partial(lengths: LengthDistribution) -> float:
    """Return the mean length of a response at a random time."""
    return fmean(n * n for n in lengths.values) / lengths.mean / 2


def _last(costs: Costs, lengths: LengthDistribution, samples: int, running: int, prompt: int) -> float:
    """Return the seconds until the longest of `samples` responses ends.

    All start together, `running` of them on the same engine.
    """
    rng, seconds = random.Random(0), 0.0
    for _ in range(_DRAWS):
        start, sampled = 0, rng.choices(lengths.values, k=samples)
        batch = [*sampled[: running - 1], max(sampled)]
        for i, length in enumerate(sorted(batch)):
            remaining = running - i
            seconds += (length - start) * costs.decode(remaining, remaining * (prompt + (start + length) / 2))
            start = length
    return seconds / _DRAWS + costs.prefill(running * prompt)


def describe_capacity(config: Config, hf: HFConfig, machine: Machine) -> list[Fact]:
    """Describe for `explain` how many engines keep the trainer of a disaggregated run busy, the cheapest first."""
    if config.launch.placement != "disaggregated" or not config.launch.gpus_per_node:
        return []
    lengths = long_tail(config.rollout.max_response_tokens)
    running = min(config.max_running_requests, max(1, config.slots // config.engine.count))
    demand = step_demand(config, estimate_costs(config, hf, machine), lengths, running, _PROMPT_TOKENS)
    kinds = []
    for name, count, tp, cost in _kinds(config):
        costs = estimate_costs(config, hf, machine, tp)
        kinds.append(EngineKind(name, count, engine_rate(costs, lengths, running, _PROMPT_TOKENS), cost * tp))
    rate, age = sum(s.count * s.rate for s in kinds), config.rollout.max_staleness
    text = f"a step keeps the trainer busy for {demand.busy:.0f} s: {demand.required_rate:.3g} samples/s feed it, "
    text += f"engines end {rate:.3g}"
    if rate >= demand.required_rate:
        needed_counts = demand.engines_needed(kinds)
        text += ": " + ", ".join(
            f"{needed_counts[s.name]} of {s.count} {s.name}" for s in kinds if needed_counts[s.name]
        )
        text += " are enough"
    text += f"; a step takes {demand.step_seconds(rate, age):.0f} s at max_staleness {age}"
    if age < demand.staleness:
        text += f", {demand.step_seconds(rate, demand.staleness):.0f} s at {demand.staleness}"
    return [("capacity", f"{text} (N'/N above 1 needs less: rlsys plan)")]


def _kinds(config: Config) -> list[tuple[str, int, int, float]]:
    """Return name, count, tp and cost of each kind of engine."""
    if not config.engine.pools:
        return [("engines", config.engine.count, config.engine.tp, 1.0)]
    return [(f"of {p.name}", p.count, p.tp or config.engine.tp, p.cost) for p in config.engine.pools]
