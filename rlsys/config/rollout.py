"""The config sections `rollout`, `engine`, `router` and `weights`: generation of samples, engines, weight updates."""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlsys.config.section import FilePath, Fraction, Megabytes, NonNegative, Positive, Seconds, Section
from rlsys.config.weight_methods import check_method

TREES = ("latr", "echo")
"""Generators that sample the responses of a group as a tree."""


class Truncation(NamedTuple):
    """Truncation of the distribution from which a token is sampled. The filters apply in this order.

    Attributes:
        top_k: number of most probable ids that are kept.
        top_p: total probability of the most probable remaining ids that are kept.
        min_p: minimum probability of a kept id, as a share of the largest probability.
    """

    top_k: int
    top_p: float = 1.0
    min_p: float = 0.0


class RolloutConfig(Section):
    deleted: ClassVar = {"auto_hold": "off_policy"}

    groups_per_step: Positive = 16
    """Number of groups per train step. A group has one prompt."""
    group_size: Annotated[int, Field(ge=1, le=65536)] = 8
    """Number of samples per group, that is, responses to one prompt. More samples give a better baseline and cost
    tokens in proportion."""
    over_provision: Annotated[float, Field(ge=1, le=16)] | Literal["auto"] = 1.0
    """Number of samples in flight, as a multiple of groups_per_step * group_size. Above 1 is APRIL: long responses do
    not delay a step, but tokens get older. A sample is in flight for over_provision steps on average, and a group
    longer. auto adapts it to auto_share."""
    auto_share: Fraction = 0.4
    """Target of over_provision = auto: the share of trained tokens that older weights sampled."""
    resume_order: Literal["oldest", "nearest_done", "longest"] = "oldest"
    """Order in which interrupted samples resume. oldest: the oldest first. nearest_done: samples of the groups with
    the fewest unfinished samples first. longest: the longest first. It has an effect only if more samples wait than
    the engines decode at once."""
    max_staleness: NonNegative = 0
    """Maximum age of a group's oldest token when it is trained: the number of train steps between the weights that
    sampled the token and the weights at the start of the step. 0 is on-policy. A small limit discards long responses,
    a large one trains older tokens."""
    staleness_policy: Literal["drop", "wait", "mask"] = "drop"
    """Treatment of a group at max_staleness. drop: the group is discarded. wait: the step waits for groups that only
    it can train. mask: the group is trained without its tokens that are too old."""
    max_resumes: NonNegative | None = None
    """Maximum number of resumes of a sample. After that a take and a push wait for the sample instead of
    interrupting it. Unset: no limit."""
    group_deadline: Seconds | None = None
    """Seconds after which an unfinished group is censored, from its admission in this process on. Only a take that
    waits for groups checks the time. Unset: never."""
    max_response_tokens: Positive = 256
    """Maximum length of a response in tokens, summed over all its segments; for an agent, of a conversation. A longer
    one is truncated."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature for training. Evaluation is greedy."""
    top_k: Annotated[int, Field(ge=2, le=2048)] | None = None
    """Sample from this number of most probable ids only. The trainer restricts its softmax to the ids that the engine
    kept (Keep Sampling Mask, DeepSeek-V3.2). Unset: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the most probable of the top_k ids that together have this probability. Needs top_k."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample only from those of the remaining ids with at least this share of the largest probability. Needs top_k,
    and engine.deterministic = false."""
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default_factory=list)
    """Texts that end a response or a turn, in addition to the model's stop tokens. They stay in the response."""
    stop_ids: list[NonNegative] = Field(default_factory=list, max_length=256)
    """Token ids that end a response or a turn, in addition to the model's stop tokens."""
    ignore_eos: bool = False
    """Continue after the model's stop tokens: responses end at max_response_tokens, or at a text of stop. Use it to
    measure long responses."""
    generator: str = "single_turn"
    """Generator of responses: single_turn, calculator (turns with a sandboxed Python calculator between them),
    functions (your own functions as tools), agent (a program with an OpenAI client, docs/agents.md), environment (a
    game or tools in a separate process, docs/environments.md), replayed (along trajectories of the data), an import
    path `package.module:function`, or `path/to/file.py:function`."""
    generator_params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the generator."""
    workers: Positive = 1
    """Number of processes that receive the engines' streams, on the machine of the rollout process. 1: the rollout
    process receives them. One process received 160,000 tokens a second with responses of 512 tokens on average, and
    more with longer ones (docs/performance.md); use several above that rate. Each takes a core and the memory of its
    samples' tokens."""
    repeat: FilePath | None = None
    """Folder of an earlier run of the same config, whose groups, interruptions and tokens this run repeats. Use it to
    debug a run with over_provision above 1."""
    length_bias_bound: Fraction = 0.1
    """Warn when trained responses are shorter than generated ones by more than this share (docs/rollout.md)."""
    keep_budget: Annotated[float, Field(ge=0)] | None = None
    """Bound of the mean |log-prob - mu| of a step's tokens in responses that older weights began (metric
    mismatch_kept_mean), for router.interruption = in_place. During a push, as many samples keep their KV cache as the
    bound allows, the longest first; the others are prefilled again. 0: all are prefilled again. Unset: all keep
    it."""
    flush_tokens: Positive | None = None
    """Maximum number of tokens, over all samples, that a crash of the rollout process may lose; they are sampled
    again. A smaller value writes to disk more often. null: 64 for each sample in flight (256 with several
    workers), but at least 16384."""
    keep_groups: NonNegative = 2
    """Number of groups of each train step whose tokens, log-probs and advantages stay readable (rlsys samples, rlsys
    dash) when no checkpoint needs them any more. A token takes 16 bytes on disk."""
    reward_timeout: Seconds = 30.0
    """Time limit of one reward in seconds. A sample whose reward takes longer is censored, and so is a group whose
    group reward takes longer."""
    reward_concurrency: Positive = 4
    """Maximum number of rewards that are computed at the same time. A plain reward function gets up to this many
    processes; an async one runs in the rollout process."""
    max_failed_share: Fraction = 0.05
    """Maximum share of a train step's samples that may end in an unexpected exception of a generator, a source or a
    planner. Each such sample is censored, and a larger share stops the run. Expected failures of rows, tools, agents,
    environments and rewards (docs/rollout.md) do not count."""
    stall_timeout: Seconds = 600.0
    """Seconds without a new token or reward after which a waiting take stops the run with a message. The run
    also stops if code in the rollout's event loop (an async reward) blocks it for this time."""

    @property
    def truncation(self) -> Truncation | None:
        """Truncation of the sampling distribution; None: none."""
        return None if self.top_k is None else Truncation(self.top_k, self.top_p, self.min_p)

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if self.ignore_eos and self.stop_ids:
            raise ValueError(
                f"ignore_eos = true with stop_ids = {self.stop_ids}: with ignore_eos no id ends a response; expected "
                "only one of the two fields"
            )
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        for name, value, default in (("top_p", self.top_p, 1.0), ("min_p", self.min_p, 0.0)):
            if value != default and self.top_k is None:
                raise ValueError(
                    f"{name} = {value:g} needs top_k: the trainer must know which ids an engine kept, and engines "
                    "return them only if their number is bounded; top_k = 1024 bounds it and changes hardly anything"
                )
        return self


