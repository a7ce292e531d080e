"""Display of a run: a live panel on a terminal, and plain lines elsewhere.

The supervisor calls these methods of a display:
    phase   with the current activity
    entry   with each line of metrics.jsonl
    status  with the status of the rollout process, about once a second
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlsys.obs.metrics import censored_by_cause
from rlsys.obs.symptoms import QUIET, sentence

_RECENT = 10
_PARTS = (
    ("rollout", "time_rollout", "cyan"),
    ("train", "time_train", "magenta"),
    ("sync", "time_sync", "yellow"),
)
_COUNTS = ("in_flight", "parked", "ready")
_BAR_WIDTH = 36
_LINE = 160
"""Number of characters of a sample's text that a warning shows."""


class RunView:
    """State of a display.

    Attributes:
        total_steps: number of steps of the run.
        phase: current activity.
        step: the last `step` line of metrics.jsonl; empty before the first.
        evals: the `eval` lines.
        warnings: the `warning` lines.
        status: status of the rollout process.
    """

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.phase = "starting"
        self.step: dict[str, Any] = {}
        self.evals: list[dict[str, Any]] = []
        self.warnings: list[dict[str, Any]] = []
        self.status: dict[str, Any] = {}
        self._resumed: dict[int, int] = {}
        """Step -> number of resumed samples, so that a repeated step counts once."""
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        """Durations of the last steps."""

    def add_entry(self, entry: dict[str, Any]) -> None:
        """Update the state with a line of metrics.jsonl."""
        if entry["kind"] == "step":
            self.step = entry
            self._resumed[entry["step"]] = int(entry.get("resumed_samples") or 0)
            if entry.get("time_step"):
                self._seconds.append(entry["time_step"])
        elif entry["kind"] == "eval":
            self.evals.append(entry)
        elif entry["kind"] == "warning":
            self.warnings.append(entry)
        elif entry.get("event") == "resume":
            self.warnings = [w for w in self.warnings if w["step"] <= entry["step"]]
            self.evals = [e for e in self.evals if e["step"] <= entry["step"]]

    @property
    def done_steps(self) -> int:
        """Number of finished steps."""
        return int(self.step.get("step", 0))

    @property
    def resumed_samples(self) -> int:
        """Number of resumed samples in all steps."""
        return sum(self._resumed.values())

    @property
    def eta_seconds(self) -> float | None:
        """Estimated remaining time in seconds; None before the first step.

        It is the number of remaining steps times the median duration of recent steps, without evaluations and
        checkpoints.
        """
        return median(self._seconds) * (self.total_steps - self.done_steps) if self._seconds else None

    @property
    def accuracy(self) -> str:
        """First and last held-out accuracy, as text."""
        if not self.evals:
            return "-"
        first, last = self.evals[0]["accuracy"], self.evals[-1]["accuracy"]
        return f"{first:.3f}" if len(self.evals) == 1 else f"{first:.3f} → {last:.3f}"

    @property
    def recent_warnings(self) -> list[dict[str, Any]]:
        """Warnings of the last QUIET steps. A symptom that lasts has no further warnings."""
        return [w for w in self.warnings if w["step"] > self.done_steps - QUIET]

    def number(self, key: str, spec: str = ",.0f") -> str:
        """Return a value of the last step, formatted by `spec`; `-` if the step has none."""
        return show(self.step.get(key), spec)


def show(value: object, spec: str) -> str:
    """Return a number, formatted by `spec`; `-` for other values."""
    return format(value, spec) if isinstance(value, int | float) else "-"


