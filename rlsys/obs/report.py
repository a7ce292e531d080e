"""Report of a run, from its metrics.jsonl: report.html, which contains its plots, and plots/*.png."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rlsys.obs.metrics import read_metrics
from rlsys.obs.summary import summarise
from rlsys.obs.symptoms import sentence

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111827 }
body { max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; margin-bottom: 0 } p { color: #6b7280; margin-top: .2rem }
.big { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0 }
.big div { border: 1px solid #e5e7eb; border-radius: 10px; padding: .7rem 1.1rem }
.big b { display: block; font-size: 1.5rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem }
img { width: 100%; border: 1px solid #e5e7eb; border-radius: 10px }
.warning { border-left: 4px solid #d97706; padding: .2rem 1rem; margin: 1rem 0; background: #fffbeb }
.warning pre { white-space: pre-wrap; color: #374151; border-top: 1px solid #e5e7eb; margin: .4rem 0 }
table { border-collapse: collapse; margin-top: 2rem } td { padding: .2rem 1.2rem .2rem 0 }
td + td { font-variant-numeric: tabular-nums }
"""


def write_report(run_dir: Path) -> None:
    """Write report.html and plots/*.png into the run folder.

    Raises:
        UserError: the run has no metrics.
    """
    from rlsys.obs.plots import FIGURES  # imported late, because matplotlib takes a second

    metrics = read_metrics(run_dir)
    folder = run_dir / "plots"
    folder.mkdir(exist_ok=True)
    images = {}
    for name, draw in FIGURES.items():
        buffer = io.BytesIO()
        draw(metrics).savefig(buffer, format="png")
        images[name] = buffer.getvalue()
        (folder / f"{name}.png").write_bytes(images[name])
    page = render_page(run_dir.name, summarise(metrics), images, metrics.warnings)
    (run_dir / "report.html").write_text(page, encoding="utf-8")


def render_page(
    name: str, summary: dict[str, Any], images: dict[str, bytes], warnings: Sequence[dict[str, Any]] = ()
) -> str:
    """Return the report as an HTML page without external resources.

    Args:
        name: name of the run.
        summary: result of `summarise`.
        images: name of a plot -> its PNG file.
        warnings: `warning` lines of metrics.jsonl.
    """
    figures = "".join(f"<div>{label}<b>{html.escape(value)}</b></div>" for label, value in headline(summary))
    encoded = {key: base64.b64encode(png).decode() for key, png in images.items()}
    plots = "".join(f'<img alt="{key}" src="data:image/png;base64,{data}">' for key, data in encoded.items())
    rows = "".join(f"<tr><td>{k}</td><td>{html.escape(_value(v))}</td></tr>" for k, v in summary.items())
    state = "finished" if summary["finished"] else "not finished"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>rlsys: {html.escape(name)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(name)}</h1>"
        f"<p>{summary['steps']} steps, {state}, {summary['sessions']} session(s)</p>"
        f'<div class="big">{figures}</div>{"".join(map(_warning, warnings))}'
        f'<div class="plots">{plots}</div><table>{rows}</table></html>\n'
    )


def _warning(warning: dict[str, Any]) -> str:
    """Return a warning with its samples as HTML."""
    samples = "".join(
        f"<pre>{html.escape(s['prompt'])}<b>{html.escape(s['response'])}</b>\nreward {_value(s['reward'])}</pre>"
        for s in warning.get("samples") or ()
    )
    text = html.escape(sentence(warning))
    return f'<div class="warning"><b>Warning, step {warning["step"]}:</b> {text}{samples}</div>'


def headline(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of the most important figures, as texts."""
    accuracy_before, accuracy_after = summary["eval_accuracy_before"], summary["eval_accuracy_after"]
    speed, off_policy = summary["tokens_per_s"], summary["off_policy_share"]
    return [
        ("held-out accuracy", f"{_value(accuracy_before)} → {_value(accuracy_after)}"),
        ("trained tokens", _value(summary["trained_tokens"])),
        ("tokens per second", "-" if speed is None else f"{speed:,.0f}"),
        ("resumed samples", _value(summary["resumed_samples"])),
        ("off-policy tokens", "-" if off_policy is None else f"{off_policy:.1%}"),
        ("tokens lost", _value(summary["tokens_lost"])),
    ]


def summary_table(run_dir: Path, summary: dict[str, Any]) -> Table:
    """Return the summary as a table for a terminal."""
    table = Table(title=f"{run_dir}", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in summary.items():
        table.add_row(key.replace("_", " "), _value(value))
    return table


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(n)}" for name, n in value.items()) or "0"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"
    return str(value)
