"""Translates slime's launch scripts (scripts/run-*.sh) into a config, as of August 2026.

An option that a script does not set has its default of slime/utils/arguments.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError
from rlsys.core.model_folder import read_stop_ids
from rlsys.core.yaml_text import parse_yaml
from rlsys.importers.arguments import Arguments
from rlsys.importers.draft import Draft, Row, Settings, Unresolved
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

SLIME = {
    "--hf-checkpoint": "model.path",
    "--load": "run.dir: the same command with the same folder resumes",
    "--save": "run.dir",
    "--save-interval": "trainer.checkpoint_every",
    "--prompt-data": "data.params.path, with data.source=jsonl",
    "--eval-prompt-data": "data.params.heldout_path",
    "--input-key": "data.keys.prompt",
    "--label-key": "data.keys.answer",
    "--tool-key": "data.keys.tools",
    "--apply-chat-template-kwargs": "data.chat_template_args",
    "--rollout-stop": "rollout.stop",
    "--rollout-stop-token-ids": "rollout.stop_ids, but for the model's own",
    "--rm-type": "data.reward",
    "--custom-rm-path": "data.reward=path/to/file.py:function",
    "--custom-generate-function-path": "rollout.generator=path/to/file.py:function",
    "--num-rollout": "trainer.steps",
    "--num-epoch": "trainer.epochs",
    "--rollout-shuffle": "data.params.shuffle",
    "--rollout-max-prompt-len": "data.params.max_prompt_tokens",
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
    "--eval-interval": "eval.interval",
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
    "--lr-warmup-iters": "trainer.warmup_steps",
    "--lr-warmup-fraction": "trainer.warmup_fraction",
    "--min-lr": "trainer.lr_end, as a share of trainer.lr",
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
    "--sglang-max-total-tokens": "engine.max_total_tokens",
    "--sglang-mem-fraction-static": "engine.memory_fraction",
    "--sglang-max-running-requests": "engine.max_running_requests",
    "--sglang-tool-call-parser": "engine.tool_call_parser",
    "--sglang-reasoning-parser": "engine.reasoning_parser",
    "--actor-num-nodes": "launch.nodes",
    "--actor-num-gpus-per-node": "launch.gpus_per_node",
    "--lora-rank": "trainer.lora.rank",
    "--lora-alpha": "trainer.lora.alpha",
    "--target-modules": "trainer.lora.targets, unset for all-linear",
    "--opd-teacher-load": "algo.teacher.path, a Hugging Face folder",
    "--opd-kl-coef": "algo.loss=[{name: distill, weight: X}]",
    "--colocate": "launch.placement=colocated, the default",
}
"""The options that slime's example scripts use most, also of Megatron -> the field of rlsys, with differences."""

