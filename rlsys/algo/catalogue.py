"""Output of `rlsys algo list` and `rlsys algo show NAME`. Imports the plug-ins on demand."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlsys.algo.plugin import EVIDENCE, evidence_of
from rlsys.algo.registry import KINDS, SECTION_KINDS, TABLE, load
from rlsys.config import read_layers
from rlsys.config.algo import AlgoSection, Spec
from rlsys.config.shipped import folder
from rlsys.config.trainer import SFTConfig
from rlsys.core.errors import UserError

_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
RECIPES = folder() / "algorithms"
SFT = folder() / "preferences", folder() / "imitation"

STAGES = {
    "prompt": "control",
    "planner": "control",
    "group_reward": "filter",
    "shaping": "filter",
    "advantage": "advantage",
    "selector": "filter",
    "correction": "correction",
    "loss": "policy loss",
    "reducer": "policy loss",
    "hook": "optimizer",
    "imitation": "rlsys sft",
    "preference": "rlsys sft",
}
"""Kind -> stage at which its plug-ins act."""
OTHER_STAGES = {
    ("prompt", "prompt_augmentation"): "generate",
    ("planner", "dapo"): "filter",
    ("planner", "mc_grpo"): "generate",
    ("planner", "grpo_roc"): "generate",
    ("planner", "ttrl"): "generate",
    ("planner", "lens"): "generate",
    ("planner", "scope"): "generate",
    ("selector", "rorecomp"): "filter, replay",
    ("advantage", "outcome_exploration"): "advantage, replay",
    ("hook", "ewma"): "correction",
    ("hook", "sync_ref"): "policy loss",
}
"""(kind, name) -> stage of a plug-in that acts at another stage than its kind."""


@dataclass(frozen=True)
class Entry:
    """Description of one plug-in.

    Attributes:
        kind: Key of KINDS.
        name: Short name.
        summary: First line of `doc`.
        doc: Docstring of the class.
        paper: Publication of the method; empty if there is none.
        evidence: Key of EVIDENCE.
        stage: Stage at which the plug-in acts.
        needs: Names of the required signals, sorted.
        fields: Name, type with limits, default and description of each parameter.
    """

    kind: str
    name: str
    summary: str
    doc: str
    paper: str
    evidence: str
    stage: str
    needs: tuple[str, ...]
    fields: tuple[tuple[str, str, str, str], ...]


def entries() -> list[Entry]:
    """Return all built-in plug-ins, ordered by kind as in KINDS."""
    return [_entry(kind, name, path) for kind in KINDS for name, path in TABLE[kind].items()]


def find(name: str) -> list[Entry]:
    """Return the built-in plug-ins with this short name, at most one per kind.

    Raises:
        UserError: no plug-in has the name.
    """
    matches = [_entry(kind, name, TABLE[kind][name]) for kind in KINDS if name in TABLE[kind]]
    if not matches:
        all_names = sorted({n for names in TABLE.values() for n in names})
        similar_names = difflib.get_close_matches(name.lower(), all_names, n=1, cutoff=0.5)
        hint = f"did you mean {similar_names[0]}?" if similar_names else f"known: {', '.join(all_names)}"
        raise UserError(f"unknown algorithm {name!r}; {hint}")
    return matches


def _entry(kind: str, name: str, path: str) -> Entry:
    """Return the description of the plug-in at an import path."""
    plugin: Any = load(kind, path)
    doc = inspect.cleandoc(plugin.__doc__ or "")
    return Entry(
        kind=kind,
        name=name,
        summary=doc.splitlines()[0],
        doc=doc,
        paper=plugin.paper,
        evidence=evidence_of(plugin),
        stage=OTHER_STAGES.get((kind, name), STAGES[kind]),
        needs=tuple(sorted(plugin().needs())),
        fields=tuple(
            (
                field,
                ", ".join([_type_name(info.annotation), *_bounds(info)]),
                f"{len(info.default)} {field}" if _is_sections(info.default) else repr(info.default),
                info.description or "",
            )
            for field, info in plugin.model_fields.items()
        ),
    )


def _is_sections(default: Any) -> TypeGuard[list[BaseModel]]:
    """Return whether the default of a field is a list of config sections."""
    return isinstance(default, list) and any(isinstance(item, BaseModel) for item in default)


def _sections(entry: Entry) -> Iterator[str]:
    """Yield each default of the plug-in that is a list of config sections, as YAML."""
    for name, info in load(entry.kind, TABLE[entry.kind][entry.name]).model_fields.items():
        if _is_sections(info.default):
            plain = [section.model_dump(mode="json", exclude_defaults=True) for section in info.default]
            yield yaml.safe_dump({name: plain}, sort_keys=False, width=110).rstrip()


def _type_name(annotation: Any) -> str:
    """Return the name of a type as in Python, without module names."""
    if get_origin(annotation) is Annotated:  # _bounds describes the metadata
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_type_name, get_args(annotation)))
    if get_origin(annotation) in (list, dict, tuple):
        return f"{get_origin(annotation).__name__}[{', '.join(map(_type_name, get_args(annotation)))}]"
    if annotation is NoneType:
        return "None"
    plain = isinstance(annotation, type) and not get_args(annotation)
    return annotation.__name__ if plain else str(annotation).replace("typing.", "")


def _bounds(annotation: Any) -> Iterator[str]:
    """Yield a phrase for each bound of a field, for example "at least 0".

    Bounds may be in a part of the field's type, for example in the `int` of `int | None`.
    """
    if isinstance(annotation, FieldInfo):
        for limit in annotation.metadata:
            for name, phrase in _LIMITS.items():
                if (value := getattr(limit, name, None)) is not None:
                    yield f"{phrase} {value:,}"
        yield from _bounds(annotation.annotation)
    else:
        for part in get_args(annotation):
            yield from _bounds(part)


def render_list() -> str:
    """Return the list of all plug-ins: for each, a line with name and summary, its source, and its parameters."""
    lines = []
    for kind, (_, purpose) in KINDS.items():
        lines.append(f"{kind}: {purpose}")
        for entry in (e for e in entries() if e.kind == kind):
            lines.append(f"  {entry.name:22} {entry.summary}")
            source = f"{entry.paper} [{entry.evidence}]" if entry.paper else f"[{entry.evidence}]"
            lines.append(f"  {'':22} {source}")
            if entry.fields:
                fields = ", ".join(f"{name}={default}" for name, _, default, _ in entry.fields)
                lines += textwrap.wrap(
                    fields, 110, initial_indent=" " * 25, subsequent_indent=" " * 27, break_long_words=False
                )
    return "\n".join(lines)


def render_show(name: str) -> str:
    """Return the descriptions of the built-in plug-ins with this short name.

    Raises:
        UserError: no plug-in has the name.
    """
    blocks = []
    for e in find(name):
        lines = [f"{e.kind}: {e.name}", "", e.doc, "", f"paper:    {e.paper or '-'}"]
        lines += [f"evidence: {EVIDENCE[e.evidence]}", f"stage:    {e.stage}"]
        lines.append(
            f"needs:    {', '.join(e.needs) or 'nothing beyond rewards and log-probs of the engine'}"
        )
        lines += [f"  {field} ({kind}, default {default}): {text}" for field, kind, default, text in e.fields]
        lines += [f"\nthe default of {text}" for text in _sections(e)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def recipes() -> dict[tuple[str, str], str]:
    """Return the recipe of each plug-in, as (kind, name) -> path below configs/ without suffix.

    It is the recipe with the plug-in's name, or else the first one that uses the plug-in.
    """
    recipe_of: dict[tuple[str, str], str] = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        section = AlgoSection.model_validate(read_layers(path)["algo"])
        for field in section.model_fields_set & set(SECTION_KINDS):
            value = getattr(section, field)
            specs = value if isinstance(value, list) else [value]
            for spec in (s for s in specs if isinstance(s, Spec)):
                key = SECTION_KINDS[field], spec.name
                if spec.name == path.stem or key not in recipe_of:
                    recipe_of[key] = f"algorithms/{path.stem}"
    for path in (path for folder_ in SFT for path in sorted(folder_.glob("*.yaml"))):
        name = SFTConfig.model_validate(read_layers(path)["sft"]).loss.name
        recipe_of["imitation" if name in TABLE["imitation"] else "preference", name] = (
            f"{path.parent.name}/{path.stem}"
        )
    return recipe_of
