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
    """Return the state of a run, one line per fact, and the last lines of the supervisor's log.

    Args:
        run: the run folder.
        current_time: seconds since the epoch.
        live: status of the coordinator; None if it does not answer.
    """
    facts = [("processes", "running" if is_locked(run) else "none")]
    if (run / JOB).is_file():
        facts.append(("slurm job", job_state((run / JOB).read_text().strip())))
    if (run / FILE_NAME).is_file():
        facts += metric_facts(run, current_time)
    if live is not None:
        facts += live_facts(live)
    log_lines = last_lines(run / "logs" / "supervisor.log", 3)
    return [f"{name:13} {value}" for name, value in facts] + [f"{'':13} {line}" for line in log_lines]


def metric_facts(run: Path, current_time: float) -> list[tuple[str, str]]:
    """Return (name, value) of the facts in metrics.jsonl. `current_time`: seconds since the epoch."""
    metrics = read_metrics(run)
    last_time = max(
        (e["time"] for e in (*metrics.runs, *metrics.steps, *metrics.evals)), default=current_time
    )
    has_ended = metrics.runs and metrics.runs[-1]["event"] == "end"
    facts = [
        ("train step", f"{metrics.last_step}{', the last' if has_ended else ''}"),
        ("last metric", f"{current_time - last_time:.0f} s ago"),
    ]
    entry = metrics.steps[-1] if metrics.steps else {}
    key = next((key for key in ("reward", "loss") if entry.get(key) is not None), None)
    if key is not None:
        facts.append((key, f"{entry[key]:.3f}"))
    lost_time = lost_seconds(MetricsTail(run).read())
    facts.append(("lost to stops", f"{lost_time:.0f} s, {lost_time * gpus_of(run):.0f} GPU-seconds"))
    facts.append(("sessions", str(sum(r["event"] in ("start", "resume") for r in metrics.runs))))
    return facts


def live_facts(live: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of the facts in the coordinator's status: its state in memory, and the engines."""
    fields = [
        ("coordinator", "coordinator"),
        ("weight version", "weight_version"),
        ("waiting for", "waiting_for"),
    ]
    facts = [(name, str(live[key])) for name, key in fields if live.get(key) is not None]
    return facts + [("engine", f"{url} {state}") for url, state in live.get("engines", {}).items()]


def lost_seconds(entries: Iterable[dict[str, Any]]) -> float:
    """Return the seconds of wall time that the run lost to stops.

    For each stop, this is the time from the last line of metrics before the stop to the start of the first new train
    step. It includes the stop, the wait in a queue, the start, and repeated steps.

    Args:
        entries: all lines of metrics.jsonl in order.
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
    """Return the number of GPUs of the run; for a run without GPUs, the number of trainer ranks."""
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
    """Return the id and Slurm's state of a job, such as `81 RUNNING 12:03 node[1-2]`, or why Slurm reports none."""
    try:
        output = client(["squeue", "--noheader", f"--jobs={job}", "--format=%T %M %R"]).strip()
    except RlsysError as e:
        return f"{job} ({str(e).splitlines()[0]})"
    return f"{job} {output or 'not in the queue'}"


def last_lines(log: Path, n: int) -> list[str]:
    """Return the last `n` lines of a log; none if the file does not exist."""
    if not log.is_file():
        return []
    with log.open(errors="replace") as f:
        return [line.rstrip("\n") for line in deque(f, maxlen=n)]


def role_logs(run: Path, role: str | None) -> list[Path]:
    """Return the paths of logs in the run folder.

    Args:
        run: the run folder.
        role: name of a role or a unit: `trainer` includes the role trainer-0. None for all logs.

    Raises:
        UserError: there is no such log.
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
    """Yield the last `lines` lines of each log; then, with `follow`, new lines without end.

    Lines start with the name of the log if there are several logs.
    """

    def prefixed(log: Path, line: str) -> str:
        return f"{log.stem}: {line}" if len(logs) > 1 else line

    offsets = {log: log.stat().st_size for log in logs}
    for log in logs:
        yield from (prefixed(log, line) for line in last_lines(log, lines))
    while follow:
        for log in logs:
            with log.open("rb") as f:
                f.seek(offsets[log])
                data = f.read()
            complete_lines = data[: data.rfind(b"\n") + 1]
            offsets[log] += len(complete_lines)
            text = complete_lines.decode(errors="replace")
            yield from (prefixed(log, line) for line in text.splitlines())
        time.sleep(FOLLOW_SECONDS)