ADVANTAGES = {
    "grpo": "grpo", "gspo": "grpo", "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "ppo": "gae",
}  # fmt: skip
KL_KINDS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
OPTIMIZERS = {"adam": "adamw", "muon": "muon", "dist_muon": "muon"}
_TEACHER_REWARD = "on_policy_distillation.reward_func"
"""End of the import path of slime's reward function that queries a teacher."""
TEACHER = "teacher's --model-path"
"""Key in the settings for the model of an SGLang server that the script starts."""
_MIS = re.compile(r"--((tis|rs)-(level|mode|lower-bound|upper-bound|veto-threshold|batch-normalize)|use-rs)$")
"""Options of slime's example train_infer_mismatch_helper."""
_INT4 = re.compile(r"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\W+1\b")
"""Environment variable that makes the trainer round weights to 4 bits."""
PROGRAMS = ("train.py", "train_async.py")
EXPECTED = "train.py or train_async.py with its options"
MATHEMATICS = {
    "math": "answers are compared by math-verify",
    "deepscaler": "an answer needs no </think> before it",
    "dapo": "a wrong answer has reward 0 instead of -1, and the answer is the boxed one",
}
"""slime's rewards for mathematics -> the difference of the reward `math`."""
FLAGS = (
    "--apply-chat-template", "--rollout-shuffle", "--partial-rollout", "--colocate", "--use-kl-loss", "--use-tis",
    "--use-routing-replay", "--use-rollout-routing-replay", "--calculate-per-token-loss",
    "--disable-grpo-std-normalization", "--normalize-advantages",
    "--disable-compute-advantages-and-returns", "--debug-train-only",
    "--optimizer-cpu-offload", "--enable-mtp-training", "--use-opd",
    "--use-dynamic-batch-size", "--balance-data", "--sequence-parallel", "--use-wandb", "--swiglu",
    "--group-query-attention",
)  # fmt: skip
"""Options without a value."""
SEVERAL = ("--eval-prompt-data", "--rollout-stop", "--rollout-stop-token-ids", "--sglang-cuda-graph-bs")
"""Options whose value consists of several arguments."""
EVAL_SAMPLING = (
    "--n-samples-per-eval-prompt", "--eval-max-response-len", "--eval-temperature", "--eval-top-p", "--eval-top-k",
)  # fmt: skip
"""Options for the sampling of evaluations."""
SFT_DEFAULTS = (
    (
        r"^--(calculate-per-token-loss|disable-compute-advantages-and-returns|debug-train-only|rollout-shuffle)$",
        (True,),
        "rlsys sft always does this",
    ),
    (
        r"^--(apply-chat-template|input-key|loss-mask-type|colocate|rollout-num-gpus.*|rollout-.*len|n-samples-.*|eval-.*|"
        r"advantage-estimator|eps-clip.*|entropy-coef|kl-.*|label-key|rm-type|sglang-.*|tool-key)$",
        None,
        "not in use by supervised fine-tuning",
    ),
)
"""Further DEFAULTS for supervised fine-tuning."""
DEFAULTS = (
    (r"^--(num-layers|hidden-size|ffn-hidden-size|num-attention-heads|group-query-attention|num-query-groups|"
     r"kv-channels|vocab-size|make-vocab-size|rotary-|use-rotary|normalization|norm-epsilon|swiglu|quick-geglu|"
     r"disable-bias-linear|add-qkv-bias|qk-(layernorm|head-dim|pos-emb)|untie-|(no-)?position-embedding|spec$|"
     r"moe-(ffn-hidden|layer-freq|router-(topk|score|pre-softmax|dtype|num-groups|group-topk|enable-expert-bias)|"
     r"shared-expert|grouped-gemm)|num-experts|multi-latent|q-lora|kv-lora|v-head|use-rope-scaling|"
     r"max-position|apply-layernorm|attention-output|use-gated-attention|no-rope-freq|seq-length|mscale|beta-fast|"
     r"beta-slow|original-max|post-(self-attn|mlp)-layernorm|model-name$|mtp-num-layers)",
     None, "read from the model's config.json"),
    (r"^--lora-dropout$", (0,), "there is no dropout"),
    (r"^--(attention|hidden)-dropout$", (0,), "there is no dropout"),
    (r"^--moe-router-load-balancing-type$", None, "the balancing loss is weighted by trainer.balance_loss"),
    (r"^--moe-z-loss-coeff$", (0,), "no z-loss"),
    (r"^--moe-token-drop-policy$", None, "no token is dropped"),
    (r"^--(ref-load|megatron-to-hf-mode|no-save|no-load-|finetune$|ckpt-format|async-save|no-save-)",
     None, "the run starts from model.path, and the reference model has the weights of this folder"),
    (r"^--load$", None, "the same command with the same run.dir resumes"),
    (r"^--(use-dynamic-batch-size|micro-batch-size|log-probs-max-tokens|data-pad-size)",
     None, "micro-batches are packed to trainer.token_budget"),
    (r"^--(accumulate-allreduce-grads-in-fp32|attention-softmax-in-fp32|sequence-parallel|bf16|loss-mask-type)$",
     None, "rlsys always does this"),
    (r"^--loss-type$", ("policy_loss",), "the loss is algo.loss"),
    (r"^--(apply-chat-template|rollout-shuffle)$", (True,), "prompts get the chat template and are shuffled"),
    (r"^--rollout-seed$", None, "data.seed orders the prompts; the orders of two frameworks are never equal"),
    (r"^--seed$", None, "run.seed; the random numbers of two frameworks are never equal"),
    (r"^--rollout-function-path$", ("slime.rollout.sglang_rollout.generate_rollout",), "rollout.generator"),
    (r"^--rollout-skip-special-tokens$", None, "reward functions get the text with the model's end token"),
    (r"^--train-backend$", ("megatron", "fsdp"), "the trainer is Megatron"),
    (r"^--(kl-loss-type|kl-loss-coef)$", None, "not in use: the script has no --use-kl-loss"),
    (r"^--(tis-clip)$", None, "not in use: the script has no --use-tis"),
    (r"^--(gamma|lambd|critic-lr|value-clip)$", None, "not in use: --advantage-estimator is not ppo"),
    (r"^--opd-(type|kl-coef)$", None, "not in use: the script has no --use-opd"),
    (r"^--(lr-warmup-init)$", (0,), "the learning rate rises from 0"),
)  # fmt: skip
"""Options that request what a run does by default: (pattern of names, values or None for all, reason)."""
SPEED = (
    (r"^--(qkv-format|attn-implementation|gradient-checkpointing)$", "the trainer does not have this switch"),
    (r"^--(recompute-(method|num-layers)|log-probs-chunk-size|attention-backend|moe-(enable-deepep|token-dispatcher|permute-fusion|"
     r"deepep|shared-expert-overlap)|use-distributed-optimizer|overlap-|use-precision-aware|"
     r"no-gradient-accumulation-fusion|no-masked-softmax-fusion|no-(rope|bias)-.*fusion|no-rope-fusion|cross-entropy|"
     r"transformer-impl|deterministic-mode|data-parallel-random|train-memory|update-weight-|"
     r"balance-|allgather-cp|(no-)?offload|enable-experimental|"
     r"distributed-timeout|num-gpus-per-node|train-env-vars|decoder-(first|last)-pipeline|no-check-for-nan|"
     r"recompute-loss-function|account-for|qwen-gdn-backend|tp-comm|cp-comm-type|manual-gc|num-workers|empty-unused)",
     "the trainer does not have this switch"),
    (r"^--(sglang|use-slime-router|slime-router|router-|rollout-health|use-fault|prefill-num-servers|rollout-data-transport)",
     "engines and router of rlsys do not have this switch"),
    (r"^--(use-wandb|wandb|disable-wandb|use-tensorboard|tb-|log-|use-tracking|dump-details|save-debug|profile|"
     r"record-|memory-(snapshot|recorder)|use-pytorch-profiler|custom-(eval-)?rollout-log|get-mismatch|ci-|save-hf|"
     r"use-rollout-entropy|skip-eval-before-train|distributed-backend|rank$|check-weight-update)",
     "the run folder has metrics and samples; run.trackers sends them on"),
)  # fmt: skip
"""Options without a counterpart that change only speed, memory or logging: (pattern of names, reason)."""
NOT_SGLANG = (
    "--sglang-router", "--sglang-server-concurrency", "--sglang-config", "--sglang-log-", "--sglang-decode-log",
    "--sglang-enable-metrics", "--sglang-enable-dp-", "--sglang-lora-backend", "--sglang-kv-events",
    "--sglang-disaggregation",
)  # fmt: skip
"""Prefixes of options that are not passed to SGLang: options of slime's router, of logs, and options that the config
refuses."""
DATA_PARALLEL = ("--sglang-dp-size", "--sglang-data-parallel-size")
"""Options that are not passed to SGLang with data-parallel attention."""


def read_yaml(data: Any) -> Settings:
    """Return the options of a YAML file.

    Args:
        data: content of the file: names of options, with or without dashes, and their values.

    Raises:
        UserError: the content is not a mapping.
    """
    if not isinstance(data, dict):
        raise UserError(f"found {type(data).__name__}; expected a mapping of options")
    return Settings(
        {
            f"--{str(key).replace('_', '-').lstrip('-')}": value
            for key, value in data.items()
            if value not in (None, False)
        }
    )


