"""Detection of symptoms of a run that does not learn, from its metrics, with possible causes and remedies.

A rule is a function from a History to a symptom or None. Rules compare the last steps with the first ones, so their
thresholds do not depend on the model. They use several steps, because one unusual step is not a symptom.
`SymptomMonitor` reports each symptom once. The thresholds were checked on the curves in tests/data/curves; the curves
of the quickstart show no symptom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

NO_SIGNAL_STEPS = 3
"""Number of consecutive steps without a gradient that is a symptom."""
WINDOW = 5
"""Number of steps over which values are averaged, at the start and at the end of a history."""
MIN_STEPS = 3 * WINDOW
"""Minimum number of steps of a history whose end and start are compared."""
MAX_TRUNCATED = 0.25
"""Fraction of responses with the maximum length from which on it is a symptom."""
ENTROPY_LEFT, ENTROPY_LOW = 0.1, 0.05
"""Bounds of an entropy that is too low: as a fraction of the first steps' entropy, and in nats per token."""
MISMATCH_GROWTH, MISMATCH_LOW = 5.0, 1e-3
"""Bounds of a mismatch that is too high: as a multiple of the first steps' mismatch, and in nats per token. It is
usually about 1e-7 in float32 and 1e-2 in bfloat16."""
LOAD_GROWTH, IDLE_GROWTH = 2.0, 0.25
"""Growth that is a symptom: factor of the busiest expert's load, and increase of the fraction of idle experts."""
DEVIATIONS = 2.0
"""Number of standard deviations by which an accuracy below the best one is a symptom."""
DEVIATIONS_LOW_ENTROPY, ENTROPY_HALVED = 1.25, 0.5
"""Number of standard deviations in place of DEVIATIONS, for the mean of two evaluations, if the entropy is below this
fraction of the first steps' entropy."""
MAX_SAME_ANSWER = 0.9
"""Fraction of held-out prompts with the same answer from which on it is a symptom."""
HIGH_REWARD = 0.5
"""Mean reward from which on an accuracy of 0 is a symptom."""
MAX_SIDE_REQUESTS = 0.5
"""Maximum fraction of agents' requests outside the main conversation."""
QUIET = 2 * WINDOW
"""Number of steps without a symptom after which it is reported again."""

Entry = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True)
class Symptom:
    """A symptom, with texts for people.

    Attributes:
        name: name of the symptom.
        observation: values of the metrics that show it.
        cause: possible causes.
        knob: remedies, with the config fields to change.
    """

    name: str
    observation: str
    cause: str
    knob: str

    def entry(self) -> dict[str, str]:
        """Return the fields of the symptom in a `warning` line of metrics.jsonl."""
        return {"name": self.name, "seen": self.observation, "cause": self.cause, "knob": self.knob}


def sentence(warning: Entry) -> str:
    """Return observation, cause and remedy of a `warning` line of metrics.jsonl as sentences."""
    return f"{warning['seen']}. {warning['cause']}. {warning['knob']}."


@dataclass(frozen=True)
class History:
    """The metrics from which rules detect symptoms.

    Attributes:
        steps: `step` lines of metrics.jsonl, sorted by step.
        evals: `eval` lines, sorted by step.
        max_staleness: rollout.max_staleness.
    """

    steps: Sequence[Entry]
    evals: Sequence[Entry] = ()
    max_staleness: int = 0

    def last(self, key: str, count: int = WINDOW) -> list[float]:
        """Return the values of `key` in the last `count` steps; empty if a step has none."""
        return _values(self.steps[-count:], key, count)

    def first(self, key: str, count: int = WINDOW) -> list[float]:
        """Return the values of `key` in the first `count` steps.

        The list is empty if a step has none, or the history has fewer than MIN_STEPS steps.
        """
        return _values(self.steps[:count], key, count) if len(self.steps) >= MIN_STEPS else []


def _values(steps: Sequence[Entry], key: str, count: int) -> list[float]:
    values = [float(value) for s in steps if (value := s.get(key)) is not None]
    return values if len(values) == count else []


def find_symptoms(history: History) -> list[Symptom]:
    """Return the symptoms that the rules detect."""
    return [symptom for rule in RULES if (symptom := rule(history)) is not None]


def no_signal(history: History) -> Symptom | None:
    """Detect that for NO_SIGNAL_STEPS steps the rewards in each group are equal."""
    groups = history.last("effective_groups", NO_SIGNAL_STEPS)
    rewards = history.last("reward", NO_SIGNAL_STEPS)
    if not groups or not rewards or any(groups) or _nearly_solved(history):
        return None
    all_equal = max(rewards) - min(rewards) < 1e-9
    level = f"all rewards are {rewards[-1]:g}" if all_equal else "the rewards of each group are equal"
    return Symptom(
        "no_signal",
        f"no learning signal for {NO_SIGNAL_STEPS} steps: {level}",
        "Advantages compare the responses to one prompt, so equal rewards give no gradient: the prompts are too "
        "hard or too easy for this model, or the reward function does not find the answer in the response",
        "Read the samples, then change data.reward, take prompts of another difficulty (data.params), or more "
        "samples a prompt (rollout.group_size)",
    )


