"""Fixtures of integration tests: a tiny random model, and a real SGLang server that serves it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.config import Config
from tests.helpers.servers import ROOT, running_engine, write_tiny_moe

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen3-MoE (vocabulary 128, context 512) with the quickstart model's tokenizer."""
    folder = write_tiny_moe(tmp_path_factory.mktemp("models") / "tiny-moe", seed=0)
    for name in TOKENIZER_FILES:
        shutil.copyfile(ROOT / "configs" / "models" / "quickstart-moe" / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def engine_config(tiny_moe: Path) -> Config:
    """Config of `engine`: deterministic, an event every 4 tokens, 32 concurrent requests, routes."""
    return Config.model_validate(
        {
            "model": {"path": tiny_moe},
            "engine": {
                "stream_interval": 4,
                "max_running_requests": 32,
                "max_total_tokens": 16384,
                "return_routes": True,
            },
            "weights": {"bucket_mb": 0.1},
        }
    )


@pytest.fixture(scope="session")
def engine_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder to which the server writes routes."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def engine(engine_config: Config, engine_run: Path) -> Iterator[str]:
    """URL of the server. Tests leave it idle and without an open update, at any weights and version."""
    with running_engine(engine_config, engine_run, engine_run) as url:
        yield url