JOINED_POOL = "joined"
"""Pool of engines that join a run."""


class PoolConfig(Section):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
    """Name of the pool in metrics, `rlsys explain` and `rlsys status`: lower-case letters, digits and underscores."""
    count: Annotated[int, Field(gt=0, le=16384)]
    """Number of engines in the pool."""
    tp: Positive | None = None
    """Tensor parallel size of each engine. Unset: engine.tp."""
    cost: Annotated[float, Field(ge=0)] = 1.0
    """Cost of one rank per second in any unit, by which metrics multiply the rank-seconds of the pool."""
    role: Literal["rollout", "explore"] = "rollout"
    """Role of the engines. rollout: they generate samples. explore: they probe prompts, so that the planner explore
    knows how many samples a prompt needs; their responses are not trained."""
    relay: bool = False
    """Send weights only to the first engine, which forwards them to the next one, and so on. Use it for engines
    behind a slow link, which each update then crosses once, as a compressed delta. The trainer's first rank and each
    of these engines keep a copy of the model in host memory. Needs weights.method = auto or broadcast for the other
    engines."""


OWN_ARGS = (
    "--api-key", "--admin-api-key", "--config", "--weight-version", "--host", "--port", "--nccl-port",
    "--dist-init-addr", "--nnodes", "--node-rank",
)  # fmt: skip
"""SGLang's arguments for the identity and address of an engine, which rlsys sets. SGLang also accepts prefixes of
them."""
LISTENING_ARGS = ("--enable-dp-attention", "--kv-events-config", "--disaggregation-mode")
"""SGLang's arguments that open ZeroMQ sockets on TCP, which need no key and unpickle received messages."""


