"""verl's launch scripts and YAML (trainer/config/ppo_trainer.yaml, ppo_megatron_trainer.yaml) -> a config of ours.

Read as of August 2026; defaults that a script leaves out are verl's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

from rlsys.core.errors import UserError
from rlsys.importers.arguments import Arguments
from rlsys.importers.draft import Draft, Row, Settings
from rlsys.importers.namespace import ScriptRun
from rlsys.importers.sizes import (
    LORA_START,
    Sizes,
    data_source,
    eval_truncation,
    omit_offload,
    reject_media,
    set_anchor,
    set_layout,
    set_sizes,
    set_steps,
    set_warm_up,
)

VERL = {
    "data.train_files": "data.params.path, with data.source=parquet",
    "data.val_files": "data.params.heldout_path",
    "data.prompt_key": "data.keys.prompt",
    "data.seed": "data.seed",
    "data.shuffle": "data.params.shuffle",
    "data.max_prompt_length": "data.params.max_prompt_tokens",
    "data.truncation": "data.params.overlong_prompts",
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
    "actor_rollout_ref.actor.optim.betas": "trainer.betas",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "trainer.lr_end",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "trainer.warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "trainer.warmup_fraction",
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
    "reward.custom_reward_function.path": "data.reward=path/to/file.py:function",
    "critic.optim.lr": "algo.critic.lr",
    "trainer.critic_warmup": "algo.critic.warmup_steps",
    "trainer.total_epochs": "trainer.epochs",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.nnodes": "launch.nodes",
    "trainer.n_gpus_per_node": "launch.gpus_per_node",
    "trainer.save_freq": "trainer.checkpoint_every",
    "trainer.test_freq": "eval.interval",
    "trainer.default_local_dir": "run.dir",
    "trainer.project_name": "run.dir",
    "trainer.experiment_name": "run.dir",
    "trainer.resume_mode": "run.dir: the same command with the same folder goes on",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
}
"""Of verl's YAML, the paths that its own example scripts use most -> our field, and how it differs, if it does."""

