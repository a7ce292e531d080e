"""Tiny runs of the quickstart model, and functions that read their results."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlsys.obs.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RLSYS = (sys.executable, "-m", "rlsys.cli.main")
TINY = (
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_response_tokens=64",
    "trainer.checkpoint_every=1",
    "parallel.ep=2",
    "eval.interval=1000",
    "eval.prompts=4",
    "engine.max_running_requests=32",
    "engine.stream_interval=4",
    "engine.start_timeout=300",
    "launch.grace_seconds=10",
)
SYNCHRONOUS = ("rollout.over_provision=1", "rollout.max_staleness=0", "trainer.steps=3")


def steps_done(run: Path) -> int:
    """Return the last step in metrics.jsonl, or 0 before the first."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if '"kind": "step"' in line), default=0)


def curve(run: Path) -> list[dict[str, Any]]:
    """Return reward, tokens, effective groups, loss and gradient norm of each step, for `same_curve`."""
    keys = ("reward", "tokens", "effective_groups", "loss", "grad_norm")
    return [{key: step[key] for key in keys} for step in read_metrics(run).steps]


def same_curve(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Return whether rewards and tokens are equal, and losses and gradient norms are equal up to rounding.

    An engine's log-probs of the same tokens differ in the last bits with the other requests in the batch.
    """
    return len(one) == len(other) and all(
        a[key] == b[key]
        if isinstance(a[key], int) or key == "reward"
        else math.isclose(a[key], b[key], rel_tol=1e-4)
        for a, b in zip(one, other, strict=True)
        for key in a
    )


def checked_ledger(run: Path) -> dict[str, Any]:
    """Check that the ledger is consistent, with nothing lost and nothing trained twice, and return it."""
    process = subprocess.run([*RLSYS, "ledger", str(run), "--json"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    ledger: dict[str, Any] = json.loads(process.stdout)
    assert (ledger["lost"], ledger["trained_twice"]) == (0, 0)
    return ledger


def logs_of(run: Path) -> str:
    """Return the ends of all logs, for the message of a failed assertion."""
    return "\n".join(
        f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in sorted((run / "logs").glob("*.log"))
    )


def train_locally(run: Path, *overrides: str) -> None:
    command = [*RLSYS, "train", "configs/quickstart.yaml", f"run.dir={run}", *TINY, *overrides]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr + logs_of(run)
