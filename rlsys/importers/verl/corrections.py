"""Translates algorithm.rollout_correction: importance weights and rejections."""

from __future__ import annotations

import math
import re
from typing import Any

from rlsys.importers.draft import Draft
from rlsys.importers.verl.names import ACTOR, FULLY_ASYNC, ONE_STEP_OFF, PROGRAM, first_present


def translate_corrections(d: Draft) -> None:
    """Translate importance weights and rejections to algo.corrections, and the bypass mode to algo.anchor."""
    section = "algorithm.rollout_correction"
    bypass = f"{section}.bypass_mode"
    is_bypassed = d.get(PROGRAM) in (*ONE_STEP_OFF, *FULLY_ASYNC)
    if d.is_present(bypass):
        is_bypassed = d.flag(bypass)
    level = d.text(f"{section}.rollout_is", "null")
    capped = first_present(
        d, f"{ACTOR}.tis_imp_ratio_cap", "algorithm.rollout_is_threshold", f"{section}.rollout_is_threshold"
    )
    level_settings = [f"{section}.rollout_is", f"{section}.rollout_is_batch_normalize"]
    corrections: list[dict[str, Any]] = []
    names = [capped]
    if is_bypassed:
        loss = f"{section}.loss_type"
        if d.text(loss, "ppo_clip") != "ppo_clip":
            d.reject(loss, "expected ppo_clip in bypass mode (algo.anchor = mu)")
        d.set_field("algo.anchor", "mu", bypass)
        # With this anchor, the ratio in the loss is already the importance weight.
        d.consumed |= {loss, capped, *level_settings}
    elif capped.startswith(section) and level in ("null", "None"):
        d.consumed |= {capped, *level_settings}
    elif not re.fullmatch(r"[\d.eE+-]*|null|None", d.text(capped)):
        low, _, high = d.text(capped).partition("_")
        corrections.append({"name": "icepop", "low": float(low), "high": float(high or low)})
    elif (cap := d.number(capped, 2.0 if capped.startswith(section) else 0)) > 0 or d.is_unresolved(capped):
        corrections.append({"name": "tis", "cap": cap})
    if corrections and capped.startswith(section):
        names += level_settings
        if level == "sequence":
            corrections[0]["level"] = "sequence"
        if d.flag(level_settings[1]):
            corrections[0]["normalise"] = True
    corrections += _rejections(d, section, names)
    if any(isinstance(t, dict) and t["name"] == "distill_pg" for t in d.get_field("algo.loss", [])):
        for name in names if corrections else ():
            d.reject(
                name,
                "no counterpart: rlsys corrects only the policy loss; verl also corrects the distillation",
            )
    if corrections:
        d.set_field("algo.corrections", corrections, *names)


def _rejections(d: Draft, section: str, names: list[str]) -> list[dict[str, Any]]:
    """Return the corrections of rollout_rs.

    Args:
        d: the config draft.
        section: verl's section of corrections.
        names: the settings of rollout_rs are appended.
    """
    rule, bound = f"{section}.rollout_rs", f"{section}.rollout_rs_threshold"
    lower_bound, veto = f"{bound}_lower", f"{section}.rollout_token_veto_threshold"
    option = d.text(rule, "null").strip("'")
    has_veto = d.text(veto, "null") not in ("null", "None")
    if option in ("null", "None") and not has_veto:
        d.consumed |= {rule, bound, lower_bound, veto}
        return []
    names += [rule, bound, lower_bound, veto]
    if option in ("token", "sequence", "geometric") or has_veto:  # settings of verl before 2026
        return [_ratio_rejection(d, option, rule)]
    rules, bounds = d.text(rule).strip("'").split(","), d.text(bound).strip("'").split(",")
    rejections = []
    for option, limits in zip(rules, bounds * len(rules) if len(bounds) == 1 else bounds, strict=False):
        match = re.fullmatch(r"(token|seq_(?:sum|mean|max))_(k[123])", option.strip())
        low, _, high = limits.strip().rpartition("_")
        if match is None or not re.fullmatch(r"[\d.eE+-]+", high) or not re.fullmatch(r"[\d.eE+-]*", low):
            d.reject(rule, "expected rules such as token_k1 or seq_mean_k3, and their bounds")
            break
        rejection = {"name": "rejection", "kind": match[2], "level": match[1].replace("seq", "sequence")}
        if (
            match[2] == "k1"
        ):  # the bounds are those of the ratio; the rejection expects those of its logarithm
            upper = float(high)
            rejection |= {"low": math.log(float(low) if low else 1 / upper), "high": math.log(upper)}
        else:
            rejection["high"] = float(high)
        rejections.append(rejection)
    return rejections


def _ratio_rejection(d: Draft, level: str, rule: str) -> dict[str, Any]:
    """Return the correction of a rule with bounds of the ratio.

    Args:
        d: the config draft.
        level: value of the rule: token, sequence or geometric.
        rule: the setting of the rule.
    """
    bound, veto = f"{rule}_threshold", f"{rule.removesuffix('rs')}token_veto_threshold"
    high = d.number(bound, 2.0)
    is_symmetric = d.text(f"{bound}_lower", "null") in ("null", "None")
    low = 1 / high if is_symmetric else d.number(f"{bound}_lower", 0.0)
    rejection: dict[str, Any] = {
        "name": "icepop",
        "weighted": False,
        "level": level,
        "low": low,
        "high": high,
    }
    if level not in ("token", "sequence", "geometric"):
        d.reject(veto, f"supported only with {rule} = token, sequence or geometric")
    if d.text(veto, "null") not in ("null", "None"):
        rejection["veto"] = d.number(veto, 0.0)
    return rejection
