"""Number of engines that a trainer needs, and the step's duration with fewer: ECHO-2's capacity rule (docs/seeds.md).

A step takes T seconds and trains B samples. The trainer is busy for b of these seconds, and engines pause for L of
these during a push. Two conditions are lower bounds of T:
- engines finish B samples in T - L seconds;
- a group that starts right after a push is complete before it is too old. If tokens may be S steps old, it has S
  whole steps and the waiting time of the next one: g <= S (T - L) + T - b, where g is the seconds of the longest
  response.

ECHO-2 states the rule in words; the formula is rlsys's. With N'/N above 1, a step does not wait for the longest
response, and groups that are too old are dropped; `rlsys plan` simulates this.
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

_MIN_DRAWS, _MAX_DRAWS = 20, 200
"""Bounds of the number of random batches over which the duration of the longest response is averaged."""
_DRAWN_RESPONSES = 20_000
"""Number of responses in all these batches, within the bounds."""


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine.

    Attributes:
        name: Name for messages.
        count: Number of engines.
        rate: Samples per second that a fully occupied engine finishes.
        cost: Cost of one engine per second.
    """

    name: str
    count: int
    rate: float
    cost: float = 1.0


@dataclass(frozen=True)
class Demand:
    """Requirements of a train step.

    Attributes:
        samples: Number of samples.
        busy: Seconds of training and pushing.
        pause: Seconds in which engines are paused for a push, or recompute prefixes after it.
        lag: Seconds of the longest response.
    """

    samples: int
    busy: float
    pause: float
    lag: float

    def step_seconds(self, rate: float, staleness: int) -> float:
        """Return the seconds of a step.

        Args:
            rate: samples per second that all engines finish.
            staleness: rollout.max_staleness.
        """
        generation = self.samples / rate
        if not staleness:
            return self.busy + max(generation, self.lag)
        age_bound = (self.busy + self.lag + staleness * self.pause) / (staleness + 1)
        return max(self.busy, self.pause + generation, age_bound)

    @property
    def staleness(self) -> int:
        """Smallest max_staleness with which the trainer never waits for the longest response."""
        return max(1, math.ceil(self.lag / (self.busy - self.pause) - 1e-9))

    @property
    def required_rate(self) -> float:
        """Samples per second that engines must finish outside of pauses, so that the trainer never waits."""
        return self.samples / (self.busy - self.pause)

    def engines_needed(self, kinds: Sequence[EngineKind]) -> dict[str, int]:
        """Return the number of engines of each kind that keep the trainer busy, by name.

        Kinds with the lowest cost per sample are used first. If all engines are too few, return their numbers.
        """
        remaining_rate = self.required_rate
        counts: dict[str, int] = {}
        for kind in sorted(kinds, key=lambda kind: kind.cost / kind.rate):
            counts[kind.name] = min(kind.count, max(0, math.ceil(remaining_rate / kind.rate - 1e-9)))
            remaining_rate -= counts[kind.name] * kind.rate
        return counts


def engine_rate(costs: Costs, lengths: LengthDistribution, running: int, prompt: int) -> float:
    """Return the samples per second of an engine in which a new request replaces each finished one.

    Args:
        costs: costs of the engine.
        lengths: response lengths.
        running: number of running requests.
        prompt: tokens of a prompt.
    """
    pass_seconds = costs.decode(running, running * (prompt + lengths.in_flight))
    # If requests end in a pass, an additional pass prefills those that replace them.
    ended_requests = running / lengths.mean
    pass_seconds += (1.0 - math.exp(-ended_requests)) * costs.prefill(0)
    return 1.0 / (lengths.mean * pass_seconds / running + prompt * costs.prompt_token)


