"""slime's launch scripts (scripts/run-*.sh) -> a config of ours.

Read as of August 2026; defaults that a script leaves out are those of slime/utils/arguments.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlsys.core.errors import UserError
from rlsys.core.model_folder import read_stop_ids
from rlsys.importers.commands import is_started, settings_of_command
from rlsys.importers.draft import Draft, OtherRun, Row, Settings, Unresolved
from rlsys.importers.shell import Script
from rlsys.importers.sizes import Sizes, put_anchor, put_sizes, put_steps, refuse_other_media, source_of

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
    "--lr-warmup-iters": "trainer.warmup_steps",
    "--lr-warmup-fraction": "trainer.warmup_steps, in steps",
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
    "--sglang-max-running-requests": "engine.max_running_requests",
    "--sglang-tool-call-parser": "engine.tool_call_parser",
    "--sglang-reasoning-parser": "engine.reasoning_parser",
    "--actor-num-nodes": "launch.nodes",
    "--actor-num-gpus-per-node": "launch.gpus_per_node",
    "--colocate": "launch.placement=colocated, the default",
}
"""Of slime's options (some are Megatron's), those that its own example scripts use most -> our field, and how it
differs, if it does."""

ADVANTAGES = {
    "grpo": "grpo", "gspo": "grpo", "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "ppo": "gae",
}  # fmt: skip
KL_KINDS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
OPTIMIZERS = {"adam": "adamw", "muon": "muon", "dist_muon": "muon"}
MATHEMATICS = ("math", "deepscaler", "dapo")
FLAGS = (
    "--apply-chat-template", "--rollout-shuffle", "--partial-rollout", "--colocate", "--use-kl-loss", "--use-tis",
    "--use-routing-replay", "--use-rollout-routing-replay", "--calculate-per-token-loss",
    "--disable-grpo-std-normalization", "--optimizer-cpu-offload", "--enable-mtp-training", "--use-opd",
    "--use-dynamic-batch-size", "--balance-data", "--sequence-parallel", "--use-wandb", "--swiglu",
    "--group-query-attention",
)  # fmt: skip
"""Options that take no value: a word behind one is no part of it."""
SEVERAL = ("--eval-prompt-data", "--rollout-stop", "--rollout-stop-token-ids", "--sglang-cuda-graph-bs")
"""Options that take several words."""
DEFAULTS = (
    (r"^--(num-layers|hidden-size|ffn-hidden-size|num-attention-heads|group-query-attention|num-query-groups|"
     r"kv-channels|vocab-size|make-vocab-size|rotary-|use-rotary|normalization|norm-epsilon|swiglu|quick-geglu|"
     r"disable-bias-linear|add-qkv-bias|qk-(layernorm|head-dim|pos-emb)|untie-|(no-)?position-embedding|spec$|"
     r"moe-(ffn-hidden|layer-freq|router-(topk|score|pre-softmax|dtype|num-groups|group-topk|enable-expert-bias)|"
     r"shared-expert|grouped-gemm)|num-experts|multi-latent|q-lora|kv-lora|v-head|use-rope-scaling|"
     r"max-position|apply-layernorm|attention-output|use-gated-attention|no-rope-freq|seq-length|mscale|beta-fast|"
     r"beta-slow|original-max|post-(self-attn|mlp)-layernorm|model-name$|mtp-num-layers)",
     None, "read from the model's config.json"),
    (r"^--(attention|hidden)-dropout$", (0,), "there is no dropout"),
    (r"^--moe-router-load-balancing-type$", None, "the balancing loss is weighted by trainer.balance_loss"),
    (r"^--moe-z-loss-coeff$", (0,), "no z-loss"),
    (r"^--moe-token-drop-policy$", None, "no token is dropped"),
    (r"^--(ref-load|megatron-to-hf-mode|no-save|no-load-|finetune$|ckpt-format|async-save|no-save-)",
     None, "one folder starts the run: model.path; the reference is its first weights"),
    (r"^--load$", None, "the same command with the same run.dir goes on"),
    (r"^--(use-dynamic-batch-size|micro-batch-size|log-probs-max-tokens|data-pad-size)",
     None, "micro-batches are packed to trainer.token_budget"),
    (r"^--(accumulate-allreduce-grads-in-fp32|attention-softmax-in-fp32|sequence-parallel|bf16|loss-mask-type)$",
     None, "so here"),
    (r"^--loss-type$", ("policy_loss",), "the loss is algo.loss"),
    (r"^--(apply-chat-template|rollout-shuffle)$", (True,), "prompts get the chat template and are shuffled"),
    (r"^--rollout-seed$", None, "data.seed orders the prompts; the orders of two frameworks are never equal"),
    (r"^--seed$", None, "run.seed; the numbers of two frameworks are never equal"),
    (r"^--rollout-function-path$", ("slime.rollout.sglang_rollout.generate_rollout",), "rollout.generator"),
    (r"^--rollout-skip-special-tokens$", None, "rewards see the text with the model's end token"),
    (r"^--train-backend$", ("megatron",), "Megatron"),
    (r"^--(kl-loss-type|kl-loss-coef)$", None, "not in use: the script has no --use-kl-loss"),
    (r"^--(tis-clip)$", None, "not in use: the script has no --use-tis"),
    (r"^--(gamma|lambd|critic-lr|value-clip)$", None, "not in use: --advantage-estimator is not ppo"),
    (r"^--opd-(type|kl-coef)$", None, "not in use: the script has no --use-opd"),
    (r"^--eval-top-k$", (-1, 1), "sets are sampled from the whole distribution, or greedily with temperature 0"),
    (r"^--(lr-warmup-init)$", (0,), "the learning rate rises from 0"),
)  # fmt: skip
"""Options that ask for what a run here does anyway."""
SPEED = (
    (r"^--(recompute-(method|num-layers)|log-probs-chunk-size|attention-backend|moe-(enable-deepep|token-dispatcher|permute-fusion|"
     r"deepep|shared-expert-overlap)|use-distributed-optimizer|overlap-|use-precision-aware|"
     r"no-gradient-accumulation-fusion|no-masked-softmax-fusion|no-(rope|bias)-.*fusion|no-rope-fusion|cross-entropy|"
     r"transformer-impl|deterministic-mode|data-parallel-random|train-memory|update-weight-|"
     r"balance-|allgather-cp|(no-)?offload|enable-experimental|"
     r"distributed-timeout|num-gpus-per-node|train-env-vars|decoder-(first|last)-pipeline|no-check-for-nan|"
     r"recompute-loss-function|account-for|qwen-gdn-backend|tp-comm|cp-comm-type|manual-gc|num-workers|empty-unused)",
     "the trainer has no such switch"),
    (r"^--(sglang|use-slime-router|slime-router|router-|rollout-health|use-fault|prefill-num-servers|rollout-data-transport)",
     "engines and router here have no such switch"),
    (r"^--(use-wandb|wandb|disable-wandb|use-tensorboard|tb-|log-|use-tracking|dump-details|save-debug|profile|"
     r"record-|memory-(snapshot|recorder)|use-pytorch-profiler|custom-(eval-)?rollout-log|get-mismatch|ci-|save-hf|"
     r"use-rollout-entropy|skip-eval-before-train|distributed-backend|rank$|check-weight-update)",
     "the run folder has metrics and samples; run.trackers sends them on"),
)  # fmt: skip
"""Options without a counterpart that change speed, memory or logging alone."""
NOT_SGLANG = ("--sglang-router", "--sglang-server-concurrency", "--sglang-config", "--sglang-log-")
"""Options that begin as SGLang's do and are slime's own, or of the engines' logs."""


