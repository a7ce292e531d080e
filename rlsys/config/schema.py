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
"""Minimum time limit in seconds for an engine's response. With a smaller limit, a busy machine would cause errors."""


class Config(Section):
    run: RunConfig = RunConfig()
    """Folder and seed of the run."""
    model: ModelConfig
    """The model to train."""
    data: DataConfig = DataConfig()
    """Prompts and rewards."""
    eval: EvalConfig = EvalConfig()
    """Held-out evaluation."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of samples: sizes, APRIL, staleness and time limits."""
    algo: AlgoSection = AlgoSection()
    """Plug-ins of the algorithm, and their parameters."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimizer, memory and checkpoints."""
    parallel: ParallelConfig = ParallelConfig()
    """Distribution of model and samples over the trainer's ranks."""
    engine: EngineConfig = EngineConfig()
    """The SGLang engines."""
    router: RouterConfig = RouterConfig()
    """Choice of the engine for a sample, and treatment of samples during a push."""
    weights: WeightsConfig = WeightsConfig()
    """Transport and attestation of weights."""
    launch: LaunchConfig = LaunchConfig()
    """Machines, GPUs and processes of the run."""
    sft: SFTConfig = SFTConfig()
    """Fine-tuning by `rlsys sft`."""

    @property
    def fine_tunes(self) -> bool:
        """Whether the config has a section `sft`, so that it is for `rlsys sft` and not for `rlsys train`."""
        return "sft" in self.model_fields_set

    @property
    def samples_per_step(self) -> int:
        return self.rollout.groups_per_step * self.rollout.group_size

    @property
    def over_provision(self) -> float:
        """rollout.over_provision, or the value with which `auto` starts."""
        factor = self.rollout.over_provision
        return min(2.0, 1.0 + self.rollout.max_staleness) if factor == "auto" else factor

    @property
    def start_seconds(self) -> float:
        """Time limit in seconds for the start of an engine.

        It is engine.start_timeout, or else derived from the size of the model and the kernels to compile.
        """
        if self.engine.start_timeout is not None:
            return self.engine.start_timeout
        folder = sum(file.stat().st_size for file in self.model.path.glob("*.safetensors"))
        reading = 4.0 * folder / 1e9  # 0.25 GB/s, for a shared folder that all engines read at once
        compiling = (300.0 if self.launch.gpus_per_node else 0.0) + (
            1800.0 if self.model.fp8_engines else 0.0
        )
        return float(round(240.0 + reading + compiling))

    @property
    def work_seconds(self) -> float:
        """Time limit in seconds for an engine request that processes all weights, or runs the first pass after it.

        It is the limit of a start, which reads and compiles at least as much.
        """
        return max(_SHORTEST_SECONDS, self.start_seconds)

    @property
    def answer_seconds(self) -> float:
        """Time limit in seconds for an engine request without computation, which may have to wait in a queue."""
        return max(_SHORTEST_SECONDS, self.start_seconds / 5)

    @property
    def max_running_requests(self) -> int:
        """Maximum number of requests that one engine decodes at the same time."""
        samples_per_engine = -(-self.slots // self.engine.writers)
        return self.engine.max_running_requests or min(2048, max(128, samples_per_engine))

    @property
    def fixed_pool_tokens(self) -> int | None:
        """Capacity of an engine's KV cache in tokens; None if the memory of its GPUs determines it."""
        if self.engine.max_total_tokens is None and not self.launch.gpus_per_node:
            return 65536
        return self.engine.max_total_tokens

    @property
    def prefill_graph_tokens(self) -> int:
        """Maximum number of tokens of a prefill for which an engine captures a CUDA graph."""
        # A resumed sample prefills its response, so graphs cover the longest response. With SGLang's default, an
        # engine captures 58 graphs, which takes 40 s.
        return min(8192, max(256, 1 << (self.rollout.max_response_tokens - 1).bit_length()))

    @property
    def stream_interval(self) -> int:
        """Number of tokens between two stream chunks of an engine."""
        # A chunk costs the rollout process as much time as 100 tokens.
        return self.engine.stream_interval or min(256, max(16, self.rollout.max_response_tokens // 64))

    @property
    def flush_tokens(self) -> int:
        """Maximum number of tokens, over all samples, that a crash may lose."""
        # A write of fewer than 64 tokens costs more for its row than for its tokens. With several workers the
        # coordinator writes only rows.
        write_tokens = 64 if self.rollout.workers == 1 else 256
        return self.rollout.flush_tokens or max(16384, write_tokens * self.slots)

    @property
    def equal_lengths(self) -> bool:
        """Whether all micro-batches of a step are padded to one length, because an all-gather needs equal shapes."""
        return self.parallel.dispatcher == "allgather"

    @property
    def diagnosis_seconds(self) -> float:
        """Seconds without a token, a reward or a metric after which the supervisor writes a diagnosis."""
        return 1.5 * self.rollout.stall_timeout  # a waiting take stops the run earlier

    @property
    def slots(self) -> int:
        """Number of samples in flight over all engines; with over_provision = auto, the number at the start."""
        return round(self.over_provision * self.samples_per_step)

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        """Check the options that determine when engines pause, and how old samples get."""
        r = self.rollout
        if self.router.interruption != "abort" and self.launch.release_memory:
            raise ValueError(
                f"router.interruption = {self.router.interruption} keeps samples in the engines, but "
                "launch.release_memory = true frees their memory while the trainer works; expected "
                "router.interruption = abort, or launch.release_memory = false"
            )
        if r.keep_budget is not None and self.router.interruption != "in_place":
            raise ValueError(
                f"rollout.keep_budget = {r.keep_budget:g}, but with router.interruption = "
                f"{self.router.interruption} no sample keeps its KV cache during a push; expected "
                "router.interruption = in_place, or rollout.keep_budget = null"
            )
        if r.keep_budget is not None and self.weights.rolling is not None:
            raise ValueError(
                f"rollout.keep_budget = {r.keep_budget:g}, but weights.rolling = {self.weights.rolling} pauses "
                "engines with all of their samples; expected only one of the two fields"
            )
        if self.launch.release_memory and self.launch.placement != "colocated":
            raise ValueError(
                f"launch.release_memory = true, but with launch.placement = {self.launch.placement} "
                "engines never pause; expected launch.placement = colocated"
            )
        return self

    @model_validator(mode="after")
    def _check_rolling(self) -> Self:
        """Check that engines can be spared for background evaluations and rolling updates."""
        r, writers = self.rollout, self.engine.writers
        if self.eval.background and (self.launch.placement == "colocated" or writers < 2):
            raise ValueError(
                "eval.background = true reserves an engine for the evaluation: expected "
                "launch.placement = disaggregated and at least 2 engines with role = rollout, found "
                f"{self.launch.placement} and {writers}"
            )
        if (rolling := self.weights.rolling) is not None:
            if self.launch.placement == "colocated" or writers < 2 or r.max_staleness < 1:
                raise ValueError(
                    f"weights.rolling = {rolling} lets engines generate with older weights: expected "
                    "launch.placement = disaggregated, at least 2 engines with role = rollout, and "
                    f"rollout.max_staleness >= 1, found {self.launch.placement}, {writers} and {r.max_staleness}"
                )
            if r.repeat is not None:
                raise ValueError(
                    f"weights.rolling = {rolling} with rollout.repeat = {r.repeat}: a run's record does not contain "
                    "the weights of each engine; expected only one of the two fields"
                )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> Self:
        """Check that samples may get as old as over-provisioning makes them."""
        r = self.rollout
        if r.over_provision == "auto" and r.max_staleness < 1:
            raise ValueError(
                f"rollout.max_staleness = {r.max_staleness}: expected 1 or more with rollout.over_provision = auto"
            )
        if self.over_provision > 1 and r.max_staleness < 1:
            raise ValueError(
                f"rollout.over_provision = {r.over_provision} keeps interrupted samples for a later weight version, "
                f"but rollout.max_staleness = {r.max_staleness} would drop them; expected max_staleness >= 1"
            )
        return self

    @model_validator(mode="after")
    def _check_companions(self) -> Self:
        """Check the options for rollout workers, exploration engines and tree generators."""
        r = self.rollout
        if r.workers > self.engine.count:
            raise ValueError(
                f"rollout.workers = {r.workers}: expected at most engine.count = {self.engine.count}, since each "
                "worker needs an engine"
            )
        if self.engine.explorers and (conflict := self._not_with_explorers()):
            raise ValueError(f"engine.pools: role = explore {conflict}")
        if self.engine.ngram_drafts and r.generator in TREES:
            raise ValueError(
                f"rollout.generator = {r.generator} with engine.ngram_drafts = {self.engine.ngram_drafts}: trees "
                "need the most probable ids of each token, which are untested for drafted tokens; expected "
                "ngram_drafts = 0"
            )
        if r.repeat is not None and r.generator in TREES:
            raise ValueError(
                f"rollout.repeat = {r.repeat} with rollout.generator = {r.generator}: a run's record does not "
                "contain where branches started and ended; expected rollout.repeat = null, or another generator"
            )
        return self

    @model_validator(mode="after")
    def _check_relay(self) -> Self:
        """Check that the layout supports a chain of engines that relays weights."""
        if not self.engine.chains:
            return self
        if self.weights.method not in ("auto", "broadcast"):
            conflict = f"with weights.method = {self.weights.method}; expected auto or broadcast"
        elif self.launch.placement == "colocated":
            conflict = (
                "with launch.placement = colocated: the trainer shares memory with these engines; expected "
                "relay = false"
            )
        elif self.model.fp8_engines:
            conflict = f"with model.fp8 = {self.model.fp8}: the combination is untested; expected fp8 = none"
        else:
            return self
        raise ValueError(f"engine.pools: relay = true {conflict}")

    @model_validator(mode="after")
    def _check_rollout(self) -> Self:
        """Check that engines support the sampling options and the sizes."""
        r, t = self.rollout, self.trainer
        if r.min_p and self.engine.deterministic:
            raise ValueError(
                f"rollout.min_p = {r.min_p:g} with engine.deterministic = true: SGLang's seeded sampling does not "
                "support min_p; expected engine.deterministic = false, or only top_k and top_p"
            )
        if r.top_k is not None and any(spec.name == "lens" for spec in self.algo.planners):
            raise ValueError(
                f"rollout.top_k = {r.top_k} with algo.planners = lens: lens trains a response on another prompt than "
                "it was sampled from, for which the sampling mask is wrong; expected rollout.top_k = null, or "
                "another planner"
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
                f"trainer.token_budget = {t.token_budget}: expected at least rollout.max_response_tokens = "
                f"{r.max_response_tokens}, the length of one response"
            )
        if t.replay == "engine" and not self.engine.return_routes:
            raise ValueError("trainer.replay = engine needs engine.return_routes = true")
        return self

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        """Check that the profiled ranks and steps exist."""
        section = self.run.profile
        if section is None:
            return self
        if (rank := max(section.ranks)) >= self.parallel.world_size:
            raise ValueError(
                f"run.profile.ranks = {rank}: expected a trainer rank below {self.parallel.world_size}"
            )
        if self.trainer.epochs is None and (step := max(section.steps)) > self.trainer.steps:
            raise ValueError(
                f"run.profile.steps = {step}: expected at most trainer.steps = {self.trainer.steps}"
            )
        return self

    @model_validator(mode="after")
    def _check_trainer(self) -> Self:
        """Check the options of optimizer, adapters and multi-token prediction."""
        t = self.trainer
        if t.offload_optimizer and self.model.dtype != "bfloat16":
            raise ValueError(
                f"trainer.offload_optimizer = {t.offload_optimizer} needs float32 weights in the optimizer: expected "
                f"model.dtype = bfloat16, found {self.model.dtype}"
            )
        if t.offload_optimizer and t.optimizer == "muon":
            raise ValueError(
                f"trainer.offload_optimizer = {t.offload_optimizer} with trainer.optimizer = muon: only AdamW runs "
                "in host memory; expected optimizer = adamw, or offload_optimizer = 0"
            )
        if t.lora is not None and (conflict := self._not_with_lora()):
            raise ValueError(f"trainer.lora trains only adapters: {conflict}")
        if t.mtp_loss and (conflict := self._not_with_mtp()):
            raise ValueError(f"trainer.mtp_loss = {t.mtp_loss:g}: {conflict}")
        if t.mtp_trunk and not t.mtp_loss:
            raise ValueError("trainer.mtp_trunk = true needs a trainer.mtp_loss above 0")
        return self

    @model_validator(mode="after")
    def _check_engines(self) -> Self:
        """Check the options of drafts, adapter pushes and the KV cache."""
        if self.engine.ngram_drafts and (conflict := self._not_with_drafts()):
            raise ValueError(f"engine.ngram_drafts = {self.engine.ngram_drafts}: {conflict}")
        if self.weights.method == "adapter" and (conflict := self._not_with_adapter_pushes()):
            raise ValueError(f"weights.method = adapter: {conflict}")
        response_tokens = self.rollout.max_response_tokens
        if self.fixed_pool_tokens is not None and self.fixed_pool_tokens < response_tokens:
            raise ValueError(
                f"engine.max_total_tokens = {self.fixed_pool_tokens}: expected at least "
                f"rollout.max_response_tokens = {response_tokens}, the length of one response"
            )
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        """Check that the samples of a step divide over the trainer's ranks, and that the launcher fits the nodes."""
        p = self.parallel
        if self.samples_per_step % (p.data_parallel * self.algo.minibatches):
            raise ValueError(
                f"rollout.groups_per_step * group_size = {self.samples_per_step} samples do not divide over "
                f"dp * algo.minibatches = {p.data_parallel} * {self.algo.minibatches}{p.why_dp}"
            )
        if self.launch.nodes > 1 and self.launch.backend == "local":
            raise ValueError(
                f"launch.nodes = {self.launch.nodes} needs launch.backend = slurm or ray; local uses one machine"
            )
        if self.launch.spare_nodes and self.launch.backend == "ray":
            raise ValueError(
                f"launch.spare_nodes = {self.launch.spare_nodes} with launch.backend = ray: Ray replaces nodes by "
                "itself; expected spare_nodes = 0"
            )
        return self

    def _not_with_explorers(self) -> str:
        """Return the conflict of exploration engines with another option; empty if there is none."""
        r = self.rollout
        if self.launch.placement == "colocated":
            return "needs launch.placement = disaggregated: colocated engines pause while the trainer works"
        if r.workers > 1:
            return f"needs one router for all engines: expected rollout.workers = 1, found {r.workers}"
        if r.repeat is not None:
            return (
                f"with rollout.repeat = {r.repeat}: a run's record does not contain probes; expected only one of the "
                "two"
            )
        if r.generator in TREES:
            return (
                f"with rollout.generator = {r.generator}: a tree sets the size of its group; expected another "
                "generator, such as single_turn"
            )
        return ""

    def _not_with_lora(self) -> str:
        """Return the conflict of adapters with another option; empty if there is none."""
        if self.trainer.optimizer == "muon":
            return "trainer.optimizer = muon updates whole matrices; expected adamw"
        if self.trainer.balance_rate:
            return (
                f"trainer.balance_rate = {self.trainer.balance_rate} moves the routers' biases; expected 0, or "
                "balance_loss instead"
            )
        if self.algo.critic is not None:
            return "algo.critic trains a second model; expected no critic"
        if self.model.fp8_trainer:
            return f"model.fp8 = {self.model.fp8}: Transformer Engine's layers have no adapters; expected rollout"
        return ""

    def _not_with_mtp(self) -> str:
        """Return the conflict of the multi-token prediction loss with another option; empty if there is none."""
        t = self.trainer
        if t.lora is not None:
            return "trainer.lora trains only adapters; expected only one of the two"
        if t.early_backward:
            return (
                "the loss is a mean over all tokens of a step, but trainer.early_backward = true processes a part; "
                "expected early_backward = false"
            )
        if t.balance_loss:
            return (
                f"trainer.balance_loss = {t.balance_loss:g} would count padding in the prediction layer's router; "
                "expected balance_loss = 0, or balance_rate instead"
            )
        if t.offload_optimizer:
            return (
                "the separate clipping of its gradient is untested with trainer.offload_optimizer = "
                f"{t.offload_optimizer:g}; expected offload_optimizer = 0"
            )
        return ""

    def _not_with_adapter_pushes(self) -> str:
        """Return the conflict of adapter pushes with another option; empty if there is none."""
        if self.trainer.lora is None:
            return "expected trainer.lora; without it the whole model changes"
        if self.launch.nodes > 1:
            return (
                f"adapters are sent through the memory of one machine, but launch.nodes = {self.launch.nodes}; "
                "expected weights.method = auto, or launch.nodes = 1"
            )
        if self.router.interruption != "abort":
            interruption = self.router.interruption
            return (
                f"router.interruption = {interruption} keeps samples in flight, so engines cannot replace their "
                "adapter; expected abort"
            )
        if self.launch.release_memory:
            return (
                "launch.release_memory = true would drop the weights of model.path; expected weights.method = auto, "
                "or release_memory = false"
            )
        if self.model.fp8_engines:
            return (
                f"model.fp8 = {self.model.fp8} would need model.path in FP8 at the start; expected fp8 = none"
            )
        return ""

    def _not_with_drafts(self) -> str:
        """Return the conflict of n-gram drafts with another option; empty if there is none."""
        if self.engine.ngram_drafts == 1:
            return "a tree of one node contains no draft; expected 0, or at least 2"
        if self.engine.deterministic:
            return "drafts depend on other samples, but engine.deterministic = true; expected deterministic = false"
        if self.rollout.top_k is not None:
            return (
                f"engines return no sampling mask for drafts, but rollout.top_k = {self.rollout.top_k}; expected "
                "top_k = null"
            )
        if self.engine.return_routes:
            return (
                "expert routes of drafted tokens are untested, but engine.return_routes = true; expected "
                "return_routes = false"
            )
        if self.weights.method == "adapter":
            return "engines do not draft with adapters, but weights.method = adapter; expected weights.method = auto"
        if self.router.interruption != "abort":
            return (
                f"drafts are tested with aborts only, but router.interruption = {self.router.interruption}; expected "
                "abort"
            )
        return ""
