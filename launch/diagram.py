"""Diagram of the roles on nodes and GPUs. Nodes with the same roles form a group. Pure, except for the drawing."""

from __future__ import annotations

from collections import defaultdict
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
    """A role on a node.

    Attributes:
        role: `trainer`, `engine`, or the name of another role.
        processes: number of processes.
        gpus: indices of the role's GPUs.
        units: for each of `gpus`, the index of its engine among the engines of this row.
        nodes_per_engine: number of nodes that each engine of this row uses.
    """

    role: str
    processes: int
    gpus: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    nodes_per_engine: int = 1

    @property
    def label(self) -> str:
        """Text such as `2 engines of 4 ranks`."""
        engines, processes = len(set(self.units)) or 1, self.processes
        if self.role == "trainer":
            return f"{processes} rank{'s' * (processes != 1)}"
        if self.role != "engine":
            return "1 process"
        if self.nodes_per_engine > 1:
            return f"{processes} ranks of an engine on {self.nodes_per_engine} nodes"
        ranks = f" of {processes // engines} ranks" if processes > engines else ""
        return f"{engines} engine{'s' * (engines != 1)}{ranks}"


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with the same roles.

    Attributes:
        nodes: indices of the nodes, ascending.
        rows: the roles of each node.
    """

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
    bounds: list[list[int]] = []
    for n in sorted(numbers):
        if bounds and n == bounds[-1][1] + 1:
            bounds[-1][1] = n
        else:
            bounds.append([n, n])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in bounds)


def group_nodes(layout: Layout, other_roles: Sequence[Role], nodes: int) -> list[NodeGroup]:
    """Group nodes with the same roles, in the order of their first node.

    Args:
        layout: nodes and GPUs of trainer and engines.
        other_roles: roles that are neither trainer nor engines.
        nodes: number of nodes.
    """
    nodes_by_rows: dict[tuple[Row, ...], list[int]] = {}
    for node in range(nodes):
        nodes_by_rows.setdefault(tuple(_rows(layout, other_roles, node)), []).append(node)
    return [NodeGroup(tuple(indices), rows) for rows, indices in nodes_by_rows.items()]


def _rows(layout: Layout, other_roles: Sequence[Role], node: int) -> Iterable[Row]:
    """Yield the roles of a node: the trainer, the engines by their number of nodes, and other roles."""
    for share in layout.trainer:
        if share.node == node:
            yield Row("trainer", share.count, share.gpus, (0,) * share.count)
    shares_by_nodes = defaultdict[int, list[NodeShare]](list)
    for engine in layout.engines:
        shares_by_nodes[len(engine)] += [share for share in engine if share.node == node]
    for nodes_per_engine, shares in sorted(shares_by_nodes.items()):
        if not shares:
            continue
        units = tuple(i for i, share in enumerate(shares) for _ in range(share.count))
        gpus = tuple(gpu for share in shares for gpu in share.gpus)
        yield Row("engine", len(units), gpus, units, nodes_per_engine)
    for role in other_roles:
        if role.node == node:
            yield Row(role.unit, 1, role.gpus, (0,) * len(role.gpus))


def draw(groups: Sequence[NodeGroup], gpus_per_node: int) -> list[Text]:
    """Draw each group: its title, and one line per role. A mark stands for a GPU; letters distinguish engines.

    Nodes with more than MAX_DRAWN_GPUS GPUs get the GPUs' indices as text.
    """
    lines = []
    is_drawn = 0 < gpus_per_node <= MAX_DRAWN_GPUS
    for group in groups:
        lines.append(Text(group.title, style="bold"))
        for row in group.rows:
            line = Text(f"  {row.role:<10} ")
            if is_drawn and row.gpus:
                line.append_text(_draw_gpus(row, gpus_per_node)).append("  ")
            gpu_text = f", GPU {ranges(row.gpus)}" if row.gpus and not is_drawn else ""
            lines.append(line.append(row.label + gpu_text, style="dim"))
    return lines


def _draw_gpus(row: Row, gpus_per_node: int) -> Text:
    """Draw one mark for each GPU of a node: a letter per engine, a square for another role, a dot for no role."""
    unit_by_gpu = dict(zip(row.gpus, row.units, strict=True))
    colours = _COLOURS.get(row.role, ("green", "green"))
    text = Text()
    for gpu in range(gpus_per_node):
        if (unit := unit_by_gpu.get(gpu)) is None:
            text.append("· ", style="dim")
        else:
            mark = chr(ord("a") + unit) if row.role == "engine" else "■"
            text.append(f"{mark} ", style=colours[unit % 2])
    return text