def program_index(argv: Sequence[str]) -> int:
    """Return the index of the training program in an argument list; -1 if there is none."""
    return next((i for i, argument in enumerate(argv) if Path(argument[-99:]).name in PROGRAMS), -1)


def read_settings(arguments: Arguments) -> Settings:
    """Return the options of the training command. Their keys have dashes; `train` is the key of the program."""
    settings = Settings({}, list(arguments.problems), list(arguments.notes))
    options = _split_options(arguments, settings)
    settings.values |= {name: arguments.value(values) for name, values in options.items()}
    settings.values["train"] = Path(arguments.argv[0]).stem
    _read_custom_config(arguments, settings)
    if any(_INT4.search(argument) for command in arguments.run.commands for argument in command):
        settings.problems.append(
            "OPEN_TRAINING_INT4_FAKE_QAT_FLAG = 1: rlsys does not train weights in 4 bits"
        )
    for command in arguments.run.commands:
        if "sglang.launch_server" in command and "--model-path" in command[:-1]:
            settings.values.setdefault(TEACHER, command[command.index("--model-path") + 1])
    return settings


def _split_options(arguments: Arguments, settings: Settings) -> dict[str, list[str]]:
    """Return option -> its values. Arguments that belong to no option are added to the problems of `settings`."""
    options: dict[str, list[str]] = {}
    name = None
    for argument in arguments.argv[1:]:
        reason = arguments.run.explain(argument)
        if argument.startswith("--") and reason is None:
            name, separator, value = argument.partition("=")
            options[name] = [value] if separator else []
        elif name is not None and _accepts_value(name, options[name], is_resolved=reason is None):
            options[name].append(argument)
        else:
            text = arguments.run.source_text(argument)
            problem = f"{reason}; it may be any option" if reason else "the argument belongs to no option"
            settings.problems.append(f"{text}: {problem}")
    return options


def _accepts_value(name: str, values: list[str], *, is_resolved: bool) -> bool:
    """Return whether the next argument is a value of an option.

    Args:
        name: the option.
        values: values that it has.
        is_resolved: whether the script determines the argument. If not, the argument may be another option.
    """
    if name in FLAGS:
        return False
    return is_resolved or not values or name in SEVERAL


def _read_custom_config(arguments: Arguments, settings: Settings) -> None:
    """Add the options of the YAML file of --custom-config-path. They override those of the command."""
    option = "--custom-config-path"
    text = arguments.run.read_text(path) if isinstance(path := settings.values.get(option), str) else None
    data = None if text is None else parse_yaml(text, f"{option} = {path}")
    if isinstance(data, dict):
        del settings.values[option]
        settings.values |= read_yaml(data).values


def translate(settings: Settings, rewards: Collection[str]) -> Draft:
    """Translate slime's options into a config.

    Args:
        settings: result of read_settings or read_yaml.
        rewards: short names of the built-in rewards.

    Raises:
        UserError: the script has no model or no data, or a value has the wrong type.
    """
    d = Draft(dict(settings.values), SLIME)
    asynchronous = d.get("train") == "train_async"
    for name in ("--hf-checkpoint", "--prompt-data"):
        if not d.is_present(name):
            if not settings.problems:
                raise UserError(f"{name} is missing; expected --hf-checkpoint and --prompt-data")
            d.require(name)
    run_dir = d.text("--save")
    d.set_field("run.dir", run_dir or "runs/imported", "--save")
    d.set_field("model.path", d.text("--hf-checkpoint"), "--hf-checkpoint")
    reject_media(d, "--hf-checkpoint", "--prompt-data")
    d.set_field("model.dtype", "bfloat16")
    if d.text("--loss-type", "policy_loss") == "sft_loss" or "sft_rollout" in d.text(
        "--rollout-function-path"
    ):
        _fine_tuning(d)
        d.finish((*SFT_DEFAULTS, *DEFAULTS), SPEED, settings)
        return d
    d.consumed -= {"--loss-type", "--rollout-function-path"}
    distils = d.flag("--use-opd") or d.text("--custom-rm-path").endswith(_TEACHER_REWARD)
    if distils:
        _teacher(d)
    else:
        d.consumed -= {"--use-opd", TEACHER}
    _data(d, rewards)
    _rollout(d)
    _algorithm(d)
    _trainer(d)
    _engines(d)
    set_sizes(d, *_sizes(d, asynchronous))
    if not d.is_present("--lr-warmup-fraction"):
        set_warm_up(d, "--lr-warmup-iters", d.get_field("algo.minibatches", 1))
    if asynchronous:
        d.set_field("rollout.max_staleness", max(1, int(d.get_field("rollout.max_staleness", 0))))
    if d.flag("--use-rollout-logprobs") or d.is_unresolved("--use-rollout-logprobs"):
        d.set_field("algo.anchor", "mu", "--use-rollout-logprobs")
    else:
        set_anchor(d)
    d.finish(DEFAULTS, SPEED, settings)
    return d


def _fine_tuning(d: Draft) -> None:
    """Translate supervised fine-tuning, for `rlsys sft`."""
    d.is_fine_tuning = True
    d.consumed |= {"--loss-type", "--rollout-function-path"}
    batch = d.integer("--global-batch-size", d.integer("--rollout-batch-size", 0))
    d.require("--rollout-batch-size")
    if d.integer("--rollout-batch-size", batch) != batch:
        d.reject(
            "--rollout-batch-size",
            f"expected {batch}, as --global-batch-size: rlsys sft trains one batch per update",
        )
    d.set_field("sft.traces", "chats")
    d.set_field("sft.params.path", d.get("--prompt-data"), "--prompt-data")
    d.set_field("sft.params.batch", batch, "--global-batch-size", "--rollout-batch-size")
    if d.text("--input-key", "messages") != "messages":
        d.reject("--input-key", "expected messages, the key of a row's chat in rlsys sft")
    if d.is_present("train") and not d.flag("--calculate-per-token-loss"):
        d.require(
            "--calculate-per-token-loss",
            "the script takes the mean loss over samples; rlsys sft has only that over tokens",
        )
        d.set_field("sft.loss", "cross_entropy", "--calculate-per-token-loss")
    _trainer(d, "sft")
    nodes, gpus = d.integer("--actor-num-nodes", 1), d.integer("--actor-num-gpus-per-node", 8)
    sizes, names = _layout(d, nodes, gpus)
    set_layout(d, sizes, names, max(1, batch))
    tokens = d.integer("--max-tokens-per-gpu", 0) * sizes.cp
    if tokens:
        d.set_field("trainer.token_budget", tokens, "--max-tokens-per-gpu", "--context-parallel-size")


