"""The config sections `model`, `trainer`, `parallel` and `sft`: the model, its optimizer, and the trainer's ranks."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlsys.config.algo import Spec
from rlsys.config.section import Beta, FilePath, NonNegative, Positive, Section

Schedule = Literal["constant", "linear", "cosine"]


class ModelConfig(Section):
    path: FilePath
    """Hugging Face folder with the initial model: config.json, *.safetensors, and a tokenizer that transformers'
    AutoTokenizer reads. Or a model of a hub, owner/name or owner/name@REVISION, which is downloaded before the start;
    the run's config.yaml records its commit."""
    trust_remote_code: bool = False
    """Allow code of the folder to run, in the conversion of its tokenizer and in engines. Kimi-K2 and Moonlight need
    it, since their tokenizers are code. Review the code first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights in trainer and engines. Use bfloat16 on GPUs. float32 takes twice the memory; the
    log-probs of trainer and engine then agree to 1e-6."""
    fp8: Literal["none", "rollout", "trainer", "both"] = "none"
    """Processes that compute in FP8: none, the engines (rollout), the trainer, or both. FP8 saves memory and time and
    makes log-probs less exact. Needs dtype = bfloat16."""
    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"
    """FP8 format of GEMMs in the trainer. e4m3: forward and backward. hybrid: e5m2 for gradients of outputs, e4m3
    otherwise."""

    @property
    def fp8_engines(self) -> bool:
        """Whether engines compute in FP8."""
        return self.fp8 in ("rollout", "both")

    @property
    def fp8_trainer(self) -> bool:
        """Whether the trainer computes in FP8."""
        return self.fp8 in ("trainer", "both")

    @model_validator(mode="after")
    def _check_fp8(self) -> Self:
        if self.fp8 != "none" and self.dtype != "bfloat16":
            raise ValueError(f"fp8 = {self.fp8} needs dtype = bfloat16; dtype = {self.dtype}")
        if self.fp8_format != "e4m3" and not self.fp8_trainer:
            raise ValueError(
                f"fp8_format = {self.fp8_format} needs FP8 in the trainer: fp8 = {self.fp8}, expected trainer or both"
            )
        return self


class LoraConfig(Section):
    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rank of the adapters: the number of columns of B and of rows of A. A larger rank can learn more, and costs
    memory and time in proportion."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Numerator of the factor alpha / rank by which the product of an adapter is scaled, so that one learning rate
    suits all ranks."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Matrices with an adapter, by the last part of their names in the model's folder, such as q_proj and down_proj.
    Unset: all matrices of attention, feed-forward blocks and experts."""


class TrainerConfig(Section):
    deleted: ClassVar = {"equal_lengths": False}

    steps: NonNegative = 60
    """Number of train steps of the whole run. Increase it to continue a finished run."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Number of passes over the training rows in data.params.path, or in sft.params.path. When the config is read, it
    sets steps to epochs * (rows // rows per step); the run's config.yaml has the steps. Without
    data.params.heldout_path, seven in eight rows are training rows. Unset: steps applies."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon: Muon for the matrices of attention, feed-forward blocks and experts, AdamW for the other
    weights, both at `lr`. Muon needs a third less optimizer memory for matrices, and more time per update
    (docs/trainer.md). Use it for models that were trained with Muon, such as Moonlight and Kimi-K2."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and keep the model's matrices frozen (LoRA). Optimizer and checkpoints then contain
    only the adapters; use about ten times the learning rate. Unset: train the model."""
    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Peak learning rate."""
    warmup_steps: NonNegative = 3
    """Number of train steps during which the learning rate increases linearly from lr_start * lr to lr."""
    lr_start: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Initial learning rate of the warm-up, as a share of lr."""
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Warm-up steps as a share of all steps. When the config is read, it sets warmup_steps. Unset: warmup_steps
    applies."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: constant, or decaying (linear, cosine) to lr_end * lr at the last step."""
    lr_end: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate of a linear or cosine schedule, as a share of lr."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """The two betas of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximum norm of the whole gradient; a larger gradient is scaled down to it."""
    nonfinite_limit: NonNegative = 2
    """Maximum number of consecutive updates that are skipped because the gradient is not finite. One more stops the
    run."""
    recompute: list[
        Literal["layer", "core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj"]
    ] = Field(default_factory=list)
    """Parts of a layer that recompute their activations in the backward pass instead of storing them; layer is the
    whole layer. Recomputation saves memory and costs up to one more forward pass."""
    offload_optimizer: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the optimizer's state that is stored and updated in host memory. A larger share saves GPU memory and
    makes updates slower. Needs model.dtype = bfloat16."""
    balance_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the routers' load-balancing loss of each sequence (DeepSeek-V3, eq. 17), per token. 0: off."""
    balance_rate: Annotated[float, Field(ge=0)] = 0.0
    """Step by which an update moves the routers' biases towards idle experts (Wang et al. 2024, balancing without a
    loss). For routers with biases, such as DeepSeek-V3's. 0: off."""
    mtp_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the loss of multi-token prediction, per token. The loss trains the layer with which engines draft, on
    the tokens that train the policy (docs/trainer.md). For models with such a layer: DeepSeek-V3, GLM-4.5. 0: the
    layer is not trained."""
    mtp_trunk: bool = False
    """Let the loss of multi-token prediction also train the model's other weights, as in pre-training. false: it
    trains only its layer, and does not change the policy."""
    token_budget: Positive = 8192
    """Maximum number of tokens of one packed micro-batch. A larger budget uses the hardware better and needs more
    memory for activations."""
    early_backward: bool = False
    """Compute gradients of finished groups while the step's other groups are still generated (FlexMARL's
    micro-batch pipeline), which hides training time. Needs launch.placement = disaggregated and an algorithm that
    treats each group independently."""
    replay: Literal["off", "engine", "trainer"] = "off"
    """Source of the expert selection in training. off: the trainer's router. engine: the selection when the token was
    sampled (R3); needs engine.return_routes. trainer: the selection of the scoring pass at the start of the step
    (R2). Replay removes a mismatch between engine and trainer."""
    checkpoint_every: Positive = 10
    """Number of train steps between two checkpoints. A crash loses at most the steps since the last one."""
    export_every: NonNegative = 0
    """Number of train steps between two exports of a Hugging Face folder (with `lora`, a PEFT adapter folder) to
    exports/step-N in the run folder. 0: no exports."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints to keep. The checkpoint with the best evaluation is also kept."""


