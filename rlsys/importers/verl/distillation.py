"""Translates distillation.*: teachers and their loss."""

from __future__ import annotations

import re
from typing import Any

from rlsys.importers.draft import Draft
from rlsys.importers.verl.names import KL_KINDS, ROLLOUT

LOSS_SETTINGS = (
    "distillation.enabled",
    *(
        f"distillation.distillation_loss.{name}"
        for name in (
            "use_task_rewards", "distillation_loss_coef", "use_policy_gradient", "loss_max_clamp", "clip_ratio_low",
            "clip_ratio_high",
        )
    ),
)  # fmt: skip
"""Settings that the loss terms depend on."""


def translate_distillation(
    d: Draft, terms: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Translate distillation.*: teachers, and the loss term of their divergence.

    Args:
        d: the config draft.
        terms: loss terms of the policy.

    Returns:
        the loss terms with the teacher's, which replaces the policy's without task rewards; and the settings that
        they depend on.
    """
    section = "distillation"
    loss = f"{section}.distillation_loss"
    models = sorted(
        name for name in d.settings if re.fullmatch(rf"{section}\.teacher_models\.\w+\.model_path", name)
    )
    for name in d.settings:
        if re.match(
            rf"{section}\.(nnodes|n_gpus_per_node|teacher_key|teacher_models\.\w+\.(key|num_replicas|inference\.))",
            name,
        ):
            d.consumed.add(name)
    if not models:
        models = [f"{section}.teacher_models.teacher_model.model_path"]
        d.require(models[0])
    teacher: dict[str, Any] = {"path": d.text(models[0]), "engine": "own"}
    if len(models) > 1:
        keys = [d.text(name.replace("model_path", "key")) for name in models]
        teacher["by_source"] = {key: d.text(name) for key, name in zip(keys[1:], models[1:], strict=True)}
    mode, policy_gradient = d.text(f"{loss}.loss_mode", "k3"), f"{loss}.use_policy_gradient"
    by_sample = d.flag(policy_gradient)
    cap, floor = f"{loss}.loss_max_clamp", f"{loss}.log_prob_min_clamp"
    bound = d.number(cap, 0.0) if d.text(cap, "null") not in ("null", "None") else 0.0
    names, of_term = [*models, f"{loss}.loss_mode"], [policy_gradient, cap]
    term: dict[str, Any] = {"name": "distill"}
    # the gradient's mean: of k1 as a reward and of k2 that of KL(policy || teacher), of k3 KL(teacher || policy)
    kind = KL_KINDS.get(mode, "")
    if by_sample != (kind == "k1") or not (mode == "forward_kl_topk" or kind):
        d.reject(
            f"{loss}.loss_mode",
            f"with use_policy_gradient = {by_sample} its gradient is not that of a divergence",
        )
    if by_sample:
        teacher["top_k"] = 0
        names.append(policy_gradient)
        sides = {side: d.number(f"{loss}.clip_ratio_{side}", 0.2) for side in ("low", "high")}
        term = {"name": "distill_pg", "clip_low": sides["low"], "clip_high": sides["high"], "dual": 3.0}
        of_term += [f"{loss}.clip_ratio_{side}" for side in sides]
        if d.text(f"{loss}.policy_loss_mode", "vanilla") != "vanilla":
            d.reject(f"{loss}.policy_loss_mode", "verl supports vanilla only")
    elif mode == "forward_kl_topk":
        names += [f"{loss}.topk", floor]
        teacher |= {"direction": 0.0, "top_k": d.integer(f"{loss}.topk", 32), "tail_bucket": False}
        if d.text(floor, "null") not in ("null", "None"):
            teacher["least_logprob"] = d.number(floor, 0.0)
    else:
        teacher["direction"] = 0.0 if kind == "k3" else 1.0
        if bound:
            d.reject(cap, "of an estimate; the divergence over the most probable tokens is compared here")
        d.warnings.append(
            "algo.loss distill: the gradient of the KL over the teacher's most probable tokens; the script estimates "
            "it from the sampled token"
        )
    if d.number(f"{ROLLOUT}.temperature", 1.0) != 1:
        d.reject(
            f"{ROLLOUT}.temperature",
            "the teacher's engine has log-probs at temperature 1; the policy samples at 1",
        )
    d.set_field("algo.teacher", teacher, *names)
    d.consumed |= {f"{loss}.{name}" for name in ("topk", "policy_loss_mode", "clip_ratio")} | {
        *of_term,
        floor,
    }
    if bound:
        term["cap"] = bound
    if has_task_rewards(d):
        weighted_term = term | {"weight": d.number(f"{loss}.distillation_loss_coef", 1.0)}
        return [*terms, weighted_term], LOSS_SETTINGS
    return [term], LOSS_SETTINGS


def has_task_rewards(d: Draft) -> bool:
    """Return whether a policy loss reads rewards, alone or together with a teacher's divergence."""
    tasks = "distillation.distillation_loss.use_task_rewards"
    return not d.flag("distillation.enabled") or not d.is_present(tasks) or d.flag(tasks)
