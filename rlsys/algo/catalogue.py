"""What `rlsys algo list` and `rlsys algo show NAME` print. Imports the plug-ins when asked, not before."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from rlsys.algo.registry import KINDS, TABLE, load
from rlsys.errors import UserError

EVIDENCE = {
    "R": "read in the authors' or a framework's code",
    "P": "read in the paper's text or a formula-level note of it",
    "N": "from a second-hand note; defaults unconfirmed",
    "A": "a reading of the abstract",
    "own": "ours",
}


@dataclass(frozen=True)
class Entry:
    """One plug-in. `fields` are (name, type, default, sentence)."""

    kind: str
    name: str
    line: str
    doc: str
    paper: str
    evidence: str
    needs: tuple[str, ...]
    fields: tuple[tuple[str, str, str, str], ...]


def entries() -> list[Entry]:
    """Every built-in plug-in, by kind in the order in which a sample meets them."""
    return [_entry(kind, name, path) for kind in KINDS for name, path in TABLE[kind].items()]


def find(name: str) -> list[Entry]:
    """The plug-ins of this short name, one per kind that has it. Raises UserError when there is none."""
    found = [_entry(kind, name, TABLE[kind][name]) for kind in KINDS if name in TABLE[kind]]
    if not found:
        import difflib

        known = sorted({n for names in TABLE.values() for n in names})
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"no algorithm {name!r}; {hint}")
    return found


def _entry(kind: str, name: str, path: str) -> Entry:
    plugin: Any = load(kind, path)
    doc = inspect.cleandoc(plugin.__doc__ or "")
    return Entry(
        kind=kind,
        name=name,
        line=doc.splitlines()[0],
        doc=doc,
        paper=plugin.paper,
        evidence=plugin.evidence,
        needs=tuple(sorted(plugin().needs())),
        fields=tuple(
            (field, _type_name(info.annotation), repr(info.default), info.description or "")
            for field, info in plugin.model_fields.items()
        ),
    )


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def render_list() -> str:
    """All plug-ins: one line each, then its parameters."""
    lines = []
    for kind, (_, what) in KINDS.items():
        lines.append(f"{kind}: {what}")
        for entry in (e for e in entries() if e.kind == kind):
            lines.append(f"  {entry.name:22} {entry.line}")
            source = f"{entry.paper} [{entry.evidence}]" if entry.paper else f"[{entry.evidence}]"
            lines.append(f"  {'':22} {source}")
            if entry.fields:
                fields = ", ".join(f"{name}={default}" for name, _, default, _ in entry.fields)
                lines.append(f"  {'':22} {fields[:160]}")
    return "\n".join(lines)


def render_show(name: str) -> str:
    """Everything about one name. Raises UserError for an unknown one."""
    blocks = []
    for e in find(name):
        lines = [f"{e.kind}: {e.name}", "", e.doc, "", f"paper:    {e.paper or '-'}"]
        lines.append(f"evidence: {EVIDENCE[e.evidence]}")
        lines.append(
            f"needs:    {', '.join(e.needs) or 'nothing beyond rewards and log-probs of the engine'}"
        )
        lines += [f"  {field} ({kind}, default {default}): {text}" for field, kind, default, text in e.fields]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
