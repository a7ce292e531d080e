"""Translates distillation.*: teachers, and the loss term of their divergence."""

from __future__ import annotations

import re
from typing import Any

from rlsys.importers.draft import Draft
from rlsys.importers.verl.names import KL_KINDS, ROLLOUT

_LOSS = "distillation.distillation_loss"
_MODE = f"{_LOSS}.loss_mode"
_POLICY_GRADIENT = f"{_LOSS}.use_policy_gradient"
_CAP, _FLOOR, _TOP_K = f"{_LOSS}.loss_max_clamp", f"{_LOSS}.log_prob_min_clamp", f"{_LOSS}.topk"

LOSS_SETTINGS = (
    "distillation.enabled",
    f"{_LOSS}.use_task_rewards",
    f"{_LOSS}.distillation_loss_coef",
    _POLICY_GRADIENT,
    _CAP,
    f"{_LOSS}.clip_ratio_low",
    f"{_LOSS}.clip_ratio_high",
)
"""Settings on which the loss terms depend."""


def translate_distillation(
    d: Draft, terms: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Translate distillation.*: teachers, and the loss term of their divergence.

    Args:
        d: the config draft.
        terms: loss terms of the policy.

    Returns:
        the loss terms: those of the policy and the teachers' term, or without task rewards only the teachers' term;
            and the settings on which they depend.
    """
    models = _teacher_models(d)
    names = [*models, _MODE]
    teacher = _teacher(d, models)
    mode = d.text(_MODE, "k3")
    kind = KL_KINDS.get(mode, "")
    by_sample = d.flag(_POLICY_GRADIENT)
    cap = d.number(_CAP, 0.0) if d.text(_CAP, "null") not in ("null", "None") else 0.0
    # The mean gradient of these losses is that of a divergence: of k1 as a reward and of k2, KL(policy || teacher);
    # of k3, KL(teacher || policy).
    if by_sample != (kind == "k1") or not (mode == "forward_kl_topk" or kind):
        d.reject(_MODE, f"with use_policy_gradient = {by_sample}, its gradient is not that of a divergence")
    term: dict[str, Any] = {"name": "distill"}
    if by_sample:
        names.append(_POLICY_GRADIENT)
        teacher["top_k"] = 0
        term = _policy_gradient_term(d)
    elif mode == "forward_kl_topk":
        names += [_TOP_K, _FLOOR]
        teacher |= _top_k_divergence(d)
    else:
        teacher["direction"] = 0.0 if kind == "k3" else 1.0
        _report_estimate(d, cap)
    if d.number(f"{ROLLOUT}.temperature", 1.0) != 1:
        d.reject(f"{ROLLOUT}.temperature", "expected 1, because the teacher's log-probs have temperature 1")
    d.set_field("algo.teacher", teacher, *names)
    d.consumed |= {_TOP_K, _FLOOR, *(f"{_LOSS}.{name}" for name in ("policy_loss_mode", "clip_ratio"))}
    if cap:
        term["cap"] = cap
    if has_task_rewards(d):
        term["weight"] = d.number(f"{_LOSS}.distillation_loss_coef", 1.0)
        return [*terms, term], LOSS_SETTINGS
    return [term], LOSS_SETTINGS


def _teacher_models(d: Draft) -> list[str]:
    """Return the settings with the teachers' models; mark the other settings of teachers as consumed."""
    section = "distillation"
    models = sorted(
        name for name in d.settings if re.fullmatch(rf"{section}\.teacher_models\.\w+\.model_path", name)
    )
    of_model = r"teacher_models\.\w+\.(key|num_replicas|inference\.)"
    ignored_names = rf"{section}\.(nnodes|n_gpus_per_node|teacher_key|{of_model})"
    d.consumed.update(name for name in d.settings if re.match(ignored_names, name))
    if not models:
        models = [f"{section}.teacher_models.teacher_model.model_path"]
        d.require(models[0])
    return models


def _teacher(d: Draft, models: list[str]) -> dict[str, Any]:
    """Return algo.teacher without its divergence. `models`: the settings with the teachers' models."""
    teacher: dict[str, Any] = {"path": d.text(models[0]), "engine": "own"}
    if len(models) > 1:
        keys = [d.text(name.replace("model_path", "key")) for name in models]
        teacher["by_source"] = {key: d.text(name) for key, name in zip(keys[1:], models[1:], strict=True)}
    return teacher


def _policy_gradient_term(d: Draft) -> dict[str, Any]:
    """Return the loss term for the divergence at the sampled token, as a reward."""
    low, high = (d.number(f"{_LOSS}.clip_ratio_{side}", 0.2) for side in ("low", "high"))
    if d.text(f"{_LOSS}.policy_loss_mode", "vanilla") != "vanilla":
        d.reject(f"{_LOSS}.policy_loss_mode", "expected vanilla, the only mode that verl supports")
    return {"name": "distill_pg", "clip_low": low, "clip_high": high, "dual": 3.0}


def _top_k_divergence(d: Draft) -> dict[str, Any]:
    """Return the fields of algo.teacher for the forward KL over the teacher's most probable tokens."""
    fields: dict[str, Any] = {"direction": 0.0, "top_k": d.integer(_TOP_K, 32), "tail_bucket": False}
    if d.text(_FLOOR, "null") not in ("null", "None"):
        fields["least_logprob"] = d.number(_FLOOR, 0.0)
    return fields


def _report_estimate(d: Draft, cap: float) -> None:
    """Report how rlsys's divergence differs from the script's, which is estimated from the sampled token.

    Args:
        d: the config draft.
        cap: the script's upper limit of the estimate; 0 for none.
    """
    if cap:
        d.reject(
            _CAP, "no counterpart: it limits an estimate; rlsys computes the divergence over several tokens"
        )
    d.warnings.append(
        "algo.loss distill: rlsys computes the gradient of the KL over the teacher's most probable tokens; the "
        "script estimates it from the sampled token"
    )


def has_task_rewards(d: Draft) -> bool:
    """Return whether the loss has a term that depends on rewards."""
    tasks = f"{_LOSS}.use_task_rewards"
    return not d.flag("distillation.enabled") or not d.is_present(tasks) or d.flag(tasks)