def settings_of(
    text: str, yaml_data: Any, variables: Mapping[str, str], path: Path | None = None
) -> Settings:
    """Read the options of the training command.

    Args:
        text: the script.
        yaml_data: what a YAML file holds; None for a script.
        variables: the environment that the script is started in.
        path: where the script lies.

    Returns:
        Options with their dashes; of several words a list. `train` is the program.

    Raises:
        UserError: there is no command of slime in it.
    """
    if yaml_data is not None:
        return Settings(
            {
                f"--{str(k).replace('_', '-').lstrip('-')}": v
                for k, v in yaml_data.items()
                if v not in (None, False)
            }
        )
    script = Script(text, variables, path)
    chosen, settings = settings_of_command(script, _program, ("train.py", "train_async.py"), r"\s--\w")
    if chosen is None:
        raise UserError("no command of slime in it: expected train.py or train_async.py with its options")
    words = chosen.words[_program(chosen.words) :]
    settings.values |= _options(script, words[1:], settings)
    settings.values["train"] = Path(words[0]).stem
    return settings


def _program(words: list[str]) -> int:
    """The place of train.py among a command's words; 0 where it is none that is started."""
    place = next(
        (i for i, w in enumerate(words) if Path(w[-99:]).name in ("train.py", "train_async.py")), None
    )
    return place if place is not None and is_started(words, place) else -1


