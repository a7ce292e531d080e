"""Translates algorithm.* and the actor's losses."""

from __future__ import annotations

import re
from typing import Any

from rlsys.importers.draft import Draft, Row
from rlsys.importers.verl.corrections import translate_corrections
from rlsys.importers.verl.distillation import translate_distillation
from rlsys.importers.verl.names import (
    ACTOR,
    ASYNC_FLOW,
    FULLY_ASYNC,
    KL_KINDS,
    MODEL,
    ONE_STEP_OFF,
    PARTIAL_ROLLOUT,
    PROGRAM,
    first_present,
)

LOSS_PARAMETERS = {
    "clip_cov": {"clip_cov_ratio": "share", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high"},
    "kl_cov": {"kl_cov_ratio": "share", "ppo_kl_coef": "coefficient"},
    "sapo": {"tau_pos": "tau_positive", "tau_neg": "tau_negative"},
}
"""Loss -> its settings in policy_loss -> parameters of the loss in rlsys."""
ADVANTAGES = {
    "grpo": "grpo", "gae": "gae", "rloo": "rloo", "rloo_vectorized": "rloo", "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "opo": "opo", "grpo_passk": "grpo_passk", "gpg": "gpg",
    "gdpo": "gdpo", "optimal_token_baseline": "optimal_token_baseline",
}  # fmt: skip
LOSSES = {
    "vanilla": "clip", "gspo": "gspo", "geo_mean": "gmpo", "clip_cov": "clip_cov", "kl_cov": "kl_cov",
    "cispo": "cispo", "sapo": "sapo", "gpg": "reinforce", "dppo_tv": "dppo", "dppo_kl": "dppo",
}  # fmt: skip
REDUCERS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}  # fmt: skip


def translate_algorithm(d: Draft) -> None:
    """Translate advantages, losses, reducer, shaping, planners, corrections and ppo_epochs."""
    advantage = _advantage(d)
    loss, names = _policy_loss(d)
    terms: list[dict[str, Any]] = [loss, *_critic(d, advantage), *_penalties(d, names)]
    loss_settings = ["algorithm.adv_estimator", "critic.cliprange_value", *(f"{ACTOR}.{n}" for n in names)]
    if d.flag("distillation.enabled"):
        terms, distillation_settings = translate_distillation(d, terms)
        loss_settings += distillation_settings
    else:
        # No field depends on this setting, so `finish` reports it as a default.
        d.consumed.discard("distillation.enabled")
    d.set_field("algo.loss", terms, *loss_settings)
    _reducer(d, loss["name"])
    _reward_kl(d)
    _group_filter(d)
    translate_corrections(d)
    if d.is_present(f"{ACTOR}.ppo_epochs"):
        d.copy_setting(f"{ACTOR}.ppo_epochs", int)


def _advantage(d: Draft) -> str:
    """Translate the advantage estimator, and return its short name in rlsys."""
    estimator = d.text("algorithm.adv_estimator", "gae")
    advantage_name = ADVANTAGES.get(estimator)
    if advantage_name is None:
        d.reject("algorithm.adv_estimator", "rlsys has no estimator of this name (rlsys algo list)")
        advantage_name = "rloo"
    if (
        advantage_name == "grpo"
        and not d.flag("algorithm.norm_adv_by_std_in_grpo")
        and d.is_present("algorithm.norm_adv_by_std_in_grpo")
    ):
        advantage_name = "dr_grpo"
    advantage_settings = ["algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"]
    gae = {"gamma": d.number("algorithm.gamma", 1.0), "lam": d.number("algorithm.lam", 1.0)}
    if advantage_name == "gae":
        advantage_settings += ["algorithm.gamma", "algorithm.lam"]
    elif gae["gamma"] != 1.0 and advantage_name.startswith("reinforce"):
        d.reject("algorithm.gamma", "expected 1: rlsys does not discount the return")
    advantage = {"gae": {"name": "gae", **gae}, "gpg": {"name": "gpg", "counts": "rewarded"}}
    d.set_field("algo.advantage", advantage.get(advantage_name, advantage_name), *advantage_settings)
    return advantage_name


