"""The config sections `rollout`, `engine`, `router` and `weights`: how samples come about, and in whose hands."""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlsys.config.section import FilePath, Fraction, Megabytes, NonNegative, Positive, Seconds, Section
from rlsys.config.weight_methods import check_method

TREES = ("latr", "echo")
"""Generators that generate a group's responses together."""


class Truncation(NamedTuple):
    """Truncation of each token's distribution at the sampling temperature.

    All but the `top_k` most probable ids are excluded; of these, the least probable ones after a mass of `top_p`, and
    those below `min_p` times the largest probability.
    """

    top_k: int
    top_p: float = 1.0
    min_p: float = 0.0


class RolloutConfig(Section):
    deleted: ClassVar = {"auto_hold": "off_policy"}

    groups_per_step: Positive = 16
    """Groups (one prompt each) that one train step trains."""
    group_size: Annotated[int, Field(ge=1, le=65536)] = 8
    """Samples per group, that is, responses to one prompt. More give a better baseline and cost as many more
    tokens."""
    over_provision: Annotated[float, Field(ge=1, le=16)] | Literal["auto"] = 1.0
    """Samples in flight, as a multiple of groups_per_step * group_size. Above 1 is APRIL: long responses no
    longer hold up a step, but tokens get older: a sample is in flight for over_provision steps on average, a
    group longer. auto steers it to auto_share."""
    auto_share: Fraction = 0.4
    """Share of trained tokens sampled by older weights at which over_provision = auto aims."""
    resume_order: Literal["oldest", "nearest_done", "longest"] = "oldest"
    """Which interrupted samples go on first: the oldest, those of the groups that lack the fewest samples, or
    the longest. It only matters when more samples wait than the engines decode at once."""
    max_staleness: NonNegative = 0
    """Largest age of a group's oldest token when it is trained: train steps between the weights that
    sampled it and the weights that the step starts from. 0 is on-policy. A small bound loses long responses, a
    large one trains older tokens."""
    staleness_policy: Literal["drop", "wait", "mask"] = "drop"
    """Treatment of a group at max_staleness. drop: the group is discarded. wait: the step waits for groups that only
    it can train. mask: the group is trained without its too old tokens."""
    max_resumes: NonNegative | None = None
    """Largest number of resumes of a sample; after that no take and no push interrupts it; they wait for it.
    Unset: no limit."""
    group_deadline: Seconds | None = None
    """Seconds after which an unfinished group is censored, counted from the moment it may start in this
    process. Only a take that waits for groups checks it. Unset: never."""
    max_response_tokens: Positive = 256
    """Longest response, in tokens, summed over all its segments; of an agent, longest conversation. What reaches it
    is truncated."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature for training. Evaluation is greedy."""
    top_k: Annotated[int, Field(ge=2, le=2048)] | None = None
    """Draw from so many most probable tokens only. The trainer restricts its softmax to the tokens that the engine
    kept (Keep Sampling Mask, DeepSeek-V3.2). Unset: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the most probable of these ids that together have this probability. Needs top_k."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw only from those of these ids whose probability is at least this share of the largest one. Needs top_k, and
    engine.deterministic = false."""
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default_factory=list)
    """Texts that end a response or a turn, beside the model's own end. They stay in the response."""
    stop_ids: list[NonNegative] = Field(default_factory=list, max_length=256)
    """Token ids that do the same."""
    ignore_eos: bool = False
    """Sample on behind the model's own end: responses end at max_response_tokens, or at a text of stop. Use it to
    measure long responses."""
    generator: str = "single_turn"
    """Generator of responses: single_turn, calculator (turns with a sandboxed Python calculator between them),
    functions (your own ones), agent (a program with an OpenAI client, docs/agents.md), environment (a game or tools
    in a process of its own, docs/environments.md), replayed (along trajectories of the data), an import path
    `package.module:function`, or `path/to/file.py:function`."""
    generator_params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the generator."""
    workers: Positive = 1
    """Processes that share the engines' streams, on the machine of the rollout process; 1: it does all itself. One
    takes in some 400,000 tokens a second of a core (bench/README.md): use more beyond that. Each takes a core and the
    memory of its samples' tokens."""
    repeat: FilePath | None = None
    """Folder of an earlier run of the same config, whose groups, interruptions and tokens this run repeats. Use
    it to debug a run with over_provision above 1."""
    length_bias_bound: Fraction = 0.1
    """Warn when trained responses are shorter than generated ones by more than this share (docs/rollout.md)."""
    keep_budget: Annotated[float, Field(ge=0)] | None = None
    """Largest mean |log-prob - mu| of a step's tokens in responses that older weights began (metric
    mismatch_kept_mean), with router.interruption = in_place. As many samples keep their keys and values over a push
    as that allows, the longest first; the others are read again. 0: all are read again. Unset: all are kept, whatever
    it costs."""
    flush_tokens: Positive | None = None
    """The most tokens, of all samples together, that a crash of the rollout process may lose; they are sampled
    again. A smaller value writes to disk more often. null: 64 for each sample in flight (256 with several
    workers), but at least 16384."""
    keep_groups: NonNegative = 2
    """Groups of each train step whose tokens stay readable (rlsys samples, rlsys dash) when no checkpoint needs them
    any more, each with its log-probs and its advantage. A token takes 16 bytes on the disk."""
    reward_timeout: Seconds = 30.0
    """Seconds for one reward. After them the sample is censored; after a group reward that is too slow, its
    group."""
    reward_concurrency: Positive = 4
    """Rewards computed at the same time. A plain reward function gets up to this many processes; an async one
    gets none."""
    max_failed_share: Fraction = 0.05
    """Largest share of a train step's samples that may end in an unexpected exception (of a generator, a
    source or a planner); each is censored, and more of them end the run. What rows, tools, agents, environments and
    rewards get wrong in the ways that docs/rollout.md names does not count here."""
    stall_timeout: Seconds = 600.0
    """Seconds without a new token or reward after which a waiting take stops the run with a message. The run
    also stops when code in the rollout's event loop (an async reward) blocks it for so long."""

    @property
    def truncation(self) -> Truncation | None:
        return None if self.top_k is None else Truncation(self.top_k, self.top_p, self.min_p)

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.ignore_eos and self.stop_ids:
            raise ValueError(
                f"ignore_eos = true with stop_ids = {self.stop_ids}: no id ends a response; use one"
            )
        return self

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        for name, value, off in (("top_p", self.top_p, 1.0), ("min_p", self.min_p, 0.0)):
            if value != off and self.top_k is None:
                raise ValueError(
                    f"{name} = {value:g} needs top_k: the trainer must know which tokens an engine kept, and engines "
                    "name them only where their number is bounded; top_k = 1024 bounds it and changes hardly anything"
                )
        return self


