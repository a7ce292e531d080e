"""`rlsys status` and `rlsys logs`: what a run is doing, from its folder and its coordinator."""

from __future__ import annotations

import fcntl
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launch.backends.slurm import client
from launch.submit import JOB
from rlsys.config import load_config
from rlsys.core.errors import RlsysError, UserError
from rlsys.obs.metrics import FILE_NAME, MetricsTail, read_metrics

FOLLOW_SECONDS = 0.5


def status_lines(run: Path, now: float, live: dict[str, Any] | None = None) -> list[str]:
    """One fact a line. `now`: seconds since the epoch. `live`: what the coordinator says, of a run that has one."""
    facts = [("processes", "running" if is_locked(run) else "none")]
    if (run / JOB).is_file():
        facts.append(("slurm job", job_state((run / JOB).read_text().strip())))
    if (run / FILE_NAME).is_file():
        metrics = read_metrics(run)
        last = max((e["time"] for e in (*metrics.runs, *metrics.steps, *metrics.evals)), default=now)
        done = metrics.runs and metrics.runs[-1]["event"] == "end"
        facts.append(("train step", f"{metrics.last_step}{', the last' if done else ''}"))
        facts.append(("last metric", f"{now - last:.0f} s ago"))
        if metrics.steps:
            facts.append(("reward", f"{metrics.steps[-1]['reward']:.3f}"))
        lost = lost_seconds(MetricsTail(run).read())
        facts.append(("lost to stops", f"{lost:.0f} s, {lost * gpus_of(run):.0f} GPU-seconds"))
        facts.append(("sessions", str(sum(r["event"] in ("start", "resume") for r in metrics.runs))))
    if live is not None:
        facts += live_facts(live)
    events = last_lines(run / "logs" / "supervisor.log", 3)
    return [f"{name:13} {value}" for name, value in facts] + [f"{'':13} {line}" for line in events]


def live_facts(live: dict[str, Any]) -> list[tuple[str, str]]:
    """What only the coordinator knows: what is in memory, and the engines."""
    shown = [
        ("coordinator", "coordinator"),
        ("weight version", "weight_version"),
        ("waiting for", "waiting_for"),
    ]
    facts = [(name, str(live[key])) for name, key in shown if live.get(key) is not None]
    return facts + [("engine", f"{url} {state}") for url, state in live.get("engines", {}).items()]


def lost_seconds(entries: Iterable[dict[str, Any]]) -> float:
    """Wall seconds between the last line before each stop and the beginning of the first train step that was not
    repeated: the stop itself, the wait in a queue, the start, and steps that were trained again.

    `entries`: all lines of metrics.jsonl in order, repeated steps too.
    """
    lost, reached, last, stopped = 0.0, 0, None, None
    for entry in entries:
        if entry["kind"] == "run" and entry["event"] in ("start", "resume") and stopped is None:
            stopped = last
        if entry["kind"] == "step" and entry["step"] > reached:
            reached = entry["step"]
            if stopped is not None:
                lost += entry["time"] - entry["time_step"] - stopped
                stopped = None
        last = entry["time"]
    return lost


def gpus_of(run: Path) -> int:
    """GPUs that the run holds; on machines without, its trainer ranks stand for them."""
    config = load_config(run / "config.yaml")
    return config.launch.nodes * config.launch.gpus_per_node or config.parallel.world_size


def is_locked(run: Path) -> bool:
    """Whether a supervisor or anything it started holds the run's lock."""
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
    """Slurm's words: `81 RUNNING 12:03 node[1-2]`; or why there are none."""
    try:
        told = client(["squeue", "--noheader", f"--jobs={job}", "--format=%T %M %R"]).strip()
    except RlsysError as e:
        return f"{job} ({str(e).splitlines()[0]})"
    return f"{job} {told or 'not in the queue'}"


def last_lines(log: Path, n: int) -> list[str]:
    """Empty when there is no such file."""
    if not log.is_file():
        return []
    with log.open(errors="replace") as f:
        return [line.rstrip("\n") for line in deque(f, maxlen=n)]


def role_logs(run: Path, role: str | None) -> list[Path]:
    """The logs of a role and its parts (`trainer` means trainer-0 too), or all. UserError when there is none."""
    logs = sorted((run / "logs").glob("*.log"))
    chosen = [
        p for p in logs if role is None or p.stem == role or p.stem.startswith((f"{role}-", f"{role}."))
    ]
    if not chosen:
        known = ", ".join(p.stem for p in logs) or "none yet"
        raise UserError(f"{run}: no log of {role or 'any role'}; logs: {known}")
    return chosen


def show_logs(logs: list[Path], lines: int, *, follow: bool) -> Iterator[str]:
    """The last `lines` of each log, then, with `follow`, what is added, for ever."""

    def named(log: Path, line: str) -> str:
        return f"{log.stem}: {line}" if len(logs) > 1 else line

    at = {log: log.stat().st_size for log in logs}
    for log in logs:
        yield from (named(log, line) for line in last_lines(log, lines))
    while follow:
        for log in logs:
            with log.open(errors="replace") as f:
                f.seek(at[log])
                text = f.read()
                whole = text[: text.rfind("\n") + 1]
                at[log] += len(whole.encode())
            yield from (named(log, line) for line in whole.splitlines())
        time.sleep(FOLLOW_SECONDS)
