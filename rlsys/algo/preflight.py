"""Told before anything starts: a plug-in that does not exist, a need that nothing serves, what has no meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.algo.objective import ANCHOR_NEEDS, Objective
from rlsys.algo.plugin import NEEDS
from rlsys.algo.registry import make_all
from rlsys.algo_section import AlgoSection
from rlsys.config import Config
from rlsys.errors import UserError


def check(config: Config) -> None:
    """Raises UserError, one line: an unknown name or parameter, a need that this run cannot serve, or fields that
    have no meaning together."""
    made = make_all(config.algo)
    asked = {f"algo.anchor = {config.algo.anchor!r}": ANCHOR_NEEDS[config.algo.anchor]}
    for field, plugins in made.items():
        for i, plugin in enumerate(plugins):
            asked[f"algo.{field}[{i}] ({type(plugin).__name__})"] = plugin.needs()
    for field, needs in asked.items():
        for need in sorted(needs):
            if reason := _why_not(need, config):
                raise UserError(f"{field} needs {need}, {NEEDS[need]}: {reason}")
    _check_reducer(made)
    _check_anchor(config.algo.anchor, made)
    _check_lens(config.algo)
    if config.trainer.early_backward and (reason := _why_not_early(config)):
        raise UserError(f"trainer.early_backward = true, but {reason}")


def _why_not_early(config: Config) -> str:
    """What keeps finished groups from going backward early; empty when nothing does."""
    whole = Objective(config.algo).needs_whole_step
    reasons = {
        "launch.placement = colocated: engines rest while the trainer works; use disaggregated": (
            config.launch.placement == "colocated"
        ),
        f"the algorithm looks at whole steps: {', '.join(whole)}": bool(whole),
        f"algo.minibatches = {config.algo.minibatches}: a step's groups are shuffled over them; use 1": (
            config.algo.minibatches > 1
        ),
        "parallel.overlap = true reduces the gradients in the last backward pass of each portion; use false": (
            config.parallel.overlap
        ),
        f"trainer.balance_loss = {config.trainer.balance_loss} weighs by all tokens of a step; use balance_rate": (
            config.trainer.balance_loss > 0
        ),
        "rollout.staleness_policy = wait chooses among all groups that are ready; use drop or mask": (
            config.rollout.staleness_policy == "wait"
        ),
        f"rollout.repeat = {config.rollout.repeat}: the record decides when a step has its groups": (
            config.rollout.repeat is not None
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _check_reducer(made: Mapping[str, Sequence[Any]]) -> None:
    """A sample's advantage says nothing about which of its tokens have one, where the estimator changes them."""
    (advantage,), (reducer,) = made["advantage"], made["reducer"]
    if reducer.over == "active" and advantage.changes_tokens():
        raise UserError(
            "algo.reducer.over = 'active' counts samples whose advantage is not 0, but algo.advantage "
            f"({type(advantage).__name__}) gives each token its own: use all"
        )


def _check_anchor(anchor: str, made: Mapping[str, Sequence[Any]]) -> None:
    """Against mu itself, the distance of the anchor from mu corrects nothing."""
    for i, correction in enumerate(made["corrections"]):
        if anchor == "mu" and correction.of_anchor:
            raise UserError(
                f"algo.corrections[{i}] ({type(correction).__name__}) acts on exp(anchor - mu), which is 1 "
                "everywhere with algo.anchor = 'mu': use algo.anchor = old, behaviour, interpolated or ewma"
            )


def _check_lens(algo: AlgoSection) -> None:
    """Who samples from cleaned prompts has to sort the samples out and to train them on the original ones."""
    fields = {"planners": algo.planners, "selectors": algo.selectors, "corrections": algo.corrections}
    having = [field for field, specs in fields.items() if "lens" in {spec.name for spec in specs}]
    if "planners" in having and (missing := sorted(set(fields) - set(having))):
        raise UserError(
            f"algo.planners has lens, but algo.{missing[0]} has not: name it in all of {', '.join(fields)}"
        )


def _why_not(need: str, config: Config) -> str:
    """Why nothing serves this need; empty when something does."""
    placement = config.launch.placement
    if need == "behaviour" and placement != "colocated":
        return (
            f"launch.placement = {placement!r} has changed the weights by then; use colocated, or algo.anchor = "
            "interpolated or ewma"
        )
    if need == "tool_penalty" and config.rollout.generator == "single_turn":
        return "rollout.generator = single_turn calls no tools; use calculator, or penalty: length"
    if need == "verdicts" and config.data.judge is None:
        return "data.judge names none"
    if need == "prompt_scores" and config.engine.reference is None:
        return "engine.reference names no server of the weights to hold them against; own starts one"
    return ""