def _data(d: Draft, rewards: Collection[str]) -> None:
    """Translate training prompts, reward, generator and evaluations."""
    path = d.get("--prompt-data")
    if "@[" in d.text("--prompt-data"):
        d.reject(
            "--prompt-data", "the value names a slice of a file; expected a file that has only these rows"
        )
    d.set_field("data.source", data_source(path), "--prompt-data")
    d.set_field("data.params.path", path, "--prompt-data")
    d.copy_setting("--input-key")
    d.copy_setting("--label-key")
    d.copy_setting("--tool-key")
    _reward(d, rewards)
    _generator(d)
    for name in ("--metadata-key", "--eval-config"):
        d.reject(name, "no counterpart: rows are read whole, and eval.sets has the evaluations")
    d.reject("--multimodal-keys", "no counterpart: prompts are text")
    if d.is_present("train") and not d.flag("--rollout-shuffle"):
        d.set_field("data.params.shuffle", False, "--rollout-shuffle")
    d.consumed.discard("--rollout-shuffle")
    if d.is_present("--rollout-max-prompt-len"):
        limit = d.integer("--rollout-max-prompt-len", 0)
        d.set_field("data.params.max_prompt_tokens", limit, "--rollout-max-prompt-len")
    if d.is_present("train") and not d.is_present("--apply-chat-template"):
        d.warnings.append(
            "data: without --apply-chat-template slime uses prompts unchanged; rlsys applies the template to chats"
        )
    _heldout(d)
    if d.is_present("--eval-interval"):
        d.set_field("eval.interval", d.integer("--eval-interval", 0), "--eval-interval")
    else:
        d.has_evaluation = False
        d.set_field("eval.prompts", 0, "--eval-interval")
        d.config["eval"].pop("sets", None)


def _reward(d: Draft, rewards: Collection[str]) -> None:
    """Translate the reward, and the keys of its result."""
    kind, import_path = d.text("--rm-type"), d.text("--custom-rm-path")
    if TEACHER in d.consumed and import_path.endswith(_TEACHER_REWARD):
        d.set_field("data.reward", "math" if "math" in rewards else "exact_answer", "--custom-rm-path")
        d.warnings.append(
            "data.reward: only a metric, because the script's function returns the teacher's log-probs"
        )
    elif d.is_present("--custom-rm-path"):
        module, _, function = import_path.rpartition(".")
        d.set_field("data.reward", f"{module}:{function}", "--custom-rm-path")
    else:
        d.require("--rm-type", "the script names no reward")
        if kind and kind not in MATHEMATICS:
            d.reject("--rm-type", "rlsys has no reward of this name; set data.reward to a reward function")
        d.set_field("data.reward", "math" if "math" in rewards else "exact_answer", "--rm-type")
        if kind in MATHEMATICS:
            d.warnings.append(f"data.reward = math: compared with slime's {kind}, {MATHEMATICS[kind]}")
    d.consumed |= {"--rm-type", "--custom-rm-path"}
    for name, key in (("--reward-key", "score"), ("--eval-reward-key", "acc")):
        if d.text(name, key) not in ("score", key):
            reason = "the reward of a dictionary is its `score`, and `acc` says whether it is correct"
            d.reject(name, f"expected {key}: {reason}")
        elif d.is_present(name):
            d.defaults.append(Row(name, d.text(name), "the reward of a dictionary is its `score`"))


def _generator(d: Draft) -> None:
    """Translate the function that generates a sample, and its limit of the conversation's length.

    The limit is a parameter of the function, and bounds the prompt.
    """
    if not d.is_present("--custom-generate-function-path"):
        return
    module, _, function = d.text("--custom-generate-function-path").rpartition(".")
    d.set_field("rollout.generator", f"{module}:{function}", "--custom-generate-function-path")
    d.warnings.append(
        "rollout.generator: rlsys calls the function as slime does, with the limits in docs/from-slime.md"
    )
    name = "--rollout-max-context-len"
    if (d.has_value(name) or d.is_unresolved(name)) and not d.is_present("--eval-max-context-len"):
        limit = d.integer(name, 0)
        params = {"rollout_max_context_len": limit, "eval_max_context_len": limit}
        d.set_field("rollout.generator_params", params, name)
        if not d.is_present("--rollout-max-prompt-len"):
            d.set_field("data.params.max_prompt_tokens", limit - 1, name)


def _heldout(d: Draft) -> None:
    """Translate --eval-prompt-data NAME PATH [NAME PATH ...]. The first file has the run's held-out prompts."""
    eval_files = _eval_files(d)
    if not eval_files:
        if d.is_unresolved("--eval-prompt-data"):
            d.set_field("data.params.heldout_path", "", "--eval-prompt-data")
        d.consumed |= {*EVAL_SAMPLING, *(f"--eval-{key}-key" for key in ("input", "label", "tool"))}
        return
    d.set_field("data.params.heldout_path", eval_files[0][1], "--eval-prompt-data")
    _heldout_keys(d)
    sampling = _eval_sampling(d)
    eval_sets: list[dict[str, Any]] = []
    for index, (name, path) in enumerate(eval_files):
        eval_set: dict[str, Any] = {"name": str(name).lower(), "prompts": 30, **sampling}
        if index:
            data = d.config["data"]
            eval_set["data"] = data | {"params": data.get("params", {}) | {"heldout_path": path}}
        eval_sets.append(eval_set)
    d.set_field("eval.sets", eval_sets, *EVAL_SAMPLING)


