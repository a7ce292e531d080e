"""Number of engines that a trainer needs, and its idle time with fewer: ECHO-2's capacity rule (docs/seeds.md). Pure.

A step takes T seconds and trains B samples. The trainer is busy for b of them, and engines pause for L of these,
during a push. The trainer never waits if engines finish B samples in T - L, and if a step's groups are complete
before they are too old. If tokens may be S steps old, a group that starts right after a push may take S whole steps
and the waiting time of the next one: g <= S (T - L) + T - b, with g seconds for the longest response. Both are lower
bounds of a step's seconds. ECHO-2 states the rule in words; the formula is rlsys's. With N'/N above 1 a step need
not wait for the longest response, and old groups are dropped: `rlsys plan` simulates that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlsys.config import Config
from rlsys.convert.config import HFConfig
from rlsys.convert.prefixes import group_of
from rlsys.core.machines import Machine
from rlsys.planner.costs import Costs, estimate_costs
from rlsys.planner.lengths import LengthDistribution, long_tail
from rlsys.planner.memory import MEAN_PROMPT_TOKENS, Fact, budget, engine_samples, model_size, samples_held
from rlsys.planner.weight_update_cost import push_rounds

_DRAWS, _RESPONSES = (20, 200), 20_000
"""Number of random groups over which the longest response is averaged, and their approximate number of responses."""


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
        """Return a sufficient number of engines of each kind, the cheapest per sample first; all if they are too
        few."""
        remaining_rate, counts = self.required_rate, {}
        for kind in sorted(kinds, key=lambda s: s.cost / s.rate):
            counts[kind.name] = min(kind.count, max(0, math.ceil(remaining_rate / kind.rate - 1e-9)))
            remaining_rate -= counts[kind.name] * kind.rate
        return counts


def engine_rate(costs: Costs, lengths: LengthDistribution, running: int, prompt: int) -> float:
    """Return the samples per second of an engine with `running` requests.

    A new request replaces a finished one.
    """
    pass_seconds = costs.decode(running, running * (prompt + lengths.in_flight))
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
        pause = costs.push + costs.prefill(running * (prompt + lengths.in_flight))
    group = group_of(prompt, [lengths.mean] * config.rollout.group_size, costs.shared_prompts)
    busy = costs.train(group * config.rollout.groups_per_step) + push_rounds(config) * costs.push
    return Demand(n, busy, pause, _last(costs, lengths, n, min(n, running), prompt))


def _last(costs: Costs, lengths: LengthDistribution, samples: int, running: int, prompt: int) -> float:
    """Return the seconds until the longest of `samples` responses ends.

    All start together, `running` of them on the same engine.
    """
    rng, seconds = random.Random(0), 0.0
    draws = max(_DRAWS[0], min(_DRAWS[1], _RESPONSES // running))
    for _ in range(draws):
        start, sampled = 0, rng.choices(lengths.values, k=samples)
        batch = [*sampled[: running - 1], max(sampled)]
        for i, length in enumerate(sorted(batch)):
            remaining = running - i
            seconds += (length - start) * costs.decode(remaining, remaining * (prompt + (start + length) / 2))
            start = length
    return seconds / draws + costs.prefill(running * prompt)


@dataclass(frozen=True)
class StepForecast:
    """Forecast of a train step with response lengths of a long tail up to the longest.

    Attributes:
        demand: requirements of the trainer.
        lengths: response lengths.
        kinds: the engines.
        rate: samples per second that all engines finish.
        running: requests that one engine decodes at once: its share of the samples in flight, or as many as its KV
            pool holds.
        waves: an engine's share of the samples in flight, in units of `running`.
        generation: seconds in which engines finish the samples of a step.
        push: seconds of a push.
        step: seconds of the step.
    """

    demand: Demand
    lengths: LengthDistribution
    kinds: list[EngineKind]
    rate: float
    running: int
    waves: float
    generation: float
    push: float
    step: float


def forecast_step(config: Config, hf: HFConfig, machine: Machine) -> StepForecast:
    """Forecast a train step from config.json and the rates of a GPU."""
    lengths, age = long_tail(config.rollout.max_response_tokens), config.rollout.max_staleness
    running = max(1, samples_held(config, budget(config, model_size(hf)).pool_tokens))
    costs = estimate_costs(config, hf, machine)
    demand = step_demand(config, costs, lengths, running, MEAN_PROMPT_TOKENS)
    kinds = []
    for name, count, tp, cost in _kinds(config):
        rate = engine_rate(estimate_costs(config, hf, machine, tp), lengths, running, MEAN_PROMPT_TOKENS)
        kinds.append(EngineKind(name, count, rate, cost * tp))
    rate = sum(k.count * k.rate for k in kinds)
    # With N'/N above 1 the longest responses continue in the next step.
    lag = 0.0 if config.over_provision > 1 and age else demand.lag
    overlaps = config.launch.placement == "disaggregated"
    return StepForecast(
        demand,
        lengths,
        kinds,
        rate,
        running,
        waves=engine_samples(config) / running,
        generation=max(demand.samples / rate, lag),
        push=push_rounds(config) * costs.push,
        step=replace(demand, lag=lag).step_seconds(rate, age if overlaps else 0),
    )


def describe_capacity(config: Config, forecast: StepForecast) -> list[Fact]:
    """Describe for `explain` how many engines keep the trainer of a disaggregated run busy, the cheapest first."""
    if config.launch.placement != "disaggregated":
        return []
    demand, rate, age = forecast.demand, forecast.rate, config.rollout.max_staleness
    text = f"a step keeps the trainer busy for {demand.busy:.0f} s: it needs {demand.required_rate:.3g} samples/s, "
    text += f"engines finish {rate:.3g}"
    if rate >= demand.required_rate:
        needed_counts = demand.engines_needed(forecast.kinds)
        text += ": " + ", ".join(
            f"{needed_counts[s.name]} of {s.count} {s.name}" for s in forecast.kinds if needed_counts[s.name]
        )
        text += " are enough"
    text += f"; a step takes {forecast.step:.0f} s at max_staleness {age}"
    if age < demand.staleness:
        text += f", {demand.step_seconds(rate, demand.staleness):.0f} s at {demand.staleness}"
    return [("capacity", f"{text} (N'/N above 1 needs less: rlsys plan)")]


def _kinds(config: Config) -> list[tuple[str, int, int, float]]:
    """Return name, count, tp and cost of each kind of engine."""
    if not config.engine.pools:
        return [("engines", config.engine.count, config.engine.tp, 1.0)]
    return [(f"of {p.name}", p.count, p.tp or config.engine.tp, p.cost) for p in config.engine.pools]
