"""The sections of a config, all but `algo` (rlsys.config.algo).

Every field has a type, a bound where one exists, and one to three sentences: what it does, when to change it, what it
costs. What can be derived is a property, not a field.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from rlsys.config.section import Beta, FilePath, Fraction, NonNegative, Positive, Section
from rlsys.types import Truncation

Schedule = Literal["constant", "linear", "cosine"]


class RunConfig(Section):
    dir: FilePath = Path("runs/default")
    """The run's folder: resolved config, metrics, rollouts, checkpoints, logs and report. The same command with
    the same folder continues the run."""
    trackers: list[Literal["wandb", "mlflow", "trackio", "swanlab"]] = Field(default_factory=list)
    """Trackers that get every line of metrics.jsonl and tables of samples. Each needs its package:
    pip install 'rlsys[wandb]'. TensorBoard files are always written."""
    spans: bool = False
    """Send OpenTelemetry spans of samples and train steps, by OTLP over HTTP, to where OTEL_EXPORTER_OTLP_ENDPOINT
    says. Needs pip install 'rlsys[otel]'. time_spans says what they cost."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of prompts, samples and weights that no folder gives. Change it to repeat an experiment with other
    random numbers."""


class ModelConfig(Section):
    path: FilePath
    """Hugging Face folder that the run starts from: config.json, *.safetensors, tokenizer.json."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of the weights in trainer and engines. Use bfloat16 on GPUs. float32 takes twice the memory,
    and there trainer and engine agree to 1e-6."""
    fp8: Literal["none", "rollout", "both"] = "none"
    """What computes in FP8: nothing, the engines (rollout), or engines and trainer (both). It saves memory and
    time and makes log-probs less exact. Needs dtype = bfloat16."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.fp8 != "none" and self.dtype != "bfloat16":
            raise ValueError(f"fp8 = {self.fp8} needs dtype = bfloat16, here it is {self.dtype}")
        return self


class KeysConfig(Section):
    prompt: str | None = None
    """Where a row has its prompt, a text or a chat. Unset: prompt or messages."""
    answer: str | None = None
    """Where a row has the right answer; `a.b` is key b of key a. Unset: answer, label, ground_truth or
    reward_model.ground_truth, whichever comes first."""
    tools: str | None = None
    """Where a row has the schemas of its tools. Unset: tools."""


