"""Diagnosis of a stall from the processes' stacks, the rollout process's status and the ends of the logs.

`rlsys doctor RUN` writes a request into the run folder. The supervisor, the only process that reaches every process
on every node, collects stacks and answers with a file. Its stall detector does so, too, after 1.5 times
rollout.stall_timeout.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.status import is_locked, last_lines
from rlsys.obs.role import describe_exit

REQUEST, ANSWER, STACKS = ".diagnose", "diagnosis.txt", Path("logs/stacks")
"""Paths in the run folder: the request, the diagnosis, and the folder of the processes' stacks."""
CLOCK = ".clock"
"""File in the run folder whose time of modification is the current time of the file server."""
ANSWER_SECONDS = 20.0

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')

_STACK_HEADER = "Stack (most recent call first)"
"""First line of a stack that faulthandler writes."""

_WAITS = (
    ("torch/distributed/", "", "the other ranks, in {function}"),
    ("rlsys/rollout/client.py", "wait_ready", "the rollout process and its engines to be ready"),
    ("rlsys/rollout/client.py", "take", "the rollout process: groups of the next step"),
    ("rlsys/rollout/client.py", "begin_push", "the rollout process: to interrupt the engines before a push"),
    ("rlsys/rollout/client.py", "end_push", "the rollout process: to attest the engines after a push"),
    ("rlsys/rollout/client.py", "evaluate", "the rollout process: an evaluation"),
    ("rlsys/rollout/client.py", "commit", "the rollout process: its journal"),
    ("rlsys/rollout/client.py", "restore", "the rollout process: to restore a step"),
    ("rlsys/weights/", "", "an engine: weight transfer, in {function}"),
    ("rlsys/trainer/checkpoints/checkpoint.py", "", "the disk: a checkpoint, in {function}"),
    ("scheduler_components/idle_sleeper.py", "", "no other process: a scheduler without requests"),
    ("sglang/srt/managers/detokenizer_manager.py", "", "its scheduler: tokens to decode"),
    ("sglang/srt/model_executor/", "", "no other process: a scheduler in a forward pass"),
    ("uvicorn/", "", "no other process: its event loop is idle"),
    ("selectors.py", "select", "no other process: its event loop is idle"),
    ("rlsys/train.py", "update", "no other process: it trains"),
)
"""(part of a file's path, name of a function or empty for any, what a process waits for in this frame). The innermost
frame of a stack that matches counts."""


@dataclass(frozen=True)
class RoleState:
    """State of one role for a diagnosis.

    Attributes:
        name: name of the role.
        node: name of its node.
        exit_code: exit code of its process; None while it runs.
        ready: whether it is ready.
        seconds: time since its start.
        last_line: last line of its log.
        unit: name of its unit.
    """

    name: str
    node: str
    exit_code: int | None
    ready: bool
    seconds: float
    last_line: str
    unit: str


def frames(stack: str) -> list[tuple[str, int, str]]:
    """Parse a stack of faulthandler, of one thread, into (file, line, function) of each frame, innermost first."""
    return [(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(stack)]


def waits_for(stack: str) -> str:
    """Return what a process waits for, and the innermost location in rlsys or SGLang.

    Args:
        stack: stack of the process; empty if it wrote none.
    """
    stack_frames = frames(stack)
    if not stack_frames:
        return "an unknown event: it wrote no stack"
    location = next(
        (
            f"{Path(file).name}:{line}"
            for file, line, _ in stack_frames
            if "/rlsys/" in file or "/sglang/" in file
        ),
        "outside rlsys",
    )
    for file, _, function in stack_frames:
        for part, name, phrase in _WAITS:
            if part in file and name in ("", function):
                return f"{phrase.format(function=function)} ({location})"
    file, line, function = stack_frames[0]
    return f"{Path(file).name}:{line} in {function} ({location})"


def describe(
    reason: str, roles: list[RoleState], status: dict[str, Any] | None, stacks: dict[str, str]
) -> str:
    """Return the text of the diagnosis: what each process waits for, then the state and the stack of each process.

    Args:
        reason: reason of the diagnosis.
        roles: state of each role.
        status: status of the rollout process; None if it does not respond.
        stacks: name of a process, such as `trainer-rank1` -> its stack.
    """
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {reason}", "", "who waits for whom"]
    without_stack = {
        r.unit: "" for r in roles if r.exit_code is None and not any(n.startswith(r.unit) for n in stacks)
    }
    waits = sorted((stacks | without_stack).items())
    lines += [f"  {name:16} waits for {waits_for(stack)}" for name, stack in waits]
    if status is None:
        lines.append(f"  {'rollout':16} does not respond")
    else:
        engines = ", ".join(f"{url} {state}" for url, state in status.get("engines", {}).items())
        rollout_state = (
            f"step {status.get('train_step')}; {status.get('waiting_for', '')}; engines: {engines}"
        )
        lines.append(f"  {'rollout':16} {rollout_state}")
    lines += ["", "processes"]
    for role in roles:
        state = "ready" if role.ready else "not ready"
        if role.exit_code is not None:
            state = describe_exit(role.exit_code)
        lines.append(f"  {role.name:16} on {role.node}, {state}, {role.seconds:.0f} s old: {role.last_line}")
    for name, stack in sorted(stacks.items()):
        lines += ["", f"stack of {name}", *("  " + line for line in stack.strip().splitlines())]
    return "\n".join(lines) + "\n"


def file_time(run: Path) -> float:
    """Return the current time of the clock that sets the times of the folder's files; it may be a file server's."""
    file = run / CLOCK
    file.touch()
    return file.stat().st_mtime


def read_stacks(run: Path, start: float) -> dict[str, str]:
    """Return the stack of each process that has written one since `start` (a time of `file_time`), by its name."""
    files = (run / STACKS).glob("*.txt")
    texts = {f.stem: f.read_text(errors="replace") for f in files if f.stat().st_mtime >= start}
    # A process appends its stacks to the file; the last one counts.
    return {name: text[max(0, text.rfind(_STACK_HEADER)) :] for name, text in texts.items()}


def request_diagnosis(run: Path) -> str:
    """Request a diagnosis from the supervisor, and return it; for a run without processes, its last log lines."""
    answer = run / ANSWER
    if not is_locked(run):
        log_lines = [
            f"  {p.stem}: {line}" for p in sorted((run / "logs").glob("*.log")) for line in last_lines(p, 2)
        ]
        return "\n".join([f"{run}: no process of this run is running; its last log lines:", *log_lines])
    previous_mtime = answer.stat().st_mtime_ns if answer.exists() else 0
    (run / REQUEST).touch()
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        if answer.exists() and answer.stat().st_mtime_ns > previous_mtime:
            return answer.read_text()
        time.sleep(0.2)
    events = "\n".join(f"  {line}" for line in last_lines(run / "logs" / "supervisor.log", 5))
    return f"{run}: the supervisor did not respond within {ANSWER_SECONDS:g} s; its last log lines:\n{events}"
