"""The sections of a config, all but `algo` (rlsys.algo_section).

Every field has a type, a bound where one exists and one sentence. What can be derived is a property, not a field.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rlsys.section import Beta, FilePath, NonNegative, Positive, Section, Share

Schedule = Literal["constant", "linear", "cosine"]


class RunConfig(Section):
    dir: FilePath = Path("runs/default")
    """Folder of the run: resolved config, metrics, rollouts, checkpoints, logs and report."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of prompts, samples and initialisation; the same seed and config give the same run."""


class ModelConfig(Section):
    path: FilePath
    """Hugging Face folder (config.json, *.safetensors, tokenizer.json) that the run starts from."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trainer's and the engine's weights."""
    fp8: Literal["none", "rollout", "both"] = "none"
    """What computes in FP8: nothing, the engines, or engines and trainer alike; needs dtype = bfloat16."""

    @model_validator(mode="after")
    def _cross(self) -> Self:
        if self.fp8 != "none" and self.dtype != "bfloat16":
            raise ValueError(f"fp8 = {self.fp8} needs dtype = bfloat16, here it is {self.dtype}")
        return self


class DataConfig(Section):
    source: str = "chain_sum_tail"
    """Short name of a prompt source, or an import path `package.module:function`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the prompt source."""
    seed: NonNegative = 0
    """Seed of the training prompts; run.seed is added to it."""
    reward: str = "reasoning_gym"
    """Short name of a reward function, or an import path `package.module:function`."""
    reward_env: list[str] = Field(default_factory=list)
    """Environment variables that a plain reward function may read, as an API key; it sees no others of ours."""
    reward_memory_gb: Annotated[float, Field(gt=0)] = 16.0
    """Address space of one process of a plain reward function, in GiB; beyond it, the function gets a MemoryError."""
    judge: str | None = None
    """What group rewards ask for verdicts: the URL of an OpenAI-compatible server, engines (the run's own), chain_sum
    (a rule), or an import path."""
    judge_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that a verdict may take, not counted while the engines rest; after them there is none."""


class EvalConfig(Section):
    every: Positive = 10
    """Train steps between two held-out evaluations; one runs before the first step and one after the last."""
    prompts: Annotated[int, Field(gt=0, le=65536)] = 128
    """Number of held-out prompts; none of them is ever trained on."""
    seed: NonNegative = 999
    """Seed of the held-out prompts."""


class RolloutConfig(Section):
    groups_per_step: Positive = 16
    """Groups (prompts) that one train step consumes."""
    group_size: Annotated[int, Field(ge=1, le=65536)] = 8
    """Samples per group."""
    over_provision: Annotated[float, Field(ge=1, le=16)] | Literal["auto"] = 1.0
    """Samples kept in flight, as a multiple of groups_per_step * group_size; above 1 makes APRIL; auto holds
    auto_share of auto_hold."""
    auto_hold: Literal["off_policy", "idle"] = "off_policy"
    """What over_provision = auto holds: the share of trained tokens that older weights sampled, or the share of a
    batch's slots that are idle."""
    auto_share: Share = 0.4
    """The share that over_provision = auto holds."""
    resume_order: Literal["oldest", "nearest_done", "longest"] = "oldest"
    """Which interrupted samples go on first: the oldest, those of the groups that lack the fewest, or the longest."""
    max_staleness: NonNegative = 0
    """Largest allowed age of a sample's oldest token at take, in weight versions."""
    staleness_policy: Literal["drop", "wait", "mask"] = "drop"
    """At max_staleness: drop the group, let the next version wait until the group has finished, or train the group
    without its tokens that are too old."""
    max_resumes: NonNegative | None = None
    """A sample that has been resumed so often is not interrupted again: the step waits for it. No bound when not
    given."""
    group_deadline: Annotated[float, Field(gt=0)] | None = None
    """Seconds from its admission by this process, pauses included, after which a take that waits censors an
    unfinished group. By default none."""
    max_response_tokens: Positive = 256
    """Budget of one response, counted over all its segments."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature of the rollout (evaluation is greedy)."""
    generator: str = "single_turn"
    """How a response comes about: single_turn, calculator (turns with a sandboxed Python calculator between them), or
    an import path `package.module:function`."""
    generator_params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the generator."""
    repeat: FilePath | None = None
    """Folder of a run of this config, whose groups, interrupts and tokens are repeated as its clock decided them."""
    length_bias_bound: Share = 0.1
    """Alarm when trained responses are shorter than generated ones by more than this share (docs/rollout.md)."""
    flush_tokens: Positive = 16384
    """Tokens of all samples together that may stream in before they are on disk: what a crash makes again."""
    reward_timeout: Annotated[float, Field(gt=0)] = 30.0
    """Seconds after which a reward counts as failed and its sample, of a group reward its group, as censored."""
    reward_concurrency: Positive = 4
    """Rewards computed at once; a plain reward function has up to so many processes, an async one none."""
    stall_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without a new token after which a take gives up and the run stops with a message; as many seconds in
    which code in the rollout's event loop (an async reward) does not let go of it stop the run, too."""


