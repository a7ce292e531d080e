"""verl's launch scripts and YAML (trainer/config/ppo_trainer.yaml, ppo_megatron_trainer.yaml) -> a config of ours.

Read as of August 2026; defaults that a script leaves out are verl's own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from rlsys.errors import UserError
from rlsys.foreign.draft import Draft
from rlsys.foreign.shell import Script
from rlsys.foreign.sizes import Sizes, put_anchor, put_sizes, source_of

VERL = {
    "data.train_files": "data.params.path, with data.source=parquet",
    "data.val_files": "data.params.heldout_path",
    "data.prompt_key": "data.keys.prompt",
    "data.tools_key": "data.keys.tools",
    "data.apply_chat_template_kwargs": "data.chat_template_args",
    "data.train_batch_size": "rollout.groups_per_step",
    "data.max_response_length": "rollout.max_response_tokens",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.recompute=[layer]",
    "actor_rollout_ref.model.lora_rank": "trainer.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "trainer.lora.alpha",
    "actor_rollout_ref.model.target_modules": "trainer.lora.targets, unset for all-linear",
    "actor_rollout_ref.actor.optim.lr": "trainer.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "trainer.warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "trainer.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "trainer.grad_clip",
    "actor_rollout_ref.actor.optim.clip_grad": "trainer.grad_clip",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algo.minibatches, the number of mini-batches in a train step",
    "actor_rollout_ref.actor.ppo_epochs": "algo.epochs",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.token_budget, the tokens of a micro-batch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.token_budget",
    "actor_rollout_ref.actor.clip_ratio": "algo.loss=[{name: clip, clip_low: X, clip_high: X}]",
    "actor_rollout_ref.actor.clip_ratio_low": "algo.loss=[{name: clip, clip_low: X}]",
    "actor_rollout_ref.actor.clip_ratio_high": "algo.loss=[{name: clip, clip_high: X}]",
    "actor_rollout_ref.actor.use_kl_loss": "algo.loss=[clip, kl]",
    "actor_rollout_ref.actor.kl_loss_coef": "algo.loss=[clip, {name: kl, beta: X}]",
    "actor_rollout_ref.actor.entropy_coeff": "algo.loss=[clip, {name: entropy, coefficient: X}]",
    "actor_rollout_ref.actor.loss_agg_mode": "algo.reducer",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "parallel.tp",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "parallel.pp",
    "actor_rollout_ref.actor.megatron.context_parallel_size": "parallel.cp",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "parallel.ep",
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": "parallel.etp",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine.tp",
    "actor_rollout_ref.rollout.max_num_seqs": "engine.max_running_requests",
    "actor_rollout_ref.rollout.multi_turn.format": "engine.tool_call_parser",
    "algorithm.adv_estimator": "algo.advantage",
    "algorithm.norm_adv_by_std_in_grpo": "algo.advantage=dr_grpo, which does not divide by the deviation",
    "algorithm.use_kl_in_reward": "algo.shaping=[kl_reward]",
    "algorithm.kl_ctrl.kl_coef": "algo.shaping=[{name: kl_reward, beta: X}]",
    "algorithm.filter_groups.enable": "algo.planners=[dapo]",
    "custom_reward_function.path": "data.reward=path/to/file.py:function",
    "critic.optim.lr": "algo.critic.lr",
    "trainer.total_epochs": "trainer.steps, the train steps of the whole run",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.nnodes": "launch.nodes",
    "trainer.n_gpus_per_node": "launch.gpus_per_node",
    "trainer.save_freq": "trainer.checkpoint_every",
    "trainer.test_freq": "eval.every",
    "trainer.default_local_dir": "run.dir",
    "trainer.project_name": "run.dir",
    "trainer.experiment_name": "run.dir",
    "trainer.resume_mode": "run.dir: the same command with the same folder goes on",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
}
"""Of verl's YAML, the paths that its own example scripts use most -> our field, and how it differs, if it does."""