def _eval_files(d: Draft) -> list[tuple[str, str]]:
    """Return (name, file) of each evaluation in --eval-prompt-data; a single file has the name `eval`."""
    arguments = d.get("--eval-prompt-data")
    tokens = [arguments] if isinstance(arguments, str) else list(arguments or [])
    if len(tokens) == 1:
        return [("eval", tokens[0])]
    if len(tokens) % 2:
        d.mark_unresolved("--eval-prompt-data", "expected pairs of a name and a file")
    return list(zip(tokens[::2], tokens[1::2], strict=False))


def _eval_sampling(d: Draft) -> dict[str, Any]:
    """Return the fields of an evaluation set for the number of samples and their sampling."""
    samples = d.integer("--n-samples-per-eval-prompt", 1)
    max_tokens = d.integer("--eval-max-response-len", d.integer("--rollout-max-response-len", 1024))
    temperature = d.number("--eval-temperature", d.number("--rollout-temperature", 1.0))
    top_k = d.integer("--eval-top-k", d.integer("--rollout-top-k", -1))
    truncation = eval_truncation(d, d.number("--eval-top-p", d.number("--rollout-top-p", 1.0)), top_k)
    if top_k == 1:
        temperature = 0.0
    if samples > 1 and temperature == 0:
        d.warnings.append(
            f"eval.sets: one response per prompt, because the script's {samples} greedy responses are equal"
        )
        samples = 1
    sampling = {"samples": samples, "temperature": temperature, "max_response_tokens": max_tokens}
    return sampling | truncation


def _heldout_keys(d: Draft) -> None:
    """Translate the keys of held-out rows, if they differ from those of training rows."""
    options = {"prompt": "--eval-input-key", "answer": "--eval-label-key", "tools": "--eval-tool-key"}
    names = [option for option in options.values() if d.is_present(option)]
    keys: dict[str, str] = {}
    differ = any(map(d.is_unresolved, names))
    for key, option in options.items():
        eval_key, training_key = d.text(option), d.text(option.replace("--eval-", "--"))
        differ |= eval_key not in ("", training_key)
        if eval_key or training_key:
            keys[key] = eval_key or training_key
    if differ:
        d.set_field("data.params.heldout_keys", keys, *names)


def _rollout(d: Draft) -> None:
    """Translate sampling, and the choice of groups that a step generates and trains."""
    d.copy_setting("--rollout-temperature", float)
    d.copy_setting("--sglang-tool-call-parser")
    d.copy_setting("--sglang-reasoning-parser")
    d.set_truncation("--rollout-top-p", "--rollout-top-k")
    if stops := d.get("--rollout-stop"):
        d.set_field("rollout.stop", stops if isinstance(stops, list) else [str(stops)], "--rollout-stop")
    _stop_ids(d)
    _over_provision(d)
    if filter_path := d.text("--dynamic-sampling-filter-path"):
        if not filter_path.endswith("check_reward_nonzero_std"):
            d.reject(
                "--dynamic-sampling-filter-path",
                "no counterpart: write the filter as a planner (algo.planners)",
            )
        d.set_field("algo.planners", ["dapo"], "--dynamic-sampling-filter-path")
    for name in (
        "--custom-convert-samples-to-train-data-path", "--buffer-filter-path", "--rollout-sample-filter-path",
        "--custom-reward-post-process-path", "--rollout-data-postprocess-path",
    ):  # fmt: skip
        if "on_policy_distillation" in d.text(name):
            continue  # _losses translates this function
        d.reject(name, "no counterpart: write the function as a planner, selector or shaping (algo)")


def _over_provision(d: Draft) -> None:
    """Translate the number of groups in flight, and the age of their tokens."""
    groups = max(1, d.integer("--rollout-batch-size", 1))
    over_provision = d.integer("--over-sampling-batch-size", groups) / groups
    if d.flag("--partial-rollout"):
        d.set_field(
            "rollout.over_provision",
            min(16.0, max(over_provision, 1.0)),
            "--partial-rollout",
            "--over-sampling-batch-size",
        )
        d.set_field("rollout.max_staleness", 4)
        d.warnings.append("rollout.max_staleness = 4: slime has no limit; see docs/rollout.md")
    elif over_provision > 1 and d.is_present("--dynamic-sampling-filter-path"):
        d.warnings.append(
            "rollout.over_provision: slime requests the groups of --over-sampling-batch-size at once, because the "
            "filter drops some; rlsys requests more groups until a step has enough"
        )
    elif over_provision > 1:
        d.reject(
            "--over-sampling-batch-size",
            "no counterpart: without --partial-rollout slime discards the surplus",
        )


def _stop_ids(d: Draft) -> None:
    """Translate stop token ids. The stop ids of the model folder need no field."""
    option, folder = "--rollout-stop-token-ids", Path(str(d.get("--hf-checkpoint", "")))
    if (stops := d.get(option)) is None:
        if d.is_unresolved(option):
            d.set_field("rollout.stop_ids", [], option)
        return
    ids = [int(i) for i in (stops if isinstance(stops, list) else [stops])]
    own_ids = read_stop_ids(folder) if (folder / "config.json").is_file() else frozenset()
    if set(ids) <= own_ids:
        d.defaults.append(Row(option, str(d.settings[option]), "these are the model's stop ids"))
    else:
        d.set_field("rollout.stop_ids", ids, option)