def format_clock(seconds: float | None) -> str:
    """Return a duration as m:ss or h:mm:ss; `-` for None."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minutes}:{second:02}"


class PlainProgress:
    """Display that prints one line per step, phase, evaluation and warning."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._view = RunView(total_steps)
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def phase(self, text: str) -> None:
        self._line(f"rlsys: {text}")

    def status(self, status: dict[str, Any]) -> None:
        self._view.status = status

    def entry(self, entry: dict[str, Any], *, live: bool) -> None:
        self._view.add_entry(entry)
        if not live:
            return
        if entry["kind"] == "step":
            self._line(plain_step(self._view))
        elif entry["kind"] == "eval":
            self._line(
                f"eval at step {entry['step']}: held-out accuracy {entry['accuracy']:.3f} "
                f"on {entry['prompts']} prompts, mean length {show(entry.get('mean_length'), '.1f')}"
                f"{left_out(entry.get('left_out'))}"
            )
            for name in set_names(entry):
                self._line(f"eval at step {entry['step']}: {set_line(name, entry)}")
        elif entry["kind"] == "warning":
            for line in warning_lines(entry):
                self._line(line)
        elif entry["event"] == "resume":
            self._line(f"rlsys: resumed after step {entry['step']}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def plain_step(view: RunView) -> str:
    """Return the last step as one line."""
    number = view.number
    if "reward" not in view.step:  # a step of rlsys sft
        return (
            f"step {view.done_steps}/{view.total_steps}  loss {number('loss', '.4f')}  "
            f"{number('tokens_per_s')} tok/s  {number('time_step', '.1f')} s  ETA {format_clock(view.eta_seconds)}"
        )
    counts = "/".join(show(view.status.get(k, view.step.get(k)), ",.0f") for k in _COUNTS)
    lengths = f"{number('response_len_p50')}/{number('response_len_p99')}"
    parts = " + ".join(f"{name} {number(key, '.1f')}" for name, key, _ in _PARTS)
    return (
        f"step {view.done_steps}/{view.total_steps}  reward {number('reward', '.3f')}  "
        f"{number('tokens_per_s')} tok/s  length p50/p99 {lengths}  "
        f"off-policy {number('off_policy_share', '.0%')}  in flight/parked/ready {counts}  "
        f"{number('time_step', '.1f')} s = {parts}  ETA {format_clock(view.eta_seconds)}"
        f"{f'  censored: {counts_text}' if (counts_text := censored(view.step)) else ''}"
    )


def censored(entry: dict[str, Any]) -> str:
    """Return the numbers of censored groups, and of censored samples by cause, in a `step` line; empty if 0."""
    causes = censored_by_cause(entry)
    groups = int(entry.get("censored") or 0)
    by_cause = f" ({', '.join(f'{cause} {n:,}' for cause, n in causes.items())} samples)" if causes else ""
    return f"{groups:,} groups{by_cause}" if groups or causes else ""


def left_out(prompts: float | None) -> str:
    """Return the number of excluded prompts as the end of a line; empty if it is 0."""
    return f", {prompts:g} left out" if prompts else ""


def evaluation_lines(entry: dict[str, Any]) -> list[str]:
    """Return the lines for an evaluation by `rlsys eval`: one for the held-out prompts, and one for each named set.

    Args:
        entry: the `eval` line of metrics.jsonl, and the evaluated `model`.
    """
    lines = [
        f"{entry['model']}: accuracy {entry['accuracy']:.4f} on {entry['prompts']} prompts, "
        f"mean length {entry['mean_length']:.1f} tokens, {entry['truncated']} truncated"
        f"{left_out(entry.get('left_out'))}"
    ]
    return lines + [set_line(name, entry) for name in set_names(entry)]


def set_names(entry: dict[str, Any]) -> list[str]:
    """Return the names of the evaluation sets in an `eval` line."""
    return [key.partition("/")[0] for key in entry if key.endswith("/accuracy")]


def set_line(name: str, entry: dict[str, Any]) -> str:
    """Return the line for a named set: pass@k with 95 % intervals, and the lengths of responses.

    Args:
        name: name of the set.
        entry: the `eval` line of metrics.jsonl.
    """
    values = {key.removeprefix(f"{name}/"): v for key, v in entry.items() if key.startswith(f"{name}/")}
    ks = sorted(int(key[5:]) for key in values if key[5:].isdigit() and key.startswith("pass_"))
    scores = ", ".join(
        f"pass@{k} {values[f'pass_{k}']:.3f} [{values[f'pass_{k}_low']:.3f}, {values[f'pass_{k}_high']:.3f}]"
        for k in ks
    )
    return (
        f"{name}: {scores} on {values['prompts']:g} prompts x {values['samples']:g}, mean length "
        f"{values['mean_length']:.1f}, {values['truncated']:g} truncated{left_out(values.get('left_out'))}"
    )


def warning_lines(warning: dict[str, Any]) -> list[str]:
    """Return the lines for a warning: observation, cause and remedy, then three lines for each of its samples."""
    lines = [f"rlsys: warning: step {warning['step']}: {sentence(warning)}"]
    for sample in warning.get("samples") or ():
        lines.append(f"    prompt    {one_line(sample['prompt'])}")
        lines.append(f"    response  {one_line(sample['response'])}")
        lines.append(f"    reward    {show(sample['reward'], 'g')}, {sample['tokens']} tokens")
    return lines


def one_line(text: str) -> str:
    """Return a text as one line; only its start and end if it is longer than _LINE characters."""
    text = " ".join(text.split())
    return text if len(text) <= _LINE else f"{text[: _LINE // 2]} ... {text[-_LINE // 2 :]}"


class LiveProgress:
    """Display that redraws a panel on a terminal, and prints warnings above it."""

    def __init__(self, total_steps: int, console: Console, title: str) -> None:
        self._view = RunView(total_steps)
        self._title = title
        self._console = console
        self._start_time = time.monotonic()
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def phase(self, text: str) -> None:
        self._view.phase = text
        self._live.refresh()

    def status(self, status: dict[str, Any]) -> None:
        self._view.status = status

    def entry(self, entry: dict[str, Any], *, live: bool) -> None:
        self._view.add_entry(entry)
        if live and entry["kind"] in ("step", "eval"):
            self._view.phase = "training" if self._view.done_steps < self._view.total_steps else "finishing"
        if live and entry["kind"] == "warning":
            for line in warning_lines(entry):
                self._live.console.print(line, markup=False, highlight=False, soft_wrap=True, style="yellow")

    def _draw(self) -> RenderableType:
        view = self._view
        elapsed = format_clock(time.monotonic() - self._start_time)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"step {view.done_steps}/{view.total_steps}",
            ProgressBar(total=max(1, view.total_steps), completed=view.done_steps, width=_BAR_WIDTH),
            f"{elapsed} elapsed, ETA {format_clock(view.eta_seconds)}",
        )
        warnings = [
            Text(f"{w['name'].replace('_', ' ')}: {w['seen']}", style="yellow") for w in view.recent_warnings
        ]
        body = Group(head, Text(), _numbers(view), Text(), _time_split(view), *warnings)
        return Panel(body, title=self._title, subtitle=view.phase, title_align="left", subtitle_align="left")