SECTIONS = (
    "data",
    "actor_rollout_ref",
    "algorithm",
    "trainer",
    "critic",
    "reward_model",
    "custom_reward_function",
)
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
ADVANTAGES = {
    "grpo": "grpo", "gae": "gae", "rloo": "rloo", "rloo_vectorized": "rloo", "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "opo": "opo", "grpo_passk": "grpo_passk", "gpg": "gpg",
    "gdpo": "gdpo", "optimal_token_baseline": "optimal_token_baseline",
}  # fmt: skip
LOSSES = {
    "vanilla": "clip", "gspo": "gspo", "geo_mean": "gmpo", "clip_cov": "clip_cov", "kl_cov": "kl_cov",
    "cispo": "cispo", "sapo": "sapo",
}  # fmt: skip
REDUCERS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
NEEDLESS = (
    (r"fsdp|ulysses|strategy$|param_offload|grad_offload", "the trainer is Megatron; parallel and trainer say how"),
    (r"micro_batch_size|dynamic_bsz|log_prob_max_token_len", "micro-batches are packed to trainer.token_budget"),
    (r"gpu_memory_utilization|max_num_batched|chunked_prefill|enforce_eager|free_cache|max_model_len|cudagraph|"
     r"enable_prefix_caching|rollout\.name$|rollout\.mode$|load_format|disable_log_stats|engine_kwargs|layered_summon",
     "engines are SGLang; engine.extra_args passes what they need beside the sizes"),
    (r"remove_padding|fused_kernels|mbridge|dist_checkpoint|override_transformer_config|torch_compile|"
     r"override_optimizer_config|use_liger|trust_remote|shm|override_config|torch_dtype",
     "ours always packs, converts bit by bit and chooses its kernels"),
    (r"\.ref\.", "the reference shares the trainer's layout"),
    (r"log_prob_micro|logger|project_name|experiment_name|log_val|val_before_train|balance_batch|resume|device$|"
     r"validation_data_dir|rollout_data_dir|profil|nccl_timeout",
     "the run folder has all of it: metrics, samples, checkpoints; run.trackers sends it on"),
    (r"filter_overlong_prompts|truncation|max_prompt_length|shuffle|dataloader|return_raw|data\.seed|"
     r"val_batch_size|num_workers|trust",
     "a prompt that is too long is refused with its number; prompts are shuffled by data.seed"),
    (r"checkpoint\.|max_critic|critic_warmup|del_local", "trainer.checkpoint_every and keep_checkpoints"),
    (r"clip_ratio_c$", "the lower bound of dual clip is algo.loss dual_clip; the usual one never acts at 10"),
)  # fmt: skip


def settings_of(text: str, yaml_data: Any, variables: Mapping[str, str]) -> dict[str, Any]:
    """By dotted name. `yaml_data`: of a YAML file; None for a script. Raises UserError when nothing is there."""
    if yaml_data is not None:
        return _flat(yaml_data)
    found: dict[str, Any] = {}
    for words in Script(text, variables).commands:
        for word in words:
            match = re.match(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)$", word, re.DOTALL)
            if match and match[1].partition(".")[0] in SECTIONS and "." in match[1]:
                found[match[1]] = match[2]
    if not found:
        raise UserError("no settings of verl in it: expected words such as data.train_batch_size=256")
    return found