def held_out_falls(history: History) -> Symptom | None:
    """Detect that the last two evaluations are significantly below the best one, while the reward has risen.

    If the entropy has halved, a smaller fall is a symptom, too: a SmolLM2-135M with trainer.lr = 3e-5 lost what it
    had learned this way (an accuracy of 0.484 after step 4, and of 0.375 after step 24).
    """
    evals = history.evals
    if len(evals) < 3:
        return None
    best = max(evals[:-2], key=lambda e: float(e["accuracy"]))
    top, latest = float(best["accuracy"]), [float(e["accuracy"]) for e in evals[-2:]]
    deviation = math.sqrt(sum(_variance(e) for e in (best, evals[-1])))
    entropy = _entropy_left(history)
    clear_fall = max(latest) < top - DEVIATIONS * deviation
    slight_fall = top - fmean(latest) >= DEVIATIONS_LOW_ENTROPY * deviation and max(latest) < top
    rewards_before = [s["reward"] for s in history.steps if best["step"] - WINDOW < s["step"] <= best["step"]]
    rewards_before = rewards_before or [s["reward"] for s in history.steps[:WINDOW]]
    recent_rewards = history.last("reward")
    reward_rises = bool(recent_rewards) and fmean(recent_rewards) > fmean(rewards_before)
    if not reward_rises or not (clear_fall or (slight_fall and entropy <= ENTROPY_HALVED)):
        return None
    return Symptom(
        "held_out_falls",
        f"the reward rises ({fmean(rewards_before):.3g} to {fmean(recent_rewards):.3g}) while held-out accuracy "
        f"falls ({top:.3f} after step {best['step']}, {latest[-1]:.3f} now)"
        + (f", and entropy is {entropy:.0%} of that of the first steps" if entropy <= ENTROPY_HALVED else ""),
        "The model exploits the reward instead of learning the task, it memorises the training prompts, or its "
        "updates are too large for its samples, which come from older weights",
        "Read the samples with the highest rewards; correct data.reward, lower trainer.lr or "
        "rollout.max_staleness, add a KL term (configs/algorithms/kl.yaml), use more "
        f"prompts, or stop at the checkpoint of step {best['step']}",
    )


def _entropy_left(history: History) -> float:
    """Return the entropy of the last steps as a fraction of the first steps' entropy; 1 if one is unknown."""
    first, recent = _entropies(history)
    return fmean(recent) / fmean(first) if first and recent and fmean(first) > 0 else 1.0


def _entropies(history: History) -> tuple[list[float], list[float]]:
    """Return the entropies of the first and of the last steps.

    They are those of the trainer's distribution if it was computed, or else estimates from the sampled tokens.
    """
    key = "entropy" if history.last("entropy") else "sampled_entropy"
    return history.first(key), history.last(key)


def never_right(history: History) -> Symptom | None:
    """Detect a high reward if no evaluation has counted a response as correct."""
    rewards = history.last("reward")
    if len(history.evals) < 2 or not rewards or (mean := fmean(rewards)) < HIGH_REWARD:
        return None
    if any(float(e["accuracy"]) > 0 for e in history.evals):
        return None
    return Symptom(
        "never_right",
        f"the mean reward is {mean:.3g}, but held-out accuracy is 0 in all {len(history.evals)} evaluations",
        "An evaluation counts a response as correct if its reward, or the first of its named parts, is at least 1. "
        "This reward stays below 1, as with a penalty on a correct answer, or it rewards incorrect answers highly",
        "Let data.reward return named parts, the first of them 1 for a correct answer (docs/own-task.md)",
    )


def _variance(entry: Entry) -> float:
    """Return the variance of an accuracy by Agresti and Coull, which is above 0 also for accuracies of 0 and 1."""
    n = float(entry.get("prompts") or 1) + 4
    adjusted_accuracy = (float(entry["accuracy"]) * (n - 4) + 2) / n
    return adjusted_accuracy * (1 - adjusted_accuracy) / n


