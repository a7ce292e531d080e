"""Names of verl and slime for what our config has under another name, for people who come from there.

verl's are paths of its YAML (volcengine/verl, trainer/config), slime's are options of its command line (THUDM/slime,
slime/utils/arguments.py; some are Megatron's). Of each, those that its own example scripts use most. The values are
our fields; units and meanings that differ are said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

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
SLIME = {
    "--hf-checkpoint": "model.path",
    "--load": "run.dir: the same command with the same folder goes on",
    "--save": "run.dir",
    "--save-interval": "trainer.checkpoint_every",
    "--prompt-data": "data.params.path, with data.source=jsonl",
    "--eval-prompt-data": "data.params.heldout_path",
    "--input-key": "data.keys.prompt",
    "--label-key": "data.keys.answer",
    "--tool-key": "data.keys.tools",
    "--apply-chat-template-kwargs": "data.chat_template_args",
    "--rollout-stop": "rollout.stop",
    "--rm-type": "data.reward",
    "--custom-rm-path": "data.reward=path/to/file.py:function",
    "--custom-generate-function-path": "rollout.generator=path/to/file.py:function",
    "--num-rollout": "trainer.steps",
    "--rollout-batch-size": "rollout.groups_per_step",
    "--n-samples-per-prompt": "rollout.group_size",
    "--global-batch-size": "algo.minibatches, the number of mini-batches in a train step",
    "--num-steps-per-rollout": "algo.minibatches",
    "--over-sampling-batch-size": "rollout.over_provision, as a multiple of what a step trains",
    "--partial-rollout": "rollout.over_provision, with rollout.max_staleness",
    "--dynamic-sampling-filter-path": "algo.planners=[dapo]",
    "--rollout-max-response-len": "rollout.max_response_tokens",
    "--rollout-temperature": "rollout.temperature",
    "--rollout-top-p": "rollout.top_p",
    "--rollout-top-k": "rollout.top_k",
    "--eval-interval": "eval.every",
    "--advantage-estimator": "algo.advantage",
    "--use-kl-loss": "algo.loss=[clip, kl]",
    "--kl-loss-coef": "algo.loss=[clip, {name: kl, beta: X}]",
    "--kl-coef": "algo.shaping=[{name: kl_reward, beta: X}]",
    "--entropy-coef": "algo.loss=[clip, {name: entropy, coefficient: X}]",
    "--eps-clip": "algo.loss=[{name: clip, clip_low: X, clip_high: X}]",
    "--eps-clip-high": "algo.loss=[{name: clip, clip_high: X}]",
    "--use-tis": "algo.corrections=[tis]",
    "--lr": "trainer.lr",
    "--lr-decay-style": "trainer.schedule",
    "--weight-decay": "trainer.weight_decay",
    "--clip-grad": "trainer.grad_clip",
    "--tensor-model-parallel-size": "parallel.tp",
    "--pipeline-model-parallel-size": "parallel.pp",
    "--context-parallel-size": "parallel.cp",
    "--expert-model-parallel-size": "parallel.ep",
    "--expert-tensor-parallel-size": "parallel.etp",
    "--max-tokens-per-gpu": "trainer.token_budget",
    "--recompute-granularity": "trainer.recompute",
    "--rollout-num-gpus": "engine.count, the number of engines",
    "--rollout-num-gpus-per-engine": "engine.tp",
    "--actor-num-nodes": "launch.nodes",
    "--actor-num-gpus-per-node": "launch.gpus_per_node",
    "--colocate": "launch.placement=colocated, the default",
}


_TRACKERS = "trackers of a run are named in run.trackers"
ELSEWHERE = {
    "max_turns": "it is the generator's: rollout.generator_params={max_turns: 4}",
    "wandb": _TRACKERS,
    "use_wandb": _TRACKERS,
    "logger": _TRACKERS,
    "adv_estimator": "it is algo.advantage",
    "reward_fn_key": "a row's key data_source goes to a reward function with verl's signature as it is",
}
"""Fields that others have and rlsys has not, or has in another way."""


def explain_foreign(error: ValidationError) -> str | None:
    """One line for a config's first mistake, where it is a key of verl, or an option of slime without its dashes."""
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        return None
    return next(filter(None, map(_told, _leaves(".".join(map(str, first["loc"])), first["input"]))), None)


def _leaves(path: str, value: Any) -> Iterator[str]:
    """The fields below an unknown key, which may be one of verl's whole sections."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(f"{path}.{key}", below)
    else:
        yield path


def _told(path: str) -> str | None:
    if path in VERL:
        return f"{path}: a field of verl; here it is {VERL[path]}"
    key = path.rpartition(".")[2].replace("-", "_").lstrip("_").removeprefix("rollout_")
    if key in ELSEWHERE:
        return f"{path}: there is no such field: {ELSEWHERE[key]}"
    for name in (path, path.rpartition(".")[2]):
        option = "--" + name.lstrip("-").replace("_", "-")
        if option in SLIME:
            return f"{path}: an option of slime; here it is {SLIME[option]}"
    return None


def told_of_options(words: list[str]) -> str | None:
    """What to say of words that the command line does not know; None where none is slime's, nor a field of ours."""
    for word, following in zip(words, [*words[1:], "VALUE"], strict=True):
        option, _, value = word.partition("=")
        if option in SLIME:
            return f"{option}: an option of slime; here it is {SLIME[option]}"
        if option.startswith("--") and "." in option:
            return f"{option}: fields have no dashes: {option[2:]}={value or following}"
    return None