def _teacher(d: Draft) -> None:
    """Translate the teacher of on-policy distillation: a server, or a Megatron checkpoint, which is rejected."""
    d.consumed.add("--opd-type")
    load = "--opd-teacher-load"
    if d.is_present(load):
        d.reject(load, "the value is a Megatron checkpoint; algo.teacher.path expects a Hugging Face folder")
        d.set_field("algo.teacher", {"path": d.text(load)}, load)
        return
    d.require(TEACHER, "algo.teacher.path: the script does not start the teacher's server")
    teacher: dict[str, Any] = {"path": d.text(TEACHER)}
    names = [TEACHER, "--use-opd"]
    if d.is_present("--rm-url") or d.is_present(TEACHER):
        names.append("--rm-url")
        teacher["engine"] = d.text("--rm-url").removesuffix("/generate") or "own"
    d.set_field("algo.teacher", teacher, *names)
    d.warnings.append(
        "algo.loss distill: rlsys computes the gradient of the reverse KL over the teacher's most probable tokens; "
        "slime estimates it from the sampled token, as a part of the advantage"
    )


def _algorithm(d: Draft) -> None:
    """Translate advantages, losses, reducer, shaping, corrections and replay of experts."""
    estimator = d.text("--advantage-estimator", "grpo")
    advantage_name = _advantage(d, estimator)
    _losses(d, estimator, advantage_name)
    by_token = d.flag("--calculate-per-token-loss") and estimator != "gspo"
    d.set_field("algo.reducer", "token_mean" if by_token else "sequence_mean", "--calculate-per-token-loss")
    if beta := d.number("--kl-coef", 0):
        d.set_field("algo.shaping", [{"name": "kl_reward", "beta": beta}], "--kl-coef")
    _corrections(d)
    engine = d.flag("--use-rollout-routing-replay")
    if d.flag("--use-routing-replay") or engine:
        names = ("--use-routing-replay", "--use-rollout-routing-replay")
        d.set_field("trainer.replay", "engine" if engine else "trainer", *names)
        d.set_field("engine.return_routes", engine, *names)


def _advantage(d: Draft, estimator: str) -> str:
    """Translate the advantages, and return their short name in rlsys. `estimator`: slime's name."""
    advantage_name = ADVANTAGES.get(estimator)
    if advantage_name is None:
        d.reject("--advantage-estimator", "rlsys has no estimator of this name (rlsys algo list)")
        advantage_name = "grpo"
    if advantage_name == "grpo" and d.flag("--disable-grpo-std-normalization"):
        advantage_name = "dr_grpo"
    whitens = advantage_name in ("reinforce_pp", "reinforce_pp_baseline")
    if advantage_name != "gae" and d.flag("--normalize-advantages") != whitens:
        if whitens:
            d.require(
                "--normalize-advantages",
                "the script does not set it; reinforce_pp always whitens the advantages",
            )
        d.reject("--normalize-advantages", "no counterpart: advantages of this estimator are not whitened")
    advantage: Any = advantage_name
    names = ["--advantage-estimator", "--disable-grpo-std-normalization"]
    if advantage_name == "gae":
        names += ["--gamma", "--lambd", "--normalize-advantages"]
        advantage = {"name": "gae", "gamma": d.number("--gamma", 1.0), "lam": d.number("--lambd", 1.0)}
        advantage["whiten"] = d.flag("--normalize-advantages")
    elif estimator == "reinforce_plus_plus" and d.number("--gamma", 1.0) != 1.0:
        d.reject("--gamma", "expected 1: reinforce_pp does not discount the return")
    d.set_field("algo.advantage", advantage, *names)
    return advantage_name


def _losses(d: Draft, estimator: str, advantage_name: str) -> None:
    """Translate the loss terms, and the critic of GAE.

    Args:
        d: the config draft.
        estimator: slime's name of the advantages.
        advantage_name: their short name in rlsys.
    """
    low = d.number("--eps-clip", 0.2)
    loss = {"name": "gspo" if estimator == "gspo" else "clip", "clip_low": low}
    terms: list[Any] = [{**loss, "clip_high": d.number("--eps-clip-high", low)}]
    loss_settings = [
        "--advantage-estimator",
        "--eps-clip",
        "--eps-clip-high",
        "--use-kl-loss",
        "--entropy-coef",
    ]
    if advantage_name == "gae":
        terms.append({"name": "value", "coefficient": 2.0, "clip": d.number("--value-clip", 0.2)})
        loss_settings.append("--value-clip")
        lr = d.number("--critic-lr", 0)
        d.set_field("algo.critic", {"lr": lr} if lr else {}, "--critic-lr")
    if d.flag("--use-kl-loss"):
        loss_settings += ["--kl-loss-coef", "--kl-loss-type"]
        kind = d.text("--kl-loss-type", "k1")
        if kind not in KL_KINDS:
            d.reject("--kl-loss-type", f"expected one of {', '.join(KL_KINDS)}")
        if beta := d.number("--kl-loss-coef", 0):
            term = {"name": "kl", "beta": beta, "kind": KL_KINDS.get(kind, "k3")}
            terms.append(term | ({"cap": None} if kind == "k3" else {}))
    if entropy := d.number("--entropy-coef", 0):
        terms.append({"name": "entropy", "coefficient": entropy})
    if TEACHER in d.consumed:
        if "on_policy_distillation" in d.text("--custom-reward-post-process-path"):
            terms = []  # the script's rewards are 0, so the policy loss is, too
        terms.append({"name": "distill", "weight": d.number("--opd-kl-coef", 1.0)})
        loss_settings += ["--use-opd", "--opd-kl-coef"]
    d.set_field("algo.loss", terms, *loss_settings)


def _corrections(d: Draft) -> None:
    """Translate truncated importance weights: those of slime, or of its example train_infer_mismatch_helper."""
    function, mis = "--custom-tis-function-path", [name for name in d.settings if _MIS.match(name)]
    d.consumed.update(mis)
    if not d.flag("--use-tis"):
        d.consumed.add(function)
        return
    if re.search(r"\bmis\.compute_mis_weights(_with_cp|_fsdp)$", d.text(function)):
        d.set_field("algo.corrections", _mis(d), "--use-tis", function, *mis)
        return
    correction: dict[str, Any] = {"name": "tis", "cap": d.number("--tis-clip", 2.0)}
    if floor := d.number("--tis-clip-low", 0.0):
        correction["floor"] = floor
    d.reject(function, "no counterpart: name a correction of your own in algo.corrections")
    for name in mis:
        d.reject(name, f"no counterpart: the option belongs to the function of {function}")
    d.set_field("algo.corrections", [correction], "--use-tis", "--tis-clip", "--tis-clip-low", function)