SECTIONS = (
    "data",
    "model",
    "optim",
    "actor_rollout_ref",
    "algorithm",
    "trainer",
    "critic",
    "reward",
    "reward_model",
    "custom_reward_function",
)
"""A command is one of verl when a setting of it is in one of these."""
EXPECTED = "python -m verl.trainer.main_ppo with settings such as data.train_batch_size=256"
ASYNC_FLOW = ("recipe.async_flow.grpo_main",)
PARTIAL_ROLLOUT = ("recipe.partial_rollout.main_ppo",)
ONE_STEP_OFF = ("verl.experimental.one_step_off_policy.main_ppo", "recipe.one_step_off_policy.main_ppo")
FULLY_ASYNC = (
    "verl.experimental.fully_async_policy.fully_async_main",
    "recipe.fully_async_policy.fully_async_main",
)
SYNC_STEPS = "async_training.trigger_parameter_sync_step"
ENTRIES = (
    "verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "main_ppo", "recipe.dapo.main_dapo", "main_dapo",
    "recipe.entropy.main_entropy", "recipe.dapo.dapo_transfer_queue.main_dapo", *ONE_STEP_OFF, *FULLY_ASYNC,
    *PARTIAL_ROLLOUT, *ASYNC_FLOW,
)  # fmt: skip
CONFIGS = (
    "ppo_trainer", "ppo_megatron_trainer", "dapo_trainer", "dapo_megatron_trainer", "one_step_off_ppo_trainer",
    "one_step_off_ppo_megatron_trainer", "fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer",
    "dapo_transfer_queue_trainer",
)  # fmt: skip
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
LOSS_PARAMETERS = {
    "clip_cov": {"clip_cov_ratio": "share", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high"},
    "kl_cov": {"kl_cov_ratio": "share", "ppo_kl_coef": "coefficient"},
    "sapo": {"tau_pos": "tau_positive", "tau_neg": "tau_negative"},
}
"""Loss -> its settings in policy_loss -> parameters of ours."""
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
KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
MEGATRON_MATRICES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",),
}  # fmt: skip
"""Megatron's names of adapted matrices -> Hugging Face's."""
MANAGERS = ("naive", "dapo", "prime")
_LAYOUT = r"(fsdp|megatron|veomni|torchtitan|automodel|mindspeed|engine|dtensor)"
SFT_DEFAULTS = (
    (r"^data\.(max_length|max_token_len_per_gpu|pad_mode|micro_batch_size.*|use_dynamic_bsz|ignore_input_ids_mismatch)$",
     None, "answers are packed to trainer.token_budget"),
    (r"^data\.val_files$", None, "no held-out loss"),
    (r"^engine(\.|$)|^model\.(fsdp_config|strategy|use_|enable_gradient|trust|external_lib)|use_remove_padding$|"
     r"^ulysses", None, "the trainer is Megatron; parallel and trainer say how"),
)  # fmt: skip
"""The same for supervised fine-tuning."""
DEFAULTS = (
    (r"^actor_rollout_ref\.ref\.(strategy|log_prob_|use_torch_compile|fsdp|megatron|veomni|torchtitan|entropy|profiler|"
     r"ulysses|engine|rollout_n)", None, "the reference shares the trainer's layout"),
    (r"strategy$|model_engine$", None, "the trainer is Megatron; parallel and trainer say how"),
    (r"(micro_batch_size(_per_gpu)?|dynamic_bsz|log_prob_max_token_len_per_gpu|forward_max_token_len_per_gpu)$", None,
     "micro-batches are packed to trainer.token_budget"),
    (r"use_remove_padding$|use_thd$", None, "samples are packed, without padding"),
    (r"\.(fsdp_config\.(model_dtype|dtype)|megatron\.dtype|rollout\.dtype|veomni\.dtype)$",
     ("bfloat16", "bf16"), "bfloat16"),
    (r"rollout\.(calculate_log_probs|mode)$", None, "engines are asked asynchronously, and their log-probs are kept"),
    (r"rollout\.ignore_eos$", (False,), "a response ends at the model's end token"),
    (r"rollout\.do_sample$", (True,), "tokens are sampled"),
    (r"rollout\.(load_format|skip_tokenizer_init|disable_log_stats|free_cache_engine|multi_stage_wake_up)$", None,
     "weights reach the engines by weights.method; launch.release_memory frees them"),
    (r"hybrid_engine$", (True, False), "launch.placement"),
    (r"data\.filter_overlong_prompts_workers$", None, "rows are counted on all CPUs"),
    (r"engine_kwargs\.(vllm\.kv_cache_dtype|trtllm\.kv_cache_config\.dtype)$", ("auto", "bfloat16", "bf16"),
     "keys and values have the model's type"),
    (r"data\.min_response_length$", None, "verl reads no such setting"),
    (r"data\.shuffle$", (True,), "prompts are shuffled by data.seed"),
    (r"data\.(return_raw_chat|return_raw_input_ids|return_full_prompt|trust_remote_code)$|trust_remote_code$", None,
     "rows are read whole; no code of a model's folder is run"),
    (r"data\.reward_fn_key$", ("data_source",), "a row's data_source goes to functions with verl's signature"),
    (r"data\.(train|val)_max_samples$", (-1,), "all rows"),
    (r"trainer\.val_before_train$", None, "an evaluation runs before the first step"),
    (r"(max_position_embeddings)$", None, "the limits of prompt and response bound the positions"),
    (r"(attention_dropout|embd_pdrop|resid_pdrop|hidden_dropout|lora_dropout)$", (0,), "there is no dropout"),
    (r"trainer\.val_only$", (False,), "training"),
    (r"data\.validation_shuffle$", (False,), "held-out prompts have a fixed order"),
    (r"^async_training\.(use_trainer_do_validate|use_rollout_log_probs)$", None, "evaluations run on the engines"),
    (r"trainer\.resume_mode$", ("auto", "disable"), "the same command with the same run.dir goes on"),
    (r"trainer\.resume_from_path$", (False, None, ""), "the same command with the same run.dir goes on"),
    (r"trainer\.use_legacy_worker_impl$|trainer\.use_v1$", ("disable", False, True), "rlsys has its own loop"),
    (r"trainer\.v1\.trainer_mode$", ("sync",), "launch.placement = colocated"),
    (r"(checkpoint\.|max_(critic_)?ckpt_to_keep|max_critic_ckpt|del_local|remove_previous|default_hdfs_dir)", None,
     "trainer.checkpoint_every and trainer.keep_checkpoints"),
    (r"^actor_rollout_ref\.model\.enable_gradient_checkpointing$", (False,), "trainer.recompute = []"),
    (r"optim\.(optimizer)$", ("AdamW", "adam", "adamw"), "trainer.optimizer = adamw"),
    (r"optim\.(lr_warmup_init)$", (0,), "the learning rate rises from 0"),
    (r"optim\.(total_training_steps|lr_decay_steps)$", (-1, None), "trainer.steps"),
    (r"actor\.(shuffle|freeze_vision_tower|calculate_entropy)$", (False,), "off"),
    (r"actor\.calculate_sum_pi_squared$", None, "computed where algo.advantage needs it"),
    (r"actor\.(kl_loss_coef|kl_loss_type)$", None, "not in use: use_kl_loss is not set"),
    (r"algorithm\.(kl_penalty|kl_ctrl\.)", None, "not in use: use_kl_in_reward is not set"),
    (r"algorithm\.filter_groups\.", None, "not in use: filter_groups.enable is not set"),
    (r"distillation\.enabled$", (False,), "no distillation"),
    (r"override_transformer_config\.(moe_aux_loss_coeff|moe_z_loss_coeff)$", (0,), "0, as trainer.balance_loss"),
    (r"override_transformer_config\.(moe_router_(dtype|load_balancing_type|enable_expert_bias|score_function|topk|"
     r"pre_softmax)|sequence_parallel|(context|tensor_model|pipeline_model|expert_model)_parallel_size|moe_grouped_gemm|use_distributed_optimizer|"
     r"normalization|swiglu|num_layers|num_query_groups|qk_layernorm|position_embedding_type|rotary_[a-z]*|"
     r"add_qkv_bias|untie_[a-z_]*)$", None, "read from the model's config.json, or from parallel"),
    (r"mtp\.mtp_loss_scaling_factor$", None, "not in use: the layer is not trained"),
    (r"agent\.default_agent_loop$", ("single_turn_agent",), "rollout.generator = single_turn"),
    (r"model\.exclude_modules$", (".*visual.*",), "models are text"),
    (r"data\.gen_batch_size$", None, "a step asks for more groups when its group policy drops some"),
    (r"reward_model\.(enable|use_reward_loop)$", (False,), "only data.reward computes rewards"),
    (r"reward_kwargs\.(max_resp_len|overlong_buffer_cfg\.)|overlong_buffer\.", None,
     "not in use: overlong_buffer_cfg.enable is not set"),
    (r"model\.(override_config\.attn_implementation|override_config\.torch_dtype)", None, "rlsys chooses"),
    (r"model\.lora_(rank|alpha)$|model\.target_modules$", (0, None), "no adapter"),
    (r"rollout\.multi_turn\.enable$", (False,), "one turn"),
    (r"router_replay\.mode$|enable_rollout_routing_replay$", (False, "disabled"), "trainer.replay = off"),
)  # fmt: skip
"""Settings that ask for what a run here does anyway."""
SPEED = (
    (rf"\.{_LAYOUT}(_config)?\.(?!override_transformer_config\.|router_replay)|{_LAYOUT}_size$|ulysses|fsdp_size",
     "the trainer is Megatron; parallel and trainer.offload_optimizer say what has which place"),
    (r"override_transformer_config\.(recompute|.*fus(ion|ed)|use_(fused|naive|flash|triton|ascend|arbitrary)|moe_enable_deepep|"
     r"moe_token_dispatcher|attention_backend|num_layers_in_|account_for|persist_layer_norm|deallocate|"
     r"gradient_accumulation|overlap|tp_comm|context_parallel_algo|apply_rope|moe_shared_expert_overlap|cuda_graph|"
     r"pipeline_model_parallel_layout|multi_latent)", "the trainer has no such switch"),
    (r"(param|optimizer|grad|activation)_offload$|override_optimizer_config\.(optimizer_(cpu_)?offload|offload_fraction|overlap|use_precision)|torch_compile|fused_kernel|use_liger|use_shm|"
     r"_with_chunking|entropy_checkpointing|prefix_grouper|mbridge|dist_checkpoint|use_orig_params|mixed_precision",
     "the trainer has no such switch"),
    (r"^critic\.(ppo_max_token|forward_max_token|model\.(enable_gradient|use_remove|enable_activation|trust)|use_dynamic)",
     "the critic shares the trainer's layout and micro-batches"),
    (r"rollout\.(enable_sleep_mode|moe_tensor_parallel_size|prometheus\.)|mtp\.(enable_rollout|speculative)|"
     r"engine_kwargs\.sglang\.enable_dp_attention|engine_kwargs\.(vllm|trtllm)\.(?!.*(quant|kv_cache_dtype|hf_overrides|"
     r"seed|logits))", "engines are SGLang without this switch; engine.extra_args passes what they need"),
    (r"rollout\.(name|gpu_memory_utilization|max_num_batched_tokens|enable_chunked_prefill|chunked_prefill|enforce_eager|"
     r"max_model_len|cudagraph|enable_prefix_caching|engine_kwargs\.vllm\.(mm_processor|compilation_config|max_model_len|"
     r"swap_space|disable_)|layered_summon|data_parallel_size|expert_parallel_size|pipeline_model_parallel_size|"
     r"update_weights_bucket|checkpoint_engine|agent\.num_workers|nnodes|n_gpus_per_node|profiler|disaggregat)",
     "engines are SGLang; engine.extra_args passes what they need beside the sizes"),
    (r"^(ray_kwargs|global_profiler|transfer_queue)\.|logger$|project_name$|experiment_name$|log_val|balance_batch$|"
     r"trainer\.(device|validation_data_dir|rollout_data_dir|esi_|ray_wait)|profiler\.|profile_steps|nccl_timeout|"
     r"dataloader_num_workers|data\.num_workers|reward(_model)?\.(num_workers|launch_reward)|val_batch_size|"
     r"ignore_input_ids_mismatch|tokenizer_parallel|data_loader_seed|trainer\.seed$|actor\.seed$|load_weight$",
     "the run folder has metrics, samples and checkpoints; run.trackers sends them on"),
)  # fmt: skip
"""Settings without a counterpart that change speed, memory or logging alone."""
_SCHEDULES = {"veomni": ("cosine", 0.0), "torchtitan": ("linear", 0.0), "automodel": ("cosine", 0.01)}
"""Trainer -> schedule and share of the last learning rate that verl gives it; constant for the others."""
PROGRAM = "train"
"""Key of the program among the settings."""
NEVER = 1_000_000
"""Interval beyond the steps of a run: the last step only."""
_SETTING = re.compile(r"(~|\+{1,2})?([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)


def read_yaml(data: Any) -> Settings:
    """Return the settings of a resolved config, or of hydra's overrides.yaml, by their dotted names.

    Raises:
        UserError: the file has other content.
    """
    if isinstance(data, list):
        if not data or not all(isinstance(argument, str) and "=" in argument for argument in data):
            raise UserError("expected a mapping of settings, or a list of overrides such as data.seed=1")
        settings = Settings({})
        for argument in data:
            _read_argument(Arguments([], ScriptRun()), str(argument), settings)
        return settings
    if not isinstance(data, dict):
        raise UserError(f"expected a mapping of settings, not {type(data).__name__}")
    return Settings(_flatten(data))


def program_index(argv: Sequence[str]) -> int:
    """Return the index of the program, the argument before the first setting, or -1 if no setting is of verl."""
    for index, argument in enumerate(argv):
        match = _SETTING.fullmatch(argument[:200])
        if match and match[3] is not None and "." in match[2] and match[2].partition(".")[0] in SECTIONS:
            index -= 1
            while index > 0 and argv[index].startswith(("-", "+", "~")) and argv[index - 1] != "-m":
                index -= 1
            while index > 0 and "=" in argv[index]:
                index -= 1
            return max(index, 0)
    return -1


def read_settings(arguments: Arguments) -> Settings:
    """Return the settings of the training command by their dotted names."""
    settings = Settings({}, list(arguments.problems), list(arguments.notes))
    settings.values[PROGRAM] = entry = (
        arguments.run.source_text(arguments.argv[0]).removesuffix(".py").rpartition("/")[2]
    )
    if entry not in ENTRIES and "sft_trainer" not in entry:
        settings.problems.append(
            f"{entry or 'the command'}: expected python -m verl.trainer.main_ppo; another program's work is not known"
        )
    for argument in arguments.argv[1:]:
        _read_argument(arguments, argument, settings)
    return settings


def _read_argument(arguments: Arguments, argument: str, settings: Settings) -> None:
    option, _, value = argument.partition("=")
    if option in ("--config-name", "-cn") and value.removesuffix(".yaml") in CONFIGS:
        return
    if option in ("--config-path", "-cp") and value in ("config", "./config"):  # verl's own
        return
    text, reason = arguments.run.source_text(argument), arguments.run.explain(option)
    if argument.startswith("-"):
        settings.problems.append(f"{text}: settings that this file or option brings are not read")
        return
    match = _SETTING.fullmatch(argument)
    if match is None or reason:
        settings.problems.append(f"{text}: {reason or 'no setting'}; it may be any setting")
    elif match[1] == "~":
        settings.problems.append(f"{text}: removes a setting; no counterpart is known")
    elif match[3] is None:
        settings.problems.append(f"{text}: a word that is no setting")
    else:
        settings.values[match[2]] = arguments.value([match[3]])


def _flatten(data: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    pending = [("", data)]
    count = 0
    while pending:
        prefix, mapping = pending.pop()
        for key, value in mapping.items():
            count += 1
            if count > 20_000:
                raise UserError("has more than 20,000 settings; expected a config of verl")
            if isinstance(value, dict):
                pending.append((f"{prefix}{key}.", value))
            elif value is not None:
                flat[f"{prefix}{key}"] = value
    return flat


def translate(settings: Settings, rewards: Collection[str]) -> Draft:
    """Make a config of verl's settings.

    Args:
        settings: of read_settings.
        rewards: short names of our rewards.

    Raises:
        UserError: a script without model or data, or a value of the wrong kind.
    """
    d = Draft(dict(settings.values), VERL)
    _asynchronous(d)
    if "sft_trainer" in str(d.get(PROGRAM)) or d.is_present("data.messages_key"):
        _fine_tuning(d)
        d.finish((*SFT_DEFAULTS, *DEFAULTS), SPEED, settings)
        return d
    for name in (f"{MODEL}.path", "data.train_files"):
        if not d.is_present(name):
            if not settings.problems:
                raise UserError(f"expected {MODEL}.path and data.train_files in it")
            d.require(name)
    of_run = (
        "trainer.default_local_dir"
        if d.is_present("trainer.default_local_dir")
        else "trainer.experiment_name"
    )
    name = d.text("trainer.experiment_name", "imported")
    d.set_field("run.dir", d.text("trainer.default_local_dir") or f"runs/{name}", of_run)
    d.set_field("model.path", d.text(f"{MODEL}.path"), f"{MODEL}.path")
    reject_media(d, f"{MODEL}.path", "data.train_files")
    d.set_field("model.dtype", "bfloat16")
    _data(d, rewards)
    _rollout(d)
    _algorithm(d)
    _trainer(d)
    if d.text("trainer.resume_mode", "auto") != "resume_path":
        d.consumed.add("trainer.resume_from_path")
    d.consumed.discard("trainer.resume_mode")
    set_sizes(d, *_sizes(d))
    if d.get(PROGRAM) in PARTIAL_ROLLOUT:
        _bound_running_samples(d)
    if d.get(PROGRAM) in ASYNC_FLOW and (share := d.get_field("trainer.warmup_fraction", 0.0)):
        ratio = f"{ACTOR}.optim.lr_warmup_steps_ratio"  # of the steps, counted in mini-batches
        d.set_field("trainer.warmup_fraction", share / d.get_field("algo.minibatches", 1), ratio)
    if d.get(PROGRAM) in FULLY_ASYNC:
        set_warm_up(d, f"{ACTOR}.optim.lr_warmup_steps", d.integer(SYNC_STEPS, 4))
    if not d.get_field("algo.anchor", ""):
        set_anchor(d)
    d.finish(DEFAULTS, SPEED, settings)
    return d


def _fine_tuning(d: Draft) -> None:
    """Translate supervised fine-tuning, for `rlsys sft`."""
    d.is_fine_tuning = True
    d.consumed.add("data.messages_key")
    model = _first_present(d, "model.path", "model.partial_pretrain")
    d.require(model)
    d.require("data.train_files")
    of_run = _first_present(d, "trainer.default_local_dir", "trainer.experiment_name")
    d.set_field(
        "run.dir", d.text("trainer.default_local_dir") or f"runs/{d.text(of_run, 'imported')}", of_run
    )
    d.set_field("model.path", d.text(model), model)
    d.set_field("model.dtype", "bfloat16")
    d.set_field("sft.traces", "chats")
    d.set_field("sft.params.path", d.get("data.train_files"), "data.train_files")
    batch = d.integer("data.train_batch_size", 256)
    d.set_field("sft.params.batch", batch, "data.train_batch_size")
    if d.text("data.messages_key", "messages") != "messages":
        d.reject("data.messages_key", "the chats of a row are its `messages`")
    for name in ("data.prompt_key", "data.response_key", "data.prompt_dict_keys", "data.response_dict_keys"):
        d.reject(name, "a row has `messages`, or `prompt` and `completion`")
    set_steps(d, "trainer.total_training_steps", "trainer.total_epochs", 30)
    _optimizer(d, "optim", "sft", 1e-5 if _is_old_fine_tuning(d) else 1e-3)
    _checkpoints(d)
    _lora(d, "model")
    m = _first_present(d, "engine.tensor_model_parallel_size", "megatron.tensor_model_parallel_size")
    m = m.removesuffix(".tensor_model_parallel_size")
    names = _layout_names(m) | {"nodes": ("trainer.nnodes",), "gpus": ("trainer.n_gpus_per_node",)}
    sizes = Sizes(
        nodes=d.integer("trainer.nnodes", 1), gpus=d.integer("trainer.n_gpus_per_node", 8),
        etp=d.integer(names["etp"][0], 0) or None,
        **{name: d.integer(names[name][0], 1) for name in ("tp", "pp", "cp", "ep")},
    )  # fmt: skip
    set_layout(d, sizes, names, batch)


def _distillation(d: Draft, terms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Translate distillation.*, and return the loss's terms with that of the teacher."""
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
            f"{loss}.loss_mode", f"its gradient with use_policy_gradient = {by_sample} is of no divergence"
        )
    if by_sample:
        teacher["top_k"] = 0
        names.append(policy_gradient)
        sides = {side: d.number(f"{loss}.clip_ratio_{side}", 0.2) for side in ("low", "high")}
        term = {"name": "distill_pg", "clip_low": sides["low"], "clip_high": sides["high"], "dual": 3.0}
        of_term += [f"{loss}.clip_ratio_{side}" for side in sides]
        if d.text(f"{loss}.policy_loss_mode", "vanilla") != "vanilla":
            d.reject(f"{loss}.policy_loss_mode", "verl has vanilla alone")
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
    if _has_task_rewards(d):
        return [*terms, term | {"weight": d.number(f"{loss}.distillation_loss_coef", 1.0)}]
    return [term]


def _has_task_rewards(d: Draft) -> bool:
    """Return whether a policy loss reads rewards, alone or beside a teacher's divergence."""
    tasks = "distillation.distillation_loss.use_task_rewards"
    return not d.flag("distillation.enabled") or not d.is_present(tasks) or d.flag(tasks)


def _asynchronous(d: Draft) -> None:
    """Translate the batch sizes of the asynchronous trainers to those of the other one."""
    program = d.get(PROGRAM)
    if program in PARTIAL_ROLLOUT:
        _partial_rollout(d)
    if program in ASYNC_FLOW:
        _async_flow(d)
    if program not in FULLY_ASYNC:
        return
    mini, required, rounds = (
        d.integer(name, default)
        for name, default in (
            (f"{ACTOR}.ppo_mini_batch_size", 256),
            ("async_training.require_batches", 1),
            (SYNC_STEPS, 4),
        )
    )
    for name in ("data.train_batch_size", "data.gen_batch_size", "trainer.total_epochs", "rollout.n"):
        d.settings.pop(name, None)
    groups = mini * required * rounds
    d.settings["data.train_batch_size"] = groups
    d.settings["trainer.total_training_steps"] = max(
        1, d.integer("rollout.total_rollout_steps", 100) // groups
    )
    d.defaults.append(Row("rollout.total_rollout_steps", str(groups), "its groups / those of a step"))
    stale = d.number("async_training.staleness_threshold", 0.1)
    partial = "async_training.partial_rollout"
    if stale > 0:
        d.set_field("rollout.over_provision", 1 + stale, "async_training.staleness_threshold")
    d.set_field("rollout.max_staleness", 1 if stale <= 1 else 2, "async_training.staleness_threshold")
    if d.is_present(partial) and not d.flag(partial):
        d.reject(partial, "interrupted samples are always resumed")
    d.warnings.append(
        f"rollout.groups_per_step = {groups}: the prompts between two pushes of the fully asynchronous trainer; its "
        "mini-batches are algo.minibatches"
    )


ASYNC_FLOW_DEFAULTS = {
    "data.train_batch_size": 16, "data.max_prompt_length": 1024, "data.max_response_length": 1024,
    f"{ACTOR}.optim.lr": 1e-6, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.03, f"{ACTOR}.ppo_mini_batch_size": 1,
    f"{ROLLOUT}.n": 8, f"{ROLLOUT}.tensor_model_parallel_size": 1, "trainer.n_gpus_per_node": 2,
    "trainer.save_freq": 20, "trainer.total_epochs": 5, "async_resources.actor_train.n_gpus_per_node": 4,
}  # fmt: skip
"""Of the recipe's async_grpo.yaml, where it differs from verl's."""


def _async_flow(d: Draft) -> None:
    """Translate the recipe async_flow: GPUs of trainer and engines, staleness, and a trainer without evaluations."""
    for name, value in ASYNC_FLOW_DEFAULTS.items():
        d.settings.setdefault(name, str(value))
    for name in ("nnodes", "n_gpus_per_node"):
        d.settings[f"rollout.{name}"] = d.settings.pop(f"trainer.{name}", "1")
        of_trainer = f"async_resources.actor_train.{name}"
        d.settings[f"trainer.{name}"] = count = d.settings.pop(of_trainer, "1")
        d.defaults.append(
            Row(of_trainer, str(count), "GPUs of the trainer; trainer.* are those of the engines")
        )
    for name in [
        name for name in d.settings if re.match(r"async_resources\.(actor_fwd|ref_fwd|advantage)\.", name)
    ]:
        d.consumed.add(name)
        d.speed.append(Row(name, str(d.settings[name]), "the trainer scores; it has no workers for that"))
    if d.is_present("data.val_files"):
        d.defaults.append(Row("data.val_files", d.text("data.val_files"), "the recipe does not evaluate"))
    d.settings |= {"data.val_files": "", "trainer.test_freq": "-1", "trainer.val_before_train": "False"}
    if d.is_present(f"{ACTOR}.ppo_epochs"):
        d.defaults.append(
            Row(f"{ACTOR}.ppo_epochs", d.text(f"{ACTOR}.ppo_epochs"), "the recipe has one pass")
        )
        del d.settings[f"{ACTOR}.ppo_epochs"]
    staleness = "async_flow.staleness"
    bound = d.integer(staleness, 1)
    if bound or d.is_unresolved(staleness):
        d.set_field("rollout.over_provision", float(bound + 1), staleness)
    d.set_field("rollout.max_staleness", bound, staleness)
    d.warnings.append(
        "rollout.over_provision: the recipe starts prompts while fewer than data.train_batch_size x (staleness + 1) "
        "wait or run; an interrupted response goes on at most 5 times there"
    )


def _partial_rollout(d: Draft) -> None:
    """Translate the recipe of partial rollouts: a step's prompts are always in flight, beside those that are done."""
    partial = "async_training.partial_rollout"
    if not d.flag(partial):
        d.require(partial)
        d.reject(partial, "interrupted samples are always resumed")
    d.set_field("rollout.over_provision", 2.0, partial)
    d.set_field("rollout.max_staleness", 4)
    d.warnings.append(
        "rollout.over_provision = 2: the script keeps data.train_batch_size prompts running until as many are done; "
        "engine.max_running_requests bounds the running samples to theirs"
    )
    d.warnings.append("rollout.max_staleness = 4: the script has no bound; see docs/rollout.md")


def _bound_running_samples(d: Draft) -> None:
    """Write engine.max_running_requests of partial rollouts, whose workers divide the prompts in flight."""
    groups, n, workers = "data.train_batch_size", f"{ROLLOUT}.n", f"{ROLLOUT}.agent.num_workers"
    count = max(1, d.integer(workers, 8))
    samples = -(-d.integer(groups, 1024) // count) * count * d.integer(n, 1)
    running = max(1, -(-samples // max(1, d.get_field("engine.count", 1))))
    bound = d.integer(f"{ROLLOUT}.max_num_seqs", 1024)
    names = (groups, n, workers, f"{ROLLOUT}.max_num_seqs", f"{ROLLOUT}.tensor_model_parallel_size")
    d.set_field("engine.max_running_requests", min(running, bound), *names)


def _data(d: Draft, rewards: Collection[str]) -> None:
    files, heldout = d.get("data.train_files"), d.get("data.val_files")
    d.set_field("data.source", data_source(files), "data.train_files")
    d.set_field("data.params.path", files, "data.train_files")
    if heldout or d.is_unresolved("data.val_files"):
        d.set_field("data.params.heldout_path", heldout, "data.val_files")
    d.copy("data.prompt_key")
    prefix = "data.apply_chat_template_kwargs."
    for name in [name for name in d.settings if name.startswith(prefix)]:
        d.set_field(f"data.chat_template_args.{name.removeprefix(prefix)}", d.get(name), name)
    d.copy("data.seed", int)
    for name in ("data.image_key", "data.video_key", "data.audio_key"):
        d.reject(name, "no counterpart: prompts are text")
    prompt_settings = ("data.truncation", "data.filter_overlong_prompts")
    side = (
        "drop" if d.flag(prompt_settings[1]) else d.text(prompt_settings[0], "error").replace("error", "drop")
    )
    if side not in ("drop", "left", "right"):
        d.reject("data.truncation", "a prompt is left out, or side on the left or right")
    limit = d.integer("data.max_prompt_length", 512)
    d.set_field("data.params.max_prompt_tokens", limit, "data.max_prompt_length")
    d.set_field("data.params.overlong_prompts", side, *prompt_settings)
    if d.is_present("data.shuffle") and not d.flag("data.shuffle"):
        d.set_field("data.params.shuffle", False, "data.shuffle")
    else:
        d.consumed.discard("data.shuffle")
    _rewards(d, rewards)


def _first_present(d: Draft, *names: str) -> str:
    """Return the first of these names that the script has; verl moved its reward settings in 2026."""
    return next((name for name in names if d.is_present(name)), names[0])


def _rewards(d: Draft, rewards: Collection[str]) -> None:
    path, function = (
        _first_present(d, f"custom_reward_function.{part}", f"reward.custom_reward_function.{part}")
        for part in ("path", "name")
    )
    if d.is_present(path):
        d.set_field("data.reward", f"{d.text(path)}:{d.text(function, 'compute_score')}", path, function)
    else:
        d.set_field("data.reward", "math" if "math" in rewards else "exact_answer")
        d.warnings.append(
            f"data.reward = {d.config['data']['reward']}: verl chooses the reward by the data_source of each row; "
            "name yours where answers are no mathematics"
        )
    for enable in ("reward_model.enable", "reward.reward_model.enable"):
        if d.is_present(enable) and (d.is_unresolved(enable) or d.flag(enable)):
            d.reject(enable, "a reward model is a server of its own here; ask it in a reward function")
    manager = _first_present(
        d, "reward_model.reward_manager", "reward.reward_manager.name", "reward.reward_manager"
    )
    if d.text(manager, "naive") not in MANAGERS:
        d.reject(manager, f"{', '.join(MANAGERS)} call a function for one response, as data.reward does")
    elif d.is_present(manager) and not d.is_unresolved(manager):
        d.defaults.append(Row(manager, str(d.settings[manager]), "data.reward is called for each response"))
    prefixes = [
        f"{section}{buffer}."
        for section in ("reward_model.", "reward.")
        for buffer in ("reward_kwargs.overlong_buffer_cfg", "overlong_buffer")
    ]
    prefix = _first_present(d, *(f"{prefix}enable" for prefix in prefixes)).removesuffix("enable")
    kwargs = prefix.removesuffix("overlong_buffer_cfg.")
    if d.flag(f"{prefix}enable") or d.is_unresolved(f"{prefix}enable"):
        cap = d.integer(f"{kwargs}max_resp_len", d.integer("data.max_response_length", 512))
        shaping = {"name": "overlong", "cap": cap, "buffer": d.integer(f"{prefix}len", cap // 5)}
        shaping["factor"] = d.number(f"{prefix}penalty_factor", 1.0)
        names = (f"{prefix}enable", f"{prefix}len", f"{prefix}penalty_factor", f"{kwargs}max_resp_len")
        d.set_field("algo.shaping", [shaping], *names)
        d.consumed.add(f"{prefix}log")


def _rollout(d: Draft) -> None:
    d.copy(f"{ROLLOUT}.temperature", float)
    d.set_truncation(f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k")
    _evaluation(d)
    d.copy(f"{ROLLOUT}.max_num_seqs", int)
    ignores_end = f"{ROLLOUT}.ignore_eos"
    if d.flag(ignores_end) or d.is_unresolved(ignores_end):
        d.set_field("rollout.ignore_eos", True, ignores_end)
    else:
        d.consumed.discard(ignores_end)
    if d.flag(f"{ROLLOUT}.multi_turn.enable"):
        if d.is_present(f"{ROLLOUT}.multi_turn.format"):
            d.copy(f"{ROLLOUT}.multi_turn.format")
        d.reject(
            f"{ROLLOUT}.multi_turn.enable",
            "tools are Python functions for rollout.generator = functions, or a generator of yours",
        )
    else:
        d.consumed.discard(f"{ROLLOUT}.multi_turn.enable")
    for rollout_name, data_name in (
        ("prompt_length", "data.max_prompt_length"),
        ("response_length", "data.max_response_length"),
    ):
        if d.is_present(f"{ROLLOUT}.{rollout_name}") and d.text(f"{ROLLOUT}.{rollout_name}") != d.text(
            data_name, "512"
        ):
            d.reject(f"{ROLLOUT}.{rollout_name}", f"differs from {data_name}")
    _engines(d)
    mode = _first_present(
        d, *(f"{ACTOR}.{part}.router_replay.mode" for part in ("megatron", "veomni", "engine"))
    )
    engine = f"{ROLLOUT}.enable_rollout_routing_replay"
    if d.text(mode, "disabled") in ("R2", "R3"):
        replay = "engine" if d.text(mode) == "R3" else "trainer"
        d.set_field("trainer.replay", replay, mode)
        d.set_field("engine.return_routes", replay == "engine", mode, engine)
    else:
        d.consumed.discard(mode)


def _evaluation(d: Draft) -> None:
    """Translate rollout.val_kwargs and the interval of evaluations."""
    values = f"{ROLLOUT}.val_kwargs"
    n, temperature = d.integer(f"{values}.n", 1), d.number(f"{values}.temperature", 0)
    truncation = eval_truncation(d, d.number(f"{values}.top_p", 1.0), d.integer(f"{values}.top_k", -1))
    names = [f"{values}.{name}" for name in ("n", "temperature", "do_sample", "top_p", "top_k")]
    if n > 1 and temperature == 0 and not any(map(d.is_unresolved, names)):
        d.warnings.append(f"eval.sets: one greedy response, not the script's {n} equal ones")
        n = 1
    if n > 1 or temperature > 0 or any(map(d.is_unresolved, names)):
        eval_set = {"name": "val", "samples": n, "temperature": temperature, "prompts": 30}
        d.set_field("eval.sets", [eval_set | (truncation if temperature else {})], *names)
    d.consumed |= set(names)
    interval = d.integer("trainer.test_freq", -1)
    if interval > 0 or d.is_unresolved("trainer.test_freq"):
        d.set_field("eval.interval", interval, "trainer.test_freq")
    elif not d.flag("trainer.val_before_train") and d.is_present("trainer.val_before_train"):
        d.has_evaluation = False
        d.set_field("eval.prompts", 0, "trainer.test_freq", "trainer.val_before_train")
        d.config["eval"].pop("sets", None)
    else:
        d.set_field("eval.interval", NEVER, "trainer.test_freq")


def _engines(d: Draft) -> None:
    """Pass on SGLang's own options."""
    prefix = f"{ROLLOUT}.engine_kwargs.sglang."
    names = [
        n for n in d.settings if n.startswith(prefix) and not n.endswith((".enable_dp_attention", ".dp_size"))
    ]
    args: list[str] = []
    for name in names:
        value = d.get(name)
        if value is False:
            d.reject(name, "an option of SGLang that is off needs engine.extra_args by hand")
            continue
        args.append("--" + name.removeprefix(prefix).replace("_", "-"))
        if value is not True:
            args += [str(argument) for argument in (value if isinstance(value, list) else [value])]
    for engine, setting in (("vllm", "kv_cache_dtype"), ("trtllm", "kv_cache_config.dtype")):
        name = f"{ROLLOUT}.engine_kwargs.{engine}.{setting}"
        kind = d.text(name, "auto")
        if kind in ("auto", "bfloat16", "bf16"):
            d.consumed.discard(name)
            continue
        if kind not in ("fp8", "fp8_e4m3", "fp8_e5m2"):
            d.reject(name, "keys and values are of the model's type, or FP8")
        args += ["--kv-cache-dtype", kind if kind.endswith("e5m2") else "fp8_e4m3"]
        names.append(name)
        d.warnings.append(
            "engine.extra_args --kv-cache-dtype: the scales of keys and values are the folder's, or 1 in SGLang"
        )
    if names:
        d.set_field("engine.extra_args", args, *names)


def _algorithm(d: Draft) -> None:
    estimator = d.text("algorithm.adv_estimator", "gae")
    advantage_name = ADVANTAGES.get(estimator)
    if advantage_name is None:
        d.reject("algorithm.adv_estimator", "not here by this name (rlsys algo list)")
        advantage_name = "rloo"
    if (
        advantage_name == "grpo"
        and not d.flag("algorithm.norm_adv_by_std_in_grpo")
        and d.is_present("algorithm.norm_adv_by_std_in_grpo")
    ):
        advantage_name = "dr_grpo"
    of_advantage = ["algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"]
    gae = {"gamma": d.number("algorithm.gamma", 1.0), "lam": d.number("algorithm.lam", 1.0)}
    if advantage_name == "gae":
        of_advantage += ["algorithm.gamma", "algorithm.lam"]
    elif gae["gamma"] != 1.0 and advantage_name.startswith("reinforce"):
        d.reject("algorithm.gamma", "the return is not discounted")
    advantage = {"gae": {"name": "gae", **gae}, "gpg": {"name": "gpg", "counts": "rewarded"}}
    d.set_field("algo.advantage", advantage.get(advantage_name, advantage_name), *of_advantage)
    of_mode = f"{ACTOR}.policy_loss.loss_mode"
    mode = d.text(of_mode, "vanilla")
    loss: dict[str, Any] = {"name": LOSSES.get(mode, "clip")}
    if mode not in LOSSES:
        d.reject(of_mode, "not here by this name (rlsys algo list)")
    low, high = (d.number(f"{ACTOR}.clip_ratio_{side}", 0.2) for side in ("low", "high"))
    if d.is_present(f"{ACTOR}.clip_ratio"):
        d.defaults.append(
            Row(
                f"{ACTOR}.clip_ratio",
                d.text(f"{ACTOR}.clip_ratio"),
                "clip_ratio_low and _high win: 0.2, if not set",
            )
        )
    names = [
        "policy_loss.loss_mode",
        "clip_ratio_low",
        "clip_ratio_high",
        "use_kl_loss",
        "entropy_coeff",
    ]
    for name, parameter in LOSS_PARAMETERS.get(loss["name"], {}).items():
        setting = _first_present(d, f"{ACTOR}.policy_loss.{name}", f"{ACTOR}.{name}")
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
    for name in ("loss_mode", *LOSS_PARAMETERS.get(loss["name"], {})):  # copies in the entropy recipe
        copy = f"{ACTOR}.{name}"
        if d.is_present(copy) and d.text(copy) == d.text(f"{ACTOR}.policy_loss.{name}"):
            d.consumed.add(copy)
    if loss["name"] in ("clip", "dual_clip", "gspo", "gmpo", "cispo", "clip_cov"):
        loss |= {"clip_low": min(1.0, low), "clip_high": high}  # below 0 there is no ratio
    terms: list[Any] = [loss]
    if advantage_name == "gae":
        terms.append({"name": "value", "coefficient": 1.0, "clip": d.number("critic.cliprange_value", 0.5)})
        lr, warmup = d.number("critic.optim.lr", 1e-5), d.integer("trainer.critic_warmup", 0)
        d.set_field("algo.critic", {"lr": lr}, "critic.optim.lr")
        if warmup:
            d.set_field("algo.critic.warmup_steps", warmup, "trainer.critic_warmup", "critic.optim.lr")
    elif d.integer("trainer.critic_warmup", 0):
        d.reject("trainer.critic_warmup", f"{estimator} has no critic")
    for name in d.settings:
        if name.startswith("critic.") and (
            advantage_name != "gae" or re.search(r"\.(model\.path|enable)$", name)
        ):
            d.consumed.add(name)
    if advantage_name == "gae" and d.text("critic.model.path", d.text(f"{MODEL}.path")) != d.text(
        f"{MODEL}.path"
    ):
        d.reject("critic.model.path", "the critic starts from the policy's folder")
    if d.flag(f"{ACTOR}.use_kl_loss"):
        names += ["kl_loss_coef", "kl_loss_type"]
        kind = d.text(f"{ACTOR}.kl_loss_type", "low_var_kl")
        gradient = {"gradient": "k2"} if kind.endswith("+") else {}
        kind = kind.removesuffix("+")
        if kind not in KL_KINDS:
            d.reject(f"{ACTOR}.kl_loss_type", f"{', '.join(KL_KINDS)} are here")
        if beta := d.number(f"{ACTOR}.kl_loss_coef", 0.001):
            terms.append({"name": "kl", "beta": beta, "kind": KL_KINDS.get(kind, "k3"), **gradient})
    if entropy := d.number(f"{ACTOR}.entropy_coeff", 0):
        terms.append({"name": "entropy", "coefficient": entropy})
    of_loss = ["algorithm.adv_estimator", "critic.cliprange_value", *(f"{ACTOR}.{n}" for n in names)]
    if d.flag("distillation.enabled"):
        terms = _distillation(d, terms)
        of_loss += ["distillation.enabled", "distillation.distillation_loss.use_task_rewards"]
        of_loss += [
            f"distillation.distillation_loss.{name}"
            for name in (
                "distillation_loss_coef", "use_policy_gradient", "loss_max_clamp", "clip_ratio_low",
                "clip_ratio_high",
            )
        ]  # fmt: skip
    else:
        d.consumed.discard("distillation.enabled")
    d.set_field("algo.loss", terms, *of_loss)
    _loss_modifiers(d, loss["name"])


def _loss_modifiers(d: Draft, loss: str) -> None:
    """Translate the reducer, the shaping of rewards, and the corrections of the engine's log-probs."""
    of_mode = f"{ACTOR}.loss_agg_mode"
    mode = d.text(of_mode, "token-mean")
    if mode not in REDUCERS:
        d.reject(of_mode, f"{', '.join(REDUCERS)} are here")
    reducer = REDUCERS.get(mode, "token_mean")
    if loss in ("gspo", "gmpo", "sapo"):  # verl's functions of these losses ignore the mode
        if reducer != "sequence_mean" and len(d.get_field("algo.loss", [])) > 1:
            d.warnings.append(
                f"algo.reducer = sequence_mean for all terms; verl reduces KL and entropy by {mode}"
            )
        reducer = "sequence_mean"
    names: list[str] = [of_mode]
    reducer_config: str | dict[str, Any] = reducer
    if reducer == "constant":
        scale = f"{ACTOR}.loss_scale_factor"
        length = d.integer(scale, d.integer("data.max_response_length", 512))
        reducer_config = {"name": "constant", "length": length if mode.endswith("norm") else 1}
        names += [scale, "data.max_response_length"] if mode.endswith("norm") else []
    d.consumed.add(f"{ACTOR}.loss_scale_factor")
    d.set_field("algo.reducer", reducer_config, *names)
    if d.flag("algorithm.use_kl_in_reward"):
        if d.text("algorithm.kl_ctrl.type", "fixed") != "fixed":
            d.reject("algorithm.kl_ctrl.type", "the weight of the reward's KL is fixed")
        if d.text("algorithm.kl_penalty", "kl") not in ("kl", "k1"):
            d.reject("algorithm.kl_penalty", "the reward's KL is k1")
        if beta := d.number("algorithm.kl_ctrl.kl_coef", 0.001):
            shaping = [*d.get_field("algo.shaping", []), {"name": "kl_reward", "beta": beta}]
            d.set_field("algo.shaping", shaping, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
    filtered = d.flag("algorithm.filter_groups.enable")
    if filtered and not _filters_groups(d):
        for name in [name for name in d.settings if name.startswith("algorithm.filter_groups.")]:
            d.consumed.add(name)
            d.defaults.append(Row(name, d.text(name), f"{d.text(PROGRAM)} reads no such setting"))
    elif filtered:
        d.set_field("algo.planners", ["dapo"], "algorithm.filter_groups.enable")
        metric, batches = (f"algorithm.filter_groups.{name}" for name in ("metric", "max_num_gen_batches"))
        if d.text(metric, "acc") not in ("acc", "score", "seq_reward", "seq_final_reward"):
            d.reject(metric, "groups are compared by their rewards")
        elif d.is_present(metric):
            d.defaults.append(
                Row(metric, d.text(metric), "a group of equal rewards of data.reward is dropped")
            )
        if d.is_present(batches):
            d.consumed.add(batches)
            d.defaults.append(Row(batches, d.text(batches), "verl stops with an error after so many batches"))
    _corrections(d)
    if d.is_present(f"{ACTOR}.ppo_epochs"):
        d.copy(f"{ACTOR}.ppo_epochs", int)


def _filters_groups(d: Draft) -> bool:
    """Return whether the program reads algorithm.filter_groups: verl's first trainer and those beside it do not."""
    program, version = d.text(PROGRAM), "trainer.use_v1"
    is_first = program == "verl.trainer.main_ppo" and d.is_present(version) and not d.flag(version)
    return not is_first and program not in (*ONE_STEP_OFF, *FULLY_ASYNC, *PARTIAL_ROLLOUT, *ASYNC_FLOW)


def _corrections(d: Draft) -> None:
    """Translate truncated importance weights and rejections."""
    section = "algorithm.rollout_correction"
    bypass = f"{section}.bypass_mode"
    is_bypassed = d.get(PROGRAM) in (*ONE_STEP_OFF, *FULLY_ASYNC)
    if d.is_present(bypass):
        is_bypassed = d.flag(bypass)
    level = d.text(f"{section}.rollout_is", "null")
    capped = _first_present(
        d, f"{ACTOR}.tis_imp_ratio_cap", "algorithm.rollout_is_threshold", f"{section}.rollout_is_threshold"
    )
    of_level = [f"{section}.rollout_is", f"{section}.rollout_is_batch_normalize"]
    corrections: list[dict[str, Any]] = []
    names = [capped]
    if is_bypassed:
        loss = f"{section}.loss_type"
        if d.text(loss, "ppo_clip") != "ppo_clip":
            d.reject(loss, "without scoring passes the loss is the clipped one (algo.anchor = mu)")
        d.set_field("algo.anchor", "mu", bypass)
        d.consumed |= {loss, capped, *of_level}  # the ratio to the engine's log-probs is the weight
    elif capped.startswith(section) and level in ("null", "None"):
        d.consumed |= {capped, *of_level}
    elif not re.fullmatch(r"[\d.eE+-]*|null|None", d.text(capped)):
        low, _, high = d.text(capped).partition("_")
        corrections.append({"name": "icepop", "low": float(low), "high": float(high or low)})
    elif (cap := d.number(capped, 2.0 if capped.startswith(section) else 0)) > 0 or d.is_unresolved(capped):
        corrections.append({"name": "tis", "cap": cap})
    if corrections and capped.startswith(section):
        names += of_level
        if level == "sequence":
            corrections[0]["level"] = "sequence"
        if d.flag(of_level[1]):
            corrections[0]["normalise"] = True
    corrections += _rejections(d, section, names)
    if any(isinstance(t, dict) and t["name"] == "distill_pg" for t in d.get_field("algo.loss", [])):
        for name in names if corrections else ():
            d.reject(name, "corrections are those of the policy loss; verl has them in the distillation, too")
    if corrections:
        d.set_field("algo.corrections", corrections, *names)


def _rejections(d: Draft, section: str, names: list[str]) -> list[dict[str, Any]]:
    """Return the corrections of rollout_rs; bounds of k1 are those of a ratio. Append its settings to `names`."""
    rule, bound = f"{section}.rollout_rs", f"{section}.rollout_rs_threshold"
    lower_bound, veto = f"{bound}_lower", f"{section}.rollout_token_veto_threshold"
    option = d.text(rule, "null").strip("'")
    has_veto = d.text(veto, "null") not in ("null", "None")
    if option in ("null", "None") and not has_veto:
        d.consumed |= {rule, bound, lower_bound, veto}
        return []
    names += [rule, bound, lower_bound, veto]
    if option in ("token", "sequence", "geometric") or has_veto:  # verl before 2026
        return [_ratio_rejection(d, option, rule)]
    rules, bounds = d.text(rule).strip("'").split(","), d.text(bound).strip("'").split(",")
    rejections = []
    for option, limits in zip(rules, bounds * len(rules) if len(bounds) == 1 else bounds, strict=False):
        match = re.fullmatch(r"(token|seq_(?:sum|mean|max))_(k[123])", option.strip())
        low, _, high = limits.strip().rpartition("_")
        if match is None or not re.fullmatch(r"[\d.eE+-]+", high) or not re.fullmatch(r"[\d.eE+-]*", low):
            d.reject(rule, "expected token_k1, seq_mean_k3 or the like with their bounds")
            break
        rejection = {"name": "rejection", "kind": match[2], "level": match[1].replace("seq", "sequence")}
        if match[2] == "k1":
            upper = float(high)
            rejection |= {"low": math.log(float(low) if low else 1 / upper), "high": math.log(upper)}
        else:
            rejection["high"] = float(high)
        rejections.append(rejection)
    return rejections


def _ratio_rejection(d: Draft, level: str, rule: str) -> dict[str, Any]:
    """Return the correction of a rule whose bounds are those of a ratio."""
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
        d.reject(veto, f"beside {rule} = {level}")
    if d.text(veto, "null") not in ("null", "None"):
        rejection["veto"] = d.number(veto, 0.0)
    return rejection


def _trainer(d: Draft) -> None:
    """Translate optimizer, memory options, checkpoints and adapters."""
    set_steps(d, "trainer.total_training_steps", "trainer.total_epochs", 30)
    _optimizer(d, f"{ACTOR}.optim", "trainer", 1e-6)
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
            "trainer.balance_loss: that of each sequence; Megatron's aux_loss is that of a micro-batch"
        )
    rate = f"{ACTOR}.megatron.override_transformer_config.moe_router_bias_update_rate"
    if d.number(rate, 0.0):
        d.set_field("trainer.balance_rate", d.number(rate, 0.0), rate)
    _fp8(d)
    _checkpoints(d)
    _lora(d, MODEL)
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
        d.reject(engines, "engines compute in the model's type, or in FP8")
    if d.text(kind, "null") not in ("null", "None", "False"):
        if d.text(kind) not in ("e4m3", "hybrid") or d.text(recipe, "delayed") != "blockwise":
            d.reject(kind, "the trainer has blocks of e4m3 or hybrid")
        d.set_field("model.fp8", "both" if in_engines else "trainer", kind, recipe, engines)
        if d.text(kind) == "hybrid":
            d.set_field("model.fp8_format", "hybrid", kind, recipe, engines)
        d.warnings.append(
            "model.fp8: the scales of the trainer's blocks are any float32 numbers; with "
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=0 those of the script are powers of two"
        )
    elif in_engines:
        d.set_field("model.fp8", "rollout", engines)
    d.consumed |= {engines, kind}


def _checkpoints(d: Draft) -> None:
    interval = d.integer("trainer.save_freq", -1)
    d.set_field("trainer.checkpoint_every", interval if interval > 0 else NEVER, "trainer.save_freq")
    d.copy("trainer.max_actor_ckpt_to_keep", int)


def _optimizer(d: Draft, optim: str, section: str, default_lr: float) -> None:
    """Translate optimizer and learning rate; `section` of the config has the schedule."""
    lr = d.number(f"{optim}.lr", default_lr)
    d.set_field("trainer.lr", lr, f"{optim}.lr")
    if (initial := d.number(f"{optim}.lr_warmup_init", 0.0)) > 0:
        if initial >= lr:
            d.reject(f"{optim}.lr_warmup_init", f"a warm-up rises; {optim}.lr = {lr:g}")
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
    for name in ("lr_decay_steps", "total_training_steps"):
        decay = d.integer(f"{optim}.{name}", -1)
        if decay > 0 and decay == d.integer("trainer.total_training_steps", 0):
            d.defaults.append(Row(f"{optim}.{name}", str(decay), "trainer.steps"))
        elif decay > 0 and d.text(f"{optim}.lr_decay_style", "constant") == "constant":
            d.defaults.append(Row(f"{optim}.{name}", str(decay), "not in use: the learning rate is constant"))
        elif decay <= 0:
            d.consumed.discard(f"{optim}.{name}")
    styles = [
        f"{optim}.{name}" for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style", "decay_type")
    ]
    style_setting = _first_present(d, *styles)
    default_style, default_end = _SCHEDULES.get(_trainer_kind(d), ("constant", 0.0))
    if _is_old_fine_tuning(d):
        default_style = "cosine"
    style = d.text(style_setting, default_style)
    if style not in ("constant", "linear", "cosine"):
        d.reject(style_setting, "constant, linear and cosine are here")
    d.set_field(f"{section}.schedule", style, style_setting)
    ratio_setting = _first_present(d, f"{optim}.min_lr_ratio", f"{optim}.min_lr_factor")
    least_setting = _first_present(d, f"{optim}.min_lr", f"{optim}.lr_min")
    if end := d.number(ratio_setting, default_end):
        d.set_field(f"{section}.lr_end", end, ratio_setting)
    elif min_lr := d.number(least_setting, 0.0):
        d.set_field(f"{section}.lr_end", min_lr / lr, least_setting, f"{optim}.lr")
    elif section == "sft":
        d.set_field("sft.lr_end", 0.0, f"{optim}.min_lr")
    d.set_field("trainer.weight_decay", d.number(f"{optim}.weight_decay", 0.01), f"{optim}.weight_decay")
    betas = d.get(f"{optim}.betas", [0.9, 0.999])
    if not (isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, float | int) for b in betas)):
        raise UserError(f"{optim}.betas = {str(betas)[:80]}: expected two numbers")
    d.set_field("trainer.betas", betas, f"{optim}.betas")
    clipped = _first_present(d, f"{ACTOR}.grad_clip", f"{optim}.clip_grad")
    d.set_field("trainer.grad_clip", d.number(clipped, 1.0), clipped)


def _is_old_fine_tuning(d: Draft) -> bool:
    """Return whether the program is verl's first trainer for fine-tuning, whose defaults differ."""
    return "fsdp_sft_trainer" in str(d.get(PROGRAM))


def _trainer_kind(d: Draft) -> str:
    """Return verl's name of the trainer."""
    return d.text("model_engine") or d.text(f"{ACTOR}.strategy") or d.text("engine") or "fsdp"


def _lora(d: Draft, model: str) -> None:
    """Translate LoRA on Hugging Face's matrices; LoRA of verl's Megatron trainer uses Megatron's names."""
    rank, alpha, targets = (f"{model}.{x}" for x in ("lora_rank", "lora_alpha", "target_modules"))
    target_modules = d.get(targets, "all-linear")
    if d.integer(rank, 0) > 0 or d.is_unresolved(rank):
        d.set_field("trainer.lora.rank", d.integer(rank, 0), rank)
        d.set_field("trainer.lora.alpha", d.number(alpha, 16), alpha, rank)
        if isinstance(target_modules, list):
            d.set_field("trainer.lora.targets", target_modules, targets, rank)
        elif target_modules != "all-linear":
            d.reject(targets, "expected all-linear or a list; give trainer.lora.targets")
    else:
        d.consumed |= {alpha, targets, f"{model}.exclude_modules"}
    section = f"{model}.lora"
    if d.integer(f"{section}.rank", 0) > 0:
        d.set_field("trainer.lora.rank", d.integer(f"{section}.rank", 0), f"{section}.rank")
        d.set_field(
            "trainer.lora.alpha", d.number(f"{section}.alpha", 32), f"{section}.alpha", f"{section}.rank"
        )
        matrices = d.get(f"{section}.target_modules", list(MEGATRON_MATRICES))
        if not isinstance(matrices, list) or not set(matrices) <= set(MEGATRON_MATRICES):
            d.reject(f"{section}.target_modules", f"{', '.join(MEGATRON_MATRICES)} are here")
        elif set(matrices) != set(MEGATRON_MATRICES):
            names = [name for matrix in matrices for name in MEGATRON_MATRICES[matrix]]
            d.set_field("trainer.lora.targets", names, f"{section}.target_modules", f"{section}.rank")
        d.consumed |= {f"{section}.target_modules", f"{section}.merge"}
        initial = f"{section}.lora_A_init_method"
        if d.text(initial, "xavier") not in ("xavier", "kaiming", "uniform", "normal"):
            d.reject(initial, "A is drawn evenly, as PEFT does")
        d.consumed.add(initial)
        d.warnings.append(LORA_START)
        if d.number(f"{section}.dropout", 0.0):
            d.reject(f"{section}.dropout", "there is no dropout")
    else:
        d.consumed.update(name for name in d.settings if name.startswith(f"{section}."))


def _layout_names(section: str) -> dict[str, tuple[str, ...]]:
    """Return attribute of Sizes -> setting of a Megatron section."""
    figures = {
        "tp": "tensor_model", "pp": "pipeline_model", "vpp": "virtual_pipeline_model", "cp": "context",
        "ep": "expert_model", "etp": "expert_tensor",
    }  # fmt: skip
    return {figure: (f"{section}.{name}_parallel_size",) for figure, name in figures.items()}


def _sizes(d: Draft) -> tuple[Sizes, dict[str, tuple[str, ...]]]:
    m = f"{ACTOR}.megatron"
    names: dict[str, tuple[str, ...]] = {
        "groups": ("data.train_batch_size",), "group_size": (f"{ROLLOUT}.n",),
        "response": ("data.max_response_length",), "prompt": ("data.max_prompt_length",),
        "update": (f"{ACTOR}.ppo_mini_batch_size",),
        "micro": (f"{ACTOR}.ppo_max_token_len_per_gpu",), "nodes": ("trainer.nnodes",),
        "gpus": ("trainer.n_gpus_per_node",), "engine_tp": (f"{ROLLOUT}.tensor_model_parallel_size",),
        **_layout_names(m),
    }  # fmt: skip
    n = d.integer(f"{ROLLOUT}.n", 1)
    if (
        n == 1
        and not d.is_unresolved(f"{ROLLOUT}.n")
        and d.get_field("algo.advantage", "") in ("grpo", "dr_grpo", "rloo")
        and _has_task_rewards(d)
    ):
        d.mark_unresolved(f"{ROLLOUT}.n", "one sample a prompt leaves a group without a baseline")
    engine_gpus = None
    if d.get(PROGRAM) in (*ONE_STEP_OFF, *FULLY_ASYNC, *ASYNC_FLOW):
        engine_gpus = d.integer("rollout.nnodes", 1) * d.integer("rollout.n_gpus_per_node", 8)
        names["engine_gpus"] = ("rollout.nnodes", "rollout.n_gpus_per_node")
        if d.get(PROGRAM) in ONE_STEP_OFF:
            d.set_field("rollout.max_staleness", 1)
    groups = d.integer("data.train_batch_size", 1024)
    if d.is_present("data.gen_batch_size") and d.get(PROGRAM) not in FULLY_ASYNC:
        generated = d.integer("data.gen_batch_size", groups)
        if not d.flag("algorithm.filter_groups.enable") and generated != groups:
            groups = generated
            names["groups"] = ("data.gen_batch_size", "data.train_batch_size")
            d.warnings.append(
                f"rollout.groups_per_step = {groups}: without filter_groups a step trains data.gen_batch_size prompts"
            )
    sizes = Sizes(
        engine_gpus=engine_gpus, groups=groups, group_size=n,
        update=d.integer(f"{ACTOR}.ppo_mini_batch_size", 256) * n, prompt=d.integer("data.max_prompt_length", 512),
        response=d.integer("data.max_response_length", 512),
        micro=d.integer(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384), nodes=d.integer("trainer.nnodes", 1),
        gpus=d.integer("trainer.n_gpus_per_node", 8), tp=d.integer(f"{m}.tensor_model_parallel_size", 1),
        pp=d.integer(f"{m}.pipeline_model_parallel_size", 1),
        vpp=d.integer(f"{m}.virtual_pipeline_model_parallel_size", 0), cp=d.integer(f"{m}.context_parallel_size", 1),
        ep=d.integer(f"{m}.expert_model_parallel_size", 1),
        etp=d.integer(f"{m}.expert_tensor_parallel_size", 0) or None,
        engine_tp=d.integer(f"{ROLLOUT}.tensor_model_parallel_size", 2),
    )  # fmt: skip
    return sizes, names