def _policy_loss(d: Draft) -> tuple[dict[str, Any], list[str]]:
    """Return the policy loss, and the actor's settings on which the loss terms depend."""
    mode_setting = f"{ACTOR}.policy_loss.loss_mode"
    mode = d.text(mode_setting, "vanilla")
    loss: dict[str, Any] = {"name": LOSSES.get(mode, "clip")}
    if mode not in LOSSES:
        d.reject(mode_setting, "rlsys has no loss of this name (rlsys algo list)")
    low, high = (d.number(f"{ACTOR}.clip_ratio_{side}", 0.2) for side in ("low", "high"))
    if d.is_present(f"{ACTOR}.clip_ratio"):
        d.defaults.append(
            Row(
                f"{ACTOR}.clip_ratio",
                d.text(f"{ACTOR}.clip_ratio"),
                "clip_ratio_low and clip_ratio_high, 0.2 by default, take precedence",
            )
        )
    names = ["policy_loss.loss_mode", "clip_ratio_low", "clip_ratio_high", "use_kl_loss", "entropy_coeff"]
    for name, parameter in LOSS_PARAMETERS.get(loss["name"], {}).items():
        setting = first_present(d, f"{ACTOR}.policy_loss.{name}", f"{ACTOR}.{name}")
        if d.is_present(setting):
            loss[parameter] = d.number(setting, 0.0)
            names.append(setting.removeprefix(f"{ACTOR}."))
    if loss["name"] == "dppo":
        loss |= {"divergence": mode.removeprefix("dppo_"), "low": low, "high": high}
        loss["cap"] = d.number(f"{ACTOR}.clip_ratio_c", 20.0)
        names.append("clip_ratio_c")
    if loss["name"] == "clip":
        loss = {"name": "dual_clip", "dual": d.number(f"{ACTOR}.clip_ratio_c", 3.0)}
        names.append("clip_ratio_c")
    d.consumed.add(f"{ACTOR}.clip_ratio_c")
    # The entropy recipe has copies of these settings.
    for name in ("loss_mode", *LOSS_PARAMETERS.get(loss["name"], {})):
        copy = f"{ACTOR}.{name}"
        if d.is_present(copy) and d.text(copy) == d.text(f"{ACTOR}.policy_loss.{name}"):
            d.consumed.add(copy)
    if loss["name"] in ("clip", "dual_clip", "gspo", "gmpo", "cispo", "clip_cov"):
        loss |= {"clip_low": min(1.0, low), "clip_high": high}  # a ratio is at least 0
    return loss, names


def _critic(d: Draft, advantage: str) -> list[dict[str, Any]]:
    """Translate the critic of GAE, and return its loss terms."""
    terms: list[dict[str, Any]] = []
    if advantage == "gae":
        terms.append({"name": "value", "coefficient": 1.0, "clip": d.number("critic.cliprange_value", 0.5)})
        lr, warmup = d.number("critic.optim.lr", 1e-5), d.integer("trainer.critic_warmup", 0)
        d.set_field("algo.critic", {"lr": lr}, "critic.optim.lr")
        if warmup:
            d.set_field("algo.critic.warmup_steps", warmup, "trainer.critic_warmup", "critic.optim.lr")
    elif d.integer("trainer.critic_warmup", 0):
        d.reject("trainer.critic_warmup", f"expected 0: {d.text('algorithm.adv_estimator')} has no critic")
    for name in d.settings:
        if name.startswith("critic.") and (advantage != "gae" or re.search(r"\.(model\.path|enable)$", name)):
            d.consumed.add(name)
    if advantage == "gae" and d.text("critic.model.path", d.text(f"{MODEL}.path")) != d.text(f"{MODEL}.path"):
        d.reject("critic.model.path", f"expected {MODEL}.path: the critic starts from the policy's model")
    return terms


def _penalties(d: Draft, names: list[str]) -> list[dict[str, Any]]:
    """Return the loss terms of KL and entropy. `names`: the actor's settings of these terms are appended."""
    terms: list[dict[str, Any]] = []
    if d.flag(f"{ACTOR}.use_kl_loss"):
        names += ["kl_loss_coef", "kl_loss_type"]
        kind = d.text(f"{ACTOR}.kl_loss_type", "low_var_kl")
        gradient = {"gradient": "k2"} if kind.endswith("+") else {}
        kind = kind.removesuffix("+")
        if kind not in KL_KINDS:
            d.reject(f"{ACTOR}.kl_loss_type", f"expected one of {', '.join(KL_KINDS)}")
        if beta := d.number(f"{ACTOR}.kl_loss_coef", 0.001):
            terms.append({"name": "kl", "beta": beta, "kind": KL_KINDS.get(kind, "k3"), **gradient})
    if entropy := d.number(f"{ACTOR}.entropy_coeff", 0):
        terms.append({"name": "entropy", "coefficient": entropy})
    return terms