def _options(script: Script, words: list[str], settings: Settings) -> dict[str, Any]:
    found: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = [value] if value else []
        elif (
            name is not None
            and name not in FLAGS
            and not (found[name] and name not in SEVERAL and script.is_whole_hole(word))
        ):
            found[name].append(word)
        elif holes := script.unresolved(word):
            settings.problems.append(f"{script.shown(word)}: {holes[0].why}; it may be any option")
        else:
            settings.problems.append(f"{word}: a word that belongs to no option")
    return {name: _value(script, value) for name, value in found.items()}


def _value(script: Script, words: list[str]) -> Any:
    if holes := [hole for word in words for hole in script.unresolved(word)]:
        return Unresolved(" ".join(map(script.shown, words)), holes[0].why)
    return True if not words else words[0] if len(words) == 1 else words


def translate(settings: Settings, rewards: Collection[str]) -> Draft:
    """Make a config of slime's options.

    Args:
        settings: of settings_of.
        rewards: short names of our rewards.

    Raises:
        UserError: a script without model or data, or a value of the wrong kind.
        OtherRun: the script fine-tunes or distils.
    """
    d = Draft(dict(settings.values), SLIME)
    asynchronous = d.get("train") == "train_async"
    _refuse_other_runs(d)
    for name in ("--hf-checkpoint", "--prompt-data"):
        if not d.present(name):
            if not settings.problems:
                raise UserError("expected --hf-checkpoint and --prompt-data in it")
            d.require(name)
    saved = d.text("--save")
    d.put("run.dir", saved or "runs/imported", "--save")
    d.put("model.path", d.text("--hf-checkpoint"), "--hf-checkpoint")
    refuse_other_media(d, "--hf-checkpoint")
    d.put("model.dtype", "bfloat16")
    _data(d, rewards)
    _rollout(d)
    _algorithm(d)
    _trainer(d)
    _engines(d)
    put_sizes(d, *_sizes(d, asynchronous))
    if asynchronous:
        d.put("rollout.max_staleness", max(1, int(d.read("rollout.max_staleness", 0))))
    if d.flag("--use-rollout-logprobs") or d.open("--use-rollout-logprobs"):
        d.put("algo.anchor", "mu", "--use-rollout-logprobs")
    else:
        put_anchor(d)
    d.close(DEFAULTS, SPEED, settings)
    return d


def _refuse_other_runs(d: Draft) -> None:
    """Supervised fine-tuning and distillation have commands and fields of their own."""
    if d.text("--loss-type", "policy_loss") == "sft_loss" or "sft_rollout" in d.text(
        "--rollout-function-path"
    ):
        raise OtherRun(
            "supervised fine-tuning (--loss-type sft_loss); nothing is written: use rlsys sft with sft.traces = "
            "chats (docs/sft.md)"
        )
    if d.flag("--use-opd"):
        raise OtherRun(
            "on-policy distillation (--use-opd); nothing is written: use algo.teacher with the loss distill "
            "(configs/algorithms/distill.yaml); algo.teacher.engine asks a server, as --rm-url does"
        )
    d.used -= {"--loss-type", "--rollout-function-path", "--use-opd"}


