"""What an engine is started with, and what it is told of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import Config
from rlsys.core.errors import UserError
from rlsys.core.model_folder import read_stop_ids
from rlsys.engine import launch_args


def command(**engine: Any) -> tuple[list[str], dict[str, str]]:
    config = Config.model_validate({"model": {"path": "some/model"}, "run": {"seed": 5}, "engine": engine})
    return launch_args.engine_command(config, 1, 3100)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: False)


def test_memory_is_released_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"model": {"path": "some/model"}, "launch": {"release_memory": True}}
    for cuda in (True, False):
        monkeypatch.setattr(launch_args, "have_cuda", lambda: cuda)  # noqa: B023
        argv, _ = launch_args.engine_command(Config.model_validate(sections), 0, 3100)
        assert ("--enable-memory-saver" in argv) == cuda


@pytest.mark.usefixtures("cpu")
def test_a_cpu_engine() -> None:
    argv, env = command(max_total_tokens=999, extra_args=["--log-level", "warning"])
    assert argv[1:4] == ["-P", "-m", "rlsys.engine.server"]
    assert option(argv, "--port") == "3100"
    assert option(argv, "--device") == "cpu"
    assert option(argv, "--max-total-tokens") == "999"
    assert option(argv, "--random-seed") == "6"
    assert "--enable-deterministic-inference" in argv
    assert "--incremental-streaming-output" in argv
    assert argv[-2:] == ["--log-level", "warning"]
    assert env["SGLANG_USE_CPU_ENGINE"] == "0"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in env
    assert "CUDA_VISIBLE_DEVICES" not in env


@pytest.mark.usefixtures("cpu")
def test_its_ranks_have_a_core_each() -> None:
    argv, env = command(tp=2, deterministic=False)
    assert option(argv, "--tp") == "2"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "--enable-deterministic-inference" not in argv


def test_a_cuda_engine_has_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_args, "have_cuda", lambda: True)
    argv, env = command(tp=2)
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "--device" not in argv
    assert "--sampling-backend" not in argv


def write(folder: Path, name: str, **fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


def test_an_engine_builds_no_vision_tower(tmp_path: Path) -> None:
    """What it holds is then what pushes bring. Text needs no axes of the rotary embedding either."""
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    write(
        tmp_path,
        "config.json",
        text_config={"rope_scaling": rope, "rope_theta": 5e6},
        vision_config={"depth": 27},
    )
    config = Config.model_validate({"model": {"path": tmp_path}})
    argv, _ = launch_args.engine_command(config, 0, 3100)
    assert json.loads(option(argv, "--json-model-override-args")) == {
        "language_model_only": True,
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    }
    write(tmp_path, "config.json", vocab_size=9)
    assert "--json-model-override-args" not in launch_args.engine_command(config, 0, 3100)[0]


def test_stop_ids_are_all_that_the_model_names(tmp_path: Path) -> None:
    assert read_stop_ids(tmp_path) == frozenset()
    write(tmp_path, "config.json", eos_token_id=7)
    assert read_stop_ids(tmp_path) == {7}
    write(tmp_path, "generation_config.json", eos_token_id=[7, 9])
    assert read_stop_ids(tmp_path) == {7, 9}
    write(tmp_path, "config.json", eos_token_id=None)
    assert read_stop_ids(tmp_path) == {7, 9}


def test_unreadable_stop_ids_are_the_users_mistake(tmp_path: Path) -> None:
    write(tmp_path, "config.json", eos_token_id=["x"])
    with pytest.raises(
        UserError, match=r"config.json: eos_token_id = \['x'\]: expected an id or a list of ids"
    ):
        read_stop_ids(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: cannot read eos_token_id: JSONDecodeError"):
        read_stop_ids(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config.json: expected a JSON object, found list"):
        read_stop_ids(tmp_path)