class RewardSpec(Section):
    """One reward of several, or one with parameters: a name, or `{name: ..., weight: ..., params: ...}`."""

    name: Annotated[str, Field(min_length=1)]
    """Short name of a reward function, or an import path `package.module:function`, or `path/to/file.py:function`."""
    weight: float = 1.0
    """What its value is multiplied with before all are added."""
    signature: Literal["auto", "rlsys", "verl", "slime", "trl", "verifiers"] = "auto"
    """How the function is called: as rlsys, verl, slime, TRL or verifiers do it. auto looks at its parameters."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function."""

    @model_validator(mode="before")
    @classmethod
    def _long(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _short(self, whole: SerializerFunctionWrapHandler) -> Any:
        """A name alone is written as it was."""
        return self.name if self == RewardSpec(name=self.name) else whole(self)


def _one_or_several(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


class DataConfig(Section):
    source: str = "chain_sum_tail"
    """Short name of a prompt source, or an import path `package.module:function`, or `path/to/file.py:function`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the prompt source."""
    keys: KeysConfig = KeysConfig()
    """Where the rows of jsonl, parquet and dataset have what a run needs, if not where it is looked for."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """What the model's chat template gets beside the messages, for example enable_thinking: false, or tools: [...].
    A row's own tools come first."""
    seed: NonNegative = 0
    """Seed of the training prompts; run.seed is added to it."""
    reward: Annotated[list[RewardSpec], BeforeValidator(_one_or_several)] = Field(
        default=[RewardSpec(name="reasoning_gym")], min_length=1
    )
    """Short name of a reward function, or an import path `package.module:function`, or `path/to/file.py:function`; or
    a list of rewards, `{name: ..., weight: ..., params: ...}`, which are added."""
    reward_env: list[str] = Field(default_factory=list)
    """Environment variables that a plain (not async) reward function may read, for example an API key. It sees
    no other variables of ours."""
    reward_memory_gb: Annotated[float, Field(gt=0)] = 16.0
    """Address space of one reward process, in GiB. A plain reward function that needs more gets a
    MemoryError."""
    judge: str | None = None
    """Who gives verdicts to group rewards that ask for them: the URL of an OpenAI-compatible server, engines
    (the run's own), chain_sum (a rule), or an import path."""
    judge_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds to wait for a verdict. After them there is none. Time in which the engines rest does not
    count."""

    @property
    def reward_name(self) -> str:
        """For messages."""
        return " + ".join(spec.name for spec in self.reward)


class EvalSet(Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    """What its figures are called: NAME/accuracy, NAME/pass_4."""
    data: DataConfig | None = None
    """Its own prompts and reward, as in the section data; what it does not give has the defaults. Unset: the
    run's."""
    prompts: Annotated[int, Field(gt=0, le=65536)] = 128
    """Number of prompts, of those that its source holds out (all of data.params.heldout_path)."""
    samples: Annotated[int, Field(gt=0, le=1024)] = 1
    """Responses to each prompt. More than one give pass@k for k = 1, 2, 4 up to all of them."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Sampling temperature; 0 is greedy."""
    max_response_tokens: Positive | None = None
    """Longest response. Unset: that of training."""

    @model_validator(mode="after")
    def _spread(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples = {self.samples} with temperature = 0 are {self.samples} equal responses; use a "
                "temperature above 0, or samples = 1"
            )
        return self


class EvalConfig(Section):
    every: Positive = 10
    """Train steps between two held-out evaluations. One more runs before the first step and one after the last.
    The next step waits for it, unless it runs in the background."""
    prompts: Annotated[int, Field(gt=0, le=65536)] = 128
    """Number of held-out prompts. None of them is ever trained on. More prompts make the accuracy more exact
    and the evaluation longer."""
    seed: NonNegative = 999
    """Seed of the held-out prompts."""
    background: bool = False
    """Evaluate beside training: an engine keeps its weights for it and gets no push and no samples until it is done.
    Needs launch.placement = disaggregated and two engines. The last evaluation is waited for."""
    sets: list[EvalSet] = Field(default_factory=list)
    """Further named sets, each with its own prompts, reward and sampling. They are asked after the held-out
    prompts, by the same weights."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [s.name for s in self.sets]
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(f"sets: the name {twice!r} is there {names.count(twice)} times")
        return self


class RolloutConfig(Section):
    groups_per_step: Positive = 16
    """Groups (one prompt each) that one train step trains."""
    group_size: Annotated[int, Field(ge=1, le=65536)] = 8
    """Samples per group, that is, responses to one prompt. More give a better baseline and cost as many more
    tokens."""
    over_provision: Annotated[float, Field(ge=1, le=16)] | Literal["auto"] = 1.0
    """Samples in flight, as a multiple of groups_per_step * group_size. Above 1 is APRIL: long responses no
    longer hold up a step, but groups wait over_provision - 1 steps on average. auto steers it to auto_share."""
    auto_hold: Literal["off_policy", "idle"] = "off_policy"
    """What over_provision = auto steers: off_policy, the share of trained tokens that older weights sampled, or
    idle, the share of slots without a sample."""
    auto_share: Fraction = 0.4
    """The share that over_provision = auto aims at."""
    resume_order: Literal["oldest", "nearest_done", "longest"] = "oldest"
    """Which interrupted samples go on first: the oldest, those of the groups that lack the fewest samples, or
    the longest. It only matters when more samples wait than the engines decode at once."""
    max_staleness: NonNegative = 0
    """How old a group's oldest token may be when it is trained: the most train steps between the weights that
    sampled it and the weights that the step starts from. 0 is on-policy. A small bound loses long responses, a
    large one trains older tokens."""
    staleness_policy: Literal["drop", "wait", "mask"] = "drop"
    """What happens at max_staleness. drop: the group is discarded. wait: the step waits for groups that only it
    can train. mask: the group is trained without its too old tokens."""
    max_resumes: NonNegative | None = None
    """How often a sample may be resumed; after that it is not interrupted again and the step waits for it.
    Unset: no limit."""
    group_deadline: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which an unfinished group is censored, counted from the moment it may start in this
    process. Only a take that waits for groups checks it. Unset: never."""
    max_response_tokens: Positive = 256
    """Longest response, in tokens, summed over all its segments. What reaches it is truncated."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature for training. Evaluation is greedy."""
    top_k: Annotated[int, Field(ge=2, le=2048)] | None = None
    """Draw from so many most probable tokens only. The trainer restricts its softmax to the tokens that the engine
    kept (Keep Sampling Mask, DeepSeek-V3.2). Unset: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of these, draw from the most probable ones that together have this mass. Needs top_k."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of these, draw from those that have this share of the largest probability. Needs top_k, and
    engine.deterministic = false."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end a response or a turn, beside the model's own end. They stay in the response."""
    generator: str = "single_turn"
    """How a response comes about: single_turn, calculator (turns with a sandboxed Python calculator between them), or
    an import path `package.module:function`, or `path/to/file.py:function`."""
    generator_params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the generator."""
    repeat: FilePath | None = None
    """Folder of an earlier run of the same config, whose groups, interruptions and tokens this run repeats. Use
    it to debug a run with over_provision above 1."""
    length_bias_bound: Fraction = 0.1
    """Warn when trained responses are shorter than generated ones by more than this share (docs/rollout.md)."""
    flush_tokens: Positive | None = None
    """The most tokens, of all samples together, that a crash of the rollout process may lose; they are sampled
    again. A smaller value writes to disk more often. null: 64 for each sample in flight, but at least 16384."""
    keep_groups: NonNegative = 2
    """Groups of each train step whose tokens stay readable (rlsys samples, rlsys dash) when no checkpoint needs them
    any more, each with its log-probs and its advantage. A token takes 16 bytes on the disk."""
    reward_timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds for one reward. After them the sample is censored; after a group reward that is too slow, its
    group."""
    reward_concurrency: Positive = 4
    """Rewards computed at the same time. A plain reward function gets up to this many processes; an async one
    gets none."""
    stall_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without a new token or reward after which a waiting take stops the run with a message. The run
    also stops when code in the rollout's event loop (an async reward) blocks it for so long."""

    @property
    def truncation(self) -> Truncation | None:
        return None if self.top_k is None else Truncation(self.top_k, self.top_p, self.min_p)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        for name, value, off in (("top_p", self.top_p, 1.0), ("min_p", self.min_p, 0.0)):
            if value != off and self.top_k is None:
                raise ValueError(
                    f"{name} = {value:g} needs top_k: the trainer must know which tokens an engine kept, and engines "
                    "name them only where their number is bounded; top_k = 1024 bounds it and changes hardly anything"
                )
        return self


class TrainerConfig(Section):
    steps: NonNegative = 60
    """Train steps of the whole run. Raise it to continue a finished run."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the weights. muon: Muon for the matrices of attention, feed-forward blocks and experts, AdamW for
    the rest, both at `lr`. It needs a third less optimizer memory for matrices, and more time per update
    (docs/trainer.md). Use it for weights that Muon made, such as Moonlight's and Kimi-K2's."""
    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""
    warmup_steps: NonNegative = 3
    """Train steps in which the learning rate rises linearly from 0 to lr."""
    schedule: Schedule = "constant"
    """The learning rate after the warm-up: constant, or falling to lr_end * lr at the last step."""
    lr_end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where a falling learning rate ends, as a share of lr."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's two betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the whole gradient; a larger gradient is scaled down to it."""
    nonfinite_limit: NonNegative = 2
    """How many updates in a row may be skipped because their gradient is not finite. One more stops the run."""
    recompute: list[
        Literal["layer", "core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj"]
    ] = Field(default_factory=list)
    """Which parts compute their activations again in the backward pass instead of storing them; layer is all of
    it. It saves memory and costs up to one more forward pass."""
    offload_optimizer: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the optimizer's state that is kept and updated in host memory. It saves GPU memory and makes
    updates slower. Needs model.dtype = bfloat16."""
    balance_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the routers' load-balancing loss (Switch Transformer, section 2.2), per token. 0 is off."""
    balance_rate: Annotated[float, Field(ge=0)] = 0.0
    """How far an update moves the routers' biases towards idle experts (Wang et al. 2024, balancing without a
    loss). For routers with biases, such as DeepSeek-V3's. 0 is off."""
    token_budget: Positive = 8192
    """Most tokens in one packed micro-batch. More use the hardware better and need more memory for
    activations."""
    early_backward: bool = False
    """Compute gradients of finished groups while the step's other groups are still generated (FlexMARL's
    micro-batch pipeline). It hides training time. Needs launch.placement = disaggregated and an algorithm that
    treats each group by itself."""
    equal_lengths: bool = False
    """Pad all micro-batches of a step to one length. It costs computation on padding; pipeline stages need not
    exchange shapes, and parallel.dispatcher = allgather needs it."""
    replay: Literal["off", "engine", "trainer"] = "off"
    """Whose expert choices training uses. off: its own. engine: those made when the token was sampled (R3).
    trainer: those of the scoring pass at the start of the step (R2). It removes mismatch between engine and
    trainer; engine also needs engine.return_routes."""
    checkpoint_every: Positive = 10
    """Train steps between two checkpoints. A crash costs at most the steps since the last one."""
    export_every: NonNegative = 0
    """Train steps between two exports of a Hugging Face folder to exports/step-N in the run; 0 makes none."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints stay on disk. The one with the best evaluation stays too."""


class ParallelConfig(Section):
    tp: Positive = 1
    """Tensor parallel size: ranks that share each layer's weights."""
    pp: Positive = 1
    """Pipeline parallel size: ranks that each hold a part of the layers."""
    vpp: Positive = 1
    """Virtual pipeline stages per rank, interleaved. More of them shorten the pipeline's idle time and send
    more messages. More than 1 needs pp > 1."""
    cp: Positive = 1
    """Context parallel size: ranks that share the tokens of each sequence. For long sequences."""
    ep: Positive = 1
    """Expert parallel size: ranks that share a layer's experts."""
    etp: Positive | None = None
    """Tensor parallel size of the experts. Unset: tp."""
    dp: Positive | None = None
    """Data parallel size: copies of the model that share the samples. Unset: the smallest that expert
    parallelism allows."""
    overlap: bool = False
    """Reduce gradients over data-parallel ranks during the backward pass instead of after it."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach their experts. alltoall sends each token to its experts only; allgather sends all tokens
    everywhere and needs trainer.equal_lengths."""

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def data_parallel(self) -> int:
        if self.dp is not None:
            return self.dp
        need = self.ep * self.expert_tp
        return need // math.gcd(need, self.tp * self.cp)

    @property
    def why_dp(self) -> str:
        """Where a size that nobody gave comes from, for messages."""
        if self.dp is not None or self.data_parallel == 1:
            return ""
        etp = f" * etp = {self.ep} * {self.expert_tp}" if self.expert_tp > 1 else f" = {self.ep}"
        return f" (parallel.ep{etp} needs dp = {self.data_parallel})"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.data_parallel

    @model_validator(mode="after")
    def _divides(self) -> Self:
        lanes = self.tp * self.cp * self.data_parallel
        need = self.ep * self.expert_tp
        if lanes % need:
            raise ValueError(
                f"tp*cp*dp = {lanes} ranks cannot be divided by ep*etp = {need}; "
                f"raise parallel.dp to a multiple of {need}"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} interleaves pipeline stages, but pp = 1; use pp >= 2")
        return self


OWN_ARGS = ("--api-key", "--admin-api-key", "--config", "--weight-version", "--host", "--port")
"""Of SGLang: what tells an engine whose it is, and where. Beginnings of them count too, as they do for SGLang."""


class EngineConfig(Section):
    count: Annotated[int, Field(gt=0, le=16384)] = 1
    """Number of SGLang engines."""
    tp: Positive = 1
    """Tensor parallel size of one engine."""
    host: str = "127.0.0.1"
    """Address that engines listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first engine; the others count up from it. 0 chooses free ports."""
    max_running_requests: Positive = 128
    """Requests that one engine decodes at the same time. More give more throughput and need a larger cache."""
    max_total_tokens: Positive = 65536
    """Tokens that one engine's cache of keys and values can hold. It must hold the longest response and its
    prompt."""
    stream_interval: Positive | None = None
    """Tokens between two stream chunks of an engine. It is the most that an engine's sudden death can cost each
    sample; a smaller value sends more messages. null: a 64th of rollout.max_response_tokens, but 16 to 256."""
    deterministic: bool = True
    """Make a sample's tokens depend on its seed alone, whatever else is in the batch (SGLang's deterministic
    inference). It makes decoding slower on GPUs."""
    return_routes: bool = False
    """Return the experts that each token was routed to, for trainer.replay = engine. Answers become larger."""
    start_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds an engine may take to start. Unset: 240, plus 4 for each GB of the model's folder, plus 300 for
    compilation on a GPU, plus 1,800 for FP8 kernels."""
    reference: Annotated[str, Field(pattern=r"^(own|https?://\S+)$")] | None = None
    """Server with the reference weights that the planner lens compares prompts against: its URL. own starts one
    more engine, which keeps the weights of model.path."""
    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of sglang.launch_server, passed on unchanged."""

    @field_validator("extra_args")
    @classmethod
    def _not_ours(cls, args: list[str]) -> list[str]:
        """config.yaml and command lines are for everybody to read; keys and labels are the run's own."""
        for arg in args:
            name = arg.partition("=")[0]
            if name.startswith("--") and len(name) > 4 and any(own.startswith(name) for own in OWN_ARGS):
                raise ValueError(f"{name} is set by rlsys itself; the keys of a run are made at its start")
        return args

    @model_validator(mode="after")
    def _ports(self) -> Self:
        if self.port + self.count > 65536:
            last = self.port + self.count - 1
            raise ValueError(f"port = {self.port}: {self.count} engines reach port {last} > 65535")
        return self


class RouterConfig(Section):
    strategy: Literal["prefix_affinity", "least_tokens", "power_of_two", "version_aware"] = "prefix_affinity"
    """Which engine a sample goes to. prefix_affinity: the one that has its prefix, unless that one is
    overloaded. least_tokens: the one with the fewest tokens. power_of_two: the less busy of two. version_aware:
    the same as prefix_affinity in a training run."""
    interruption: Literal["abort", "retract", "in_place"] = "abort"
    """What a weight push does to samples in flight (disaggregated engines). abort: they return, are saved, and
    go on after the push. retract: the engine keeps them and computes their cache again. in_place: it keeps them
    with the old cache, which is fastest and least exact."""


class WeightsConfig(Section):
    method: Literal["tensor", "broadcast", "disk", "disk_delta"] = "tensor"
    """How weights travel. tensor: buckets that each engine takes from a trainer rank of its machine.
    broadcast: buckets through a process group, to any machine. disk: a safetensors folder that all share.
    disk_delta: the same, changed tensors only."""
    bucket_mb: Annotated[float, Field(gt=0)] = 256.0
    """Size of one bucket in MiB. Larger ones make fewer calls and need more memory during a push."""
    canary_mean: Annotated[float, Field(gt=0)] | None = None
    """Largest mean |trainer - engine| log-prob after a push; an engine beyond it does not serve. Unset: 1e-6
    for float32, 2e-2 for bfloat16."""
    canary_p999: Annotated[float, Field(gt=0)] | None = None
    """Largest 99.9th percentile of the same differences. Unset: 1e-4 for float32, 0.5 for bfloat16."""
    uncompared: Annotated[float, Field(ge=0, le=1)] | None = None
    """Largest share of an engine's tensors in layouts that cannot be compared with the trainer's; an engine with
    more does not serve. Such tensors must change when the trainer's do, and only then. Unset: 0, with model.fp8
    0.75. Raise it for kernels that rearrange their weights."""


class LaunchConfig(Section):
    backend: Literal["local", "slurm", "ray"] = "local"
    """What starts the processes: this machine (local), tasks of a Slurm job, or actors of a Ray cluster."""
    nodes: Annotated[int, Field(gt=0, le=65536)] = 1
    """Machines of the run. More than one needs the backend slurm or ray, and a run.dir that all of them see."""
    gpus_per_node: Annotated[int, Field(ge=0, le=1024)] = 0
    """GPUs of the run on each machine. 0: processes see all devices of their machine (one machine, or no
    GPU)."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: trainer and engines share the GPUs and take turns. disaggregated: each has its own GPUs, and
    with max_staleness >= 1 generation goes on while the trainer works."""
    release_memory: bool = False
    """Colocated on GPUs: engines give back the memory of weights and cache while the trainer works. Use it when
    both do not fit at once."""
    grace_seconds: Annotated[float, Field(gt=0)] = 15.0
    """Seconds a process gets to end by itself before it is killed."""
    preemption_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Seconds between the scheduler's SIGTERM or SIGUSR1 and its SIGKILL. A checkpoint that would take longer
    is not begun."""
    max_restarts: NonNegative = 3
    """How often a role may be restarted without a train step in between. One more death stops the run."""
    min_engines: Positive | None = None
    """Fewest engines to begin with, and to go on with when others do not start or die too often, which are tried
    again from time to time. Unset: all of them."""
    srun_args: list[str] = Field(default_factory=list)
    """Further arguments of each role's srun, for example of a container plug-in (backend slurm)."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on loopback where Prometheus reads the run (docs/seeing.md). 0 finds a free one; unset: none."""
    silence_seconds: Annotated[float, Field(gt=0)] = 900.0
    """Seconds without a token, a reward or a metric after which the log tells who waits for whom."""


class SFTConfig(Section):
    traces: str = "chain_sum"
    """Short name of what writes the traces of `rlsys sft`, or `package.module:function`,
    or `path/to/file.py:function`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the trace writer."""
    lr_end: Fraction = 0.02
    """Learning rate of the last step, as a share of trainer.lr. It falls linearly after the warm-up."""
