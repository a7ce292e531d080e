"""Checks of the parallel layout and of trainer settings against a model's config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlsys.config import Config
from rlsys.config.precision import BLOCK
from rlsys.convert.adapters import check_lora
from rlsys.convert.config import HFConfig
from rlsys.core.errors import UserError
from rlsys.core.model_folder import read_fields


def trained_model(config: Config) -> HFConfig:
    """Read config.json of model.path; its MTP layers count as trained if trainer.mtp_loss is set.

    Raises:
        UserError: See HFConfig.read.
    """
    hf = HFConfig.read(config.model.path)
    return replace(hf, mtp=True) if config.trainer.mtp_loss and not hf.mtp else hf


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each pipeline stage.

    All stages have the same number, but the last one, which has the head, may have fewer. The last number is 0 or
    negative if the model has too few layers.
    """
    per_stage = -(-layers // stages)
    return [per_stage] * (stages - 1) + [layers - per_stage * (stages - 1)]


def layer_stages(layers: int, pp: int, vpp: int) -> list[int]:
    """Return the pipeline stage of each layer.

    A stage has consecutive layers. With interleaved stages (vpp > 1), it has vpp runs of consecutive layers.
    """
    if vpp > 1:
        layers_per_run = layers // (pp * vpp)
        return [i // layers_per_run % pp for i in range(layers)]
    return [stage for stage, n in enumerate(stage_layers(layers, pp)) for _ in range(n)]


def check_layout(config: Config, hf: HFConfig) -> None:
    """Raise UserError if the sizes of the model are not divisible by those of the layout and the engines."""
    p, path = config.parallel, config.model.path
    if p.pp > hf.layers:
        raise UserError(f"parallel.pp = {p.pp}: expected at most the {hf.layers} layers of {path}")
    stages = stage_layers(hf.layers, p.pp)
    if p.vpp == 1 and stages[-1] < 1:
        raise UserError(
            f"parallel.pp = {p.pp} does not divide layers = {hf.layers} of {path}: with {stages[0]} layers in each "
            f"stage, the last stage would have {max(0, stages[-1])}"
        )
    if hf.family.stacks:
        _check_stacks(config, hf)
    if hf.delta is not None and p.cp > 1:
        raise UserError(
            f"parallel.cp = {p.cp}: expected 1, because {path} has gated delta nets, whose states depend on all "
            "earlier tokens of a sequence"
        )
    if p.ep > 1 and not hf.experts:
        raise UserError(f"parallel.ep = {p.ep}: expected 1, because {path} has no experts")
    for name, size, divided_name, total in (
        ("parallel.pp * vpp", p.pp * p.vpp if p.vpp > 1 else 1, "layers", hf.layers),
        ("parallel.tp", p.tp, "key-value heads", hf.kv_heads),
        ("parallel.tp", p.tp, "attention heads", hf.heads),
        ("parallel.tp", p.tp, "key heads of the gated delta net", hf.delta.key_heads if hf.delta else 0),
        ("parallel.tp", p.tp, "vocab_size", hf.padded_vocab_size),
        ("parallel.tp", p.tp, "the feed-forward size", 0 if all(hf.moe_layers) else hf.ffn_size),
        ("parallel.tp", p.tp, "the shared experts' feed-forward size", hf.shared_ffn_size),
        ("parallel.ep", p.ep, "experts", hf.experts),
        ("parallel.etp", p.expert_tp, "the experts' feed-forward size", hf.expert_ffn_size),
        *(("engine.tp", tp, "attention heads", hf.heads) for tp in config.engine.tps),
    ):
        if total % size:
            raise UserError(f"{name} = {size} does not divide {divided_name} = {total} of {path}")


def _check_stacks(config: Config, hf: HFConfig) -> None:
    """Raise UserError for settings that rlsys does not support for experts that are stacked in one tensor."""
    path = config.model.path
    biased = any(rule.per_expert and rule.megatron.endswith(".bias") for rule in hf.family.rules)
    if biased and config.parallel.expert_tp > 1:
        raise UserError(
            f"parallel.etp = {config.parallel.expert_tp}: expected 1, because the experts of {path} have biases, "
            "which megatron-core does not shard"
        )
    if config.model.fp8 != "none":
        raise UserError(f"model.fp8 = {config.model.fp8}: expected none, because {path} has stacked experts")


def check_fp8(config: Config, hf: HFConfig) -> None:
    """Raise UserError if model.fp8 does not support the model, or an engine's rank would hold partial FP8 blocks."""
    if config.model.fp8 == "none":
        return
    path = config.model.path
    if hf.delta is not None:
        raise UserError(
            f"model.fp8 = {config.model.fp8}: expected none, because FP8 is untested with gated delta nets, which "
            f"{path} has"
        )
    divided = [
        ("the feed-forward size", 0 if all(hf.moe_layers) else hf.ffn_size),
        ("the experts' feed-forward size", hf.expert_ffn_size),
        ("the shared experts' feed-forward size", hf.shared_ffn_size),
        ("the size of all attention heads", hf.heads * hf.head_dim),
    ]
    sizes = [(divided_name, size, tp, tp) for tp in config.engine.tps for divided_name, size in divided]
    for divided_name, size, ranks, tp in [
        ("the hidden size", hf.hidden_size, 1, config.engine.tps[0]),
        *sizes,
    ]:
        if size % (BLOCK * ranks):
            raise UserError(
                f"model.fp8 = {config.model.fp8}: {divided_name} = {size} of {path}; expected a multiple of "
                f"{BLOCK * ranks}, so that each of engine.tp = {tp} ranks has whole blocks of {BLOCK}"
            )


def check_quantised(path: Path, hf: HFConfig) -> None:
    """Raise UserError if the weights in model.path are quantised."""
    if hf.quantised:
        raise UserError(
            f"model.path = {path}: its weights are quantised ({hf.quantised}), and engines that serve it cannot load "
            f"new weights; expected the output of `rlsys convert hf-to-megatron --hf {path} --out FOLDER`"
        )


def check_requirements(config: Config, hf: HFConfig) -> None:
    """Raise UserError for settings of trainer, engine and rollout that the model does not support."""
    check_fp8(config, hf)
    check_lora(config, hf)
    path = config.model.path
    check_quantised(path, hf)
    _check_tested(config, hf)
    _check_trainer(config, hf)
    if config.rollout.max_response_tokens >= hf.context_length:
        raise UserError(
            f"rollout.max_response_tokens = {config.rollout.max_response_tokens}: expected less than the context of "
            f"{hf.context_length} tokens of {path}, which also contains the prompt"
        )


def _check_tested(config: Config, hf: HFConfig) -> None:
    """Raise UserError for settings that are untested with the attention of the model."""
    path = config.model.path
    if hf.delta is not None and config.trainer.optimizer == "muon":
        raise UserError(
            f"trainer.optimizer = muon: expected adamw, because Muon is untested with gated delta nets, which {path} "
            "has"
        )
    if config.engine.ngram_drafts and (hf.latent is not None or hf.delta is not None or hf.window):
        raise UserError(
            f"engine.ngram_drafts = {config.engine.ngram_drafts}: expected 0, because drafts are untested with the "
            f"attention of {path}: latent attention, gated delta nets or windows"
        )


def _check_trainer(config: Config, hf: HFConfig) -> None:
    """Raise UserError for trainer settings that need experts, MTP layers or modules that the model lacks."""
    t, path = config.trainer, config.model.path
    balance = (("balance_loss", t.balance_loss), ("balance_rate", t.balance_rate))
    for field, value in balance:
        if value and not hf.experts:
            raise UserError(f"trainer.{field} = {value}: expected 0, because {path} has no experts")
    if t.balance_rate and hf.routing.kind != "sigmoid":
        raise UserError(
            f"trainer.balance_rate = {t.balance_rate}: expected 0, because the routers of {path} have no bias"
        )
    if t.mtp_loss and (reason := _no_prediction(hf)):
        raise UserError(f"trainer.mtp_loss = {t.mtp_loss:g}: {reason} of {path}; expected 0")
    is_absent = {
        "mla_up_proj": hf.latent is None,
        "shared_experts": not hf.shared_ffn_size,
        "moe": not hf.experts,
    }
    for module in t.recompute:
        if is_absent.get(module):
            raise UserError(f"trainer.recompute contains {module}; expected only modules that {path} has")


def _no_prediction(hf: HFConfig) -> str:
    """Return why no MTP layer can be trained, as text before "of PATH"; "" if one can be trained."""
    if not hf.prediction_layers:
        return "no layer for multi-token prediction (num_nextn_predict_layers) is in config.json"
    if not hf.family.mtp:
        return f"training of multi-token prediction is not supported for {hf.family.architecture}, the architecture"
    if hf.prediction_layers > 1:
        return f"only one layer for multi-token prediction can be trained, but not the {hf.prediction_layers} layers"
    if hf.tied:
        return "multi-token prediction is untested with tie_word_embeddings = true, the value in config.json"
    return ""


def check_teacher(config: Config, hf: HFConfig, teacher: HFConfig, folder: Path) -> None:
    """Raise UserError if the teacher in `folder` does not fit the layout or the vocabulary of the policy `hf`."""
    check_layout(config, teacher)
    check_vocabulary(config, hf, teacher.vocab_size, folder)


def check_vocabulary(config: Config, hf: HFConfig, tokens: int, folder: Path) -> None:
    """Raise UserError if the vocabulary of a teacher differs in size from that of the policy.

    Args:
        config: The config.
        hf: The policy.
        tokens: Number of tokens of the teacher's vocabulary.
        folder: Folder of the teacher.
    """
    if config.algo.teacher is not None and tokens != hf.vocab_size:
        field = next(f for f, path in config.algo.teacher.folders.items() if path == folder)
        raise UserError(
            f"algo.teacher.{field} = {str(folder)!r}: its vocabulary has {tokens} tokens; expected {hf.vocab_size}, "
            "as the policy's"
        )


def read_vocabulary(folder: Path) -> int:
    """Read vocab_size in the config.json of a model of any architecture. Raises UserError if that fails."""
    try:
        return int(read_fields(folder)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{folder / 'config.json'}: cannot read vocab_size: {type(e).__name__} {e}") from None
