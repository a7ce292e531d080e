"""The whole config: its sections, derived values, and the checks between sections."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from rlsys.config.algo import AlgoSection
from rlsys.config.data import DataConfig, EvalConfig
from rlsys.config.launch import LaunchConfig, RunConfig
from rlsys.config.rollout import TREES, EngineConfig, RolloutConfig, RouterConfig, WeightsConfig
from rlsys.config.section import Section
from rlsys.config.trainer import ModelConfig, ParallelConfig, SFTConfig, TrainerConfig

_SHORTEST_SECONDS = 60.0
"""Smallest limit of an engine's response: a smaller one would depend on the machine's load."""


class Config(Section):
    run: RunConfig = RunConfig()
    """Folder and seed."""
    model: ModelConfig
    """The model that is trained."""
    data: DataConfig = DataConfig()
    """Prompts and rewards."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation: sizes, APRIL, staleness, time limits."""
    algo: AlgoSection = AlgoSection()
    """The algorithm: which plug-ins, with which parameters."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimizer, memory and checkpoints."""
    parallel: ParallelConfig = ParallelConfig()
    """Distribution of the model and the samples over the trainer's ranks."""
    engine: EngineConfig = EngineConfig()
    """The SGLang engines."""
    router: RouterConfig = RouterConfig()
    """Placement of samples on engines, and their treatment during a push."""
    weights: WeightsConfig = WeightsConfig()
    """Transport and attestation of weights."""
    launch: LaunchConfig = LaunchConfig()
    """Machines, GPUs and start of the processes."""
    sft: SFTConfig = SFTConfig()
    """The warm start of `rlsys sft`."""

    @property
    def fine_tunes(self) -> bool:
        """Whether the file has a section `sft`: it is meant for `rlsys sft`, not for `rlsys train`."""
        return "sft" in self.model_fields_set

    @property
    def samples_per_step(self) -> int:
        return self.rollout.groups_per_step * self.rollout.group_size

    @property
    def over_provision(self) -> float:
        """Factor at the start of the run; `auto` adapts it later."""
        factor = self.rollout.over_provision
        return min(2.0, 1.0 + self.rollout.max_staleness) if factor == "auto" else factor

    @property
    def start_seconds(self) -> float:
        """Time limit of an engine's start: engine.start_timeout, or an estimate from what it reads and compiles."""
        if self.engine.start_timeout is not None:
            return self.engine.start_timeout
        folder = sum(file.stat().st_size for file in self.model.path.glob("*.safetensors"))
        reading = 4.0 * folder / 1e9  # a quarter of a GB/s: a shared folder that all engines read at once
        compiling = (300.0 if self.launch.gpus_per_node else 0.0) + (
            1800.0 if self.model.fp8_engines else 0.0
        )
        return float(round(240.0 + reading + compiling))

    @property
    def work_seconds(self) -> float:
        """Time limit of a request over all weights of an engine, or of its first pass with new ones.

        It equals that of a start, which reads and compiles no less.
        """
        return max(_SHORTEST_SECONDS, self.start_seconds)

    @property
    def answer_seconds(self) -> float:
        """Time limit of an engine request that only waits for its turn: a fifth of a start."""
        return max(_SHORTEST_SECONDS, self.start_seconds / 5)

    @property
    def max_running_requests(self) -> int:
        """Requests that one engine decodes concurrently."""
        share = -(-self.slots // self.engine.writers)
        return self.engine.max_running_requests or min(2048, max(128, share))

    @property
    def fixed_pool_tokens(self) -> int | None:
        """Tokens in an engine's KV pool; None if the memory of its GPUs decides."""
        if self.engine.max_total_tokens is None and not self.launch.gpus_per_node:
            return 65536
        return self.engine.max_total_tokens

    @property
    def prefill_graph_tokens(self) -> int:
        """Tokens of the largest prompt with a CUDA graph on an engine: the longest response may return as a prompt.

        SGLang's own bound makes 58 graphs, which take 40 s of a start.
        """
        return min(8192, max(256, 1 << (self.rollout.max_response_tokens - 1).bit_length()))

    @property
    def stream_interval(self) -> int:
        """Tokens between two stream chunks of an engine: a chunk costs the rollout process as much as 100 tokens."""
        return self.engine.stream_interval or min(256, max(16, self.rollout.max_response_tokens // 64))

    @property
    def flush_tokens(self) -> int:
        """The most tokens that a crash may lose.

        A write of fewer than 64 costs more for its row than for its tokens; with several workers, which receive the
        tokens, the coordinator writes rows only.
        """
        at_once = 64 if self.rollout.workers == 1 else 256
        return self.rollout.flush_tokens or max(16384, at_once * self.slots)

    @property
    def equal_lengths(self) -> bool:
        """Whether all micro-batches of a step are padded to one length: an all-gather needs equal shapes."""
        return self.parallel.dispatcher == "allgather"

    @property
    def diagnosis_seconds(self) -> float:
        """Seconds without a token, a reward or a metric after which the supervisor writes a diagnosis.

        It exceeds rollout.stall_timeout, at which a waiting take stops the run by itself.
        """
        return 1.5 * self.rollout.stall_timeout

    @property
    def slots(self) -> int:
        """Samples in flight over the whole pool; at the start, if over_provision is auto."""
        return round(self.over_provision * self.samples_per_step)

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        """Check when engines pause and resume, and the resulting age of their samples."""
        r = self.rollout
        if self.router.interruption != "abort" and self.launch.release_memory:
            raise ValueError(
                f"router.interruption = {self.router.interruption} keeps samples in the engines, which with "
                "launch.release_memory = true have no memory while the trainer works; use abort, or false"
            )
        if r.keep_budget is not None and self.router.interruption != "in_place":
            raise ValueError(
                f"rollout.keep_budget = {r.keep_budget:g}, but with router.interruption = "
                f"{self.router.interruption} no sample keeps its keys and values over a push; use in_place, or null"
            )
        if r.keep_budget is not None and self.weights.rolling is not None:
            raise ValueError(
                f"rollout.keep_budget = {r.keep_budget:g}, but weights.rolling = {self.weights.rolling} pauses "
                "engines with all that is in them; leave one of the two out"
            )
        if self.launch.release_memory and self.launch.placement != "colocated":
            raise ValueError(
                f"launch.release_memory = true, but with launch.placement = {self.launch.placement} "
                "engines never rest; use colocated"
            )
        writing = self.engine.writers
        if self.eval.background and (self.launch.placement == "colocated" or writing < 2):
            raise ValueError(
                "eval.background = true keeps an engine for the evaluation while the others go on: expected "
                "launch.placement = disaggregated and engine.count >= 2 without a pool that explores, they are "
                f"{self.launch.placement} and {writing}"
            )
        if (rolling := self.weights.rolling) is not None:
            if self.launch.placement == "colocated" or writing < 2 or r.max_staleness < 1:
                raise ValueError(
                    f"weights.rolling = {rolling} lets engines with older weights go on: expected launch.placement = "
                    "disaggregated, engine.count >= 2 without a pool that explores, and rollout.max_staleness >= 1, "
                    f"they are {self.launch.placement}, {writing} and {r.max_staleness}"
                )
            if r.repeat is not None:
                raise ValueError(
                    f"weights.rolling = {rolling} with rollout.repeat: a record does not say which engine had which "
                    "weights; leave one of them out"
                )
        if r.over_provision == "auto" and r.max_staleness < 1:
            raise ValueError(
                f"rollout.max_staleness = {r.max_staleness}: expected 1 or more with rollout.over_provision = auto, "
                "which is always 1 otherwise"
            )
        if self.over_provision > 1 and r.max_staleness < 1:
            raise ValueError(
                f"rollout.over_provision = {r.over_provision} keeps interrupted samples for a later weight version, "
                f"but rollout.max_staleness = {r.max_staleness} would drop them; use max_staleness >= 1"
            )
        return self

    @model_validator(mode="after")
    def _check_companions(self) -> Self:
        """Check the options for several rollout workers, exploration engines and trees."""
        r = self.rollout
        if r.workers > self.engine.count:
            raise ValueError(
                f"rollout.workers = {r.workers}, but engine.count = {self.engine.count}: each has engines of its own"
            )
        if self.engine.explorers and (conflict := self._not_with_explorers()):
            raise ValueError(f"engine.pools: role = explore {conflict}")
        if self.engine.ngram_drafts and r.generator in TREES:
            raise ValueError(
                f"rollout.generator = {r.generator} with engine.ngram_drafts = {self.engine.ngram_drafts}: trees "
                "need the most probable ids of each token, which is not tested for drafted ones; expected 0"
            )
        if r.repeat is not None and r.generator in TREES:
            raise ValueError(
                f"rollout.repeat with rollout.generator = {r.generator}: a record does not say where branches were "
                "begun and cut off; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_relay(self) -> Self:
        """Check that the layout supports a chain of engines that relays weights."""
        if not self.engine.chains:
            return self
        if self.weights.method not in ("auto", "broadcast"):
            conflict = (
                f"with weights.method = {self.weights.method}; use auto or broadcast for the other engines"
            )
        elif self.launch.placement == "colocated":
            conflict = (
                "with launch.placement = colocated: the trainer shares memory with such engines; leave it out"
            )
        elif self.model.fp8_engines:
            conflict = f"with model.fp8 = {self.model.fp8}: the combination is untested; use none"
        else:
            return self
        raise ValueError(f"engine.pools: relay = true {conflict}")

    @model_validator(mode="after")
    def _check_rollout(self) -> Self:
        """Check that engines support the sampling options and the sizes."""
        r, t = self.rollout, self.trainer
        if r.min_p and self.engine.deterministic:
            raise ValueError(
                f"rollout.min_p = {r.min_p:g} with engine.deterministic = true: SGLang cannot draw by min_p from a "
                "seed; use engine.deterministic = false, or top_k and top_p"
            )
        if r.top_k is not None and any(spec.name == "lens" for spec in self.algo.planners):
            raise ValueError(
                f"rollout.top_k = {r.top_k} with algo.planners = lens, which trains a response on another prompt "
                "than it was drawn from: the tokens that were kept there are not this prompt's; leave one of them out"
            )
        if (fewest := self.launch.min_engines) is not None and fewest > self.engine.writers:
            explore = f", of which {self.engine.explorers} explore" if self.engine.explorers else ""
            raise ValueError(
                f"launch.min_engines = {fewest}: expected at most engine.count = {self.engine.count}{explore}"
            )
        if (max_engines := self.launch.max_engines) is not None and max_engines < self.engine.count:
            raise ValueError(
                f"launch.max_engines = {max_engines}: expected at least engine.count = {self.engine.count}"
            )
        if t.token_budget < r.max_response_tokens:
            raise ValueError(
                f"trainer.token_budget = {t.token_budget} cannot hold one response of "
                f"rollout.max_response_tokens = {r.max_response_tokens}"
            )
        if t.replay == "engine" and not self.engine.return_routes:
            raise ValueError("trainer.replay = engine needs engine.return_routes = true")
        return self

    @model_validator(mode="after")
    def _check_trainer(self) -> Self:
        """Check the options of a train step, and that samples divide over its ranks."""
        r, t, p = self.rollout, self.trainer, self.parallel
        if (section := self.run.profile) is not None and (rank := max(section.ranks)) >= p.world_size:
            raise ValueError(f"run.profile.ranks = {rank}: expected a trainer rank below {p.world_size}")
        if section is not None and t.epochs is None and (step := max(section.steps)) > t.steps:
            raise ValueError(f"run.profile.steps = {step}: expected at most trainer.steps = {t.steps}")
        if t.offload_optimizer and self.model.dtype != "bfloat16":
            raise ValueError(
                f"trainer.offload_optimizer = {t.offload_optimizer} needs model.dtype = bfloat16, "
                f"which keeps float32 weights in the optimizer; here it is {self.model.dtype}"
            )
        if t.offload_optimizer and t.optimizer == "muon":
            raise ValueError(
                f"trainer.offload_optimizer = {t.offload_optimizer} with trainer.optimizer = muon: only AdamW can be "
                "updated in host memory; use adamw, or offload_optimizer = 0"
            )
        if t.lora is not None and (conflict := self._not_with_lora()):
            raise ValueError(f"trainer.lora trains nothing but adapters: {conflict}")
        if t.mtp_loss and (conflict := self._not_with_mtp()):
            raise ValueError(f"trainer.mtp_loss = {t.mtp_loss:g}: {conflict}")
        if t.mtp_trunk and not t.mtp_loss:
            raise ValueError("trainer.mtp_trunk = true needs a trainer.mtp_loss above 0")
        if self.engine.ngram_drafts and (conflict := self._not_with_drafts()):
            raise ValueError(f"engine.ngram_drafts = {self.engine.ngram_drafts}: {conflict}")
        if self.weights.method == "adapter" and (conflict := self._not_with_adapter_pushes()):
            raise ValueError(f"weights.method = adapter: {conflict}")
        if self.fixed_pool_tokens is not None and self.fixed_pool_tokens < r.max_response_tokens:
            raise ValueError(
                f"engine.max_total_tokens = {self.fixed_pool_tokens} cannot hold one response of "
                f"rollout.max_response_tokens = {r.max_response_tokens}"
            )
        if self.samples_per_step % (p.data_parallel * self.algo.minibatches):
            raise ValueError(
                f"rollout.groups_per_step * group_size = {self.samples_per_step} samples do not divide over "
                f"dp * algo.minibatches = {p.data_parallel} * {self.algo.minibatches}{p.why_dp}"
            )
        if self.launch.nodes > 1 and self.launch.backend == "local":
            raise ValueError(
                f"launch.nodes = {self.launch.nodes} needs launch.backend = slurm or ray; local is one machine"
            )
        if self.launch.spare_nodes and self.launch.backend == "ray":
            raise ValueError(
                f"launch.spare_nodes = {self.launch.spare_nodes}: Ray takes any node that it has; leave it out"
            )
        return self

    def _not_with_explorers(self) -> str:
        """Return the reason against exploration engines, if any."""
        r = self.rollout
        if self.launch.placement == "colocated":
            return "needs launch.placement = disaggregated: colocated engines rest while the trainer works"
        if r.workers > 1:
            return f"needs rollout.workers = 1, since one router must know all engines; it is {r.workers}"
        if r.repeat is not None:
            return "with rollout.repeat: a record does not say what was tried out; leave one of them out"
        if r.generator in TREES:
            return (
                f"with rollout.generator = {r.generator}: a tree is as large as its branches; use single_turn"
            )
        return ""

    def _not_with_lora(self) -> str:
        """Return the option that needs more than adapters on megatron-core's own layers, if any."""
        if self.trainer.optimizer == "muon":
            return "trainer.optimizer = muon is for whole matrices; use adamw"
        if self.trainer.balance_rate:
            return f"trainer.balance_rate = {self.trainer.balance_rate} moves the routers' biases; use balance_loss"
        if self.algo.critic is not None:
            return "algo.critic trains a second model; leave it out"
        if self.model.fp8_trainer:
            return f"model.fp8 = {self.model.fp8} needs Transformer Engine: no adapters; use rollout"
        return ""

    def _not_with_mtp(self) -> str:
        """Return the option that would change or omit the loss of multi-token prediction, if any."""
        t = self.trainer
        if t.lora is not None:
            return "trainer.lora trains nothing but adapters; use one of them"
        if t.early_backward:
            return (
                "it is a mean over a step's tokens, of which trainer.early_backward sees some only; use false"
            )
        if t.balance_loss:
            return (
                f"its own router is not told what is padding, trainer.balance_loss = {t.balance_loss:g}; use 0, or "
                "balance_rate"
            )
        if t.offload_optimizer:
            return (
                "its gradient is clipped by itself, which was never tried with trainer.offload_optimizer = "
                f"{t.offload_optimizer:g}; use 0"
            )
        return ""

    def _not_with_adapter_pushes(self) -> str:
        """Return the option that engines with a separate adapter do not support, if any."""
        if self.trainer.lora is None:
            return "expected trainer.lora; without it the whole model changes"
        if self.launch.nodes > 1:
            return (
                "adapters are sent through the memory of one machine, "
                f"launch.nodes = {self.launch.nodes}; use auto"
            )
        if self.router.interruption != "abort":
            interruption = self.router.interruption
            return (
                f"engines keep an adapter that samples in flight use, router.interruption = {interruption}; "
                "use abort"
            )
        if self.launch.release_memory:
            return "engines would lose model.path with launch.release_memory = true; use auto, or false"
        if self.model.fp8_engines:
            return (
                f"engines would need model.path in FP8 from the start, model.fp8 = {self.model.fp8}; use none"
            )
        return ""

    def _not_with_drafts(self) -> str:
        """Return the option that is incompatible with drafts, if any.

        Tokens must be the model's, drawn from the sample's seed, and `mu` must be the model's log-prob.
        """
        if self.engine.ngram_drafts == 1:
            return "a tree of one node has no guess in it; expected 0, or 2 and more"
        if self.engine.deterministic:
            return "what is guessed depends on other samples, engine.deterministic = true; use false"
        if self.rollout.top_k is not None:
            return f"the ids that sampling kept are not told with it, rollout.top_k = {self.rollout.top_k}; use null"
        if self.engine.return_routes:
            return "experts of tokens that drafts gave were never compared, engine.return_routes = true; use false"
        if self.weights.method == "adapter":
            return "engines do not draft with adapters, weights.method = adapter; use auto"
        if self.router.interruption != "abort":
            return f"only aborts were tried, router.interruption = {self.router.interruption}; use abort"
        return ""
