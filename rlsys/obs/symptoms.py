"""Signs that a run does not learn, read from its figures: what is seen, why it may be, and which field to change.

A rule is a pure function of a History. Rules compare the last steps with the first ones, so they need no knowledge of
the model, and they look at several steps at once: one odd step is no symptom. `Watch` tells each symptom once.
Bounds were tried on the curves in tests/data/curves; the quickstart's gives no warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

NO_SIGNAL_STEPS = 3
"""Steps in a row without any gradient."""
WINDOW = 5
"""Steps whose figures are put together, at the beginning and at the end of a history."""
FEWEST = 3 * WINDOW
"""Steps before the end is compared with the beginning."""
CUT_OFF = 0.25
"""Share of responses that reach the longest length."""
ENTROPY_LEFT, ENTROPY_LOW = 0.1, 0.05
"""Of the first steps' entropy; nats a token."""
MISMATCH_GROWTH, MISMATCH_LOW = 5.0, 1e-3
"""Times the first steps' gap; nats a token. Float32 has about 1e-7, bfloat16 about 1e-2."""
LOAD_GROWTH, IDLE_GROWTH = 2.0, 0.25
"""Times the first steps' load of the busiest expert; share of a layer's experts that got tokens and get none now."""
DEVIATIONS = 2.0
"""Standard deviations by which a held-out accuracy must lie below the best one."""
ONE_ANSWER = 0.9
"""Share of the held-out prompts from which one answer to all of them is odd."""
PAID = 0.5
"""Mean reward from which an accuracy of 0 is odd."""
ASIDE = 0.5
"""Share of agents' requests that are no turn of a response."""
QUIET = 2 * WINDOW
"""Steps without a symptom after which it is told again."""

Entry = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True)
class Symptom:
    name: str
    seen: str
    cause: str
    knob: str

    def entry(self) -> dict[str, str]:
        """What a `warning` line of metrics.jsonl says of it."""
        return asdict(self)


def sentence(warning: Entry) -> str:
    """A `warning` line of metrics.jsonl, for a person."""
    return f"{warning['seen']}. {warning['cause']}. {warning['knob']}."


@dataclass(frozen=True)
class History:
    """`step` and `eval` lines of a run, each sorted by step."""

    steps: Sequence[Entry]
    evals: Sequence[Entry] = ()

    def last(self, key: str, count: int = WINDOW) -> list[float]:
        """Values of the last `count` steps; empty unless all of them have one."""
        return _values(self.steps[-count:], key, count)

    def first(self, key: str, count: int = WINDOW) -> list[float]:
        """The same of the first steps of a history that is long enough to be compared; else empty."""
        return _values(self.steps[:count], key, count) if len(self.steps) >= FEWEST else []


def _values(steps: Sequence[Entry], key: str, count: int) -> list[float]:
    found = [float(value) for s in steps if (value := s.get(key)) is not None]
    return found if len(found) == count else []


def find_symptoms(history: History) -> list[Symptom]:
    return [found for rule in RULES if (found := rule(history)) is not None]


def no_signal(history: History) -> Symptom | None:
    groups = history.last("effective_groups", NO_SIGNAL_STEPS)
    rewards = history.last("reward", NO_SIGNAL_STEPS)
    if not groups or not rewards or any(groups) or _nearly_solved(history):
        return None
    same = max(rewards) - min(rewards) < 1e-9
    level = f"all rewards are {rewards[-1]:g}" if same else "the rewards of each group are equal"
    return Symptom(
        "no_signal",
        f"no learning signal for {NO_SIGNAL_STEPS} steps: {level}",
        "Advantages compare the responses to one prompt, so equal rewards give no gradient: the prompts are too "
        "hard or too easy for this model, or the reward does not see the answer in the response",
        "Read the samples, then change data.reward, take prompts of another difficulty (data.params), or more "
        "samples a prompt (rollout.group_size)",
    )


def held_out_falls(history: History) -> Symptom | None:
    """The last two evaluations lie below the best one by more than chance, and the reward is higher than it was."""
    evals = history.evals
    if len(evals) < 3:
        return None
    best = max(evals[:-2], key=lambda e: float(e["accuracy"]))
    top, latest = float(best["accuracy"]), [float(e["accuracy"]) for e in evals[-2:]]
    deviation = math.sqrt(sum(_variance(e) for e in (best, evals[-1])))
    before = [s["reward"] for s in history.steps if best["step"] - WINDOW < s["step"] <= best["step"]]
    before = before or [s["reward"] for s in history.steps[:WINDOW]]
    since = history.last("reward")
    if max(latest) >= top - DEVIATIONS * deviation or not since or fmean(since) <= fmean(before):
        return None
    return Symptom(
        "held_out_falls",
        f"the reward rises ({fmean(before):.3g} to {fmean(since):.3g}) while held-out accuracy falls "
        f"({top:.3f} after step {best['step']}, {latest[-1]:.3f} now)",
        "The model learns what the reward pays and not the task, or it learns the training prompts by heart",
        "Read the best rewarded samples; mend data.reward, add a KL term (configs/algorithms/kl.yaml), use more "
        f"prompts, or stop at the checkpoint of step {best['step']}",
    )


