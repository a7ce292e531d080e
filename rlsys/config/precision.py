"""Settings of FP8 (`model.fp8`), and the number of tokens whose logits are computed at once.

    rollout   engines hold each projection in FP8 blocks; the trainer uses bfloat16 and quantises pushed weights
    trainer   the trainer's GEMMs run in FP8 blocks through Transformer Engine; engines and pushes use bfloat16
    both      engines and trainer use the same FP8 blocks: one FP8 graph (Jet-RL)

A block has 128 x 128 weights and one scale. This is SGLang's format of a folder in FP8 (DeepSeek-V3, section 3.3),
and Transformer Engine's `blockwise` recipe. It has not been run on a GPU yet.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

from rlsys.config import Config
from rlsys.core.devices import have_cuda
from rlsys.core.errors import UserError

BLOCK = 128
TOKENS = 16
"""Transformer Engine's FP8 GEMMs need a multiple of this number of tokens."""
LOGIT_BYTES = 2**30
"""Maximum size in bytes of the logits in memory (rlsys.trainer.model.output_layer). It is enough for 1,664 rows of
151,936 ids, which keep a GPU busy."""
_ROW_MULTIPLE = 128
SCALE = "weight_scale_inv"
"""SGLang's name of the scales of a projection's `weight`, by which quantised values are multiplied."""
CAPABILITY = {"rollout": (8, 9), "trainer": (9, 0), "both": (9, 0)}
"""Minimum compute capability of a GPU for FP8 GEMMs (rollout), or Transformer Engine's FP8 blocks."""
_QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_PROJECTION = re.compile(
    r"\.(self_attn|mlp|block_sparse_moe)\.(.+\.)?(\w+_proj|kv_a_proj_with_mqa|w[123])\.weight$"
)


def engine_args(config: Config) -> list[str]:
    """Return the arguments with which SGLang's server holds the model in FP8; empty without FP8 in engines.

    The server starts without weights; the first push sends them.
    """
    if not config.model.fp8_engines:
        return []
    override = json.dumps({"quantization_config": _QUANTIZATION})
    return ["--quantization", "fp8", "--json-model-override-args", override]


def trainer_fields(config: Config) -> dict[str, Any]:
    """Return the FP8 fields of Megatron-Core's TransformerConfig; empty without FP8 in the trainer.

    With these fields, parameters stay in bfloat16 and are quantised for each GEMM.
    """
    if not config.model.fp8_trainer:
        return {}
    return {"fp8": config.model.fp8_format, "fp8_recipe": "blockwise"}


def token_multiple(config: Config) -> int:
    """Return the divisor of the number of tokens of each context-parallel rank that sharding and FP8 require."""
    return config.parallel.tp * (TOKENS if config.model.fp8_trainer else 1)


def logit_rows(columns: int) -> int:
    """Return the number of tokens whose float32 logits are computed at once.

    Args:
        columns: number of vocabulary ids on this rank.
    """
    rows = LOGIT_BYTES // (4 * columns)
    return max(1, rows // _ROW_MULTIPLE * _ROW_MULTIPLE or rows)


def is_quantised(name: str) -> bool:
    """Return whether engines hold a tensor in FP8.

    These are the projections of attention, MLPs and experts, but not norms, routers, embeddings and the head.

    Args:
        name: Hugging Face name of the tensor.
    """
    return _PROJECTION.search(name) is not None


def check_device(config: Config, capability: tuple[int, int] | None, transformer_engine: bool) -> None:
    """Check that this machine supports `model.fp8`.

    Args:
        config: the run's config.
        capability: compute capability (major, minor) of the GPU; None: no GPU.
        transformer_engine: whether Transformer Engine is installed.

    Raises:
        UserError: the GPU is missing or has a lower capability, or Transformer Engine is missing.
    """
    fp8 = config.model.fp8
    if fp8 == "none":
        return
    required = CAPABILITY[fp8]
    if capability is None or capability < required:
        detected = (
            "this machine has no GPU" if capability is None else f"this machine's has {_dotted(capability)}"
        )
        raise UserError(
            f"model.fp8 = {fp8} needs a GPU of compute capability {_dotted(required)} or more; {detected}"
        )
    if config.model.fp8_trainer and not transformer_engine:
        raise UserError(
            f"model.fp8 = {fp8} needs Transformer Engine, which is not installed; install it, or use rollout"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def device_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability (major, minor) of this machine's GPUs, without importing torch.

    Return None if there is no GPU, or nvidia-smi does not report the capability.
    """
    if not have_cuda() or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    capabilities = [(int(a), int(b)) for a, b in re.findall(r"^(\d+)\.(\d+)\s*$", output, re.MULTILINE)]
    return min(capabilities, default=None)
