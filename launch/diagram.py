"""Diagram of the roles on nodes and GPUs; equal nodes are grouped. Pure, except for the drawing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

from launch.plan import Role
from rlsys.planner.layout import Layout, NodeShare

MAX_DRAWN_GPUS = 16
"""Maximum number of GPUs per node that are drawn one by one."""
_COLOURS = {"trainer": ("magenta", "magenta"), "engine": ("cyan", "blue"), "reference": ("green", "green")}
"""Two colours per role, to distinguish neighbouring engines."""


@dataclass(frozen=True)
class Row:
    """A role on a node. `units[i]` is the engine, counted on this node, that has the GPU `gpus[i]`."""

    role: str
    processes: int
    gpus: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    spans: int = 1
    """Number of nodes of each of its engines."""

    @property
    def label(self) -> str:
        """Text such as `2 engines of 4 ranks`."""
        engines, processes = len(set(self.units)) or 1, self.processes
        if self.role == "trainer":
            return f"{processes} rank{'s' * (processes != 1)}"
        if self.role != "engine":
            return "1 process"
        if self.spans > 1:
            return f"{processes} ranks of an engine on {self.spans} nodes"
        ranks = f" of {processes // engines} ranks" if processes > engines else ""
        return f"{engines} engine{'s' * (engines != 1)}{ranks}"


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with the same roles: their indices, in order."""

    nodes: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Heading such as `nodes 0-3: each of the 4`."""
        numbers = ranges(self.nodes)
        return (
            f"node {numbers}" if len(self.nodes) == 1 else f"nodes {numbers}: each of the {len(self.nodes)}"
        )


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: 0, 1, 2, 5 -> `0-2, 5`."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def group_nodes(layout: Layout, other_roles: Sequence[Role], nodes: int) -> list[NodeGroup]:
    """Group nodes with the same roles, in the order of their first node.

    `other_roles`: roles that are neither trainer nor engines.
    """
    kinds: dict[tuple[Row, ...], list[int]] = {}
    for node in range(nodes):
        kinds.setdefault(tuple(_rows(layout, other_roles, node)), []).append(node)
    return [NodeGroup(tuple(indices), rows) for rows, indices in kinds.items()]


def _rows(layout: Layout, other_roles: Sequence[Role], node: int) -> Iterable[Row]:
    for share in layout.trainer:
        if share.node == node:
            yield Row("trainer", share.count, share.gpus, (0,) * share.count)
    engine_shares: list[tuple[NodeShare, int]] = [
        (s, len(e)) for e in layout.engines for s in e if s.node == node
    ]
    for spans in sorted({n for _, n in engine_shares}):
        shares = [share for share, n in engine_shares if n == spans]
        units = tuple(i for i, share in enumerate(shares) for _ in range(share.count))
        gpus = tuple(gpu for share in shares for gpu in share.gpus)
        yield Row("engine", len(units), gpus, units, spans)
    for role in other_roles:
        if role.node == node:
            yield Row(role.unit, 1, role.gpus, (0,) * len(role.gpus))


def draw(groups: Sequence[NodeGroup], gpus_per_node: int) -> list[Text]:
    """Draw one line per role with a mark for each of its GPUs; letters distinguish a node's engines."""
    lines = []
    is_drawn = 0 < gpus_per_node <= MAX_DRAWN_GPUS
    for group in groups:
        head = Text(group.title, style="bold")
        lines.append(head)
        for row in group.rows:
            line = Text(f"  {row.role:<10} ")
            if is_drawn and row.gpus:
                line.append_text(_strip(row, gpus_per_node)).append("  ")
            gpu_text = f", GPU {ranges(row.gpus)}" if row.gpus and not is_drawn else ""
            lines.append(line.append(row.label + gpu_text, style="dim"))
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