def never_right(history: History) -> Symptom | None:
    """Well paid, and still no evaluation has counted a single response as right."""
    rewards = history.last("reward")
    if len(history.evals) < 2 or not rewards or (mean := fmean(rewards)) < PAID:
        return None
    if any(float(e["accuracy"]) > 0 for e in history.evals):
        return None
    return Symptom(
        "never_right",
        f"the mean reward is {mean:.3g}, but held-out accuracy is 0 in all {len(history.evals)} evaluations",
        "An evaluation counts a response as right whose reward is 1 or more; of named parts, the first one. This "
        "reward stays below 1, as with a penalty on a right answer, or it pays much for what is not yet right",
        "Let data.reward give named parts, the first of them 1 for a right answer (docs/own-task.md)",
    )


def _variance(entry: Entry) -> float:
    """Of an accuracy, after Agresti and Coull: not 0 where all or none were right."""
    n = float(entry.get("prompts") or 1) + 4
    share = (float(entry["accuracy"]) * (n - 4) + 2) / n
    return share * (1 - share) / n


def learned_to_guess(history: History) -> Symptom | None:
    """Better than at first, by an answer that does not look at the prompt: the two last evaluations tell."""
    if len(history.evals) < 3 or _nearly_solved(history):
        return None
    first, latest = history.evals[0], history.evals[-2:]
    now = float(latest[-1]["accuracy"])
    same = [float(e.get("same_answer_share") or 0) for e in latest]
    constant = [float(e.get("constant_accuracy") or 0) for e in latest]
    best, chance = constant[-1], DEVIATIONS * math.sqrt(_variance(first) + _variance(latest[-1]))
    if min(same) >= ONE_ANSWER and float(first.get("same_answer_share") or 0) < ONE_ANSWER:
        seen = f"the model gives {same[-1]:.0%} of the held-out prompts the same answer; {now:.0%} of these are right"
    elif (
        all(float(e["accuracy"]) <= c for e, c in zip(latest, constant, strict=True))
        and now > float(first["accuracy"]) + chance
        and _stands(history)
    ):
        seen = (
            f"held-out accuracy rose from {float(first['accuracy']):.3f} to {now:.3f} and stands, where one and the "
            f"same answer to every prompt would get {best:.3f}"
        )
    else:
        return None
    return Symptom(
        "learned_to_guess",
        seen,
        "The model has learned which answers are frequent and not how to find the right one: the task is too hard "
        "for it, or its responses are too short to work it out",
        "Read the samples; take easier prompts first (data.params) or prompts whose answers are less alike, let the "
        "prompt ask for the way to the answer, raise rollout.max_response_tokens, or begin with rlsys sft",
    )


def _stands(history: History) -> bool:
    """The reward of the last steps is no higher than that of those before."""
    rewards, before = history.last("reward"), history.steps[-2 * WINDOW : -WINDOW]
    middle = _values(before, "reward", WINDOW)
    return bool(rewards and middle) and fmean(rewards) <= fmean(middle) + 0.01


def at_the_cap(history: History) -> Symptom | None:
    shares = history.last("truncated_share")
    if not shares or (share := fmean(shares)) < CUT_OFF:
        return None
    first, now = history.first("response_len_mean"), history.last("response_len_mean")
    grows = bool(first and now) and fmean(now) > 1.2 * fmean(first)
    growth = (
        f", and lengths grow ({fmean(first):.0f} to {fmean(now):.0f} tokens in the mean)" if grows else ""
    )
    return Symptom(
        "at_the_cap",
        f"{share:.0%} of the responses reach rollout.max_response_tokens{growth}",
        "A response that is cut off has no answer, so long thoughts are punished whether they are right or not; or "
        "the model does not know how to end",
        "Raise rollout.max_response_tokens, shape the reward by length (docs/algorithms.md: overlong), or leave "
        "cut-off responses out of the loss (algo.selectors = [overlong_filter])",
    )