def _data(d: Draft, rewards: Collection[str]) -> None:
    path = d.get("--prompt-data")
    if "@[" in d.text("--prompt-data"):
        d.refuse("--prompt-data", "a slice of a file; expected a file with the rows that are meant")
    d.put("data.source", source_of(path), "--prompt-data")
    d.put("data.params.path", path, "--prompt-data")
    d.move("--input-key")
    d.move("--label-key")
    d.move("--tool-key")
    kind, own = d.text("--rm-type"), d.text("--custom-rm-path")
    if d.present("--custom-rm-path"):
        module, _, function = own.rpartition(".")
        d.put("data.reward", f"{module}:{function}", "--custom-rm-path")
    else:
        d.require("--rm-type", "the script names no reward")
        if kind and kind not in MATHEMATICS:
            d.refuse("--rm-type", "no reward of that name here; name yours in data.reward")
        d.put("data.reward", "math" if "math" in rewards else "exact_answer", "--rm-type")
    d.used |= {"--rm-type", "--custom-rm-path"}
    if d.present("--custom-generate-function-path"):
        own = d.text("--custom-generate-function-path")
        module, _, function = own.rpartition(".")
        d.put("rollout.generator", f"{module}:{function}", "--custom-generate-function-path")
        d.odd.append("rollout.generator: it is called as slime does, within limits; see docs/from-slime.md")
    for name in ("--reward-key", "--eval-reward-key", "--metadata-key", "--eval-config"):
        d.refuse(name, "no counterpart: rewards are named by what they return, rows are read whole")
    d.refuse("--multimodal-keys", "no counterpart: models and prompts are text")
    if d.present("train") and not d.present("--rollout-shuffle"):
        d.odd.append(
            "data.seed: slime without --rollout-shuffle keeps the order of the rows; here they are shuffled"
        )
    if d.present("train") and not d.present("--apply-chat-template"):
        d.odd.append(
            "data: slime without --apply-chat-template takes prompts as they are; here chats get the template"
        )
    _held_out(d)


def _held_out(d: Draft) -> None:
    """--eval-prompt-data NAME PATH [NAME PATH ...]; the first is what the run is judged by."""
    decided = ("--n-samples-per-eval-prompt", "--eval-max-response-len", "--eval-temperature")
    words = d.get("--eval-prompt-data")
    pairs = [words] if isinstance(words, str) else list(words or [])
    if len(pairs) > 1 and len(pairs) % 2:
        d.unknown("--eval-prompt-data", "expected pairs of a name and a file")
    named = [("eval", pairs[0])] if len(pairs) == 1 else list(zip(pairs[::2], pairs[1::2], strict=False))
    if not named:
        if d.open("--eval-prompt-data"):
            d.put("data.params.heldout_path", "", "--eval-prompt-data")
        for name in (*decided, "--eval-top-p"):
            d.used.add(name)
        return
    d.put("data.params.heldout_path", named[0][1], "--eval-prompt-data")
    samples = d.whole("--n-samples-per-eval-prompt", 1)
    longest = d.whole("--eval-max-response-len", d.whole("--rollout-max-response-len", 1024))
    hot = d.number("--eval-temperature", d.number("--rollout-temperature", 1.0))
    sets: list[dict[str, Any]] = []
    for place, (name, path) in enumerate(named):
        chosen: dict[str, Any] = {"name": str(name).lower(), "prompts": 30, "samples": samples}
        chosen |= {"temperature": hot, "max_response_tokens": longest}
        if place:
            data = d.config["data"]
            chosen["data"] = data | {"params": data.get("params", {}) | {"heldout_path": path}}
        sets.append(chosen)
    d.put("eval.sets", sets, *decided)
    if d.number("--eval-top-p", 1.0) != 1:
        d.refuse("--eval-top-p", "sets are sampled from the whole distribution")


