"""Eight steps of the real stack for each kind of generator, with one item of each bad kind a step: all steps are
done, no token is lost, and each item is counted under its cause.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import load_config
from rlsys.core.types import LONGEST_REASON, CensorCause, Sample
from rlsys.data import PromptSource, Tokenizer, build_source
from rlsys.ledger.reader import RunReader
from rlsys.ledger.samples import SampleQuery
from rlsys.obs.metrics import read_metrics
from tests.helpers.servers import ROOT
from tests.helpers.sessions import RLSYS, SMALL, Session, check_agreement, check_ledger
from tests.integration.test_tool_agents import module

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS, GROUPS, SIZE = 8, 6, 4
OWN = "tests/data/bad_items.py"
ROW = {"half an emoji": CensorCause.ROW, "too long": CensorCause.PROMPT}
REWARDS = dict.fromkeys(("reward raises", "reward is none", "reward is not a number"), CensorCause.REWARD)
KINDS: dict[str, dict[str, CensorCause]] = {
    "turns": {"generator raises": CensorCause.EXCEPTION},
    "functions": {},
    "agent": dict.fromkeys(
        ("agent raises", "agent stops at nothing", "agent calls a number", "agent says half an emoji"),
        CensorCause.TOOL,
    ),
    "environment": dict.fromkeys(
        (
            "environment raises", "environment says text", "environment says an image",
            "environment rewards with none",
        ),
        CensorCause.TOOL,
    ),
    "tree": {},
    "workers": {"generator raises": CensorCause.EXCEPTION},
}  # fmt: skip
"""What is wrong beside rows and rewards, and what it is counted under."""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add", "description": "adds whole numbers",
        "parameters": {
            "type": "object", "properties": {"terms": {"type": "array", "items": {"type": "integer"}}},
            "required": ["terms"],
        },
    },
}  # fmt: skip
OVERRIDES: dict[str, tuple[str, ...]] = {
    "turns": (f"rollout.generator={OWN}:turns",),
    "workers": (f"rollout.generator={OWN}:turns", "rollout.workers=2", "engine.count=2"),
    "functions": (
        "rollout.generator=functions", f"rollout.generator_params={{functions: ['{OWN}:add'], max_turns: 3}}",
        "engine.tool_call_parser=qwen25", f"data.chat_template_args={json.dumps({'tools': [SCHEMA]})}",
    ),
    "agent": ("rollout.generator=agent", f"rollout.generator_params={{run: '{OWN}:solve'}}"),
    "environment": (
        "rollout.generator=environment", f"rollout.generator_params={{connector: '{OWN}:Tries', max_turns: 2}}",
    ),
    "tree": (
        "rollout.generator=latr", "rollout.generator_params={second: 0.02, max_gap: 0.9}",
        "algo.advantage=branch_grpo",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, that has learned to call a tool: the warm start of examples/tools in short."""
    folder = tmp_path_factory.mktemp("tools")
    module("model").make(folder / "model")
    small = ["trainer.steps=120", "trainer.token_budget=4096", "sft.params={guesses: 0}"]
    where = [f"model.path={folder}/model", f"run.dir={folder}/sft"]
    command = [*RLSYS, "sft", "examples/tools/sft.yaml", *where, *small]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return folder / "sft/model"


def sums(count: int) -> list[dict[str, Any]]:
    """Different ones."""
    drawn = random.Random(0)
    terms = {tuple(drawn.randint(0, 9) for _ in range(4)) for _ in range(3 * count)}
    return [{"prompt": "+".join(map(str, t)) + "=", "answer": str(sum(t))} for t in sorted(terms)[:count]]


def spoilt(row: dict[str, Any], bad: str) -> dict[str, Any]:
    if bad == "half an emoji":
        return {**row, "prompt": row["prompt"] + "\ud83d", "bad": bad}
    if bad == "too long":
        return {**row, "prompt": row["prompt"] * 800, "bad": bad}
    return {**row, "bad": bad}


