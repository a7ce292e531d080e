"""Start a real SGLang server as the supervisor does: under a keeper, which ends its whole process group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from launch.ports import free_ports
from rlsys.config import Config
from rlsys.core.identity import engine_identity, write_config
from rlsys.core.owner import Owner, claim
from rlsys.engine.cpu.platform import declare_torchvision_ops
from rlsys.engine.launch_args import engine_command
from rlsys.segments.records import FOLDER
from rlsys.segments.route_records import ROUTES_VARIABLE
from tests.helpers.engine_process import engine_arguments, engine_environment

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 800.0  # upper bound only; on two busy cores a start took more than 240
GRACE_SECONDS = 10.0

TINY_MOE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "max_position_embeddings": 512, "initializer_range": 0.2, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def tiny_moe_model(seed: int, **changes: Any) -> Any:
    """Return a tiny random model of transformers in float32."""
    declare_torchvision_ops()
    import transformers

    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**TINY_MOE, **changes})).float()


def write_tiny_moe(folder: Path, seed: int) -> Path:
    tiny_moe_model(seed).save_pretrained(folder)
    return folder


@contextmanager
def running_engine(
    config: Config, folder: Path, run: Path | None = None, owner: Owner | None = None
) -> Iterator[str]:
    """Run a server and yield its URL once it is healthy. At exit, end its process group.

    Args:
        config: The config of the engine.
        folder: Folder of the log.
        run: Run folder to which the engine writes routes; None: its responses hold them.
        owner: Owner of the keys that the engine requires; None: it requires none.
    """
    port = free_ports(config.engine.host, 1)[0]
    argv, env = engine_command(config, 0, port)
    argv += engine_arguments()
    if run is not None:
        env |= {**claim(run).environment(1), ROUTES_VARIABLE: str(run / FOLDER / "engine-0")}
    url = f"http://{config.engine.host}:{port}"
    if owner is None:
        argv += ["--weight-version", "0"]  # a run would write it to a file
    else:
        write_config(folder / "keys.yaml", engine_identity(owner, url))
        argv += ["--config", str(folder / "keys.yaml")]
    keeper = [sys.executable, "-m", "launch.keeper", "--grace", str(GRACE_SECONDS), "--", *argv]
    with (
        (folder / "engine.log").open("wb") as log,
        subprocess.Popen(
            keeper,
            cwd=ROOT,
            env=engine_environment(config, env),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            wait_until_healthy(url, process, folder / "engine.log")
            yield url
        finally:
            process.terminate()


@contextmanager
def running_router(folder: Path, *args: str) -> Iterator[str]:
    """Run `rlsys router` as a process and yield its URL. At exit, check its exit code."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = [sys.executable, "-m", "rlsys.cli.main", "router", "--port", str(port), *args]
    with (folder / f"router-{port}.log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
    try:
        while not _is_ready(port):
            assert process.poll() is None, "the router did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait() == 0


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the engine did not start:\n{log.read_text(errors='replace')[-4000:]}")