def learned_to_guess(history: History) -> Symptom | None:
    """Detect that the last two evaluations have the accuracy of answers that do not depend on the prompt."""
    if len(history.evals) < 3 or _nearly_solved(history):
        return None
    first, latest = history.evals[0], history.evals[-2:]
    accuracy = float(latest[-1]["accuracy"])
    same_answer = [float(e.get("same_answer_share") or 0) for e in latest]
    constant = [float(e.get("constant_accuracy") or 0) for e in latest]
    best, chance = constant[-1], DEVIATIONS * math.sqrt(_variance(first) + _variance(latest[-1]))
    if min(same_answer) >= MAX_SAME_ANSWER and float(first.get("same_answer_share") or 0) < MAX_SAME_ANSWER:
        observation = (
            f"the model gives {same_answer[-1]:.0%} of the held-out prompts the same answer; "
            f"accuracy is {accuracy:.0%}"
        )
    elif (
        all(float(e["accuracy"]) <= c for e, c in zip(latest, constant, strict=True))
        and accuracy > float(first["accuracy"]) + chance
        and _stagnates(history)
    ):
        observation = (
            f"held-out accuracy rose from {float(first['accuracy']):.3f} to {accuracy:.3f} and stagnates, and the "
            f"same answer to every prompt would get {best:.3f}"
        )
    else:
        return None
    return Symptom(
        "learned_to_guess",
        observation,
        "The model has learned which answers are frequent, not how to find the correct one: the task is too hard "
        "for it, or its responses are too short for a derivation",
        "Read the samples; start with easier prompts (data.params) or prompts with more diverse answers, ask for a "
        "derivation in the prompt, raise rollout.max_response_tokens, or start with rlsys sft",
    )


def _stagnates(history: History) -> bool:
    """Return whether the mean reward of the last steps is at most 0.01 higher than that of the steps before them."""
    rewards, earlier_steps = history.last("reward"), history.steps[-2 * WINDOW : -WINDOW]
    middle = _values(earlier_steps, "reward", WINDOW)
    return bool(rewards and middle) and fmean(rewards) <= fmean(middle) + 0.01


def at_the_cap(history: History) -> Symptom | None:
    """Detect that many responses have the maximum length."""
    shares = history.last("truncated_share")
    if not shares or (share := fmean(shares)) < MAX_TRUNCATED:
        return None
    first, lengths = history.first("response_len_mean"), history.last("response_len_mean")
    grows = bool(first and lengths) and fmean(lengths) > 1.2 * fmean(first)
    growth = (
        f", and the mean length grows ({fmean(first):.0f} to {fmean(lengths):.0f} tokens)" if grows else ""
    )
    return Symptom(
        "at_the_cap",
        f"{share:.0%} of the responses reach rollout.max_response_tokens{growth}",
        "A truncated response has no answer, so long reasoning is penalised whether it is correct or not; or the "
        "model does not learn to stop",
        "Raise rollout.max_response_tokens, shape the reward by length (docs/algorithms.md: overlong), or exclude "
        "truncated responses from the loss (algo.selectors = [overlong_filter])",
    )


def entropy_collapse(history: History) -> Symptom | None:
    """Detect that entropy is close to 0 and the reward stagnates, before the task is nearly solved."""
    first, recent = _entropies(history)
    if not first or not recent:
        return None
    initial, current = fmean(first), fmean(recent)
    has_collapsed = current <= min(ENTROPY_LEFT * initial, ENTROPY_LOW)
    if not has_collapsed or not _stagnates(history) or _nearly_solved(history):
        return None
    return Symptom(
        "entropy_collapse",
        f"entropy fell from {initial:.2g} to {current:.2g} nats per token, and the reward has stopped rising",
        "The model generates nearly the same response each time, so it no longer explores",
        "Lower trainer.lr, raise the upper clip bound (algo.loss, clip_high) or rollout.temperature, or add an "
        "entropy term (configs/algorithms/entropy.yaml, clip_cov.yaml, kl_cov.yaml)",
    )


def _nearly_solved(history: History) -> bool:
    """Return whether the last evaluation has an accuracy of at least 0.9."""
    return bool(history.evals) and float(history.evals[-1]["accuracy"]) >= 0.9


def mismatch_grows(history: History) -> Symptom | None:
    """Detect that the difference between the log-probs of engine and trainer grows."""
    first, recent = history.first("mismatch_mean"), history.last("mismatch_mean")
    if not first or not recent:
        return None
    initial, gap = median(first), median(recent)
    if gap < MISMATCH_GROWTH * initial or gap < MISMATCH_LOW:
        return None
    return Symptom(
        "mismatch_grows",
        f"engine and trainer increasingly disagree: the mean of |logp - mu| rose from {initial:.2g} to {gap:.2g}",
        "Both use the same weights with different kernels, dtypes or expert selection, and the model has moved to "
        "where that matters; the loss then trains on tokens that the trainer would not sample",
        "Replay the experts (trainer.replay = engine), correct for it (configs/algorithms/tis.yaml, icepop.yaml), "
        "lower trainer.lr, or use a more precise dtype (model.dtype, model.fp8)",
    )


