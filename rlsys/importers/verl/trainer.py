"""Translates trainer.*, optimizer, memory options, FP8, adapters and multi-token prediction."""

from __future__ import annotations

from rlsys.importers.draft import Draft
from rlsys.importers.sizes import LORA_START, omit_offload, set_steps
from rlsys.importers.verl.names import ACTOR, MODEL, NEVER, ROLLOUT
from rlsys.importers.verl.optimizer import translate_optimizer

MEGATRON_MATRICES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",),
}  # fmt: skip
"""Megatron's names of adapted matrices -> Hugging Face's."""


def translate_trainer(d: Draft) -> None:
    """Translate steps, optimizer, memory options, FP8, checkpoints, adapters and multi-token prediction."""
    set_steps(d, "trainer.total_training_steps", "trainer.total_epochs", 30)
    translate_optimizer(d, f"{ACTOR}.optim", "trainer", 1e-6)
    checkpointed = f"{MODEL}.enable_gradient_checkpointing"
    if not d.is_present(checkpointed) or d.is_unresolved(checkpointed) or d.flag(checkpointed):
        d.set_field("trainer.recompute", ["layer"], checkpointed)
    else:
        d.consumed.discard(checkpointed)
    offloads = [
        f"{ACTOR}.{part}.optimizer_offload" for part in ("megatron", "fsdp_config", "veomni", "engine")
    ]
    d.consumed.update(offloads)
    if any(d.flag(name) for name in offloads):
        d.set_field("trainer.offload_optimizer", 1.0, *offloads)
    balance = f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff"
    if d.number(balance, 0.0):
        d.set_field("trainer.balance_loss", d.number(balance, 0.0), balance)
        d.warnings.append(
            "trainer.balance_loss: rlsys balances each sequence; Megatron's aux_loss balances a micro-batch"
        )
    rate = f"{ACTOR}.megatron.override_transformer_config.moe_router_bias_update_rate"
    if d.number(rate, 0.0):
        d.set_field("trainer.balance_rate", d.number(rate, 0.0), rate)
    _fp8(d)
    translate_checkpoints(d)
    translate_lora(d, MODEL)
    _multi_token_prediction(d)


def _multi_token_prediction(d: Draft) -> None:
    """Translate the training of a layer for multi-token prediction."""
    mtp = f"{MODEL}.mtp"
    if d.flag(f"{mtp}.enable") and d.flag(f"{mtp}.enable_train"):
        weight, detached = f"{mtp}.mtp_loss_scaling_factor", f"{mtp}.detach_encoder"
        names = (f"{mtp}.enable", f"{mtp}.enable_train")
        d.set_field("trainer.mtp_loss", d.number(weight, 0.1), weight, *names)
        d.set_field("trainer.mtp_trunk", not d.flag(detached), detached, *names)
        omit_offload(d)
    else:
        d.consumed |= {f"{mtp}.{name}" for name in ("enable", "enable_train", "detach_encoder")}


def _fp8(d: Draft) -> None:
    """Translate FP8 of engines and trainer."""
    transformer = f"{ACTOR}.megatron.override_transformer_config"
    engines, kind, recipe = f"{ROLLOUT}.quantization", f"{transformer}.fp8", f"{transformer}.fp8_recipe"
    d.consumed |= {recipe, f"{ACTOR}.optim.override_optimizer_config.fp8_recipe"}
    in_engines = d.text(engines, "null") not in ("null", "None")
    if in_engines and d.text(engines) != "fp8":
        d.reject(engines, "expected fp8")
    if d.text(kind, "null") not in ("null", "None", "False"):
        if d.text(kind) not in ("e4m3", "hybrid") or d.text(recipe, "delayed") != "blockwise":
            d.reject(kind, f"expected e4m3 or hybrid, with {recipe} = blockwise")
        d.set_field("model.fp8", "both" if in_engines else "trainer", kind, recipe, engines)
        if d.text(kind) == "hybrid":
            d.set_field("model.fp8_format", "hybrid", kind, recipe, engines)
        d.warnings.append(
            "model.fp8: the trainer's scales are float32 numbers; with NVTE_FP8_BLOCK_SCALING_FP32_SCALES=0 the "
            "script's scales are powers of two"
        )
    elif in_engines:
        d.set_field("model.fp8", "rollout", engines)
    d.consumed |= {engines, kind}


def translate_checkpoints(d: Draft) -> None:
    """Translate the interval of checkpoints and the number that is kept."""
    interval = d.integer("trainer.save_freq", -1)
    d.set_field("trainer.checkpoint_every", interval if interval > 0 else NEVER, "trainer.save_freq")
    d.copy_setting("trainer.max_actor_ckpt_to_keep", int)


def translate_lora(d: Draft, model: str) -> None:
    """Translate LoRA.

    Args:
        d: the config draft.
        model: section of the model. Its `lora_rank` adapts matrices by Hugging Face's names; its section `lora`, for
            verl's Megatron trainer, by Megatron's names.
    """
    rank, alpha, targets = (f"{model}.{x}" for x in ("lora_rank", "lora_alpha", "target_modules"))
    target_modules = d.get(targets, "all-linear")
    if d.integer(rank, 0) > 0 or d.is_unresolved(rank):
        d.set_field("trainer.lora.rank", d.integer(rank, 0), rank)
        d.set_field("trainer.lora.alpha", d.number(alpha, 16), alpha, rank)
        if isinstance(target_modules, list):
            d.set_field("trainer.lora.targets", target_modules, targets, rank)
        elif target_modules != "all-linear":
            d.reject(targets, "expected all-linear or a list of names; set trainer.lora.targets")
    else:
        d.consumed |= {alpha, targets, f"{model}.exclude_modules"}
    _megatron_lora(d, f"{model}.lora")


def _megatron_lora(d: Draft, section: str) -> None:
    """Translate LoRA of verl's Megatron trainer, whose matrices have Megatron's names."""
    if d.integer(f"{section}.rank", 0) > 0:
        d.set_field("trainer.lora.rank", d.integer(f"{section}.rank", 0), f"{section}.rank")
        d.set_field(
            "trainer.lora.alpha", d.number(f"{section}.alpha", 32), f"{section}.alpha", f"{section}.rank"
        )
        matrices = d.get(f"{section}.target_modules", list(MEGATRON_MATRICES))
        if not isinstance(matrices, list) or not set(matrices) <= set(MEGATRON_MATRICES):
            d.reject(f"{section}.target_modules", f"expected some of {', '.join(MEGATRON_MATRICES)}")
        elif set(matrices) != set(MEGATRON_MATRICES):
            names = [name for matrix in matrices for name in MEGATRON_MATRICES[matrix]]
            d.set_field("trainer.lora.targets", names, f"{section}.target_modules", f"{section}.rank")
        d.consumed |= {f"{section}.target_modules", f"{section}.merge"}
        initial = f"{section}.lora_A_init_method"
        if d.text(initial, "xavier") not in ("xavier", "kaiming", "uniform", "normal"):
            d.reject(
                initial,
                "expected xavier, kaiming, uniform or normal; rlsys samples A uniformly, as PEFT does",
            )
        d.consumed.add(initial)
        d.warnings.append(LORA_START)
        if d.number(f"{section}.dropout", 0.0):
            d.reject(f"{section}.dropout", "expected 0: rlsys has no dropout")
    else:
        d.consumed.update(name for name in d.settings if name.startswith(f"{section}."))