JOINED_POOL = "joined"
"""Pool of engines that join a run."""


class PoolConfig(Section):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
    """Its name in metrics, `rlsys explain` and `rlsys status`: small letters, digits and underscores."""
    count: Annotated[int, Field(gt=0, le=16384)]
    """Engines in it."""
    tp: Positive | None = None
    """Tensor parallel size of each of them. Unset: engine.tp."""
    cost: Annotated[float, Field(ge=0)] = 1.0
    """Cost of one rank of it per second, in any unit. The metrics multiply its rank-seconds by it."""
    role: Literal["rollout", "explore"] = "rollout"
    """Role of its engines. rollout: they generate samples. explore: they probe prompts, so that the planner explore
    knows how many samples a prompt needs; their responses are not trained."""
    relay: bool = False
    """Send weights to the first engine only, which passes them on to the next, and so on. For engines behind a slow
    link: it is crossed once, by what has changed, compressed. The trainer's first rank and each of these engines then
    keep a copy of the model in host memory. Needs weights.method = auto or broadcast, which are for all others."""


OWN_ARGS = (
    "--api-key", "--admin-api-key", "--config", "--weight-version", "--host", "--port", "--nccl-port",
    "--dist-init-addr", "--nnodes", "--node-rank",
)  # fmt: skip
"""SGLang's arguments for the identity and address of an engine. Abbreviations count, too, as SGLang accepts them."""
LISTENING_ARGS = ("--enable-dp-attention", "--kv-events-config", "--disaggregation-mode")
"""SGLang's arguments that open ZeroMQ sockets on TCP, which need no key and unpickle what they receive."""


KERNEL_ARGS = (
    "--moe-runner-backend", "--moe-a2a-backend", "--fp8-gemm-backend", "--bf16-gemm-backend", "--quantization",
    "--ep", "--ep-size", "--expert-parallel-size", "--ep-num-redundant-experts", "--enable-eplb",
    "--init-expert-location", "--enforce-shared-experts-fusion", "--moe-dp-size", "--kt-method",
)  # fmt: skip
"""Arguments of SGLang with which an engine's tensors may differ from the trainer's in order, format or number."""