def _mis(d: Draft) -> list[dict[str, Any]]:
    """Return the corrections of train_infer_mismatch_helper: an importance weight, and a rejection with a veto."""
    level, mode = d.text("--tis-level", "token"), d.text("--tis-mode", "truncate")
    d.require("--tis-upper-bound")
    high = d.number("--tis-upper-bound", 2.0)
    low = d.number("--tis-lower-bound", 1 / high)
    normalises = d.flag("--tis-batch-normalize")
    if normalises and (level, mode == "mask") != ("token", False):
        d.reject(
            "--tis-batch-normalize", "supported only with --tis-level token and --tis-mode truncate or clip"
        )
    elif normalises:
        d.warnings.append(
            "algo.corrections tis: normalise divides by the mean weight over an update's tokens with an advantage; "
            "the script by the mean over those of a micro-batch"
        )
    weight: dict[str, Any] = {
        "truncate": {"name": "tis", "cap": high},
        "clip": {"name": "tis", "floor": low, "cap": high},
        "mask": {"name": "icepop", "low": low, "high": high},
    }.get(mode, {})
    if not weight:
        d.reject("--tis-mode", "expected truncate, clip or mask")
        return []
    corrections = [
        weight | ({} if level == "token" else {"level": level}) | ({"normalise": True} if normalises else {})
    ]
    if d.flag("--use-rs"):
        rejection = {
            "name": "icepop", "weighted": False, "low": d.number("--rs-lower-bound", low),
            "high": d.number("--rs-upper-bound", high), "level": d.text("--rs-level", "token"),
        }  # fmt: skip
        corrections.append(rejection | {"veto": d.number("--rs-veto-threshold", 0.0)})
    return corrections


def _trainer(d: Draft, section: str = "trainer") -> None:
    """Translate optimizer, schedule, checkpoints, FP8, adapters and multi-token prediction.

    Args:
        d: the config draft.
        section: section of the config that has the schedule.
    """
    set_steps(d, "--num-rollout", "--num-epoch", 0)
    d.require("--lr")
    lr = d.number("--lr", 0.0)
    d.copy_setting("--lr", float)
    if d.is_present("--lr-warmup-fraction"):
        d.set_field("trainer.warmup_fraction", d.number("--lr-warmup-fraction", 0.0), "--lr-warmup-fraction")
    else:
        d.set_field("trainer.warmup_steps", d.integer("--lr-warmup-iters", 0), "--lr-warmup-iters")
    style = d.text("--lr-decay-style", "linear")
    if style not in ("constant", "linear", "cosine"):
        d.reject("--lr-decay-style", "expected constant, linear or cosine")
    d.set_field(f"{section}.schedule", style, "--lr-decay-style")
    if lr and ((min_lr := d.number("--min-lr", 0.0)) or section == "sft"):
        d.set_field(f"{section}.lr_end", min(1.0, min_lr / lr), "--min-lr", "--lr")
    d.set_field("trainer.weight_decay", d.number("--weight-decay", 0.01), "--weight-decay")
    d.set_field("trainer.grad_clip", d.number("--clip-grad", 1.0), "--clip-grad")
    betas = [d.number("--adam-beta1", 0.9), d.number("--adam-beta2", 0.999)]
    d.set_field("trainer.betas", betas, "--adam-beta1", "--adam-beta2")
    if d.is_present("--recompute-granularity"):
        parts = {"full": ["layer"], "selective": ["core_attn"]}
        recomputed = parts.get(d.text("--recompute-granularity"), [])
        d.set_field("trainer.recompute", recomputed, "--recompute-granularity")
    if (optimizer := d.text("--optimizer", "adam")) not in OPTIMIZERS:
        d.reject("--optimizer", f"expected {' or '.join(OPTIMIZERS)}")
    d.set_field("trainer.optimizer", OPTIMIZERS.get(optimizer, "adamw"), "--optimizer")
    if d.is_present("--fp8-recipe") or d.is_present("--fp8-format"):
        if d.text("--fp8-recipe", "delayed") != "blockwise" or d.text("--fp8-format", "e4m3") != "e4m3":
            d.reject("--fp8-recipe", "expected blockwise with --fp8-format e4m3 (model.fp8 = both)")
        d.set_field("model.fp8", "both", "--fp8-recipe", "--fp8-format")
    if d.flag("--optimizer-cpu-offload"):
        d.set_field("trainer.offload_optimizer", 1.0, "--optimizer-cpu-offload")
    d.set_field("trainer.checkpoint_every", d.integer("--save-interval", 20), "--save-interval")
    _expert_balance(d)
    _lora(d)
    _multi_token_prediction(d)


def _expert_balance(d: Draft) -> None:
    """Translate the loss and the bias that balance the load of experts."""
    for name, path in (
        ("--moe-aux-loss-coeff", "trainer.balance_loss"),
        ("--moe-router-bias-update-rate", "trainer.balance_rate"),
    ):
        if d.number(name, 0.0):
            d.set_field(path, d.number(name, 0.0), name)
    kind = d.text("--moe-router-load-balancing-type", "aux_loss")
    if d.get_field("trainer.balance_loss", 0.0) and kind != "seq_aux_loss":
        d.warnings.append(
            f"trainer.balance_loss: rlsys balances each sequence; Megatron's {kind} balances a micro-batch"
        )


def _multi_token_prediction(d: Draft) -> None:
    """Translate the training of a layer for multi-token prediction."""
    weight = d.number("--mtp-loss-scaling-factor", 0.2)
    if d.flag("--enable-mtp-training"):
        d.set_field("trainer.mtp_loss", weight, "--mtp-loss-scaling-factor", "--enable-mtp-training")
        omit_offload(d)
        if d.integer("--mtp-num-layers", 1) > 1:
            d.reject("--mtp-num-layers", "expected 1 layer for multi-token prediction")