def _numbers(view: RunView) -> Table:
    number, status = view.number, view.status
    table = Table.grid(padding=(0, 2))
    for style in ("dim", "bold", "dim", "bold"):
        table.add_column(style=style, no_wrap=True)
    table.add_row("reward", number("reward", ".3f"), "held-out accuracy", view.accuracy)
    length = f"p50 {number('response_len_p50')}   p99 {number('response_len_p99')}"
    table.add_row("tokens/s", number("tokens_per_s"), "response length", length)
    stale = f"mean {number('staleness_mean', '.2f')}   max {number('staleness_max')}"
    table.add_row("off-policy tokens", number("off_policy_share", ".1%"), "staleness", stale)
    counts = "   ".join(f"{k.replace('_', ' ')} {show(status.get(k), ',.0f')}" for k in _COUNTS)
    table.add_row("resumed samples", f"{view.resumed_samples:,}", "samples", counts)
    mismatch = f"mean {number('mismatch_mean', '.1e')}   p99.9 {number('mismatch_p999', '.1e')}"
    table.add_row("loss", number("loss", ".4f"), "|logp - mu|", mismatch)
    if counts_text := censored(view.step):
        table.add_row("censored", counts_text)
    return table


def _time_split(view: RunView) -> Text:
    """Return a bar of the last step's duration, coloured by phase, and the duration of each phase."""
    seconds = {name: float(view.step.get(key) or 0.0) for name, key, _ in _PARTS}
    total = sum(seconds.values())
    text = Text("time of a step    ", style="dim")
    for name, _, colour in _PARTS:
        if total:
            text.append("█" * round(_BAR_WIDTH * seconds[name] / total), style=colour)
    for name, _, colour in _PARTS:
        text.append(f"  {name} {seconds[name]:.1f} s" if total else f"  {name} -", style=colour)
    return text


def make_progress(total_steps: int, title: str, console: Console) -> LiveProgress | PlainProgress:
    """Return a live display if the console is a terminal, or else a plain one.

    Args:
        total_steps: number of steps of the run.
        title: title of the panel.
    """
    if console.is_terminal:
        return LiveProgress(total_steps, console, title)
    return PlainProgress(total_steps, console)