def _rollout(d: Draft) -> None:
    d.move("--rollout-temperature", float)
    d.move("--sglang-tool-call-parser")
    d.move("--sglang-reasoning-parser")
    d.cut("--rollout-top-p", "--rollout-top-k")
    if stops := d.get("--rollout-stop"):
        d.put("rollout.stop", stops if isinstance(stops, list) else [str(stops)], "--rollout-stop")
    _stop_ids(d)
    groups = max(1, d.whole("--rollout-batch-size", 1))
    over = d.whole("--over-sampling-batch-size", groups) / groups
    if d.flag("--partial-rollout"):
        d.put(
            "rollout.over_provision",
            min(16.0, max(over, 1.5)),
            "--partial-rollout",
            "--over-sampling-batch-size",
        )
        d.put("rollout.max_staleness", 4)
        d.odd.append("rollout.max_staleness = 4: slime has no bound; see docs/rollout.md")
    elif over > 1 and d.present("--dynamic-sampling-filter-path"):
        d.odd.append(
            "rollout.over_provision: --over-sampling-batch-size asks for more groups at once because the filter "
            "drops some; here a step asks again until it has enough"
        )
    elif over > 1:
        d.refuse("--over-sampling-batch-size", "without --partial-rollout slime throws the surplus away")
    if chosen := d.text("--dynamic-sampling-filter-path"):
        if not chosen.endswith("check_reward_nonzero_std"):
            d.refuse("--dynamic-sampling-filter-path", "a filter of yours is a planner here: algo.planners")
        d.put("algo.planners", ["dapo"], "--dynamic-sampling-filter-path")
    for name in (
        "--custom-convert-samples-to-train-data-path", "--buffer-filter-path", "--rollout-sample-filter-path",
        "--custom-reward-post-process-path", "--rollout-data-postprocess-path",
    ):  # fmt: skip
        d.refuse(name, "a function of slime's own loop; planners, selectors and shaping of algo do this here")


def _stop_ids(d: Draft) -> None:
    """The model's own ids need no field; others are named by their texts."""
    option, folder = "--rollout-stop-token-ids", Path(str(d.get("--hf-checkpoint", "")))
    if (stops := d.get(option)) is None:
        return
    ids = [int(i) for i in (stops if isinstance(stops, list) else [stops])]
    if not (folder / "config.json").is_file():
        d.refuse(
            option,
            f"{folder} is not here: ids that the model does not stop at need their texts in rollout.stop",
        )
    elif others := sorted(set(ids) - read_stop_ids(folder)):
        d.refuse(
            option,
            f"the model does not stop at {min(others)}: name the texts of such ids in rollout.stop",
        )
    else:
        d.used.add(option)
        d.defaults.append(Row(option, str(d.settings[option]), "the model's own stop ids"))


def _algorithm(d: Draft) -> None:
    estimator = d.text("--advantage-estimator", "grpo")
    ours = ADVANTAGES.get(estimator)
    if ours is None:
        d.refuse("--advantage-estimator", "not here by this name (rlsys algo list)")
        ours = "grpo"
    if ours == "grpo" and d.flag("--disable-grpo-std-normalization"):
        ours = "dr_grpo"
    advantage: Any = ours
    of_advantage = ["--advantage-estimator", "--disable-grpo-std-normalization"]
    if ours == "gae":
        of_advantage += ["--gamma", "--lambd"]
        advantage = {"name": "gae", "gamma": d.number("--gamma", 1.0), "lam": d.number("--lambd", 1.0)}
    d.put("algo.advantage", advantage, *of_advantage)
    low = d.number("--eps-clip", 0.2)
    loss = {"name": "gspo" if estimator == "gspo" else "clip", "clip_low": low}
    terms: list[Any] = [{**loss, "clip_high": d.number("--eps-clip-high", low)}]
    of_loss = ["--advantage-estimator", "--eps-clip", "--eps-clip-high", "--use-kl-loss", "--entropy-coef"]
    if ours == "gae":
        terms.append({"name": "value"})
        lr = d.number("--critic-lr", 0)
        d.put("algo.critic", {"lr": lr} if lr else {}, "--critic-lr")
    if d.flag("--use-kl-loss"):
        of_loss += ["--kl-loss-coef", "--kl-loss-type"]
        kind = d.text("--kl-loss-type", "k1")
        if kind not in KL_KINDS:
            d.refuse("--kl-loss-type", f"{', '.join(KL_KINDS)} are here")
        if beta := d.number("--kl-loss-coef", 0):
            terms.append({"name": "kl", "beta": beta, "kind": KL_KINDS.get(kind, "k3")})
    if entropy := d.number("--entropy-coef", 0):
        terms.append({"name": "entropy", "coefficient": entropy})
    d.put("algo.loss", terms, *of_loss)
    by_token = d.flag("--calculate-per-token-loss") and estimator != "gspo"
    d.put("algo.reducer", "token_mean" if by_token else "sequence_mean", "--calculate-per-token-loss")
    if beta := d.number("--kl-coef", 0):
        d.put("algo.shaping", [{"name": "kl_reward", "beta": beta}], "--kl-coef")
    if d.flag("--use-tis"):
        correction: dict[str, Any] = {"name": "tis", "cap": d.number("--tis-clip", 2.0)}
        if floor := d.number("--tis-clip-low", 0.0):
            correction["floor"] = floor
        d.refuse("--custom-tis-function-path", "a correction of yours is named in algo.corrections")
        of_tis = ("--use-tis", "--tis-clip", "--tis-clip-low", "--custom-tis-function-path")
        d.put("algo.corrections", [correction], *of_tis)
    engine = d.flag("--use-rollout-routing-replay")
    if d.flag("--use-routing-replay") or engine:
        names = ("--use-routing-replay", "--use-rollout-routing-replay")
        d.put("trainer.replay", "engine" if engine else "trainer", *names)
        d.put("engine.return_routes", engine, *names)


