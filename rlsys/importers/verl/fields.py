"""Tables of verl's settings.

VERL            settings with a field of rlsys
DEFAULTS        settings that request what rlsys does by default; SFT_DEFAULTS for fine-tuning
SPEED           settings without a counterpart that change only speed, memory or logging
"""

from __future__ import annotations

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
    "trainer.resume_mode": "run.dir: the same command with the same folder resumes",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
}
"""The settings that verl's example scripts use most -> the field of rlsys, with differences."""
_LAYOUT = r"(fsdp|megatron|veomni|torchtitan|automodel|mindspeed|engine|dtensor)"
SFT_DEFAULTS = (
    (r"^data\.(max_length|max_token_len_per_gpu|pad_mode|micro_batch_size.*|use_dynamic_bsz|ignore_input_ids_mismatch)$",
     None, "answers are packed to trainer.token_budget"),
    (r"^data\.val_files$", None, "no held-out loss"),
    (r"^engine(\.|$)|^model\.(fsdp_config|strategy|use_|enable_gradient|trust|external_lib)|use_remove_padding$|"
     r"^ulysses", None, "the trainer is Megatron; see parallel and trainer"),
)  # fmt: skip
"""Further DEFAULTS for supervised fine-tuning."""
DEFAULTS = (
    (r"^actor_rollout_ref\.ref\.(strategy|log_prob_|use_torch_compile|fsdp|megatron|veomni|torchtitan|entropy|profiler|"
     r"ulysses|engine|rollout_n)", None, "the reference shares the trainer's layout"),
    (r"strategy$|model_engine$", None, "the trainer is Megatron; see parallel and trainer"),
    (r"(micro_batch_size(_per_gpu)?|dynamic_bsz|log_prob_max_token_len_per_gpu|forward_max_token_len_per_gpu)$", None,
     "micro-batches are packed to trainer.token_budget"),
    (r"use_remove_padding$|use_thd$", None, "samples are packed, without padding"),
    (r"\.(fsdp_config\.(model_dtype|dtype)|megatron\.dtype|rollout\.dtype|veomni\.dtype)$",
     ("bfloat16", "bf16"), "bfloat16"),
    (r"rollout\.(calculate_log_probs|mode)$", None, "requests are asynchronous; log-probs are stored"),
    (r"rollout\.ignore_eos$", (False,), "a response ends at the model's end token"),
    (r"rollout\.do_sample$", (True,), "tokens are sampled"),
    (r"rollout\.(load_format|skip_tokenizer_init|disable_log_stats|free_cache_engine|multi_stage_wake_up)$", None,
     "weights reach the engines by weights.method; launch.release_memory frees them"),
    (r"hybrid_engine$", (True, False), "launch.placement"),
    (r"data\.filter_overlong_prompts_workers$", None, "rows are counted on all CPUs"),
    (r"engine_kwargs\.(vllm\.kv_cache_dtype|trtllm\.kv_cache_config\.dtype)$", ("auto", "bfloat16", "bf16"),
     "keys and values have the model's type"),
    (r"data\.min_response_length$", None, "verl does not read this setting"),
    (r"data\.shuffle$", (True,), "prompts are shuffled by data.seed"),
    (r"data\.(return_raw_chat|return_raw_input_ids|return_full_prompt|trust_remote_code)$|trust_remote_code$", None,
     "rows are read whole; code in a model folder is never run"),
    (r"data\.reward_fn_key$", ("data_source",), "a row's data_source goes to functions with verl's signature"),
    (r"data\.(train|val)_max_samples$", (-1,), "all rows are used"),
    (r"trainer\.val_before_train$", None, "an evaluation runs before the first step"),
    (r"(max_position_embeddings)$", None, "the limits of prompt and response bound the positions"),
    (r"(attention_dropout|embd_pdrop|resid_pdrop|hidden_dropout|lora_dropout)$", (0,), "there is no dropout"),
    (r"trainer\.val_only$", (False,), "the run trains"),
    (r"data\.validation_shuffle$", (False,), "held-out prompts have a fixed order"),
    (r"^async_training\.(use_trainer_do_validate|use_rollout_log_probs)$", None, "evaluations run on the engines"),
    (r"trainer\.resume_mode$", ("auto", "disable"), "the same command with the same run.dir resumes"),
    (r"trainer\.resume_from_path$", (False, None, ""), "the same command with the same run.dir resumes"),
    (r"trainer\.use_legacy_worker_impl$|trainer\.use_v1$", ("disable", False, True), "rlsys has its own loop"),
    (r"trainer\.v1\.trainer_mode$", ("sync",), "launch.placement = colocated"),
    (r"(checkpoint\.|max_(critic_)?ckpt_to_keep|max_critic_ckpt|del_local|remove_previous|default_hdfs_dir)", None,
     "trainer.checkpoint_every and trainer.keep_checkpoints"),
    (r"^actor_rollout_ref\.model\.enable_gradient_checkpointing$", (False,), "trainer.recompute = []"),
    (r"optim\.(optimizer)$", ("AdamW", "adam", "adamw"), "trainer.optimizer = adamw"),
    (r"optim\.(lr_warmup_init)$", (0,), "the learning rate rises from 0"),
    (r"optim\.(total_training_steps|lr_decay_steps)$", (-1, None), "trainer.steps"),
    (r"actor\.(shuffle|freeze_vision_tower|calculate_entropy)$", (False,), "rlsys does not do this"),
    (r"actor\.calculate_sum_pi_squared$", None, "computed where algo.advantage needs it"),
    (r"actor\.(kl_loss_coef|kl_loss_type)$", None, "not in use: use_kl_loss is not set"),
    (r"algorithm\.(kl_penalty|kl_ctrl\.)", None, "not in use: use_kl_in_reward is not set"),
    (r"algorithm\.filter_groups\.", None, "not in use: filter_groups.enable is not set"),
    (r"distillation\.enabled$", (False,), "the run does not distil"),
    (r"override_transformer_config\.(moe_aux_loss_coeff|moe_z_loss_coeff)$", (0,), "0, as trainer.balance_loss"),
    (r"override_transformer_config\.(moe_router_(dtype|load_balancing_type|enable_expert_bias|score_function|topk|"
     r"pre_softmax)|sequence_parallel|(context|tensor_model|pipeline_model|expert_model)_parallel_size|moe_grouped_gemm|use_distributed_optimizer|"
     r"normalization|swiglu|num_layers|num_query_groups|qk_layernorm|position_embedding_type|rotary_[a-z]*|"
     r"add_qkv_bias|untie_[a-z_]*)$", None, "read from the model's config.json, or from parallel"),
    (r"mtp\.mtp_loss_scaling_factor$", None, "not in use: the layer is not trained"),
    (r"agent\.default_agent_loop$", ("single_turn_agent",), "rollout.generator = single_turn"),
    (r"model\.exclude_modules$", (".*visual.*",), "models are text"),
    (r"data\.gen_batch_size$", None, "a step requests more groups when its group policy drops some"),
    (r"reward_model\.(enable|use_reward_loop)$", (False,), "only data.reward computes rewards"),
    (r"reward_kwargs\.(max_resp_len|overlong_buffer_cfg\.)|overlong_buffer\.", None,
     "not in use: overlong_buffer_cfg.enable is not set"),
    (r"model\.(override_config\.attn_implementation|override_config\.torch_dtype)", None,
     "rlsys chooses the implementation of attention; model.dtype is the dtype"),
    (r"model\.lora_(rank|alpha)$|model\.target_modules$", (0, None), "the run trains no adapter"),
    (r"rollout\.multi_turn\.enable$", (False,), "a response has one turn"),
    (r"router_replay\.mode$|enable_rollout_routing_replay$", (False, "disabled"), "trainer.replay = off"),
)  # fmt: skip
"""Settings that request what a run does by default: (pattern of names, values or None for all, reason)."""
SPEED = (
    (rf"\.{_LAYOUT}(_config)?\.(?!override_transformer_config\.|router_replay)|{_LAYOUT}_size$|ulysses|fsdp_size",
     "the trainer is Megatron; parallel and trainer.offload_optimizer determine the layout"),
    (r"override_transformer_config\.(recompute|.*fus(ion|ed)|use_(fused|naive|flash|triton|ascend|arbitrary)|moe_enable_deepep|"
     r"moe_token_dispatcher|attention_backend|num_layers_in_|account_for|persist_layer_norm|deallocate|"
     r"gradient_accumulation|overlap|tp_comm|context_parallel_algo|apply_rope|moe_shared_expert_overlap|cuda_graph|"
     r"pipeline_model_parallel_layout|multi_latent)", "the trainer does not have this switch"),
    (r"(param|optimizer|grad|activation)_offload$|override_optimizer_config\.(optimizer_(cpu_)?offload|offload_fraction|overlap|use_precision)|torch_compile|fused_kernel|use_liger|use_shm|"
     r"_with_chunking|entropy_checkpointing|prefix_grouper|mbridge|dist_checkpoint|use_orig_params|mixed_precision",
     "the trainer does not have this switch"),
    (r"^critic\.(ppo_max_token|forward_max_token|model\.(enable_gradient|use_remove|enable_activation|trust)|use_dynamic)",
     "the critic shares the trainer's layout and micro-batches"),
    (r"rollout\.(enable_sleep_mode|moe_tensor_parallel_size|prometheus\.)|mtp\.(enable_rollout|speculative)|"
     r"engine_kwargs\.sglang\.enable_dp_attention|engine_kwargs\.(vllm|trtllm)\.(?!.*(quant|kv_cache_dtype|hf_overrides|"
     r"seed|logits))", "engines are SGLang without this switch; engine.extra_args passes other options"),
    (r"rollout\.(name|gpu_memory_utilization|max_num_batched_tokens|enable_chunked_prefill|chunked_prefill|enforce_eager|"
     r"max_model_len|cudagraph|enable_prefix_caching|engine_kwargs\.vllm\.(mm_processor|compilation_config|max_model_len|"
     r"swap_space|disable_)|layered_summon|data_parallel_size|expert_parallel_size|pipeline_model_parallel_size|"
     r"update_weights_bucket|checkpoint_engine|agent\.num_workers|nnodes|n_gpus_per_node|profiler|disaggregat)",
     "engines are SGLang; engine.extra_args passes other options"),
    (r"^(ray_kwargs|global_profiler|transfer_queue)\.|logger$|project_name$|experiment_name$|log_val|balance_batch$|"
     r"trainer\.(device|validation_data_dir|rollout_data_dir|esi_|ray_wait)|profiler\.|profile_steps|nccl_timeout|"
     r"dataloader_num_workers|data\.num_workers|reward(_model)?\.(num_workers|launch_reward)|val_batch_size|"
     r"ignore_input_ids_mismatch|tokenizer_parallel|data_loader_seed|trainer\.seed$|actor\.seed$|load_weight$",
     "the run folder has metrics, samples and checkpoints; run.trackers sends them on"),
)  # fmt: skip
"""Settings without a counterpart that change only speed, memory or logging: (pattern of names, reason)."""