class TrainerConfig(Section):
    steps: NonNegative = 60
    """Train steps of the whole run."""
    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegative = 3
    """Steps of linear warm-up."""
    schedule: Schedule = "constant"
    """The learning rate after the warm-up: as it is, or falling to lr_end of its peak at the last step."""
    lr_end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where a falling learning rate ends, as a share of lr."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""
    nonfinite_limit: NonNegative = 2
    """Updates in a row that are skipped because their gradient is not finite; one more stops the run."""
    recompute: list[
        Literal["layer", "core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj"]
    ] = Field(default_factory=list)
    """What computes its activations again in the backward pass instead of keeping them; `layer` is all of it."""
    offload_optimizer: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the optimizer's state that lives, and is updated, in host memory; needs model.dtype = bfloat16."""
    balance_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the routers' auxiliary load-balancing loss (Switch Transformer, section 2.2), per token."""
    balance_rate: Annotated[float, Field(ge=0)] = 0.0
    """How far an update moves the routers' biases towards idle experts (Wang et al. 2024, no auxiliary loss)."""
    token_budget: Positive = 8192
    """Most tokens in one packed micro-batch."""
    early_backward: bool = False
    """Finished groups go backward as soon as they fill a micro-batch of every rank, while the step's others are being
    made (FlexMARL's micro-batch pipeline); needs launch.placement = disaggregated."""
    equal_lengths: bool = False
    """Pad a step's micro-batches to one length: pipeline stages then need not tell each other shapes."""
    replay: Literal["off", "engine", "trainer"] = "off"
    """Whose experts a token takes again in training: its own choice, the engine's (R3), the scoring pass's (R2)."""
    checkpoint_every: Positive = 10
    """Train steps between two checkpoints."""
    export_every: NonNegative = 0
    """Train steps between two exports of a Hugging Face folder, exports/step-N in the run; 0 makes none."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept on disk, beside the one with the best evaluation."""


class ParallelConfig(Section):
    tp: Positive = 1
    """Tensor parallel size."""
    pp: Positive = 1
    """Pipeline parallel size."""
    vpp: Positive = 1
    """Virtual pipeline stages per rank, interleaved; more than 1 needs pp > 1."""
    cp: Positive = 1
    """Context parallel size."""
    ep: Positive = 1
    """Expert parallel size."""
    etp: Positive | None = None
    """Tensor parallel size of the experts; tp when not given."""
    dp: Positive | None = None
    """Data parallel size; the smallest that expert parallelism allows when not given."""
    overlap: bool = False
    """Reduce gradients over data-parallel ranks while the backward pass goes on."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens travel to their experts; allgather needs trainer.equal_lengths."""

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