def _lora(d: Draft) -> None:
    """Translate the LoRA options of Miles, a fork of slime.

    `--target-modules` uses Hugging Face's module names, as `trainer.lora.targets` does.
    """
    rank = d.integer("--lora-rank", 0)
    if rank <= 0 and not d.is_unresolved("--lora-rank"):
        return
    d.set_field("trainer.lora.rank", rank, "--lora-rank")
    d.warnings.append(LORA_START)
    d.set_field("trainer.lora.alpha", d.number("--lora-alpha", 16), "--lora-alpha", "--lora-rank")
    targets = d.text("--target-modules", "all-linear")
    if targets not in ("all-linear", "all"):
        d.set_field("trainer.lora.targets", targets.split(","), "--target-modules", "--lora-rank")


def _engines(d: Draft) -> None:
    """Translate SGLang's options: those with a field of rlsys to this field, all others to engine.extra_args."""
    d.copy_setting("--sglang-max-total-tokens", int)
    d.copy_setting("--sglang-mem-fraction-static", float)
    d.copy_setting("--sglang-max-running-requests", int)
    names, args = [], []
    for name, value in d.settings.items():
        if not name.startswith("--sglang-") or name in d.consumed or name.startswith(NOT_SGLANG):
            continue
        if name in DATA_PARALLEL and d.is_present("--sglang-enable-dp-attention"):
            continue
        names.append(name)
        args.append("--" + name.removeprefix("--sglang-"))
        if not isinstance(value, Unresolved) and value is not True:
            args += [str(argument) for argument in (value if isinstance(value, list) else [value])]
    if names:
        d.set_field("engine.extra_args", args, *names)


def _sizes(d: Draft, asynchronous: bool) -> tuple[Sizes, dict[str, tuple[str, ...]]]:
    """Return the sizes of the run, and attribute of Sizes -> the options that set it.

    Args:
        d: the config draft.
        asynchronous: whether the program is train_async.py.
    """
    names = _size_names(d)
    shared = d.flag("--colocate") and not asynchronous
    _check_sizes(d, shared)
    groups, n = d.integer("--rollout-batch-size", 1), d.integer("--n-samples-per-prompt", 1)
    nodes, gpus = d.integer("--actor-num-nodes", 1), d.integer("--actor-num-gpus-per-node", 8)
    sizes, layout_names = _layout(d, nodes, gpus)
    sizes = replace(
        sizes, groups=groups, group_size=n, update=_update_size(d, groups * n) or None,
        prompt=d.integer("--rollout-max-prompt-len", 2048), response=d.integer("--rollout-max-response-len", 1024),
        micro=d.integer("--max-tokens-per-gpu", 0), engine_tp=d.integer("--rollout-num-gpus-per-engine", 1),
        engine_gpus=None if shared else d.integer("--rollout-num-gpus", nodes * gpus),
    )  # fmt: skip
    return sizes, names | layout_names


def _size_names(d: Draft) -> dict[str, tuple[str, ...]]:
    """Return attribute of Sizes -> the options that set it, for the sizes of batch, lengths and engines."""
    update_setting = (
        "--num-steps-per-rollout" if d.is_present("--num-steps-per-rollout") else "--global-batch-size"
    )
    return {
        "groups": ("--rollout-batch-size",), "group_size": ("--n-samples-per-prompt",),
        "response": ("--rollout-max-response-len",), "prompt": ("--rollout-max-prompt-len",),
        "update": (update_setting,),
        "micro": ("--max-tokens-per-gpu",), "engine_tp": ("--rollout-num-gpus-per-engine",),
        "engine_gpus": ("--rollout-num-gpus",), "placement": ("--colocate",),
    }  # fmt: skip


def _check_sizes(d: Draft, shared: bool) -> None:
    """Report sizes that the script must set, and a group of one sample.

    Args:
        d: the config draft.
        shared: whether the engines share the trainer's GPUs.
    """
    for name in ("--rollout-batch-size", "--rollout-max-response-len"):
        d.require(name)
    if (
        d.integer("--n-samples-per-prompt", 1) == 1
        and not d.is_unresolved("--n-samples-per-prompt")
        and d.get_field("algo.advantage", "") in ("grpo", "dr_grpo")
    ):
        d.mark_unresolved(
            "--n-samples-per-prompt", "expected more than 1: a group of one sample has no baseline"
        )
    if not shared and not d.is_unresolved("--colocate"):
        d.require(
            "--rollout-num-gpus", "the engines have separate GPUs, and the script does not set their number"
        )


def _update_size(d: Draft, samples: int) -> int:
    """Return the number of samples of an update; 0 if no option sets it. `samples`: samples of a rollout."""
    size = d.integer("--global-batch-size", 0)
    if d.has_value("--num-steps-per-rollout"):
        size = samples // max(1, d.integer("--num-steps-per-rollout", 1))
    return size


def _layout(d: Draft, nodes: int, gpus: int) -> tuple[Sizes, dict[str, tuple[str, ...]]]:
    """Return the parallel sizes of the trainer, and attribute of Sizes -> the options that set it."""
    names: dict[str, tuple[str, ...]] = {
        "nodes": ("--actor-num-nodes",), "gpus": ("--actor-num-gpus-per-node",),
        "tp": ("--tensor-model-parallel-size",), "pp": ("--pipeline-model-parallel-size",),
        "cp": ("--context-parallel-size",), "ep": ("--expert-model-parallel-size",),
        "etp": ("--expert-tensor-parallel-size",),
    }  # fmt: skip
    sizes = Sizes(
        nodes=nodes, gpus=gpus, etp=d.integer("--expert-tensor-parallel-size", 0) or None,
        **{name: d.integer(names[name][0], 1) for name in ("tp", "pp", "cp", "ep")},
    )  # fmt: skip
    return sizes, names