def _trainer(d: Draft) -> None:
    steps, of_steps = put_steps(
        d, "--num-rollout", ("--num-epoch", 0), "--prompt-data", ("--rollout-batch-size", 1)
    )
    d.require("--lr")
    lr = d.number("--lr", 0.0)
    d.move("--lr", float)
    fraction = d.number("--lr-warmup-fraction", 0.0)
    warmup = d.whole("--lr-warmup-iters", round(fraction * steps))
    of_warmup = ["--lr-warmup-iters", "--lr-warmup-fraction"]
    d.put("trainer.warmup_steps", warmup, *of_warmup, *(of_steps if fraction else []))
    style = d.text("--lr-decay-style", "linear")
    if style not in ("constant", "linear", "cosine"):
        d.refuse("--lr-decay-style", "constant, linear and cosine are here")
    d.put("trainer.schedule", style, "--lr-decay-style")
    if (least := d.number("--min-lr", 0.0)) and lr:
        d.put("trainer.lr_end", least / lr, "--min-lr", "--lr")
    d.put("trainer.weight_decay", d.number("--weight-decay", 0.01), "--weight-decay")
    d.put("trainer.grad_clip", d.number("--clip-grad", 1.0), "--clip-grad")
    betas = [d.number("--adam-beta1", 0.9), d.number("--adam-beta2", 0.999)]
    d.put("trainer.betas", betas, "--adam-beta1", "--adam-beta2")
    if d.present("--recompute-granularity"):
        parts = {"full": ["layer"], "selective": ["core_attn"]}
        recomputed = parts.get(d.text("--recompute-granularity"), [])
        d.put("trainer.recompute", recomputed, "--recompute-granularity")
    if (optimizer := d.text("--optimizer", "adam")) not in OPTIMIZERS:
        d.refuse("--optimizer", f"{' and '.join(OPTIMIZERS)} are here")
    d.put("trainer.optimizer", OPTIMIZERS.get(optimizer, "adamw"), "--optimizer")
    if d.flag("--optimizer-cpu-offload"):
        d.put("trainer.offload_optimizer", 1.0, "--optimizer-cpu-offload")
    for name, place, otherwise in (
        ("--save-interval", "trainer.checkpoint_every", 20),
        ("--eval-interval", "eval.every", 20),
    ):
        d.put(place, d.whole(name, otherwise), name)
    for name, place in (
        ("--moe-aux-loss-coeff", "trainer.balance_loss"),
        ("--moe-router-bias-update-rate", "trainer.balance_rate"),
    ):
        if d.number(name, 0.0):
            d.put(place, d.number(name, 0.0), name)
    d.refuse("--lora-rank", "not translated: give trainer.lora yourself")
    weight = d.number("--mtp-loss-scaling-factor", 0.2)
    if d.flag("--enable-mtp-training"):
        d.put("trainer.mtp_loss", weight, "--mtp-loss-scaling-factor", "--enable-mtp-training")
        if (layers := d.whole("--mtp-num-layers", 1)) > 1:
            d.refuse(
                "--mtp-num-layers", f"{layers}: one layer for multi-token prediction can be trained; use 1"
            )