def _reducer(d: Draft, loss: str) -> None:
    """Translate the reducer of token losses. `loss`: name of the policy loss."""
    mode_setting = f"{ACTOR}.loss_agg_mode"
    mode = d.text(mode_setting, "token-mean")
    if mode not in REDUCERS:
        d.reject(mode_setting, f"expected one of {', '.join(REDUCERS)}")
    reducer = REDUCERS.get(mode, "token_mean")
    if loss in ("gspo", "gmpo", "sapo"):  # verl's functions of these losses ignore the mode
        if reducer != "sequence_mean" and len(d.get_field("algo.loss", [])) > 1:
            d.warnings.append(
                f"algo.reducer = sequence_mean: it applies to all terms; verl reduces KL and entropy by {mode}"
            )
        reducer = "sequence_mean"
    names: list[str] = [mode_setting]
    reducer_config: str | dict[str, Any] = reducer
    if reducer == "constant":
        scale = f"{ACTOR}.loss_scale_factor"
        length = d.integer(scale, d.integer("data.max_response_length", 512))
        reducer_config = {"name": "constant", "length": length if mode.endswith("norm") else 1}
        names += [scale, "data.max_response_length"] if mode.endswith("norm") else []
    d.consumed.add(f"{ACTOR}.loss_scale_factor")
    d.set_field("algo.reducer", reducer_config, *names)


def _reward_kl(d: Draft) -> None:
    """Translate the KL penalty in the reward."""
    if d.flag("algorithm.use_kl_in_reward"):
        if d.text("algorithm.kl_ctrl.type", "fixed") != "fixed":
            d.reject("algorithm.kl_ctrl.type", "expected fixed")
        if d.text("algorithm.kl_penalty", "kl") not in ("kl", "k1"):
            d.reject("algorithm.kl_penalty", "expected kl or k1")
        if beta := d.number("algorithm.kl_ctrl.kl_coef", 0.001):
            shaping = [*d.get_field("algo.shaping", []), {"name": "kl_reward", "beta": beta}]
            d.set_field("algo.shaping", shaping, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")


def _group_filter(d: Draft) -> None:
    """Translate the filter of groups with equal rewards."""
    filtered = d.flag("algorithm.filter_groups.enable")
    if filtered and not _filters_groups(d):
        for name in [name for name in d.settings if name.startswith("algorithm.filter_groups.")]:
            d.consumed.add(name)
            d.defaults.append(Row(name, d.text(name), f"{d.text(PROGRAM)} does not read this setting"))
    elif filtered:
        d.set_field("algo.planners", ["dapo"], "algorithm.filter_groups.enable")
        metric, batches = (f"algorithm.filter_groups.{name}" for name in ("metric", "max_num_gen_batches"))
        if d.text(metric, "acc") not in ("acc", "score", "seq_reward", "seq_final_reward"):
            d.reject(
                metric, "expected acc, score, seq_reward or seq_final_reward: the filter compares rewards"
            )
        elif d.is_present(metric):
            d.defaults.append(
                Row(metric, d.text(metric), "a group of equal rewards of data.reward is dropped")
            )
        if d.is_present(batches):
            d.consumed.add(batches)
            d.defaults.append(
                Row(batches, d.text(batches), "verl stops with an error after this number of batches")
            )


def _filters_groups(d: Draft) -> bool:
    """Return whether the program reads algorithm.filter_groups. verl's first and asynchronous trainers do not."""
    program, version = d.text(PROGRAM), "trainer.use_v1"
    is_first = program == "verl.trainer.main_ppo" and d.is_present(version) and not d.flag(version)
    return not is_first and program not in (*ONE_STEP_OFF, *FULLY_ASYNC, *PARTIAL_ROLLOUT, *ASYNC_FLOW)
