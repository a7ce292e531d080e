"""State of a run for `rlsys status` and `rlsys logs`: from its folder and its coordinator."""

from __future__ import annotations

import fcntl
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launch.backends.slurm import client
from launch.submit import JOB
from rlsys.config import load_run_config
from rlsys.core.errors import RlsysError, UserError
from rlsys.obs.metrics import FILE_NAME, MetricsTail, read_metrics

FOLLOW_SECONDS = 0.5


def status_lines(run: Path, current_time: float, live: dict[str, Any] | None = None) -> list[str]:
    """Return one line per fact.

    Args:
        run: the run folder.
        current_time: seconds since the epoch.
        live: status of the coordinator, if it answers.
    """
    facts = [("processes", "running" if is_locked(run) else "none")]
    if (run / JOB).is_file():
        facts.append(("slurm job", job_state((run / JOB).read_text().strip())))
    if (run / FILE_NAME).is_file():
        metrics = read_metrics(run)
        last = max((e["time"] for e in (*metrics.runs, *metrics.steps, *metrics.evals)), default=current_time)
        done = metrics.runs and metrics.runs[-1]["event"] == "end"
        facts.append(("train step", f"{metrics.last_step}{', the last' if done else ''}"))
        facts.append(("last metric", f"{current_time - last:.0f} s ago"))
        if metrics.steps:
            entry = metrics.steps[-1]
            facts += [(key, f"{entry[key]:.3f}") for key in ("reward", "loss") if entry.get(key) is not None][
                :1
            ]
        lost_time = lost_seconds(MetricsTail(run).read())
        facts.append(("lost to stops", f"{lost_time:.0f} s, {lost_time * gpus_of(run):.0f} GPU-seconds"))
        facts.append(("sessions", str(sum(r["event"] in ("start", "resume") for r in metrics.runs))))
    if live is not None:
        facts += live_facts(live)
    events = last_lines(run / "logs" / "supervisor.log", 3)
    return [f"{name:13} {value}" for name, value in facts] + [f"{'':13} {line}" for line in events]


def live_facts(live: dict[str, Any]) -> list[tuple[str, str]]:
    """Return facts that only the coordinator knows: its state in memory, and the engines."""
    fields = [
        ("coordinator", "coordinator"),
        ("weight version", "weight_version"),
        ("waiting for", "waiting_for"),
    ]
    facts = [(name, str(live[key])) for name, key in fields if live.get(key) is not None]
    return facts + [("engine", f"{url} {state}") for url, state in live.get("engines", {}).items()]


def lost_seconds(entries: Iterable[dict[str, Any]]) -> float:
    """Return the wall seconds that stops cost.

    It sums, for each stop, the time from the last line before it to the start of the first train step that
    was not repeated: the stop, the wait in a queue, the start, and repeated steps.

    `entries`: all lines of metrics.jsonl in order.
    """
    total, last_step, last_time, stop_time = 0.0, 0, None, None
    for entry in entries:
        if entry["kind"] == "run" and entry["event"] in ("start", "resume") and stop_time is None:
            stop_time = last_time
        if entry["kind"] == "step" and entry["step"] > last_step:
            last_step = entry["step"]
            if stop_time is not None:
                total += entry["time"] - entry["time_step"] - stop_time
                stop_time = None
        last_time = entry["time"]
    return total


def gpus_of(run: Path) -> int:
    """Return the number of GPUs of the run; without GPUs, of trainer ranks."""
    config = load_run_config(run)
    return config.launch.nodes * config.launch.gpus_per_node or config.parallel.world_size


def is_locked(run: Path) -> bool:
    """Return whether a supervisor or any process that it started holds the run's lock."""
    lock = run / ".lock"
    if not lock.exists():
        return False
    with lock.open() as f:
        try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def job_state(job: str) -> str:
    """Return Slurm's description, such as `81 RUNNING 12:03 node[1-2]`, or why there is none."""
    try:
        output = client(["squeue", "--noheader", f"--jobs={job}", "--format=%T %M %R"]).strip()
    except RlsysError as e:
        return f"{job} ({str(e).splitlines()[0]})"
    return f"{job} {output or 'not in the queue'}"


def last_lines(log: Path, n: int) -> list[str]:
    """Return the last `n` lines; empty if the file does not exist."""
    if not log.is_file():
        return []
    with log.open(errors="replace") as f:
        return [line.rstrip("\n") for line in deque(f, maxlen=n)]


def role_logs(run: Path, role: str | None) -> list[Path]:
    """Return the logs of a role and its parts (`trainer` includes trainer-0), or all logs.

    Raises:
        UserError: there is none.
    """
    logs = sorted((run / "logs").glob("*.log"))
    selected = [
        p for p in logs if role is None or p.stem == role or p.stem.startswith((f"{role}-", f"{role}."))
    ]
    if not selected:
        names = ", ".join(p.stem for p in logs) or "none yet"
        raise UserError(f"{run}: no log of {role or 'any role'}; logs: {names}")
    return selected


def show_logs(logs: list[Path], lines: int, *, follow: bool) -> Iterator[str]:
    """Yield the last `lines` of each log and then, with `follow`, new lines forever."""

    def prefixed(log: Path, line: str) -> str:
        return f"{log.stem}: {line}" if len(logs) > 1 else line

    offsets = {log: log.stat().st_size for log in logs}
    for log in logs:
        yield from (prefixed(log, line) for line in last_lines(log, lines))
    while follow:
        for log in logs:
            with log.open(errors="replace") as f:
                f.seek(offsets[log])
                text = f.read()
                complete_lines = text[: text.rfind("\n") + 1]
                offsets[log] += len(complete_lines.encode())
            yield from (prefixed(log, line) for line in complete_lines.splitlines())
        time.sleep(FOLLOW_SECONDS)