def entropy_collapse(history: History) -> Symptom | None:
    """Entropy fell to nearly nothing, and the reward does not rise any more although not every group is equal."""
    key = "entropy" if history.last("entropy") else "sampled_entropy"
    first, now = history.first(key), history.last(key)
    if not first or not now:
        return None
    was, left = fmean(first), fmean(now)
    if left > ENTROPY_LEFT * was or left > ENTROPY_LOW or not _stands(history) or _nearly_solved(history):
        return None
    return Symptom(
        "entropy_collapse",
        f"entropy fell from {was:.2g} to {left:.2g} nats a token, and the reward has stopped rising",
        "The model gives nearly the same response each time, so it finds nothing new to learn from",
        "Lower trainer.lr, raise the upper clip bound (algo.loss, clip_high) or rollout.temperature, or add an "
        "entropy term (configs/algorithms/entropy.yaml, clip_cov.yaml, kl_cov.yaml)",
    )


def _nearly_solved(history: History) -> bool:
    """Held-out prompts are answered, so that little is left to be found."""
    return bool(history.evals) and float(history.evals[-1]["accuracy"]) >= 0.9


def mismatch_grows(history: History) -> Symptom | None:
    first, now = history.first("mismatch_mean"), history.last("mismatch_mean")
    if not first or not now:
        return None
    was, gap = median(first), median(now)
    if gap < MISMATCH_GROWTH * was or gap < MISMATCH_LOW:
        return None
    return Symptom(
        "mismatch_grows",
        f"engine and trainer disagree more and more: |logp - mu| is {gap:.2g} in the mean, it was {was:.2g}",
        "Both compute the same weights in different ways (kernels, number types, choice of experts), and the model "
        "has moved to where that matters; the loss then trains what was not sampled",
        "Replay the experts (trainer.replay = engine), correct for it (configs/algorithms/tis.yaml, icepop.yaml), "
        "lower trainer.lr, or compute in a more exact type (model.dtype, model.fp8)",
    )


def router_collapse(history: History) -> Symptom | None:
    found = []
    first, now = history.first("expert_load_max"), history.last("expert_load_max")
    if first and now and median(now) >= LOAD_GROWTH * median(first):
        found.append(
            f"the busiest expert has {median(now):.1f} times the mean load, it had {median(first):.1f}"
        )
    first, now = history.first("expert_idle_share"), history.last("expert_idle_share")
    if first and now and median(now) >= median(first) + IDLE_GROWTH:
        found.append(f"{median(now):.0%} of a layer's experts get no token, it was {median(first):.0%}")
    if not found:
        return None
    return Symptom(
        "router_collapse",
        "the routers send all tokens to few experts: " + ", and ".join(found),
        "Nothing balances the experts, and those that get tokens learn to get more",
        "Set trainer.balance_loss (1e-3 is usual), trainer.balance_rate for routers with biases, or lower trainer.lr",
    )


def asked_aside(history: History) -> Symptom | None:
    """Counts since the rollout process began."""
    calls, aside = history.last("agent_calls"), history.last("agent_side_calls")
    if not calls or not aside or aside[-1] <= ASIDE * calls[-1]:
        return None
    return Symptom(
        "asked_aside",
        f"{aside[-1] / calls[-1]:.0%} of what agents ask is answered on the side",
        "With rollout.generator_params.train: first only the conversation that an agent begins with is trained. "
        "These agents rewrite their history, or ask most in other conversations",
        "Set train: all in rollout.generator_params, or let the agent begin with the conversation that is to be "
        "learned (docs/agents.md)",
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
    asked_aside,
)


class Watch:
    """Owns a run's history, and remembers what it has told: a symptom that lasts is told once.

    Only trainer rank 0 has one. A run that goes on gives it the lines of its earlier sessions.
    """

    def __init__(self, steps: Sequence[Entry] = (), evals: Sequence[Entry] = ()) -> None:
        self._steps, self._evals = list(steps), list(evals)
        self._seen: dict[str, int] = {}
        """By name: the step that last showed it."""
        for end in range(max(0, len(steps) - QUIET), len(steps)):
            at = steps[end]["step"]
            self._note(at, find_symptoms(History(steps[: end + 1], [e for e in evals if e["step"] <= at])))

    def add(self, entry: Entry) -> list[Symptom]:
        """Symptoms that this `step` or `eval` line shows for the first time, or again after a while."""
        lean = {k: v for k, v in entry.items() if not isinstance(v, list)}  # no histograms: all steps stay
        (self._evals if entry["kind"] == "eval" else self._steps).append(lean)
        return self._note(entry["step"], find_symptoms(History(self._steps, self._evals)))

    def _note(self, step: int, found: Sequence[Symptom]) -> list[Symptom]:
        new = [s for s in found if step - self._seen.get(s.name, -QUIET) >= QUIET]
        self._seen |= {s.name: step for s in found}
        return new
