"""Which roles are on which nodes and GPUs, with equal nodes told once. Pure, but for the drawing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

from launch.plan import Role
from rlsys.planner.layout import Layout, NodeShare

MOST_DRAWN = 16
"""GPUs of a node that are drawn one by one."""
_COLOURS = {"trainer": ("magenta", "magenta"), "engine": ("cyan", "blue"), "reference": ("green", "green")}
"""Two a role, so that neighbouring engines are told apart."""


@dataclass(frozen=True)
class Row:
    """What one role has on a node: `units[i]` is the engine, counted on this node, that has the GPU `gpus[i]`."""

    role: str
    processes: int
    gpus: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    spans: int = 1
    """Nodes that each of its engines is on."""

    @property
    def words(self) -> str:
        number, each = len(set(self.units)) or 1, self.processes
        if self.role == "trainer":
            return f"{each} rank{'s' * (each != 1)}"
        if self.role != "engine":
            return "1 process"
        if self.spans > 1:
            return f"{each} ranks of an engine on {self.spans} nodes"
        ranks = f" of {each // number} ranks" if each > number else ""
        return f"{number} engine{'s' * (number != 1)}{ranks}"


@dataclass(frozen=True)
class Fold:
    """Nodes that hold the same: their indices, in order."""

    nodes: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        named = ranges(self.nodes)
        return f"node {named}" if len(self.nodes) == 1 else f"nodes {named}: each of the {len(self.nodes)}"


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> `0-2, 5`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def fold(layout: Layout, others: Sequence[Role], nodes: int) -> list[Fold]:
    """`others`: roles that are neither trainer nor engines. Nodes in the order of the first of each kind."""
    kinds: dict[tuple[Row, ...], list[int]] = {}
    for node in range(nodes):
        kinds.setdefault(tuple(_rows(layout, others, node)), []).append(node)
    return [Fold(tuple(where), rows) for rows, where in kinds.items()]


def _rows(layout: Layout, others: Sequence[Role], node: int) -> Iterable[Row]:
    for share in layout.trainer:
        if share.node == node:
            yield Row("trainer", share.count, share.gpus, (0,) * share.count)
    here: list[tuple[NodeShare, int]] = [(s, len(e)) for e in layout.engines for s in e if s.node == node]
    for spans in sorted({n for _, n in here}):
        shares = [share for share, n in here if n == spans]
        units = tuple(i for i, share in enumerate(shares) for _ in range(share.count))
        gpus = tuple(gpu for share in shares for gpu in share.gpus)
        yield Row("engine", len(units), gpus, units, spans)
    for role in others:
        if role.node == node:
            yield Row(role.unit, 1, role.gpus, (0,) * len(role.gpus))


def draw(folds: Sequence[Fold], gpus_per_node: int) -> list[Text]:
    """One line a role, with a mark for each of its GPUs; letters tell a node's engines apart."""
    lines = []
    drawn = 0 < gpus_per_node <= MOST_DRAWN
    for one in folds:
        head = Text(one.title, style="bold")
        lines.append(head)
        for row in one.rows:
            line = Text(f"  {row.role:<10} ")
            if drawn and row.gpus:
                line.append_text(_strip(row, gpus_per_node)).append("  ")
            where = f", GPU {ranges(row.gpus)}" if row.gpus and not drawn else ""
            lines.append(line.append(row.words + where, style="dim"))
    return lines


def _strip(row: Row, width: int) -> Text:
    marks = dict(zip(row.gpus, row.units, strict=True))
    colours = _COLOURS.get(row.role, ("green", "green"))
    text = Text()
    for gpu in range(width):
        unit = marks.get(gpu)
        letter = "·" if unit is None else chr(ord("a") + unit) if row.role == "engine" else "■"
        text.append(f"{letter} ", style="dim" if unit is None else colours[unit % 2])
    return text