def _engines(d: Draft) -> None:
    """SGLang's own options are passed on; those that a field of ours sets become that field."""
    d.move("--sglang-max-total-tokens", int)
    d.move("--sglang-max-running-requests", int)
    names, args = [], []
    for name, value in d.settings.items():
        if not name.startswith("--sglang-") or name in d.used or name.startswith(NOT_SGLANG):
            continue
        names.append(name)
        args.append("--" + name.removeprefix("--sglang-"))
        if not isinstance(value, Unresolved) and value is not True:
            args += [str(word) for word in (value if isinstance(value, list) else [value])]
    if names:
        d.put("engine.extra_args", args, *names)


def _sizes(d: Draft, asynchronous: bool) -> tuple[Sizes, dict[str, tuple[str, ...]]]:
    names: dict[str, tuple[str, ...]] = {
        "groups": ("--rollout-batch-size",), "group_size": ("--n-samples-per-prompt",),
        "response": ("--rollout-max-response-len",), "prompt": ("--rollout-max-prompt-len",),
        "update": ("--num-steps-per-rollout",) if d.present("--num-steps-per-rollout") else ("--global-batch-size",),
        "micro": ("--max-tokens-per-gpu",), "nodes": ("--actor-num-nodes",), "gpus": ("--actor-num-gpus-per-node",),
        "tp": ("--tensor-model-parallel-size",), "pp": ("--pipeline-model-parallel-size",),
        "cp": ("--context-parallel-size",), "ep": ("--expert-model-parallel-size",),
        "etp": ("--expert-tensor-parallel-size",), "engine_tp": ("--rollout-num-gpus-per-engine",),
        "engine_gpus": ("--rollout-num-gpus",), "placement": ("--colocate",),
    }  # fmt: skip
    for name in ("--rollout-batch-size", "--rollout-max-response-len"):
        d.require(name)
    groups, n = d.whole("--rollout-batch-size", 1), d.whole("--n-samples-per-prompt", 1)
    if (
        n == 1
        and not d.open("--n-samples-per-prompt")
        and d.read("algo.advantage", "") in ("grpo", "dr_grpo")
    ):
        d.unknown("--n-samples-per-prompt", "one sample a prompt leaves a group of grpo without a baseline")
    update = d.whole("--global-batch-size", 0)
    if d.given("--num-steps-per-rollout"):
        update = groups * n // max(1, d.whole("--num-steps-per-rollout", 1))
    d.used.add("--global-batch-size")
    nodes, gpus = d.whole("--actor-num-nodes", 1), d.whole("--actor-num-gpus-per-node", 8)
    shared = d.flag("--colocate") and not asynchronous
    if not shared and not d.open("--colocate"):
        d.require(
            "--rollout-num-gpus", "the engines have GPUs of their own, and the script does not say how many"
        )
    etp = d.whole("--expert-tensor-parallel-size", 0)
    sizes = Sizes(
        groups=groups, group_size=n, update=update or None,
        prompt=d.whole("--rollout-max-prompt-len", 2048), response=d.whole("--rollout-max-response-len", 1024),
        micro=d.whole("--max-tokens-per-gpu", 0), nodes=nodes, gpus=gpus,
        tp=d.whole("--tensor-model-parallel-size", 1), pp=d.whole("--pipeline-model-parallel-size", 1),
        cp=d.whole("--context-parallel-size", 1), ep=d.whole("--expert-model-parallel-size", 1),
        etp=etp or None, engine_tp=d.whole("--rollout-num-gpus-per-engine", 1),
        engine_gpus=None if shared else d.whole("--rollout-num-gpus", nodes * gpus),
    )  # fmt: skip
    return sizes, names