def source_of(
    folder: Path, rows: list[dict[str, Any]], held: list[dict[str, Any]]
) -> tuple[PromptSource, tuple[str, ...]]:
    """The source of these rows, which are written to files, and its settings."""
    for name, lines in (("rows", rows), ("held", held)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    params = {"path": f"{folder}/rows.jsonl", "heldout_path": f"{folder}/held.jsonl"}
    overrides = ("data.source=jsonl", f"data.params={json.dumps(params)}", f"data.reward={OWN}:reward")
    config = load_config(ROOT / "configs/quickstart.yaml", [f"run.dir={folder}/x", *overrides])
    return build_source(config, Tokenizer(config.model.path)), overrides


def write_rows(folder: Path, bad: list[str]) -> tuple[str, ...]:
    """Rows in such an order that each step meets one of each bad kind, and a good one last. Returns what the config
    has to say of them."""
    step = [kind for i, kind in enumerate(bad) for kind in ([kind, ""] if i < GROUPS - 1 else [kind])] + [""]
    assert step.count("") == GROUPS
    row_iterator = iter(sums(8 + (STEPS + 1) * len(step)))
    eval_rows = [
        *(next(row_iterator) for _ in range(6)),
        spoilt(next(row_iterator), "too long"),
        spoilt(next(row_iterator), "half an emoji"),
    ]
    kinds = step * (STEPS + 1)
    plain = [next(row_iterator) for _ in kinds]
    order = [spoilt(row, kind) if kind else row for row, kind in zip(plain, kinds, strict=True)]
    numbered = [{**row, "number": i} for i, row in enumerate(plain)]
    source = source_of(folder, numbered, eval_rows)[0]  # the order depends on the number of rows alone
    rows: list[dict[str, Any]] = [{} for _ in order]
    for index, row in enumerate(order):
        rows[source.train(index).entry["number"]] = row
    source, overrides = source_of(folder, rows, eval_rows)
    assert [source.train(i).entry.get("bad", "") for i in range(len(order))] == kinds
    return overrides


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_outlives_one_item_of_each_bad_kind_a_step(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    bad = {**ROW, **REWARDS, **KINDS[kind]}
    if kind == "agent":  # it makes its prompt itself, hears that it is too long, and gives up
        bad["too long"] = CensorCause.TOOL
    overrides = [*write_rows(tmp_path, [*bad]), *OVERRIDES[kind], f"rollout.groups_per_step={GROUPS}"]
    if kind == "functions":
        overrides.append(f"model.path={request.getfixturevalue('tool_model')}")
    run = tmp_path / "run"
    explained = subprocess.run(
        [*RLSYS, "explain", "configs/quickstart.yaml", f"run.dir={run}", *SMALL, *overrides],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert explained.returncode == 0, explained.stderr
    assert (
        f"{STEPS + 1 + 1} rows cannot be read" in explained.stdout
    )  # those of the steps, and a held-out one
    assert f"{STEPS + 1 + 1} rows are too long" in explained.stdout
    on_policy = ("rollout.over_provision=1", "rollout.max_staleness=0", "eval.interval=4")
    session = Session(run, f"trainer.steps={STEPS}", *on_policy, *overrides)
    try:
        code, output = session.end()
    finally:
        session.kill()
    assert code == 0, output
    metrics = read_metrics(run)
    assert [s["step"] for s in metrics.steps] == list(range(1, STEPS + 1))
    ledger = check_ledger(run)
    assert ledger["trained"] == STEPS * GROUPS
    check_agreement(run)
    assert [line["left_out"] for line in metrics.evals] == [2, 2, 2]

    # The last step's bad items may still have been on their way when it was taken.
    counted = Counter[CensorCause]()
    for cause in bad.values():
        counted[cause] += 1 if cause is CensorCause.EXCEPTION else SIZE
    for cause in CensorCause:
        count, expected = metrics.steps[-1][f"censored_samples_{cause}"], counted[cause]
        assert (STEPS - 1) * expected <= count <= (STEPS + 1) * expected, cause
    assert (STEPS - 1) * len(bad) <= ledger["censored"] <= (STEPS + 1) * len(bad)
    records = RunReader(run).samples(SampleQuery(status="censored", limit=256))
    reasons = [record.sample.censor_reason or "" for record in records]
    assert reasons and all(0 < len(reason) <= LONGEST_REASON for reason in reasons)
    assert any("rows.jsonl:" in reason and "lone UTF-16 surrogate" in reason for reason in reasons)
    check_observed(kind, [s for g in RunReader(run).groups("train_step = ?", STEPS) for s in g.samples])


def check_observed(kind: str, samples: list[Sample]) -> None:
    """What tools and environments say is there, as the model can read it."""
    if kind in ("functions", "environment"):
        assert any(s.observed for s in samples)