def step_demand(
    config: Config, costs: Costs, lengths: LengthDistribution, running: int, prompt: int
) -> Demand:
    """Return the requirements of a config's train step.

    Args:
        config: the config.
        costs: costs of engines, trainer and push.
        lengths: response lengths.
        running: number of requests of an engine, whose prefixes it recomputes after a push.
        prompt: tokens of a prompt.
    """
    n = config.samples_per_step
    pause = 0.0
    if not config.weights.rolling:
        pause = costs.push + costs.prefill(running * (prompt + lengths.in_flight))
    group = group_of(prompt, [lengths.mean] * config.rollout.group_size, costs.shared_prompts)
    busy = costs.train(group * config.rollout.groups_per_step) + push_rounds(config) * costs.push
    return Demand(n, busy, pause, _longest_response(costs, lengths, n, min(n, running), prompt))


def _longest_response(
    costs: Costs, lengths: LengthDistribution, samples: int, running: int, prompt: int
) -> float:
    """Return the mean seconds until the longest of several responses ends that start at the same time.

    Args:
        costs: costs of the engine.
        lengths: response lengths.
        samples: number of responses on all engines.
        running: number of responses on the engine with the longest one.
        prompt: tokens of a prompt.
    """
    rng = random.Random(0)
    seconds = 0.0
    draws = max(_MIN_DRAWS, min(_MAX_DRAWS, _DRAWN_RESPONSES // running))
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
    """Forecast of a train step for a long-tailed distribution of response lengths (long_tail).

    Attributes:
        demand: Requirements of the trainer.
        lengths: Response lengths.
        kinds: Kinds of engines.
        rate: Samples per second that all engines finish.
        running: Number of requests that an engine decodes at once: its share of the samples in flight, or as many as
            its KV pool holds.
        waves: An engine's share of the samples in flight, divided by `running`.
        generation: Seconds in which engines finish the samples of a step.
        push: Seconds of a push.
        step: Seconds of the step.
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
    """Forecast a train step from config.json of the model and the rates of a GPU, without a simulation."""
    lengths = long_tail(config.rollout.max_response_tokens)
    max_age = config.rollout.max_staleness
    running = max(1, samples_held(config, budget(config, model_size(hf)).pool_tokens))
    costs = estimate_costs(config, hf, machine)
    demand = step_demand(config, costs, lengths, running, MEAN_PROMPT_TOKENS)
    kinds = []
    for name, count, tp, cost in _kinds(config):
        rate = engine_rate(estimate_costs(config, hf, machine, tp), lengths, running, MEAN_PROMPT_TOKENS)
        kinds.append(EngineKind(name, count, rate, cost * tp))
    rate = sum(k.count * k.rate for k in kinds)
    # With N'/N above 1 the longest responses continue in the next step.
    lag = 0.0 if config.over_provision > 1 and max_age else demand.lag
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
        step=replace(demand, lag=lag).step_seconds(rate, max_age if overlaps else 0),
    )


def describe_capacity(config: Config, forecast: StepForecast) -> list[Fact]:
    """Describe for `rlsys explain` how many engines keep the trainer of a disaggregated run busy.

    Return no fact for a colocated run.
    """
    if config.launch.placement != "disaggregated":
        return []
    demand, rate, max_age = forecast.demand, forecast.rate, config.rollout.max_staleness
    text = f"a step keeps the trainer busy for {demand.busy:.0f} s: it needs {demand.required_rate:.3g} samples/s, "
    text += f"engines finish {rate:.3g}"
    if rate >= demand.required_rate:
        counts = demand.engines_needed(forecast.kinds)
        enough = [
            f"{counts[kind.name]} of {kind.count} {kind.name}" for kind in forecast.kinds if counts[kind.name]
        ]
        text += f": {', '.join(enough)} are enough"
    text += f"; a step takes {forecast.step:.0f} s at max_staleness {max_age}"
    if max_age < demand.staleness:
        text += f", {demand.step_seconds(rate, demand.staleness):.0f} s at {demand.staleness}"
    return [("capacity", f"{text} (N'/N above 1 needs less: rlsys plan)")]


def _kinds(config: Config) -> list[tuple[str, int, int, float]]:
    """Return name, number, tensor-parallel size and cost of a rank of each kind of engine."""
    if not config.engine.pools:
        return [("engines", config.engine.count, config.engine.tp, 1.0)]
    return [(f"of {p.name}", p.count, p.tp or config.engine.tp, p.cost) for p in config.engine.pools]