class ParallelConfig(Section):
    tp: Positive = 1
    """Tensor parallel size: number of ranks that share each layer's weights."""
    pp: Positive = 1
    """Pipeline parallel size: number of ranks that each hold a part of the layers."""
    vpp: Positive = 1
    """Number of virtual pipeline stages per rank, which are interleaved. More stages reduce the pipeline's idle time
    and send more messages. More than 1 needs pp > 1."""
    cp: Positive = 1
    """Context parallel size: number of ranks that share the tokens of each sequence. For long sequences."""
    ep: Positive = 1
    """Expert parallel size: number of ranks that share a layer's experts."""
    etp: Positive | None = None
    """Tensor parallel size of the experts. Unset: tp."""
    dp: Positive | None = None
    """Data parallel size: number of copies of the model that share the samples. Unset: the smallest number that
    expert parallelism allows."""
    overlap: bool = False
    """Reduce gradients over data-parallel ranks during the backward pass instead of after it."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """Exchange of tokens between ranks with experts. alltoall: each token goes only to the ranks of its experts.
    allgather: each token goes to all ranks, so all micro-batches of a step are padded to one length."""

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def data_parallel(self) -> int:
        if self.dp is not None:
            return self.dp
        divisor = self.ep * self.expert_tp
        return divisor // math.gcd(divisor, self.tp * self.cp)

    @property
    def why_dp(self) -> str:
        """Reason for a derived data-parallel size, for messages; empty if dp is set or 1."""
        if self.dp is not None or self.data_parallel == 1:
            return ""
        etp = f" * etp = {self.ep} * {self.expert_tp}" if self.expert_tp > 1 else f" = {self.ep}"
        return f" (parallel.ep{etp} needs dp = {self.data_parallel})"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.data_parallel

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        ranks_per_stage = self.tp * self.cp * self.data_parallel
        divisor = self.ep * self.expert_tp
        if ranks_per_stage % divisor:
            raise ValueError(
                f"tp*cp*dp = {ranks_per_stage} ranks cannot be divided by ep*etp = {divisor}; "
                f"raise parallel.dp to a multiple of {divisor}"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} interleaves pipeline stages, but pp = 1; use pp >= 2")
        return self


class SFTConfig(Section):
    traces: str = "chain_sum"
    """Source of the answers that `rlsys sft` trains: a short name, `package.module:function`, or
    `path/to/file.py:function`. chats, pairs and labels read files of rows (docs/sft.md)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source."""
    loss: Spec = Spec(name="cross_entropy")
    """Loss on the answers (docs/algorithms.md). Losses of the kind imitation (cross_entropy, dft, otr) train each
    token. Losses of the kind preference (dpo, simpo, orpo, kto, reward_model and others) compare answers; they cost
    one more forward pass, or two with a reference model, for which a copy of the initial weights is in host
    memory."""
    schedule: Schedule = "linear"
    """Learning rate after the warm-up: constant, or decaying (linear, cosine) to lr_end."""
    lr_end: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Learning rate of the last step, as a share of trainer.lr."""
