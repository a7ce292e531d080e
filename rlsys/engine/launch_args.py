"""Command line and environment variables of one SGLang server. Has no side effects; reads which GPUs are visible."""

from __future__ import annotations

import itertools
import json

from rlsys.config import Config
from rlsys.config.precision import engine_args
from rlsys.core.devices import VARIABLE, have_cuda, visible_devices
from rlsys.core.errors import UserError
from rlsys.core.imports import module_command
from rlsys.core.model_folder import language_model_overrides
from rlsys.engine.head_sizes import check_head_size
from rlsys.engine.hooks.peer_weights import READ_LOADER, WRITE_LOADER
from rlsys.engine.warm_up import NAME as WARM_UP


def uses_peer_weights(config: Config) -> bool:
    """Return whether an engine may load its weights from another engine. Conditions:

    - Engines serve while the trainer works.
    - Engines have the trainer's precision.
    - One rollout worker controls all engines, because all transfers use one folder.
    """
    full_precision = not config.model.fp8_engines and config.weights.method != "adapter"
    return full_precision and config.launch.placement == "disaggregated" and config.rollout.workers == 1


def _on_cuda(config: Config) -> bool:
    """Return whether engines run on CUDA, by the rule of launch/environment.py.

    The config decides first, because this process may run on a host without a GPU, such as the head node of a Ray
    cluster.
    """
    return config.launch.gpus_per_node > 0 or have_cuda()


def engine_command(config: Config, index: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the additional environment variables of an engine.

    Args:
        index: Index of the engine in the launch.
        port: Port of its HTTP server.

    Raises:
        UserError: SGLang's kernels do not support the model's attention heads.
    """
    e = config.engine
    argv = module_command(
        "rlsys.engine.server",
        "--model-path", str(config.model.path),
        "--host", e.host,
        "--port", str(port),
        "--dtype", config.model.dtype,
        "--tp", str(e.tp_of(index)),
        "--max-running-requests", str(config.max_running_requests),
        "--random-seed", str(config.run.seed + index),
        "--stream-interval", str(config.stream_interval),
        "--incremental-streaming-output",
        "--enable-metrics",
        "--skip-server-warmup",
        "--sleep-on-idle",  # otherwise an idle scheduler keeps a core busy
    )  # fmt: skip
    env = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # a health probe must not wait for a forward pass
        "SGLANG_MAMBA_CONV_DTYPE": config.model.dtype,  # convolution state of a gated delta net; default bfloat16
    }
    feature_argv, feature_env = _feature_args(config)
    device_argv, device_env = _device_args(config, index)
    return [*argv, *feature_argv, *device_argv, *e.extra_args], env | feature_env | device_env


def _feature_args(config: Config) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and environment variables of optional features."""
    e = config.engine
    argv: list[str] = []
    env: dict[str, str] = {}
    if (tokens := config.fixed_pool_tokens) is not None:
        argv += ["--max-total-tokens", str(tokens)]
    if config.model.trust_remote_code:
        argv.append("--trust-remote-code")
    if e.deterministic:
        argv.append("--enable-deterministic-inference")
    if uses_peer_weights(config):
        argv += ["--custom-weight-loader", WRITE_LOADER, READ_LOADER]
    argv += engine_args(config)
    if config.model.fp8_engines or (config.model.path / ".metadata").is_file():
        # The folder has another format than the engine; the first push loads the weights.
        argv += ["--load-format", "dummy"]
    if changes := language_model_overrides(config.model.path):
        argv += ["--json-model-override-args", json.dumps(changes)]
    if config.weights.method == "adapter" and (lora := config.trainer.lora) is not None:
        argv += ["--enable-lora", "--max-lora-rank", str(lora.rank), "--max-loras-per-batch", "2"]
        argv += ["--lora-target-modules", *(lora.targets or ["all"])]
        if not _on_cuda(config):
            argv += ["--lora-backend", "torch_native"]
    if e.ngram_drafts:
        argv += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(e.ngram_drafts)]
        if not _on_cuda(config):
            env["SGLANG_NATIVE_MOVE_KV_CACHE"] = "1"
    if e.return_routes:
        argv.append("--enable-return-routed-experts")
    if e.tool_call_parser is not None:
        argv += ["--tool-call-parser", e.tool_call_parser]
    if e.reasoning_parser is not None:
        argv += ["--reasoning-parser", e.reasoning_parser]
    return argv, env