def router_collapse(history: History) -> Symptom | None:
    """Detect that routers select fewer and fewer experts."""
    observations = []
    first, recent = history.first("expert_load_max"), history.last("expert_load_max")
    if first and recent and median(recent) >= LOAD_GROWTH * median(first):
        observations.append(
            f"the busiest expert has {median(recent):.1f} times the mean load, up from {median(first):.1f}"
        )
    first, recent = history.first("expert_idle_share"), history.last("expert_idle_share")
    if first and recent and median(recent) >= median(first) + IDLE_GROWTH:
        observations.append(
            f"{median(recent):.0%} of a layer's experts get no token, up from {median(first):.0%}"
        )
    if not observations:
        return None
    return Symptom(
        "router_collapse",
        "the routers send all tokens to few experts: " + ", and ".join(observations),
        "Nothing balances the experts, and experts that get tokens learn to attract more",
        "Set trainer.balance_loss (1e-3 is usual), trainer.balance_rate for routers with biases, or lower trainer.lr",
    )


def staleness_at_bound(history: History) -> Symptom | None:
    """Detect that each of the last steps trains groups of the maximum age.

    With a maximum of 1, groups must also expire, because the age 1 is usual if generation is one step ahead.
    """
    bound, ages = history.max_staleness, history.last("staleness_max")
    expired = history.last("expired")
    discarded = int(expired[-1] - expired[0]) if expired else 0
    if not bound or not ages or min(ages) < bound or (bound == 1 and discarded <= 0):
        return None
    return Symptom(
        "staleness_at_bound",
        f"for {WINDOW} steps the oldest trained group has the maximum age, rollout.max_staleness = {bound}"
        + (f", and {discarded} groups expired" if discarded > 0 else ""),
        "More samples are in flight than the steps can train, or responses take many steps to finish. Updates on "
        "old tokens are less reliable, and groups that expire are mostly those with long responses",
        "Lower rollout.over_provision; correct for old tokens (configs/algorithms/decoupled_ppo.yaml, m2po.yaml) or "
        "lower trainer.lr if held-out accuracy falls; if groups expire and it does not, raise rollout.max_staleness",
    )


def many_side_requests(history: History) -> Symptom | None:
    """Detect that most of the agents' requests are outside the main conversation."""
    calls, side_calls = (
        history.last("agent_calls"),
        history.last("agent_side_calls"),
    )  # since the process started
    if not calls or not side_calls or side_calls[-1] <= MAX_SIDE_REQUESTS * calls[-1]:
        return None
    return Symptom(
        "asked_aside",
        f"{side_calls[-1] / calls[-1]:.0%} of the agents' requests are outside the trained conversation",
        "With rollout.generator_params.train: first only an agent's first conversation is trained. These agents "
        "rewrite their history, or use other conversations",
        "Set train: all in rollout.generator_params, or let the agent start with the conversation to be trained "
        "(docs/agents.md)",
    )


RULES = (
    no_signal,
    held_out_falls,
    never_right,
    learned_to_guess,
    at_the_cap,
    entropy_collapse,
    mismatch_grows,
    router_collapse,
    staleness_at_bound,
    many_side_requests,
)


class SymptomMonitor:
    """Owner of a run's history, which reports a symptom once as long as it lasts. It runs in trainer rank 0."""

    def __init__(
        self, steps: Sequence[Entry] = (), evals: Sequence[Entry] = (), max_staleness: int = 0
    ) -> None:
        """Create a monitor.

        Args:
            steps: `step` lines of earlier sessions, sorted by step.
            evals: `eval` lines of earlier sessions, sorted by step.
            max_staleness: rollout.max_staleness.
        """
        self._steps, self._evals, self._max_staleness = list(steps), list(evals), max_staleness
        self._last_steps: dict[str, int] = {}
        """Name of a symptom -> the last step with it."""
        for end in range(max(0, len(steps) - QUIET), len(steps)):
            step = steps[end]["step"]
            self._add_symptoms(
                step, self._symptoms(steps[: end + 1], [e for e in evals if e["step"] <= step])
            )

    def add(self, entry: Entry) -> list[Symptom]:
        """Add a `step` or `eval` line to the history.

        Returns:
            the symptoms that are new, or occur again after QUIET steps.
        """
        numbers = {k: v for k, v in entry.items() if not isinstance(v, list)}  # without large histograms
        (self._evals if entry["kind"] == "eval" else self._steps).append(numbers)
        return self._add_symptoms(entry["step"], self._symptoms(self._steps, self._evals))

    def _symptoms(self, steps: Sequence[Entry], evals: Sequence[Entry]) -> list[Symptom]:
        return find_symptoms(History(steps, evals, self._max_staleness))

    def _add_symptoms(self, step: int, symptoms: Sequence[Symptom]) -> list[Symptom]:
        """Record the symptoms of a step, and return those to report."""
        new = [s for s in symptoms if step - self._last_steps.get(s.name, -QUIET) >= QUIET]
        self._last_steps |= {s.name: step for s in symptoms}
        return new
