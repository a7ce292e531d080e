"""examples/tools with each stock client, in a venv of its own: the ledger has what the engine says that it made, and
nothing is lost when agents, environment, engine, rollout and trainer are killed."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlsys.core.types import Sample
from rlsys.ledger.reader import RunReader
from rlsys.obs.metrics import read_metrics
from tests.helpers.servers import ROOT
from tests.helpers.sessions import (
    GROUPS,
    RLSYS,
    Session,
    as_json,
    check_agreement,
    check_ledger,
    command_line,
)
from tests.helpers.venvs import venv
from tests.integration.test_agent_run import HOST, kill, parents_line

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

TOOLS = ROOT / "examples/tools"
CLIENTS = ("openai==3.57.0", "anthropic==2.13.0", "openai-agents==0.24.0")
AGENTS = {"openai": "agent.py", "anthropic": "anthropic_agent.py", "sdk": "sdk_agent.py"}
ENVIRONMENT = "rlsys.environments.serve"
SFT_STEPS = 120
"""After so many the model calls the tool, as long as it has not learned to guess as well."""


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    tool_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool_module)
    return tool_module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warm start in short."""
    folder = tmp_path_factory.mktemp("tools")
    module("model").write_model(folder / "model")
    small = [f"trainer.steps={SFT_STEPS}", "trainer.token_budget=4096", "sft.params={guesses: 0}"]
    where = [f"model.path={folder}/model", f"run.dir={folder}/sft"]
    command = [*RLSYS, "sft", "examples/tools/sft.yaml", *where, *small]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return folder / "sft/model"


def overrides(model: Path, agent: str) -> tuple[str, ...]:
    """As rl.yaml and its neighbours have it."""
    params = {
        "run": f"examples/tools/{AGENTS[agent]}:solve",
        "python": str(venv("agents", *CLIENTS)),
        "environment": {"connector": "examples/tools/adding.py:Adding"},
    }
    return (
        f"model.path={model}", "data.reward=exact_answer", "engine.tool_call_parser=qwen25",
        "rollout.generator=agent", f"rollout.generator_params={json.dumps(params)}",
    )  # fmt: skip


@pytest.mark.parametrize("agent", sorted(AGENTS))
def test_the_ledger_matches_the_engines_request_log(agent: str, model: Path, tmp_path: Path) -> None:
    """Id by id and log-prob by log-prob, over interruptions and pushes."""
    run, record = tmp_path / "run", tmp_path / "record"
    record.mkdir()
    words = ["--log-requests", "--log-requests-level", "3", "--log-requests-format", "json"]
    words += ["--log-requests-target", str(record)]
    options = ("engine.stream_interval=1000", f"engine.extra_args={json.dumps(words)}")
    steps = (
        "trainer.steps=3",
        "trainer.checkpoint_every=100",
    )  # a checkpoint lets tokens of earlier steps go
    session = Session(run, *overrides(model, agent), *steps, *options)
    try:
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    assert check_ledger(run)["trained"] == 3 * GROUPS
    assert sum(s["resumed_samples"] for s in read_metrics(run).steps) > 0, "over_provision"
    samples = [s for g in RunReader(run).groups("state = 'trained'") for s in g.samples]
    assert any(s.observed for s in samples), "the tool was called"
    requests = finished_requests(record)
    for sample in samples:
        check_record(sample, requests[sample.sample_id])
    summary = as_json("report", str(run))[1]  # its 99.9th percentile is of a handful of tokens here
    assert summary["mean_abs_logprob_diff"] <= 1e-6


def finished_requests(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What the engine has written of each sample's requests (SGLang's --log-requests), in their order."""
    requests = defaultdict(list)
    lines = [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    for entry in (json.loads(line.partition("] ")[2]) for line in lines):
        if entry["event"] == "request.finished" and entry["rid"].endswith("."):
            sample_id = entry["rid"].partition("-")[2].rpartition("-")[0]
            requests[int(sample_id)].append(entry)
    return requests


def check_record(sample: Sample, requests: list[dict[str, Any]]) -> None:
    """Each request was asked with what the sample has, and made what follows there. The record of a stream has its
    last chunk and how many tokens there were: here all but the first one."""
    ids = [*sample.prompt_ids, *sample.response_ids]
    first, token_count = len(sample.prompt_ids), 0
    for request in requests:
        input_ids, meta = request["obj"]["input_ids"], request["out"]["meta_info"]
        end = len(input_ids) + meta["completion_tokens"]
        token_count += meta["completion_tokens"]
        chunk = [(token, logp) for logp, token, *_ in meta["output_token_logprobs"]]
        assert len(chunk) >= meta["completion_tokens"] - 1
        assert input_ids == ids[: len(input_ids)]
        start = end - len(chunk)
        assert [token for token, _ in chunk] == ids[start:end]
        assert [logp for _, logp in chunk] == pytest.approx(
            list(sample.mu[start - first : end - first]), abs=1e-7
        )
    assert token_count == sample.sampled_tokens


STEPS = 8


@pytest.fixture
def session(model: Path, tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path / "run", *overrides(model, "sdk"), f"trainer.steps={STEPS}")
    yield session
    session.kill()


def test_nothing_is_lost_when_every_process_is_killed(session: Session, tmp_path: Path) -> None:
    """An agent of a framework: it has no say in how its client asks again."""
    run = tmp_path / "run"
    session.wait_for_steps(1)
    kill(session, lambda p: ENVIRONMENT in command_line(p))
    session.wait_for_steps(1)
    kill(session, lambda p: HOST in command_line(p) and HOST in parents_line(p))  # agents
    session.find("rlsys.engine.server").send_signal(signal.SIGKILL)
    session.wait_for_steps(3)
    session.find("rlsys.train", "--config").send_signal(signal.SIGKILL)
    session.wait_for_steps(5)
    session.find("rlsys.rollout.service").send_signal(signal.SIGKILL)
    code, output = session.end()
    assert code == 0, output
    assert check_ledger(run)["trained"] == STEPS * GROUPS
    assert [s["step"] for s in read_metrics(run).steps] == list(range(1, STEPS + 1))
    check_agreement(run)
    samples = [s for g in RunReader(run).groups("train_step = ?", STEPS) for s in g.samples]
    assert any(s.observed for s in samples), "the tool was called"