def _attention_backend(config: Config) -> str | None:
    """Return the attention backend of an engine on CUDA; None if SGLang selects it by the GPU."""
    arguments = [*config.engine.extra_args, ""]
    for arg, following in reversed(
        list(itertools.pairwise(arguments))
    ):  # the last of equal arguments has effect
        name, equals, value = arg.partition("=")
        if name == "--attention-backend":
            return value if equals else following
    # FlashAttention 3, the default on Hopper, supports half precision only. With TP 2, a mixture of experts sampled
    # different tokens for the same seed (github.com/sgl-project/sglang/pull/10930); with Triton it did not.
    # FlashInfer, the default on Blackwell, disables the prefix cache.
    return "triton" if config.model.dtype == "float32" or config.engine.deterministic else None


def attention_notes(config: Config) -> list[str]:
    """Return warnings about the attention backend that engine.extra_args selects on CUDA."""
    if not (_on_cuda(config) and config.engine.deterministic and _attention_backend(config) == "fa3"):
        return []
    return [
        "engine.deterministic with --attention-backend fa3: a mixture of experts with TP 2 sampled different "
        "tokens for the same seed; use triton"
    ]


def _device_args(config: Config, index: int) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and environment variables that depend on the device, CUDA or CPU."""
    tp = config.engine.tp_of(index)
    argv: list[str] = []
    env: dict[str, str] = {}
    if _on_cuda(config):
        argv += ["--warmups", WARM_UP, "--cuda-graph-max-bs-prefill", str(config.prefill_graph_tokens)]
        argv += ["--mem-fraction-static", str(config.engine.memory_fraction)]
        if config.launch.release_memory:
            argv.append("--enable-memory-saver")
            # Otherwise CUDA graphs keep gigabytes while the trainer works.
            env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
        env[VARIABLE] = ",".join(_devices(config, index))
        backend = _attention_backend(config)
        check_head_size(config.model.path, backend)
        if backend is not None:
            argv += ["--attention-backend", backend]
    else:
        argv += [
            "--device", "cpu",
            "--attention-backend", "torch_native",
            "--sampling-backend", "pytorch",
            "--cuda-graph-backend-decode", "disabled",
            "--cuda-graph-backend-prefill", "disabled",
            "--disable-overlap-schedule",
            "--mem-fraction-static", "0.8",  # of the host's memory; --max-total-tokens limits the KV pool
        ]  # fmt: skip
        env["SGLANG_USE_CPU_ENGINE"] = "0"  # SGLang's CPU kernels need instructions that some machines lack
        if tp > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(i) for i in range(tp))
    return argv, env


def _devices(config: Config, index: int) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES of engine `index`.

    With a launch plan, these are indices of the GPUs of the engine's node. Otherwise they are the next of the GPUs
    that are visible to this process, after those of engines with a smaller index.

    Raises:
        UserError: CUDA_VISIBLE_DEVICES of this process has too few GPUs.
    """
    tp = config.engine.tp_of(index)
    first = sum(config.engine.tp_of(i) for i in range(index))
    indices = range(first, first + tp)
    # In a launch plan with GPUs, indices count the GPUs of the engine's node (launch/keeper.py).
    if config.launch.gpus_per_node or (visible := visible_devices()) is None:
        return [str(i) for i in indices]
    if indices[-1] >= len(visible):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES = {','.join(visible)} has {len(visible)} GPUs; engine {index} with "
            f"engine.tp = {tp} needs at least {indices[-1] + 1}"
        )
    return [visible[i] for i in indices]
