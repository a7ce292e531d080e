"""Functions that the benches share: a real engine, a random model, and figures of repeats and of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from launch.ports import free_ports  # noqa: E402
from rlsys.config import Config  # noqa: E402
from rlsys.convert.config import HFConfig  # noqa: E402
from rlsys.convert.table import entries  # noqa: E402
from rlsys.core.identity import config_path, engine_identity, write_config  # noqa: E402
from rlsys.core.owner import Owner  # noqa: E402
from rlsys.engine.launch_args import engine_command  # noqa: E402
from tests.helpers.engine_process import engine_arguments, engine_environment  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the smallest and the largest value."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine() -> dict[str, Any]:
    """Return cores, GPU, versions and load average of this machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cores": os.cpu_count(), "gpu": gpu, "python": platform.python_version(),
        "torch": torch.__version__, "load_average": os.getloadavg()[0],
    }  # fmt: skip


def write_random_moe(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **sizes: Any
) -> Path:
    """Write a Qwen3-MoE with random weights. It has no end token, so no response ends before its limit.

    Args:
        folder: Hugging Face folder to write.
        dtype: type of the weights.
        device: device on which the weights are drawn.
        sizes: fields of config.json to set.

    Returns:
        `folder`.
    """
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, **sizes,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)

    def weight(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        values = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
        return values.to("cpu", dtype)

    tensors = {
        name: weight(shape) for entry in entries(HFConfig.read(folder)) for name, shape in entry.hf.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextlib.contextmanager
def running_engine(
    config: Config, folder: Path, start_seconds: float = 300.0, owner: Owner | None = None
) -> Iterator[str]:
    """Start an SGLang server and yield its URL. End the server with all its descendants after the context.

    Args:
        config: config of the run; its first engine is started.
        folder: folder of the server's log, engine.log.
        start_seconds: time limit of the start.
        owner: launch whose keys the server requires; None: no keys, and weight version 0.
    """
    port = free_ports(config.engine.host, 1)[0]
    argv, env = engine_command(config, 0, port)
    argv += engine_arguments()
    url = f"http://{config.engine.host}:{port}"
    if owner is None:
        argv += ["--weight-version", "0"]
    else:
        path = config_path(owner.run_dir, f"engine-{port}")
        write_config(path, engine_identity(owner, url))
        argv += ["--config", str(path)]
    with running(
        argv, folder / "engine.log", lambda: _answers(url), engine_environment(config, env), start_seconds
    ):
        yield url


@contextlib.contextmanager
def running(
    argv: Sequence[str],
    log: Path,
    answers: Callable[[], bool],
    env: dict[str, str] | None = None,
    start_seconds: float = 60.0,
) -> Iterator[int]:
    """Run a command under a keeper, and end it with all its descendants after the context.

    Args:
        argv: the command.
        log: file of its output.
        answers: returns whether the command is ready.
        env: all environment variables; None: those of this process.
        start_seconds: time limit until the command is ready.

    Yields:
        the keeper's process id, once the command is ready.

    Raises:
        SystemExit: the command ended early, or was not ready in time.
    """
    keeper = [sys.executable, "-m", "launch.keeper", "--grace", "10", "--", *argv]
    with log.open("wb") as out:
        process = subprocess.Popen(
            keeper,
            cwd=ROOT,
            env=env,  # None: the environment of this process
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
        )
        try:
            deadline = time.monotonic() + start_seconds
            while not answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    state = (
                        "is running, but not ready"
                        if process.poll() is None
                        else f"ended with exit code {process.returncode}"
                    )
                    sys.exit(
                        f"{' '.join(argv)}: {state}; expected it to be ready within {start_seconds:.0f} s\n"
                        f"{log.read_text(errors='replace')[-4000:]}"
                    )
                time.sleep(0.2)
            yield process.pid
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    """Return whether the server's health check succeeds."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def say(text: str) -> None:
    """Print a line of progress to stderr, because stdout is for the JSON result."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