KERNEL_ARGS = (
    "--moe-runner-backend", "--moe-a2a-backend", "--fp8-gemm-backend", "--bf16-gemm-backend", "--quantization",
    "--ep", "--ep-size", "--expert-parallel-size", "--ep-num-redundant-experts", "--enable-eplb",
    "--init-expert-location", "--enforce-shared-experts-fusion", "--moe-dp-size", "--kt-method",
)  # fmt: skip
"""SGLang's arguments with which the order, format or number of an engine's tensors may differ from the trainer's."""


class EngineConfig(Section):
    count: Annotated[int, Field(gt=0, le=16384)] = 1
    """Number of SGLang engines."""
    tp: Positive = 1
    """Tensor parallel size of one engine."""
    pools: list[PoolConfig] = Field(default_factory=list)
    """Pools of different engines, in the order in which they get GPUs; count is then the sum of their counts, and may
    be omitted. Use pools for engines of several sizes, with router.strategy = hardware_affinity, and for metrics of
    throughput and cost per pool. Empty: all engines are equal."""
    host: str = "127.0.0.1"
    """Address on which engines listen."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first engine; the others use the following ports. 0: free ports."""
    max_running_requests: Positive | None = None
    """Maximum number of requests that one engine decodes at the same time. A larger number gives more throughput and
    needs a larger KV cache. null: the engine's share of the samples in flight, but 128 to 2,048."""
    memory_fraction: Fraction = 0.88
    """Share of a GPU's memory for an engine's weights, its KV cache (SGLang's mem_fraction_static) and the memory
    that a colocated trainer keeps meanwhile; the rest is for activations. The KV cache is at most as large as the
    samples in flight need at their maximum length."""
    max_total_tokens: Positive | None = None
    """Capacity of one engine's KV cache in tokens. It must be large enough for the longest response and its prompt.
    null: the capacity that memory_fraction allows on GPUs, 65,536 without GPUs."""
    stream_interval: Positive | None = None
    """Number of tokens between two stream chunks of an engine, and the maximum number of tokens that each sample
    loses if an engine crashes. A smaller value sends more messages. null: a 64th of rollout.max_response_tokens, but
    16 to 256."""
    deterministic: bool = True
    """Make a sample's tokens depend only on its seed, not on the other requests in the batch (SGLang's deterministic
    inference with sampling by token id; docs/rollout.md states the guarantee). Decoding on GPUs is slower."""
    ngram_drafts: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of nodes of the draft tree that an engine verifies in one pass, including the last sampled token. Drafts
    are continuations of equal n-grams (SGLang's NGRAM). They make small batches faster if responses repeat themselves
    or each other. Needs deterministic = false, since drafts depend on other samples. 0: no drafts."""
    return_routes: bool = False
    """Return the experts to which each token was routed, for trainer.replay = engine. It makes responses larger."""
    start_timeout: Seconds | None = None
    """Time limit in seconds for the start of an engine. Unset: 240, plus 4 for each GB of the model's folder, plus
    300 for compilation on a GPU, plus 1,800 for FP8 kernels."""
    reference: Annotated[str, Field(pattern=r"^(own|https?://\S+)$")] | None = None
    """URL of a server with the reference weights, with which the planner lens compares prompts. own: the run starts
    one more engine, which keeps the weights of model.path. Unset: none."""
    tool_call_parser: str | None = None
    """SGLang's name for the model's tool-call format, for example qwen25, hermes or llama3. Chat requests to the
    engines and the generator functions use it. Unset: calls stay text."""
    reasoning_parser: str | None = None
    """SGLang's name for the model's reasoning format, for example deepseek-r1 or qwen3. Chat responses of the engines
    then have the reasoning separately, as reasoning_content, and the generator functions parses calls after it. The
    tokens stay the same. Unset: the reasoning stays in the text."""
    extra_args: list[str] = Field(default_factory=list)
    """Additional arguments of sglang.launch_server, passed on unchanged."""

    @property
    def drafts_with_model(self) -> bool:
        """Whether extra_args make SGLang draft with the model's layer for multi-token prediction."""
        values: dict[str, str] = {}
        for arg, next_arg in zip_longest(self.extra_args, self.extra_args[1:], fillvalue=""):
            name, separator, value = arg.partition("=")
            values[name] = value if separator else next_arg
        algorithm = values.get("--speculative-algorithm", "").upper()
        return algorithm in ("EAGLE", "NEXTN") and "--speculative-draft-model-path" not in values

    @property
    def chooses_kernels(self) -> bool:
        """Whether extra_args contain one of KERNEL_ARGS."""
        return any(arg.partition("=")[0] in KERNEL_ARGS for arg in self.extra_args)

    @property
    def explorers(self) -> int:
        """Number of engines that probe prompts."""
        return sum(pool.count for pool in self.pools if pool.role == "explore")

    @property
    def writers(self) -> int:
        """Number of engines that generate samples."""
        return self.count - self.explorers

    def explores(self, index: int) -> bool:
        """Return whether engine `index` probes prompts."""
        pool = self.pool_of(index)
        return pool is not None and pool.role == "explore"

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Engine indices of each pool that relays weights, in the order of the relay."""
        chains, first = [], 0
        for pool in self.pools:
            if pool.relay:
                chains.append(tuple(range(first, first + pool.count)))
            first += pool.count
        return tuple(chains)

    def chain_of(self, name: str | None) -> int | None:
        """Return the index in `chains` of the pool `name`; None if it does not relay, or there is no such pool."""
        relays = [pool.name for pool in self.pools if pool.relay]
        return relays.index(name) if name in relays else None

    @property
    def tps(self) -> list[int]:
        """The different tensor parallel sizes of engines, ascending."""
        return sorted({self.tp_of(i) for i in range(self.count)})

    def pool_of(self, index: int | None, pool_name: str | None = None) -> PoolConfig | None:
        """Return the pool of an engine; None if it has none.

        Args:
            index: number of the engine; None for an engine that joined the run.
            pool_name: name of the pool of an engine that joined.
        """
        if index is None:
            return next((pool for pool in self.pools if pool.name == pool_name), None)
        for pool in self.pools:
            if index < pool.count:
                return pool
            index -= pool.count
        return None

    def tp_of(self, index: int) -> int:
        """Return the tensor parallel size of engine `index`; engine.tp if its pool does not set one."""
        pool = self.pool_of(index)
        return self.tp if pool is None or pool.tp is None else pool.tp

    @model_validator(mode="before")
    @classmethod
    def _sum_of_pools(cls, data: Any) -> Any:
        pools = data.get("pools") if isinstance(data, dict) else None
        if isinstance(pools, list) and pools and data.get("count") is None:
            counts = [pool.get("count") if isinstance(pool, dict) else None for pool in pools]
            if all(
                isinstance(n, int) and n > 0 for n in counts
            ):  # the pools' validation reports other counts
                return {**data, "count": sum(counts)}
        return data

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        if not self.pools:
            return self
        names = [p.name for p in self.pools]
        if duplicate := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(f"pools: two have the name {duplicate}; expected different names")
        if JOINED_POOL in names:
            raise ValueError(
                f"pools: name = {JOINED_POOL} is reserved for engines that join a run; expected another name"
            )
        if all(p.role == "explore" for p in self.pools):
            raise ValueError(
                "pools: role = explore in all of them; expected at least one pool with role = rollout"
            )
        if (total := sum(p.count for p in self.pools)) != self.count:
            raise ValueError(
                f"count = {self.count}, but the pools have {' + '.join(str(p.count) for p in self.pools)} = {total} "
                "engines; expected no count, or null if the base config has one"
            )
        return self

    @field_validator("extra_args")
    @classmethod
    def _check_extra_args(cls, args: list[str]) -> list[str]:
        """Reject arguments that rlsys sets, and arguments that open sockets without a key.

        A key in extra_args would be readable in config.yaml and on the command line.
        """
        for arg in args:
            name = arg.partition("=")[0]
            if not name.startswith("--") or len(name) <= 4:
                continue
            if any(prefix.startswith(name) for prefix in OWN_ARGS):
                raise ValueError(
                    f"{name}: rlsys sets this argument; expected other arguments of sglang.launch_server"
                )
            if any(listening.startswith(name) for listening in LISTENING_ARGS):
                raise ValueError(
                    f"{name} opens SGLang sockets that need no key and unpickle messages; expected other arguments"
                )
        return args

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.port + self.count > 65536:
            last = self.port + self.count - 1
            raise ValueError(
                f"port = {self.port}: {self.count} engines use ports up to {last}; expected at most 65535"
            )
        return self


class RouterConfig(Section):
    strategy: Literal[
        "prefix_affinity", "least_tokens", "power_of_two", "version_aware", "hardware_affinity"
    ] = "prefix_affinity"
    """Choice of the engine for a sample. prefix_affinity: the engine that caches the sample's prefix, unless it is
    overloaded. least_tokens: the engine with the fewest tokens. power_of_two: the less busy of two random engines.
    version_aware: with weights.rolling, an engine with the weights of the sample's last token, otherwise as
    prefix_affinity. hardware_affinity: the engine that minimises the time for all samples, given each engine's
    measured prefill and decode rates; for engines on different machines."""
    interruption: Literal["abort", "retract", "in_place"] = "abort"
    """Treatment of samples in flight during a weight push, or, with colocated engines, during the take before it.
    abort: the router aborts and saves them, and resumes them after the push. retract: the engine keeps them and
    recomputes their KV cache in full passes. in_place: the engine keeps them with the old KV cache, which is fastest
    and least exact."""


class WeightsConfig(Section):
    deleted: ClassVar = {"uncompared": None, "canary_p999": None}

    method: Annotated[str, AfterValidator(check_method)] = "auto"
    """The weight transport. auto: an engine on GPUs (without GPUs, on a machine) of trainer ranks opens their memory,
    and other engines receive the weights in buckets through a process group. broadcast: as auto, but on CPU hosts all
    engines use a process group. sharded: the trainer ranks that own the tensors send them concurrently, so that no
    rank gathers or sends the whole model; for engines on separate GPUs. disk: a shared safetensors folder.
    disk_delta: as disk, but only changed tensors. adapter: only the adapters of trainer.lora, on one machine; engines
    keep model.path and compute with both. Or the import path of a WeightTransport: `package.module:Class`, or
    `path/to/file.py:Class`."""
    rolling: Annotated[int, Field(ge=1)] | None = None
    """Number of engines that a push updates in one round; the others generate with the previous weights until their
    round. Use it for large pools of disaggregated engines: fewer engines pause, but the trainer gathers and sends the
    model once per round, and tokens get older. Unset: all engines."""
    bucket_mb: Megabytes = 256.0
    """Size of one bucket in MiB. Larger buckets need fewer calls and more memory during a push."""
    canary_mean: Annotated[float, Field(gt=0)] | None = None
    """Bound of the mean difference |trainer - engine| of log-probs after a push; an engine above it does not serve.
    Unset: for an engine's first push, a bound that depends on the model's precision, depth and vocabulary; then three
    times the value of the first push. The bound of the 99.9th percentile of the differences is proportional."""
