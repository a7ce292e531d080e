"""Report of rehearsed ranks as text, and detection of ranks that would run out of memory. Pure, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rlsys.config import Config
from rlsys.rehearse.figures import HOST, KINDS, Figures
from rlsys.rehearse.kinds import name_of_kind

GB = 1e9
"""Bytes of a gigabyte."""
_PHASES = {
    "score": "scoring pass",
    "passes": "forward and backward",
    "reduce": "reduce gradients",
    "update": "optimizer step",
    "gather": "gather for the engines",
}
_MEANING = {
    "activations": "activations",
    "communication": "communication buffers",
    "other": "other",
}


def problems(figures: Sequence[Figures], gpu_gb: float | None, engine_bytes: float) -> list[str]:
    """Return one line for each rank that needs more memory than its GPU has.

    Args:
        figures: Figures of the ranks.
        gpu_gb: Memory of a GPU in GB; None: unknown, no rank is reported.
        engine_bytes: Bytes that an engine holds on the same GPU.
    """
    messages = []
    for f in figures:
        for phase in f.phases:
            need = phase.total + engine_bytes
            if gpu_gb is None or need <= gpu_gb * GB:
                continue
            largest = max(KINDS, key=lambda kind: phase.peak.get(kind, 0))
            engine = f" beside an engine of {engine_bytes / GB:.3g} GB" if engine_bytes else ""
            messages.append(
                f"{name_of_kind(f.stage, f.stages)} (rank {f.rank}): {_PHASES[phase.name]} needs "
                f"{phase.total / GB:.3g} GB{engine}, a GPU has {gpu_gb:g} GB; the largest part is {largest}, "
                f"{phase.peak[largest] / GB:.3g} GB"
            )
            break  # a run would end in this phase
    return messages


def describe(config: Config, figures: Sequence[Figures], engine_bytes: float) -> str:
    """Return the report: a table with a column for each rank, the collectives of each rank, and notes.

    Args:
        config: The rehearsed config.
        figures: Figures of the ranks.
        engine_bytes: Bytes that an engine holds on the same GPU; 0: none.
    """
    p = config.parallel
    title = (
        f"{p.world_size} trainer ranks: tp {p.tp}, pp {p.pp}, vpp {p.vpp}, cp {p.cp}, ep {p.ep}, etp {p.expert_tp}, "
        f"dp {p.data_parallel}"
    )
    first = figures[0]
    work = (
        f"one update: {first.micro_batches} micro-batches of {first.tokens:,} tokens a rank, sequences of "
        f"{first.longest:,}"
    )
    lines = [title, work, "", *_table(figures, engine_bytes), ""]
    for f in figures:
        lines += [*_collectives(f), ""]
    for note in dict.fromkeys(note for f in figures for note in f.notes):
        lines.append(f"note: {note}")
    if requests := sorted({question for f in figures for question in f.guessed}):
        lines.append(f"values of tensors without values, assumed to be 1: {'; '.join(requests)}")
    return "\n".join(lines)


def _table(figures: Sequence[Figures], engine_bytes: float) -> list[str]:
    """Return the lines of the table. Its sizes are in MB if all of them are below 0.1 GB."""
    peaks = [f.worst.peak for f in figures]
    scale, unit = (GB, "GB") if max(f.worst.total for f in figures) >= GB / 10 else (1e6, "MB")
    rows: list[tuple[str, list[str]]] = [
        ("", [name_of_kind(f.stage, f.stages) for f in figures]),
        ("rank", [str(f.rank) for f in figures]),
        ("layers", [str(f.layers) for f in figures]),
        ("parameters, millions", [f"{f.parameters / 1e6:,.4g}" for f in figures]),
        (f"memory at its peak, {unit}", [f"{f.worst.total / scale:,.4g}" for f in figures]),
        ("  that is while", [_PHASES[f.worst.name] for f in figures]),
        *((f"  {_MEANING.get(k, k)}", [f"{peak.get(k, 0) / scale:,.4g}" for peak in peaks]) for k in KINDS),
    ]
    if any(HOST in peak for peak in peaks):
        host_cells = [f"{peak.get(HOST, 0) / scale:,.4g}" for peak in peaks]
        rows.append((f"in the host's memory, {unit}", host_cells))
    if engine_bytes:
        rows.append((f"the engine beside it, {unit}", [f"{engine_bytes / scale:,.4g}"] * len(figures)))
    leftover = [
        sum(f.live_bytes.get(k, 0) for k in ("activations", "communication", "other")) for f in figures
    ]
    rows.append((f"left over after the step, {unit}", [f"{n / scale:,.3g}" for n in leftover]))
    rows += _by_phase(figures, scale, unit)
    rows.append(("hashed of a weight update, GB", [f"{f.hashed / GB:,.4g}" for f in figures]))
    rows.append(("rehearsed in, s", [f"{sum(phase.seconds for phase in f.phases):.0f}" for f in figures]))
    rows.append(("  with memory, GB", [f"{f.resident / GB:.2g}" for f in figures]))
    return _aligned(rows)


def _by_phase(figures: Sequence[Figures], scale: float, unit: str) -> list[tuple[str, list[str]]]:
    """Return the rows (name, cells) of peaks, FLOPs and traffic. `scale`: bytes of `unit`."""
    rows: list[tuple[str, list[str]]] = [(f"peak of each part, {unit}", [""] * len(figures))]
    for name, label in _PHASES.items():
        rows.append((f"  {label}", [f"{f.phase(name).total / scale:,.4g}" for f in figures]))
    rows.append(("TFLOPs", [""] * len(figures)))
    for name in ("score", "passes"):
        rows.append((f"  {_PHASES[name]}", [f"{f.phase(name).flops / 1e12:,.4g}" for f in figures]))
    for label, across in (("traffic inside nodes, GB", False), ("traffic across nodes, GB", True)):
        sums = [
            sum(c.bytes for c in f.collectives if c.across == across and len(c.ranks) > 1) for f in figures
        ]
        rows.append((label, [f"{n / GB:,.4g}" for n in sums]))
    return rows


def _collectives(f: Figures) -> list[str]:
    """Return the lines of the collective calls of a rank."""
    calls = [c for c in f.collectives if len(c.ranks) > 1]  # a group of one rank sends nothing
    if not calls:
        return [f"collectives of {name_of_kind(f.stage, f.stages)}: none"]
    rows = [("part", ["operation", "group", "ranks", "", "type", "times", "MB each", "GB"])]
    for c in sorted(
        calls, key=lambda c: (list(_PHASES).index(c.phase) if c.phase in _PHASES else -1, -c.bytes)
    ):
        rows.append(
            (
                _PHASES.get(c.phase, c.phase),
                [
                    c.op.strip("_"), group_name(c.group), ranks_in_words(c.ranks),
                    "across nodes" if c.across else "in a node", c.dtype, f"{c.calls:,}",
                    f"{c.bytes / c.calls / 1e6:,.4g}", f"{c.bytes / GB:,.4g}",
                ],
            )
        )  # fmt: skip
    return [
        f"collectives of {name_of_kind(f.stage, f.stages)} (rank {f.rank})",
        *_aligned(rows, left_columns=5),
    ]


def group_name(description: str) -> str:
    """Return the readable name of a group: `expert model parallel` for EXPERT_MODEL_PARALLEL_GROUP."""
    return (
        "all ranks"
        if description == "default_pg"
        else description.removesuffix("_GROUP").replace("_", " ").lower()
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return a short text for ascending ranks, such as `8: 0-7` or `4: 0-24 by 8`.

    Without a constant step, it is for example `3: 0, 1 ... 7`.
    """
    steps = {b - a for a, b in pairwise(ranks)}
    if len(steps) > 1:
        return f"{len(ranks)}: {ranks[0]}, {ranks[1]} ... {ranks[-1]}"
    step = next(iter(steps), 1)
    step_text = f" by {step}" if step > 1 else ""
    return f"{len(ranks)}: {ranks[0]}-{ranks[-1]}{step_text}"


def _aligned(rows: Sequence[tuple[str, list[str]]], left_columns: int = 0) -> list[str]:
    """Format rows (name, cells) as lines with aligned columns.

    The names and the first `left_columns` cells are aligned to the left, the other cells to the right.
    """
    name_width = max(len(name) for name, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(rows[0][1]))]
    lines = []
    for name, cells in rows:
        columns = [
            cell.ljust(width) if i < left_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join([name.ljust(name_width), *columns]).rstrip())
    return lines