class EngineConfig(Section):
    count: Annotated[int, Field(gt=0, le=16384)] = 1
    """Number of SGLang engines."""
    tp: Positive = 1
    """Tensor parallel size of one engine."""
    host: str = "127.0.0.1"
    """Address the engines bind to."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first engine, the next ones count up; 0 takes free ports."""
    max_running_requests: Positive = 128
    """Requests that one engine decodes at once."""
    max_total_tokens: Positive = 65536
    """Tokens in one engine's KV pool."""
    stream_interval: Positive = 16
    """Tokens between two stream chunks: the most that an engine's sudden death can cost a sample."""
    deterministic: bool = True
    """Make a sample's seed decide its tokens, alone or in any batch (SGLang's deterministic inference)."""
    return_routes: bool = False
    """Hand over the experts that each token was routed to, for router replay in the trainer."""
    start_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds an engine may take to start. When not given: 240, 4 more for each GB of the model's folder, 300 for
    what is compiled on a GPU, and 1,800 for FP8 kernels."""
    reference: Annotated[str, Field(pattern=r"^(own|https?://\S+)$")] | None = None
    """Server of the weights that a planner holds prompts against (lens): its URL; own starts one more engine, which
    keeps the weights of model.path."""
    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of sglang.launch_server, passed on unchanged."""

    @model_validator(mode="after")
    def _ports(self) -> Self:
        if self.port + self.count > 65536:
            last = self.port + self.count - 1
            raise ValueError(f"port = {self.port}: {self.count} engines reach port {last} > 65535")
        return self


class RouterConfig(Section):
    strategy: Literal["prefix_affinity", "least_tokens", "power_of_two", "version_aware"] = "prefix_affinity"
    """How a sample's engine is chosen: by its prefix (unless that is a hot spot), by tokens, the better of two, or
    by its weights (which is by its prefix, as long as every engine that serves has the current weights)."""
    interruption: Literal["abort", "retract", "in_place"] = "abort"
    """What becomes of samples in flight when weights are pushed while engines generate: they come back and are
    durable; the engine keeps them and computes their prefix again; it keeps them with their old keys and values."""


class WeightsConfig(Section):
    method: Literal["tensor", "broadcast", "disk", "disk_delta"] = "tensor"
    """How weights travel: tensor (buckets in shared memory, one host), broadcast (buckets through a process group,
    any host), disk (a safetensors folder that all share) or disk_delta (only the tensors that changed)."""
    bucket_mb: Annotated[float, Field(gt=0)] = 256.0
    """Size of one bucket in MiB."""
    canary_mean: Annotated[float, Field(gt=0)] | None = None
    """Largest mean |trainer - engine| log-prob after a push; by default 1e-6 for float32, 2e-2 for bfloat16."""
    canary_p999: Annotated[float, Field(gt=0)] | None = None
    """Largest 99.9th percentile of the same; 1e-4 for float32 and 0.5 for bfloat16 when not given."""


class LaunchConfig(Section):
    backend: Literal["local", "slurm", "ray"] = "local"
    """What starts the processes: this machine, tasks of a Slurm job, or actors of a Ray cluster."""
    nodes: Annotated[int, Field(gt=0, le=65536)] = 1
    """Machines of the run; more than one needs the backend slurm or ray, and a run.dir that all of them see."""
    gpus_per_node: Annotated[int, Field(ge=0, le=1024)] = 0
    """GPUs of the run on each node; 0 leaves devices to the processes themselves (one machine, or no GPU)."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: engines rest while the trainer works; disaggregated: generation goes on meanwhile."""
    release_memory: bool = False
    """colocated on GPUs: while the trainer works, engines give back the memory of weights and cache."""
    grace_seconds: Annotated[float, Field(gt=0)] = 15.0
    """Seconds a process has to end by itself before it is killed."""
    preemption_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Seconds between the scheduler's SIGTERM or SIGUSR1 and its SIGKILL; no longer checkpoint is begun."""
    max_restarts: NonNegative = 3
    """Restarts of a role without a train step between them; one more death stops the run."""
    min_engines: Positive | None = None
    """The run goes on without engines that do not come up, or die too often, while so many are left; by default it
    needs all."""
    srun_args: list[str] = Field(default_factory=list)
    """Further arguments of each role's srun, as of a container plug-in; used by the backend slurm."""
    silence_seconds: Annotated[float, Field(gt=0)] = 900.0
    """Seconds without a token, a score or a metric after which the log tells who waits for whom."""


class SFTConfig(Section):
    traces: str = "chain_sum"
    """Short name of what writes the traces of `rlsys sft`, or an import path `package.module:function`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the trace writer."""
    lr_end: Share = 0.02
    """Learning rate of the last step as a share of trainer.lr; it falls linearly after the warm-up."""