def _flat(data: Any, before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{before}{key}.")
        elif value is not None:
            out[f"{before}{key}"] = value
    return out


def translate(settings: Mapping[str, Any], rewards: Collection[str]) -> Draft:
    """`rewards`: short names of ours. Raises UserError for a script without model or data."""
    d = Draft(dict(settings), VERL)
    if not d.given(f"{MODEL}.path") or not d.given("data.train_files"):
        raise UserError(f"expected {MODEL}.path and data.train_files in it")
    name = d.get("trainer.experiment_name", "imported")
    local = d.get("trainer.default_local_dir")
    d.put(
        "run.dir",
        str(local or f"runs/{name}"),
        "trainer.default_local_dir" if local else "trainer.experiment_name",
    )
    d.move(f"{MODEL}.path")
    d.put("model.dtype", "bfloat16")
    _data(d, rewards)
    _rollout(d)
    _algorithm(d)
    _trainer(d)
    put_sizes(d, *_sizes(d))
    put_anchor(d)
    d.close(NEEDLESS)
    return d


def _data(d: Draft, rewards: Collection[str]) -> None:
    files, held = d.get("data.train_files"), d.get("data.val_files")
    d.put("data.source", source_of(files))
    d.put("data.params.path", files, "data.train_files")
    if held:
        d.put("data.params.heldout_path", held, "data.val_files")
    d.move("data.prompt_key")
    own, function = (
        d.get("custom_reward_function.path"),
        d.get("custom_reward_function.name", "compute_score"),
    )
    if own:
        names = ("custom_reward_function.path", "custom_reward_function.name")
        d.put("data.reward", f"{own}:{function}", *names)
    else:
        d.put("data.reward", "math" if "math" in rewards else "exact_answer")
        d.odd.append(
            f"data.reward = {d.config['data']['reward']}: verl chooses the reward by the data_source of each row; "
            "name yours where answers are no mathematics"
        )
    if d.get("reward_model.enable"):
        d.refuse(
            "reward_model.enable", "a reward model is a server of its own here; ask it in a reward function"
        )
    manager = d.get("reward_model.reward_manager")
    if manager is not None and manager not in ("naive", "dapo", "batch", "prime"):
        d.refuse("reward_model.reward_manager", "only data.reward computes rewards here")
    prefix = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if d.get(f"{prefix}.enable"):
        cap = int(d.get("reward_model.reward_kwargs.max_resp_len", d.get("data.max_response_length", 512)))
        shaping = {"name": "overlong", "cap": cap, "buffer": int(d.get(f"{prefix}.len", cap // 5))}
        shaping["factor"] = float(d.get(f"{prefix}.penalty_factor", 1.0))
        d.put("algo.shaping", [shaping], f"{prefix}.enable", f"{prefix}.len", f"{prefix}.penalty_factor")
    for left in ("enable", "len", "penalty_factor", "log"):
        d.used.add(f"{prefix}.{left}")
    d.used |= {
        "reward_model.reward_kwargs.max_resp_len",
        "reward_model.reward_manager",
        "reward_model.enable",
    }


def _rollout(d: Draft) -> None:
    d.move(f"{ROLLOUT}.temperature", float)
    d.cut(f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k")
    n, temperature = (
        int(d.get(f"{ROLLOUT}.val_kwargs.n", 1)),
        float(d.get(f"{ROLLOUT}.val_kwargs.temperature", 0)),
    )
    if n > 1:
        chosen = {"name": "val", "samples": n, "temperature": temperature or 1.0, "prompts": 30}
        d.put("eval.sets", [chosen], f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.val_kwargs.temperature")
    for name in ("do_sample", "top_p", "top_k"):
        if n > 1 and name == "top_p" and d.get(f"{ROLLOUT}.val_kwargs.top_p", 1.0) != 1.0:
            d.refuse(f"{ROLLOUT}.val_kwargs.top_p", "sets are sampled from the whole distribution")
        d.used.add(f"{ROLLOUT}.val_kwargs.{name}")
    d.used |= {f"{ROLLOUT}.val_kwargs.n", f"{ROLLOUT}.val_kwargs.temperature"}
    d.move(f"{ROLLOUT}.max_num_seqs", int)
    if d.get(f"{ROLLOUT}.multi_turn.enable"):
        d.move(f"{ROLLOUT}.multi_turn.format")
        d.refuse(
            f"{ROLLOUT}.multi_turn.enable",
            "tools are Python functions for rollout.generator = functions, or a generator of yours",
        )


def _algorithm(d: Draft) -> None:
    estimator = str(d.get("algorithm.adv_estimator", "gae"))
    ours = ADVANTAGES.get(estimator)
    if ours is None:
        d.refuse("algorithm.adv_estimator", "not here; rloo has a baseline from samples that are trained")
        ours = "rloo"
    if ours == "grpo" and d.get("algorithm.norm_adv_by_std_in_grpo") is False:
        ours = "dr_grpo"
    gae = {"gamma": float(d.get("algorithm.gamma", 1.0)), "lam": float(d.get("algorithm.lam", 1.0))}
    d.put("algo.advantage", {"name": "gae", **gae} if ours == "gae" else ours, "algorithm.adv_estimator",
          "algorithm.norm_adv_by_std_in_grpo")  # fmt: skip
    mode = str(d.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla"))
    loss: dict[str, Any] = {"name": LOSSES.get(mode, "clip")}
    if mode not in LOSSES:
        d.refuse(f"{ACTOR}.policy_loss.loss_mode", "not here; clip stands in its place (rlsys algo list)")
    low, high = (
        d.get(f"{ACTOR}.clip_ratio_{side}", d.get(f"{ACTOR}.clip_ratio", 0.2)) for side in ("low", "high")
    )
    if loss["name"] in ("clip", "gspo", "gmpo", "cispo"):
        loss |= {"clip_low": min(1.0, float(low)), "clip_high": float(high)}  # below 0 there is no ratio
    terms: list[Any] = [loss]
    if ours == "gae":
        terms.append({"name": "value"})
        d.put(
            "algo.critic",
            {k: float(v) for k, v in {"lr": d.get("critic.optim.lr")}.items() if v},
            "critic.optim.lr",
        )
    if d.get(f"{ACTOR}.use_kl_loss") and (beta := float(d.get(f"{ACTOR}.kl_loss_coef", 0.001))):
        kind = KL_KINDS.get(str(d.get(f"{ACTOR}.kl_loss_type", "low_var_kl")))
        if kind is None:
            d.refuse(f"{ACTOR}.kl_loss_type", "k1, k2 and k3 are here; k3 stands in its place")
        terms.append({"name": "kl", "beta": beta, "kind": kind or "k3"})
    if entropy := float(d.get(f"{ACTOR}.entropy_coeff", 0)):
        terms.append({"name": "entropy", "coefficient": entropy})
    names = (
        "policy_loss.loss_mode", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "use_kl_loss", "kl_loss_coef",
        "kl_loss_type", "entropy_coeff",
    )  # fmt: skip
    d.put("algo.loss", terms, *(f"{ACTOR}.{n}" for n in names))
    _around_the_loss(d, loss["name"])


def _around_the_loss(d: Draft, loss: str) -> None:
    """How it is summed, what is done to rewards before it, and what corrects for the engine's log-probs."""
    reducer = REDUCERS.get(str(d.get(f"{ACTOR}.loss_agg_mode", "token-mean")), "token_mean")
    if loss in ("gspo", "gmpo"):  # one ratio a sequence
        reducer = "sequence_mean"
    length = int(d.get("data.max_response_length", 512))
    made = {"name": "constant", "length": length} if reducer == "constant" else reducer
    d.put("algo.reducer", made, f"{ACTOR}.loss_agg_mode")
    if d.get("algorithm.use_kl_in_reward") and (beta := float(d.get("algorithm.kl_ctrl.kl_coef", 0.001))):
        shaping = [*d.config["algo"].get("shaping", []), {"name": "kl_reward", "beta": beta}]
        d.put("algo.shaping", shaping, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
    if d.get("algorithm.filter_groups.enable"):
        d.put("algo.planners", ["dapo"], "algorithm.filter_groups.enable")
    if (capped := d.get(f"{ACTOR}.tis_imp_ratio_cap", d.get("algorithm.rollout_is_threshold"))) and float(
        capped
    ) > 0:
        correction = [{"name": "tis", "cap": float(capped)}]
        d.put("algo.corrections", correction, f"{ACTOR}.tis_imp_ratio_cap", "algorithm.rollout_is_threshold")
    d.used |= {f"algorithm.{n}" for n in ("use_kl_in_reward", "kl_ctrl.kl_coef", "kl_ctrl.type", "gamma", "lam",
                                          "filter_groups.enable", "filter_groups.metric",
                                          "filter_groups.max_num_gen_batches")}  # fmt: skip
    if d.given(f"{ACTOR}.ppo_epochs"):
        d.move(f"{ACTOR}.ppo_epochs", int)


def _trainer(d: Draft) -> None:
    optim = f"{ACTOR}.optim"
    if steps := int(d.get("trainer.total_training_steps", 0) or 0):
        d.put("trainer.steps", steps, "trainer.total_training_steps")
    else:
        d.put("trainer.steps", 500, "trainer.total_epochs")
        epochs = d.get("trainer.total_epochs", 30)
        d.odd.append(f"trainer.steps = 500: set {epochs} (total_epochs) x rows / rollout.groups_per_step")
    steps = int(d.config["trainer"]["steps"])
    d.used.add("trainer.total_epochs")
    d.move(f"{optim}.lr", float)
    warmup = int(d.get(f"{optim}.lr_warmup_steps", -1))
    ratio = float(d.get(f"{optim}.lr_warmup_steps_ratio", 0))
    names = (f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio")
    d.put("trainer.warmup_steps", warmup if warmup >= 0 else round(ratio * steps), *names)
    style = str(d.get(f"{optim}.lr_decay_style", d.get(f"{optim}.lr_scheduler_type", "constant")))
    if style in ("constant", "linear", "cosine"):
        d.put("trainer.schedule", style, f"{optim}.lr_decay_style", f"{optim}.lr_scheduler_type")
    else:
        d.refuse(f"{optim}.lr_decay_style", "constant, linear and cosine are here")
    d.put("trainer.weight_decay", float(d.get(f"{optim}.weight_decay", 0.01)), f"{optim}.weight_decay")
    for name in (f"{ACTOR}.grad_clip", f"{optim}.clip_grad"):
        d.move(name, float)
    if d.get(f"{MODEL}.enable_gradient_checkpointing", True):
        d.put("trainer.recompute", ["layer"], f"{MODEL}.enable_gradient_checkpointing")
    if d.get(f"{ACTOR}.megatron.optimizer_offload") or d.get(f"{ACTOR}.fsdp_config.optimizer_offload"):
        names = (f"{ACTOR}.megatron.optimizer_offload", f"{ACTOR}.fsdp_config.optimizer_offload")
        d.put("trainer.offload_optimizer", 1.0, *names)
    for name, place in (("save_freq", "trainer.checkpoint_every"), ("test_freq", "eval.every")):
        every = int(d.get(f"trainer.{name}", -1))
        d.put(place, every if every > 0 else steps, f"trainer.{name}")
    d.move("trainer.max_actor_ckpt_to_keep", int)
    _put_lora(d)


def _put_lora(d: Draft) -> None:
    """Its adapters of Hugging Face's matrices; those of its Megatron trainer have Megatron's names."""
    rank, alpha, targets = (f"{MODEL}.{x}" for x in ("lora_rank", "lora_alpha", "target_modules"))
    named = d.get(targets, "all-linear")
    if int(d.get(rank, 0)) > 0:
        d.put("trainer.lora.rank", int(d.get(rank)), rank)
        d.put("trainer.lora.alpha", float(d.get(alpha, 16)), alpha)
        if isinstance(named, list):
            d.put("trainer.lora.targets", named, targets)
        elif named != "all-linear":
            d.refuse(targets, "expected all-linear or a list; give trainer.lora.targets")
    if d.get(f"{MODEL}.lora.rank"):
        d.refuse(f"{MODEL}.lora.rank", "not translated: give trainer.lora yourself")


def _sizes(d: Draft) -> tuple[Sizes, dict[str, tuple[str, ...]]]:
    m = f"{ACTOR}.megatron"
    names = {
        "groups": ("data.train_batch_size", "data.gen_batch_size"), "group_size": (f"{ROLLOUT}.n",),
        "response": ("data.max_response_length",), "update": (f"{ACTOR}.ppo_mini_batch_size",),
        "micro": (f"{ACTOR}.ppo_max_token_len_per_gpu",), "nodes": ("trainer.nnodes",),
        "gpus": ("trainer.n_gpus_per_node",), "tp": (f"{m}.tensor_model_parallel_size",),
        "pp": (f"{m}.pipeline_model_parallel_size",), "vpp": (f"{m}.virtual_pipeline_model_parallel_size",),
        "cp": (f"{m}.context_parallel_size",), "ep": (f"{m}.expert_model_parallel_size",),
        "etp": (f"{m}.expert_tensor_parallel_size",), "engine_tp": (f"{ROLLOUT}.tensor_model_parallel_size",),
    }  # fmt: skip
    n = int(d.get(f"{ROLLOUT}.n", 1))
    etp = d.get(f"{m}.expert_tensor_parallel_size")
    if n == 1 and d.config["algo"]["advantage"] in ("grpo", "dr_grpo", "rloo"):
        d.odd.append(f"rollout.group_size = 8: {ROLLOUT}.n = 1 leaves a group without a baseline")
        n = 8
    if d.given("data.gen_batch_size"):
        d.refuse(
            "data.gen_batch_size",
            "a step asks for as many groups as it trains, and more if some are filtered",
        )
    sizes = Sizes(
        groups=int(d.get("data.train_batch_size", 1024)), group_size=n,
        update=int(d.get(f"{ACTOR}.ppo_mini_batch_size", 256)) * n, prompt=int(d.get("data.max_prompt_length", 512)),
        response=int(d.get("data.max_response_length", 512)),
        micro=int(d.get(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)), nodes=int(d.get("trainer.nnodes", 1)),
        gpus=int(d.get("trainer.n_gpus_per_node", 8)), tp=int(d.get(f"{m}.tensor_model_parallel_size", 1)),
        pp=int(d.get(f"{m}.pipeline_model_parallel_size", 1)),
        vpp=int(d.get(f"{m}.virtual_pipeline_model_parallel_size", 1)),
        cp=int(d.get(f"{m}.context_parallel_size", 1)),
        ep=int(d.get(f"{m}.expert_model_parallel_size", 1)), etp=None if etp is None else int(etp),
        engine_tp=int(d.get(f"{ROLLOUT}.tensor_model_parallel_size", 2)),
    )  # fmt: skip
    return sizes, names
