"""Translates the optimizer and the schedule of its learning rate."""

from __future__ import annotations

from rlsys.core.errors import UserError
from rlsys.importers.draft import Draft, Row
from rlsys.importers.verl.names import ACTOR, PROGRAM, first_present

_SCHEDULES = {"veomni": ("cosine", 0.0), "torchtitan": ("linear", 0.0), "automodel": ("cosine", 0.01)}
"""verl's trainer -> its default schedule, and the last learning rate as a share of the first. Other trainers have a
constant learning rate."""


def translate_optimizer(d: Draft, optim: str, section: str, default_lr: float) -> None:
    """Translate the optimizer and the schedule of the learning rate.

    Args:
        d: the config draft.
        optim: section of verl's settings with the optimizer.
        section: section of the config with the schedule.
        default_lr: verl's default learning rate.
    """
    lr = d.number(f"{optim}.lr", default_lr)
    d.set_field("trainer.lr", lr, f"{optim}.lr")
    _warm_up(d, optim, lr)
    for name in ("lr_decay_steps", "total_training_steps"):
        decay = d.integer(f"{optim}.{name}", -1)
        if decay > 0 and decay == d.integer("trainer.total_training_steps", 0):
            d.defaults.append(Row(f"{optim}.{name}", str(decay), "trainer.steps"))
        elif decay > 0 and d.text(f"{optim}.lr_decay_style", "constant") == "constant":
            d.defaults.append(Row(f"{optim}.{name}", str(decay), "not in use: the learning rate is constant"))
        elif decay <= 0:
            d.consumed.discard(f"{optim}.{name}")
    _decay(d, optim, section, lr)
    d.set_field("trainer.weight_decay", d.number(f"{optim}.weight_decay", 0.01), f"{optim}.weight_decay")
    betas = d.get(f"{optim}.betas", [0.9, 0.999])
    if not (isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, float | int) for b in betas)):
        raise UserError(f"{optim}.betas = {str(betas)[:80]}: expected two numbers")
    d.set_field("trainer.betas", betas, f"{optim}.betas")
    clipped = first_present(d, f"{ACTOR}.grad_clip", f"{optim}.clip_grad")
    d.set_field("trainer.grad_clip", d.number(clipped, 1.0), clipped)


def _warm_up(d: Draft, optim: str, lr: float) -> None:
    """Translate the warm-up of the learning rate `lr`."""
    if (initial := d.number(f"{optim}.lr_warmup_init", 0.0)) > 0:
        if initial >= lr:
            d.reject(f"{optim}.lr_warmup_init", f"expected less than {optim}.lr = {lr:g}")
        d.set_field("trainer.lr_start", initial / lr, f"{optim}.lr_warmup_init", f"{optim}.lr")
    else:
        d.consumed.discard(f"{optim}.lr_warmup_init")
    warmup, ratio = f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio"
    if d.integer(warmup, -1) >= 0 or d.is_unresolved(warmup):
        d.set_field("trainer.warmup_steps", d.integer(warmup, 0), warmup)
        d.consumed.add(ratio)
    elif d.number(ratio, 0) or d.is_unresolved(ratio):
        d.set_field("trainer.warmup_fraction", d.number(ratio, 0), ratio, warmup)
    else:
        d.set_field("trainer.warmup_steps", 0, warmup, ratio)


def _decay(d: Draft, optim: str, section: str, lr: float) -> None:
    """Translate the decay of the learning rate `lr`. The other arguments are those of translate_optimizer."""
    styles = [
        f"{optim}.{name}" for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style", "decay_type")
    ]
    style_setting = first_present(d, *styles)
    default_style, default_end = _SCHEDULES.get(_trainer_kind(d), ("constant", 0.0))
    if is_old_fine_tuning(d):
        default_style = "cosine"
    style = d.text(style_setting, default_style)
    if style not in ("constant", "linear", "cosine"):
        d.reject(style_setting, "expected constant, linear or cosine")
    d.set_field(f"{section}.schedule", style, style_setting)
    ratio_setting = first_present(d, f"{optim}.min_lr_ratio", f"{optim}.min_lr_factor")
    min_lr_setting = first_present(d, f"{optim}.min_lr", f"{optim}.lr_min")
    if end := d.number(ratio_setting, default_end):
        d.set_field(f"{section}.lr_end", end, ratio_setting)
    elif min_lr := d.number(min_lr_setting, 0.0):
        d.set_field(f"{section}.lr_end", min_lr / lr, min_lr_setting, f"{optim}.lr")
    elif section == "sft":
        d.set_field("sft.lr_end", 0.0, f"{optim}.min_lr")


def is_old_fine_tuning(d: Draft) -> bool:
    """Return whether the program is verl's first trainer for fine-tuning, which has other defaults."""
    return "fsdp_sft_trainer" in str(d.get(PROGRAM))


def _trainer_kind(d: Draft) -> str:
    """Return verl's name of the trainer."""
    return d.text("model_engine") or d.text(f"{ACTOR}.strategy") or d.text("engine") or "fsdp"
