"""slime's launch scripts (scripts/run-*.sh) -> a config of ours.

Read as of August 2026; defaults that a script leaves out are those of slime/utils/arguments.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlsys.errors import UserError
from rlsys.foreign.draft import Draft, Row
from rlsys.foreign.shell import Script
from rlsys.foreign.sizes import Sizes, put_anchor, put_sizes, source_of
from rlsys.model_folder import read_stop_ids

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
MATHEMATICS = ("math", "deepscaler", "dapo", "f1")
NEEDLESS = (
    (r"^--(num-layers|hidden-size|ffn-|num-attention|group-query|num-query|kv-channels|vocab|make-vocab|rotary|use-rotary|"
     r"normalization|norm-|swiglu|disable-bias|add-qkv|qk-|untie|position-|spec$|moe-(ffn|layer|router|shared|grouped|"
     r"permute|aux)|num-experts|multi-latent|q-lora|kv-lora|v-head|rope|max-position|apply-layernorm|attention-output|"
     r"no-rope|seq-length|mscale|beta-fast|beta-slow|original-max)",
     "read from the model's config.json"),
    (r"^--(ref-load|megatron-to-hf|no-save|no-load|finetune|ckpt|async-save|save-hf)",
     "one folder starts the run: model.path; the reference is its first weights"),
    (r"^--(sequence-parallel|use-dynamic-batch|balance-data|micro-batch|recompute-(method|num)|log-probs-|"
     r"accumulate-allreduce|attention-|hidden-dropout|moe-(enable|token)|bf16|fp16|use-distributed|overlap|"
     r"use-precision|no-gradient|transformer-impl|deterministic|data-parallel-random|train-memory|"
     r"update-weight|log-probs)",
     "ours always does so, or chooses it: packing, float32 sums, kernels"),
    (r"^--(sglang|use-slime-router|slime-router|router|rollout-function|rollout-health|use-fault)",
     "engines are sized by engine.*; engine.extra_args passes SGLang's own arguments on"),
    (r"^--(use-wandb|wandb|use-tensorboard|tb-|log-|use-tracking|debug|dump|save-debug|load-debug|profile|record|"
     r"use-pytorch-profiler|custom-(eval-)?rollout-log)",
     "the run folder has metrics and samples; run.trackers sends them on"),
    (r"^--(apply-chat|rollout-shuffle|rollout-seed|seed|num-epoch|start-rollout|skip-eval|group-rm|"
     r"rollout-max-(prompt|context)|eval-(temperature|top|max-context|min)|rollout-skip)",
     "the chat template is the model's; prompts are shuffled by data.seed"),
)  # fmt: skip


def settings_of(text: str, yaml_data: Any, variables: Mapping[str, str]) -> dict[str, Any]:
    """By option, with its dashes; of several words a list. Raises UserError when nothing is there."""
    if yaml_data is not None:
        return {
            f"--{str(k).replace('_', '-').lstrip('-')}": v
            for k, v in yaml_data.items()
            if v not in (None, False)
        }
    found: dict[str, Any] = {}
    for words in Script(text, variables).commands:
        start = next((i for i, w in enumerate(words) if Path(w).name in ("train.py", "train_async.py")), None)
        if start is not None:
            found |= _options(words[start + 1 :])
            found["train"] = Path(words[start]).stem
    if not found:
        raise UserError("no command of slime in it: expected train.py or train_async.py with its options")
    return found


def _options(words: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            out[name] = [value] if value else []
        elif name is not None:
            out[name].append(word)
    return {k: True if not v else v[0] if len(v) == 1 else v for k, v in out.items()}


def translate(settings: Mapping[str, Any], rewards: Collection[str]) -> Draft:
    """`rewards`: short names of ours. Raises UserError for a script without model or data."""
    d = Draft(dict(settings), SLIME)
    asynchronous = d.get("train") == "train_async"
    if not d.given("--hf-checkpoint") or not d.given("--prompt-data"):
        raise UserError("expected --hf-checkpoint and --prompt-data in it")
    saved = d.get("--save")
    d.put("run.dir", str(saved) if saved else "runs/imported", "--save")
    d.used.add("--load")
    d.move("--hf-checkpoint")
    d.put("model.dtype", "bfloat16")
    _data(d, rewards)
    _rollout(d)
    _algorithm(d)
    _trainer(d)
    put_sizes(d, *_sizes(d, asynchronous))
    if asynchronous:
        d.put("rollout.max_staleness", max(1, int(d.config["rollout"].get("max_staleness", 0))))
    put_anchor(d)
    d.close(NEEDLESS)
    return d


def _data(d: Draft, rewards: Collection[str]) -> None:
    path = d.get("--prompt-data")
    d.put("data.source", source_of(path))
    d.put("data.params.path", path, "--prompt-data")
    d.move("--input-key")
    d.move("--label-key")
    kind, own = str(d.get("--rm-type", "")), d.get("--custom-rm-path")
    if own:
        module, _, function = str(own).rpartition(".")
        d.put("data.reward", f"{module}:{function}", "--custom-rm-path")
    else:
        d.put("data.reward", "math" if "math" in rewards else "exact_answer", "--rm-type")
        if kind not in MATHEMATICS:
            d.refuse(
                "--rm-type", f"not here by this name; data.reward = {d.config['data']['reward']} in its place"
            )
    d.used |= {"--rm-type", "--custom-rm-path"}
    if own := d.get("--custom-generate-function-path"):
        module, _, function = str(own).rpartition(".")
        d.put("rollout.generator", f"{module}:{function}", "--custom-generate-function-path")
        d.odd.append("rollout.generator: it is called as slime does, within limits; see docs/from-slime.md")
    for name in ("--reward-key", "--eval-reward-key", "--tool-key", "--metadata-key", "--eval-config"):
        d.refuse(name, "no counterpart: rewards are named by what they return, rows are read whole")
    _held_out(d)


def _held_out(d: Draft) -> None:
    """--eval-prompt-data NAME PATH [NAME PATH ...]; the first is what the run is judged by."""
    words = d.get("--eval-prompt-data")
    pairs = [words] if isinstance(words, str) else list(words or [])
    named = [("eval", pairs[0])] if len(pairs) == 1 else list(zip(pairs[::2], pairs[1::2], strict=False))
    if not named:
        return
    d.put("data.params.heldout_path", named[0][1], "--eval-prompt-data")
    samples = int(d.get("--n-samples-per-eval-prompt", 1))
    longest = int(d.get("--eval-max-response-len", d.get("--rollout-max-response-len", 1024)))
    hot = float(d.get("--eval-temperature", d.get("--rollout-temperature", 1.0)))
    sets: list[dict[str, Any]] = []
    for place, (name, path) in enumerate(named):
        chosen: dict[str, Any] = {"name": str(name).lower(), "prompts": 30, "samples": samples}
        chosen |= {"temperature": hot, "max_response_tokens": longest}
        if place:
            data = d.config["data"]
            chosen["data"] = data | {"params": data["params"] | {"heldout_path": path}}
        sets.append(chosen)
    d.put("eval.sets", sets, "--n-samples-per-eval-prompt", "--eval-max-response-len", "--eval-temperature")
    if d.given("--eval-top-p") and float(d.get("--eval-top-p")) != 1:
        d.refuse("--eval-top-p", "sets are sampled from the whole distribution")


def _rollout(d: Draft) -> None:
    d.move("--rollout-temperature", float)
    d.move("--sglang-tool-call-parser")
    d.move("--sglang-reasoning-parser")
    d.cut("--rollout-top-p", "--rollout-top-k")
    if stops := d.get("--rollout-stop"):
        d.put("rollout.stop", stops if isinstance(stops, list) else [str(stops)], "--rollout-stop")
    _stop_ids(d)
    groups = int(d.get("--rollout-batch-size", 1))
    over = int(d.get("--over-sampling-batch-size", groups)) / groups
    if d.get("--partial-rollout"):
        d.put(
            "rollout.over_provision",
            min(16.0, max(over, 1.5)),
            "--partial-rollout",
            "--over-sampling-batch-size",
        )
        d.put("rollout.max_staleness", 4)
        d.odd.append("rollout.max_staleness = 4: slime has no bound; see docs/rollout.md")
    elif over > 1:
        why = "without --partial-rollout slime throws the surplus away; here a step asks again if some are filtered"
        d.refuse("--over-sampling-batch-size", why)
    if chosen := d.get("--dynamic-sampling-filter-path"):
        if str(chosen).endswith("check_reward_nonzero_std"):
            d.put("algo.planners", ["dapo"], "--dynamic-sampling-filter-path")
        else:
            d.refuse("--dynamic-sampling-filter-path", "a filter of yours is a planner here: algo.planners")
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
        d.needless.append(Row(option, str(d.settings[option]), "the model's own stop ids"))


def _algorithm(d: Draft) -> None:
    estimator = str(d.get("--advantage-estimator", "grpo"))
    ours = ADVANTAGES.get(estimator)
    if ours is None:
        d.refuse("--advantage-estimator", "not here; grpo in its place (rlsys algo list)")
        ours = "grpo"
    if ours == "grpo" and d.get("--disable-grpo-std-normalization"):
        ours = "dr_grpo"
    advantage: Any = ours
    if ours == "gae":
        advantage = {
            "name": "gae",
            "gamma": float(d.get("--gamma", 1.0)),
            "lam": float(d.get("--lambd", 1.0)),
        }
    d.put("algo.advantage", advantage, "--advantage-estimator", "--disable-grpo-std-normalization")
    low = float(d.get("--eps-clip", 0.2))
    loss = {"name": "gspo" if estimator == "gspo" else "clip", "clip_low": low}
    terms: list[Any] = [{**loss, "clip_high": float(d.get("--eps-clip-high", low))}]
    if ours == "gae":
        terms.append({"name": "value"})
        d.put(
            "algo.critic", {k: float(v) for k, v in {"lr": d.get("--critic-lr")}.items() if v}, "--critic-lr"
        )
    if d.get("--use-kl-loss") and (beta := float(d.get("--kl-loss-coef", 0))):
        kind = KL_KINDS.get(str(d.get("--kl-loss-type", "k1")), "k3")
        terms.append({"name": "kl", "beta": beta, "kind": kind})
    if entropy := float(d.get("--entropy-coef", 0)):
        terms.append({"name": "entropy", "coefficient": entropy})
    of_loss = ("eps-clip", "eps-clip-high", "use-kl-loss", "kl-loss-coef", "kl-loss-type", "entropy-coef")
    d.put("algo.loss", terms, *(f"--{n}" for n in of_loss))
    by_token = bool(d.get("--calculate-per-token-loss")) and estimator != "gspo"
    d.put("algo.reducer", "token_mean" if by_token else "sequence_mean", "--calculate-per-token-loss")
    if beta := float(d.get("--kl-coef", 0)):
        d.put("algo.shaping", [{"name": "kl_reward", "beta": beta}], "--kl-coef")
    if d.get("--use-tis"):
        d.put(
            "algo.corrections",
            [{"name": "tis", "cap": float(d.get("--tis-clip", 2.0))}],
            "--use-tis",
            "--tis-clip",
        )
    if d.get("--use-routing-replay") or d.get("--use-rollout-routing-replay"):
        engine = bool(d.get("--use-rollout-routing-replay"))
        names = ("--use-routing-replay", "--use-rollout-routing-replay")
        d.put("trainer.replay", "engine" if engine else "trainer", *names)
        d.config.setdefault("engine", {})["return_routes"] = engine
    d.used |= {"--gamma", "--lambd"}


def _trainer(d: Draft) -> None:
    d.put("trainer.steps", int(d.get("--num-rollout", 500)), "--num-rollout")
    if not d.given("--num-rollout"):
        d.odd.append("trainer.steps = 500: the script has no --num-rollout")
    d.move("--lr", float)
    d.put("trainer.warmup_steps", int(d.get("--lr-warmup-iters", 0)), "--lr-warmup-iters")
    style = str(d.get("--lr-decay-style", "constant"))
    if style in ("constant", "linear", "cosine"):
        d.put("trainer.schedule", style, "--lr-decay-style")
    else:
        d.refuse("--lr-decay-style", "constant, linear and cosine are here")
    d.move("--weight-decay", float)
    d.move("--clip-grad", float)
    betas = [float(d.get("--adam-beta1", 0.9)), float(d.get("--adam-beta2", 0.98))]
    d.put("trainer.betas", betas, "--adam-beta1", "--adam-beta2")
    if d.given("--recompute-granularity"):
        parts = {"full": ["layer"], "selective": ["core_attn"]}
        d.put(
            "trainer.recompute",
            parts.get(str(d.get("--recompute-granularity")), []),
            "--recompute-granularity",
        )
    if (optimizer := str(d.get("--optimizer", "adam"))) not in OPTIMIZERS:
        d.refuse("--optimizer", f"{' and '.join(OPTIMIZERS)} are here")
    elif OPTIMIZERS[optimizer] != "adamw":
        d.put("trainer.optimizer", OPTIMIZERS[optimizer], "--optimizer")
    if d.get("--optimizer-cpu-offload"):
        d.put("trainer.offload_optimizer", 1.0, "--optimizer-cpu-offload")
    for name, place, otherwise in (
        ("--save-interval", "trainer.checkpoint_every", 20),
        ("--eval-interval", "eval.every", 20),
    ):
        d.put(place, int(d.get(name, otherwise)), name)
    if d.get("--lora-rank") is not None:
        d.refuse("--lora-rank", "not translated: give trainer.lora yourself")
    weight = float(d.get("--mtp-loss-scaling-factor", 0.2))
    if d.get("--enable-mtp-training"):
        d.put("trainer.mtp_loss", weight, "--mtp-loss-scaling-factor")
    if int(layers := d.get("--mtp-num-layers", 1)) > 1:
        d.refuse("--mtp-num-layers", f"{layers}: one layer for multi-token prediction can be trained; use 1")
    for name in ("--train-backend", "--loss-mask-type"):
        if d.get(name) not in (None, "megatron"):
            d.refuse(name, "not here: a text model is trained, by Megatron")


def _sizes(d: Draft, asynchronous: bool) -> tuple[Sizes, dict[str, tuple[str, ...]]]:
    names = {
        "groups": ("--rollout-batch-size",), "group_size": ("--n-samples-per-prompt",),
        "response": ("--rollout-max-response-len",), "update": ("--global-batch-size", "--num-steps-per-rollout"),
        "micro": ("--max-tokens-per-gpu",), "nodes": ("--actor-num-nodes",), "gpus": ("--actor-num-gpus-per-node",),
        "tp": ("--tensor-model-parallel-size",), "pp": ("--pipeline-model-parallel-size",),
        "cp": ("--context-parallel-size",), "ep": ("--expert-model-parallel-size",),
        "etp": ("--expert-tensor-parallel-size",), "engine_tp": ("--rollout-num-gpus-per-engine",),
        "engine_gpus": ("--rollout-num-gpus",), "placement": ("--colocate",),
    }  # fmt: skip
    groups, n = int(d.get("--rollout-batch-size", 1)), int(d.get("--n-samples-per-prompt", 1))
    if n == 1 and d.config["algo"]["advantage"] in ("grpo", "dr_grpo"):
        d.odd.append("rollout.group_size = 8: one sample a prompt leaves a group without a baseline")
        n = 8
    update = d.get("--global-batch-size")
    if d.given("--num-steps-per-rollout"):
        update = groups * n // int(d.get("--num-steps-per-rollout"))
    nodes, gpus = int(d.get("--actor-num-nodes", 1)), int(d.get("--actor-num-gpus-per-node", 8))
    etp = d.get("--expert-tensor-parallel-size")
    shared = bool(d.get("--colocate")) and not asynchronous
    response = int(d.get("--rollout-max-response-len", 1024))
    sizes = Sizes(
        groups=groups, group_size=n, update=None if update is None else int(update),
        prompt=int(d.get("--rollout-max-prompt-len", 2048)), response=response,
        micro=int(d.get("--max-tokens-per-gpu", 0)), nodes=nodes, gpus=gpus,
        tp=int(d.get("--tensor-model-parallel-size", 1)), pp=int(d.get("--pipeline-model-parallel-size", 1)),
        cp=int(d.get("--context-parallel-size", 1)), ep=int(d.get("--expert-model-parallel-size", 1)),
        etp=None if etp is None else int(etp), engine_tp=int(d.get("--rollout-num-gpus-per-engine", 1)),
        engine_gpus=None if shared else int(d.get("--rollout-num-gpus", nodes * gpus)),
    )  # fmt: skip
    for name in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"):
        d.refuse(name, "layers are dealt to the stages as evenly as they go")
    return sizes, names