class EngineConfig(Section):
    count: Annotated[int, Field(gt=0, le=16384)] = 1
    """Number of SGLang engines."""
    tp: Positive = 1
    """Tensor parallel size of one engine."""
    pools: list[PoolConfig] = Field(default_factory=list)
    """Groups of engines that are not alike, in the order in which they get GPUs; count is then their sum and may be
    left out. Use it for engines of several sizes, with router.strategy = hardware_affinity, and to see what each
    group makes and costs. Empty: count engines that are alike."""
    host: str = "127.0.0.1"
    """Address that engines listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first engine; the others count up from it. 0 chooses free ports."""
    max_running_requests: Positive | None = None
    """Requests that one engine decodes at the same time. More give more throughput and need a larger cache. null: its
    share of the samples in flight, but 128 to 2,048."""
    memory_fraction: Fraction = 0.88
    """Share of a GPU's memory for an engine's weights, its cache of keys and values (SGLang's mem_fraction_static)
    and what a colocated trainer keeps meanwhile; the rest is for activations. The cache is no larger than the samples
    in flight need at their longest."""
    max_total_tokens: Positive | None = None
    """Tokens that one engine's cache of keys and values can hold. It must hold the longest response and its
    prompt. null: on GPUs as memory_fraction says, without them 65,536."""
    stream_interval: Positive | None = None
    """Tokens between two stream chunks of an engine. It is the most that an engine's sudden death can cost each
    sample; a smaller value sends more messages. null: a 64th of rollout.max_response_tokens, but 16 to 256."""
    deterministic: bool = True
    """Make a sample's tokens depend on its seed alone, whatever else is in the batch (SGLang's deterministic
    inference with a draw by token id; docs/rollout.md says what is promised). It makes decoding slower on GPUs."""
    ngram_drafts: Annotated[int, Field(ge=0, le=64)] = 0
    """Nodes of the tree of guesses that an engine checks in one pass, the last real token among them: what has
    followed the same tokens before (SGLang's NGRAM). It pays where responses repeat themselves or each other and the
    batch is small. Needs deterministic = false, since a guess depends on other samples. 0: none."""
    return_routes: bool = False
    """Return the experts that each token was routed to, for trainer.replay = engine. Answers become larger."""
    start_timeout: Seconds | None = None
    """Seconds an engine may take to start. Unset: 240, plus 4 for each GB of the model's folder, plus 300 for
    compilation on a GPU, plus 1,800 for FP8 kernels."""
    reference: Annotated[str, Field(pattern=r"^(own|https?://\S+)$")] | None = None
    """Server with the reference weights that the planner lens compares prompts against: its URL. own starts one
    more engine, which keeps the weights of model.path."""
    tool_call_parser: str | None = None
    """SGLang's name for the format in which the model calls tools, for example qwen25, hermes or llama3. Chats at the
    engines and the generator functions use it. Unset: calls stay text."""
    reasoning_parser: str | None = None
    """SGLang's name for the format of the model's reasoning, for example deepseek-r1 or qwen3. Chats at the engines
    then have it apart, as reasoning_content, and the generator functions looks for calls behind it. It changes no
    token."""
    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of sglang.launch_server, passed on unchanged."""

    @property
    def drafts_with_model(self) -> bool:
        """Whether extra_args configure SGLang to draft with the model's own layer for multi-token prediction."""
        values: dict[str, str] = {}
        for arg, following in zip_longest(self.extra_args, self.extra_args[1:], fillvalue=""):
            name, separator, value = arg.partition("=")
            values[name] = value if separator else following
        algorithm = values.get("--speculative-algorithm", "").upper()
        return algorithm in ("EAGLE", "NEXTN") and "--speculative-draft-model-path" not in values

    @property
    def chooses_kernels(self) -> bool:
        """Whether extra_args choose kernels or a division of weights that may store them in another order."""
        return any(arg.partition("=")[0] in KERNEL_ARGS for arg in self.extra_args)

    @property
    def explorers(self) -> int:
        """Number of engines that probe prompts."""
        return sum(pool.count for pool in self.pools if pool.role == "explore")

    @property
    def writers(self) -> int:
        """Number of engines that write samples: all others."""
        return self.count - self.explorers

    def explores(self, index: int) -> bool:
        """Whether engine `index` probes prompts."""
        pool = self.pool_of(index)
        return pool is not None and pool.role == "explore"

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Engines that relay weights to one another, by pool."""
        chains, first = [], 0
        for pool in self.pools:
            if pool.relay:
                chains.append(tuple(range(first, first + pool.count)))
            first += pool.count
        return tuple(chains)

    def chain_of(self, name: str | None) -> int | None:
        """Return the index in `chains` of the pool of that name; None if it is not a chain."""
        relays = [pool.name for pool in self.pools if pool.relay]
        return relays.index(name) if name in relays else None

    @property
    def tps(self) -> list[int]:
        """Return the tensor parallel sizes, each once, ascending."""
        return sorted({self.tp_of(i) for i in range(self.count)})

    def pool_of(self, index: int | None, pool_name: str | None = None) -> PoolConfig | None:
        """Return the pool of engine `index`, or of an engine that joined pool `pool_name`; None without a pool."""
        if index is None:
            return next((pool for pool in self.pools if pool.name == pool_name), None)
        for pool in self.pools:
            if index < pool.count:
                return pool
            index -= pool.count
        return None

    def tp_of(self, index: int) -> int:
        """Return the tensor parallel size of engine `index`; engine.tp for one that joins and for the reference."""
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
            ):  # otherwise the pools themselves are refused
                return {**data, "count": sum(counts)}
        return data

    @model_validator(mode="after")
    def _pools_differ(self) -> Self:
        if not self.pools:
            return self
        names = [p.name for p in self.pools]
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(f"pools: two have the name {twice}; expected different names")
        if JOINED_POOL in names:
            raise ValueError(
                f"pools: name = {JOINED_POOL} is that of engines that join a run; expected another one"
            )
        if all(p.role == "explore" for p in self.pools):
            raise ValueError(
                "pools: role = explore in all of them; expected one whose samples are trained, with role = rollout"
            )
        if (total := sum(p.count for p in self.pools)) != self.count:
            raise ValueError(
                f"count = {self.count}, but the pools have {' + '.join(str(p.count) for p in self.pools)} = {total} "
                "engines; leave count out, or set it to null over a base that has it"
            )
        return self

    @field_validator("extra_args")
    @classmethod
    def _not_ours(cls, args: list[str]) -> list[str]:
        """Refuse keys and labels: config.yaml and command lines are readable by all users."""
        for arg in args:
            name = arg.partition("=")[0]
            if not name.startswith("--") or len(name) <= 4:
                continue
            if any(prefix.startswith(name) for prefix in OWN_ARGS):
                raise ValueError(f"{name} is set by rlsys itself; the keys of a run are made at its start")
            if any(listening.startswith(name) for listening in LISTENING_ARGS):
                raise ValueError(
                    f"{name} opens sockets of SGLang that ask for no key and unpickle what they are sent"
                )
        return args

    @model_validator(mode="after")
    def _ports(self) -> Self:
        if self.port + self.count > 65536:
            last = self.port + self.count - 1
            raise ValueError(f"port = {self.port}: {self.count} engines reach port {last} > 65535")
        return self


class RouterConfig(Section):
    strategy: Literal[
        "prefix_affinity", "least_tokens", "power_of_two", "version_aware", "hardware_affinity"
    ] = "prefix_affinity"
    """Which engine a sample goes to. prefix_affinity: the one that has its prefix, unless that one is
    overloaded. least_tokens: the one with the fewest tokens. power_of_two: the less busy of two. version_aware:
    with weights.rolling one that has the weights of its last token, else the same as prefix_affinity.
    hardware_affinity: where it takes all samples together the least time, by the speeds at which each engine was seen
    to read prompts and to write; for engines on unlike machines."""
    interruption: Literal["abort", "retract", "in_place"] = "abort"
    """Treatment of samples in flight during a weight push; with colocated engines the take before it. abort: they
    return, are saved, and go on after the push. retract: the engine keeps them and computes their cache again, at
    once and in full passes. in_place: it keeps them with the old cache, which is fastest and least exact."""


class WeightsConfig(Section):
    deleted: ClassVar = {"uncompared": None, "canary_p999": None}

    method: Annotated[str, AfterValidator(check_method)] = "auto"
    """The weight transport. auto: it follows from the layout, engine by engine: an engine opens the memory of trainer
    ranks on its GPUs (without GPUs, on its machine), and all others get the weights in buckets through a process
    group. broadcast: the same, on CPU hosts through a process group to every engine. sharded: the trainer ranks that
    own the tensors send them, all at once, so that none gathers or sends the whole model; for engines on GPUs of
    their own. disk: a safetensors folder that all share. disk_delta: the same, changed tensors only. adapter: the
    adapters of trainer.lora alone, on one machine; engines keep model.path and compute with both. Or the import path
    of a WeightTransport: `package.module:Class`, or `path/to/file.py:Class`."""
    rolling: Annotated[int, Field(ge=1)] | None = None
    """Engines that a push updates at once; the others go on with the weights before it until their turn comes.
    Unset: all at once. For large pools: it keeps the others at work, but the trainer gathers and sends the model
    once for every round, and tokens get older. For disaggregated engines."""
    bucket_mb: Megabytes = 256.0
    """Size of one bucket in MiB. Larger ones make fewer calls and need more memory during a push."""
    canary_mean: Annotated[float, Field(gt=0)] | None = None
    """Largest mean |trainer - engine| log-prob after a push; an engine beyond it does not serve. Unset: at first
    the most that precision, depth and vocabulary of the model explain, then three times what an engine's first push
    showed. The bound of the 99.9th percentile of the same differences follows in proportion."""
