"""Translates data.* and the reward function."""

from __future__ import annotations

from collections.abc import Collection

from rlsys.importers.draft import Draft, Row
from rlsys.importers.sizes import data_source
from rlsys.importers.verl.names import first_present

MANAGERS = ("naive", "dapo", "prime")
"""Reward managers that call a reward function for each response."""


def translate_data(d: Draft, rewards: Collection[str]) -> None:
    """Translate data.* and the reward.

    Args:
        d: the config draft.
        rewards: short names of the built-in rewards.
    """
    files, heldout = d.get("data.train_files"), d.get("data.val_files")
    d.set_field("data.source", data_source(files), "data.train_files")
    d.set_field("data.params.path", files, "data.train_files")
    if heldout or d.is_unresolved("data.val_files"):
        d.set_field("data.params.heldout_path", heldout, "data.val_files")
    d.copy_setting("data.prompt_key")
    prefix = "data.apply_chat_template_kwargs."
    for name in [name for name in d.settings if name.startswith(prefix)]:
        d.set_field(f"data.chat_template_args.{name.removeprefix(prefix)}", d.get(name), name)
    d.copy_setting("data.seed", int)
    for name in ("data.image_key", "data.video_key", "data.audio_key"):
        d.reject(name, "no counterpart: prompts are text")
    prompt_settings = ("data.truncation", "data.filter_overlong_prompts")
    side = (
        "drop" if d.flag(prompt_settings[1]) else d.text(prompt_settings[0], "error").replace("error", "drop")
    )
    if side not in ("drop", "left", "right"):
        d.reject("data.truncation", "expected error, left or right")
    limit = d.integer("data.max_prompt_length", 512)
    d.set_field("data.params.max_prompt_tokens", limit, "data.max_prompt_length")
    d.set_field("data.params.overlong_prompts", side, *prompt_settings)
    if d.is_present("data.shuffle") and not d.flag("data.shuffle"):
        d.set_field("data.params.shuffle", False, "data.shuffle")
    else:
        d.consumed.discard("data.shuffle")
    _rewards(d, rewards)


def _rewards(d: Draft, rewards: Collection[str]) -> None:
    """Translate the reward function, the reward manager, and the penalty of overlong responses."""
    # verl moved its reward settings to `reward` in 2026; scripts have the old or the new names.
    path, function = (
        first_present(d, f"custom_reward_function.{part}", f"reward.custom_reward_function.{part}")
        for part in ("path", "name")
    )
    if d.is_present(path):
        d.set_field("data.reward", f"{d.text(path)}:{d.text(function, 'compute_score')}", path, function)
    else:
        d.set_field("data.reward", "math" if "math" in rewards else "exact_answer")
        d.warnings.append(
            f"data.reward = {d.config['data']['reward']}: verl chooses a reward by the data_source of each row; set "
            "data.reward if the answers are not mathematics"
        )
    for enable in ("reward_model.enable", "reward.reward_model.enable"):
        if d.is_present(enable) and (d.is_unresolved(enable) or d.flag(enable)):
            d.reject(
                enable, "no counterpart: run the reward model as a server, and query it in a reward function"
            )
    manager = first_present(
        d, "reward_model.reward_manager", "reward.reward_manager.name", "reward.reward_manager"
    )
    if d.text(manager, "naive") not in MANAGERS:
        d.reject(manager, f"expected {', '.join(MANAGERS)}: data.reward is called for each response")
    elif d.is_present(manager) and not d.is_unresolved(manager):
        d.defaults.append(Row(manager, str(d.settings[manager]), "data.reward is called for each response"))
    _overlong(d)


def _overlong(d: Draft) -> None:
    """Translate the penalty of overlong responses, whose settings have one of several sections."""
    prefixes = [
        f"{section}{buffer}."
        for section in ("reward_model.", "reward.")
        for buffer in ("reward_kwargs.overlong_buffer_cfg", "overlong_buffer")
    ]
    prefix = first_present(d, *(f"{prefix}enable" for prefix in prefixes)).removesuffix("enable")
    kwargs = prefix.removesuffix("overlong_buffer_cfg.")
    if d.flag(f"{prefix}enable") or d.is_unresolved(f"{prefix}enable"):
        cap = d.integer(f"{kwargs}max_resp_len", d.integer("data.max_response_length", 512))
        shaping = {"name": "overlong", "cap": cap, "buffer": d.integer(f"{prefix}len", cap // 5)}
        shaping["factor"] = d.number(f"{prefix}penalty_factor", 1.0)
        names = (f"{prefix}enable", f"{prefix}len", f"{prefix}penalty_factor", f"{kwargs}max_resp_len")
        d.set_field("algo.shaping", [shaping], *names)
        d.consumed.add(f"{prefix}log")
